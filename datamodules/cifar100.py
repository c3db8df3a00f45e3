"""CIFAR-100: 60,000 images of 32 × 32 pixels in 100 classes, cropped, mirrored and normalised on the training device.

Shapes: N images, B of them in a batch, 3 channels. Images are stored as N × height × width × 3; batches are
B × 3 × height × width in channels-last layout.
"""

import os
import pickle
import tarfile
import warnings
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.datasets import CIFAR100 as Published
from torchvision.datasets.utils import check_integrity

from mupscale.datamodules.files import fetched, read_npz, shared, version_of
from mupscale.datamodules.resident import ResidentLoader, TensorData, TensorSplit
from mupscale.errors import UserError

CLASSES, SIZE = 100, 32
PADDING = 4  # black pixels on every side of an image, before it is cropped
OFFSETS = 2 * PADDING + 1  # places where a crop can begin, in rows and in columns
NPZ = "cifar100.npz"


class CIFAR100(TensorData):
    """CIFAR-100, kept as uint8 on the training device; batches of normalised float32 images with labels 0..99.

    Training pads every image by 4 black pixels, crops it at random, and mirrors it with probability 1/2. Crops and
    mirroring depend only on the seed, the epoch and the image's place in the order, so they do not change with the
    number or type of devices, or when a run is resumed. Images are normalised by the mean and deviation of each channel
    over the training images. Validation and test use the test images without augmentation, prediction uses them without
    labels. Training drops an incomplete last batch. The order resumes exactly, from the state that the training loader
    saves in Lightning's checkpoints.

    Args:
        data_dir: Folder with the data set as cifar100.npz (x_train, x_test: uint8 [images, 32, 32, 3]; y_train,
            y_test: 0..99) or unpacked as cifar-100-python. If there is neither, the first start unpacks the
            cifar-100-python.tar.gz in this folder, or downloads it (169 MB).
        batch_size: Images per batch, over all devices together.
        seed: The seed of the order of batches, crops and flips; by default that of `seed_everything`.
    """

    classes = CLASSES

    def __init__(self, data_dir: str = "data", batch_size: int = 128, seed: int | None = None) -> None:
        super().__init__(batch_size, seed)
        self.data_dir = data_dir

    def prepare_data(self) -> None:
        self._folder()

    def load(self, device: torch.device) -> None:
        folder = self._folder()
        key = type(self), version_of(_files(folder)), device
        self._data = shared(key, lambda: _resident(folder, device))

    def _loader(self, tensors: tuple[Tensor, ...], *, training: bool) -> ResidentLoader:
        assert self._data.table is not None
        kind = AugmentingLoader if training else NormalisingLoader
        return kind(self._data.table, tensors, self.batch_size, **self.loader_options(training=training))

    def _folder(self) -> Path:
        """The folder with the data set, downloaded if necessary; raises a UserError if the download fails."""
        folder = Path(self.data_dir).expanduser()
        if not (folder / NPZ).is_file() and not (folder / Published.base_folder).is_dir():
            unpack(folder)
        return folder


class NormalisingLoader(ResidentLoader):
    """Batches of normalised images, with labels if there are any."""

    _rows_stand_alone = True

    def __init__(self, table: Tensor, tensors: tuple[Tensor, ...], batch_size: int, **options: Any) -> None:
        super().__init__(tensors, batch_size, **options)
        self.table = table

    def _made_of(self) -> tuple[Hashable, ...]:
        return *super()._made_of(), id(self.table)

    def _batch(self, rows: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        images, *labels = super()._batch(rows)
        return normalise(images, self.table), *labels


class AugmentingLoader(NormalisingLoader):
    """Batches of normalised random crops of padded images, half of them mirrored, with labels."""

    _rows_stand_alone = True

    def _augmentation_draws(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        tops, lefts = torch.randint(OFFSETS, (2, rows), generator=generator)
        return tops, lefts, torch.randint(2, (rows,), generator=generator).bool()

    def _batch(self, rows: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        (images, labels), (tops, lefts, flips) = self.tensors, chances
        return augment(images, rows, tops, lefts, flips, self.table), labels.index_select(0, rows)


def padded(images: Tensor) -> Tensor:
    """Images [N, 32, 32, 3] with a black frame: [N, 40, 40, 3]."""
    return F.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))


def augment(images: Tensor, rows: Tensor, tops: Tensor, lefts: Tensor, flips: Tensor, table: Tensor) -> Tensor:
    """Crops of images[rows] at tops and lefts, mirrored by flips, normalised; a CUDA graph can capture it."""
    windows = images.unfold(1, SIZE, 1).unfold(2, SIZE, 1).movedim(3, -1)  # a view: [N, 9, 9, 32, 32, 3]
    crops = windows[rows, tops, lefts]
    return normalise(torch.where(flips[:, None, None, None], crops.flip(2), crops), table)


def normalise(images: Tensor, table: Tensor) -> Tensor:
    """Normalises uint8 [B, 32, 32, 3] to float32 [B, 3, 32, 32], channels last, by table: exactly as torchvision."""
    # where the values of each channel begin
    channels = torch.arange(0, table.numel(), 256, dtype=torch.int32, device=table.device)
    places = images.flatten(1) + channels.repeat(SIZE * SIZE)
    return table.flatten().index_select(0, places.flatten()).view(images.shape).permute(0, 3, 1, 2)


def normalisation_table(mean: Tensor, deviation: Tensor) -> Tensor:
    """The normalised number for each channel and uint8 value, float32 [3, 256], computed as torchvision does."""
    values = torch.arange(256).float().div(255)
    mean, deviation = (statistic.float()[:, None] for statistic in (mean, deviation))
    return (values - mean) / deviation


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation (1 if constant) of each channel, values in 0..1, as float64 [3]; sums are exact integers."""
    counts = torch.stack([torch.bincount(images[..., channel].flatten(), minlength=256) for channel in range(3)])
    values = torch.arange(256)
    pixels = int(counts[0].sum())
    total, squares = (counts * values).sum(1), (counts * values**2).sum(1)
    # n Σv² − (Σv)² may exceed 2⁶³, so it is computed in Python's integers
    spread = [pixels * square - one**2 for one, square in zip(total.tolist(), squares.tolist(), strict=True)]
    deviation = torch.tensor(spread, dtype=torch.float64).sqrt() / pixels / 255
    return total.double() / pixels / 255, deviation.where(deviation > 0, 1.0)


def unpack(folder: Path) -> None:
    """Puts cifar-100-python into `folder`, from the archive in that folder or, if there is none, from the network."""
    archive = folder / Published.filename
    with fetched(archive, Published.url, "md5", Published.tgz_md5) as temporary:
        try:
            with tarfile.open(temporary / archive.name) as tar:
                tar.extractall(temporary, filter="data")  # nothing outside of it, and no devices
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(f"data_dir: {archive} cannot be unpacked ({error})") from error
        read_published(temporary / Published.base_folder)
        try:
            os.rename(temporary / Published.base_folder, folder / Published.base_folder)
        except OSError:
            if not (folder / Published.base_folder).is_dir():  # if it is there, another process was faster
                raise


def _listed() -> list[list[str]]:
    return [*Published.train_list, *Published.test_list, [Published.meta["filename"], Published.meta["md5"]]]


def _files(folder: Path) -> list[Path]:
    if (folder / NPZ).is_file():
        return [folder / NPZ]
    paths = [folder / Published.base_folder / name for name, _ in _listed()]
    return [path for path in paths if path.is_file()]


def _resident(folder: Path, device: torch.device) -> TensorSplit:
    """Images and labels, and the table of normalised values."""
    (images, labels), (test_images, test_labels) = read_images(folder)
    table = normalisation_table(*channel_statistics(images)).to(device)
    train = padded(images.to(device)), labels.to(device)
    return TensorSplit(train, (test_images.to(device), test_labels.to(device)), table)


def read_images(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Images, uint8 [N, 32, 32, 3], and labels, int64 [N]: first the training set, then the test set."""
    file = folder / NPZ
    if file.is_file():
        x_train, y_train, x_test, y_test = read_npz(file, ("x_train", "y_train", "x_test", "y_test"))
        return [_check_part(file, "train", x_train, y_train), _check_part(file, "test", x_test, y_test)]
    return read_published(folder / Published.base_folder)


def read_published(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """The training set and the test set as published: pickles, of which only arrays, texts and lists are read."""
    if not all(check_integrity(folder / name, md5) for name, md5 in _listed()):
        raise UserError(
            f"data_dir: {folder} is damaged or incomplete: its checksums are not the published ones. Delete it"
        )
    parts = []
    for part, [[name, _]] in (("train", Published.train_list), ("test", Published.test_list)):
        # NumPy 2.4.0 to 2.4.4 warn about the age of the published files
        old = warnings.catch_warnings(action="ignore", category=np.exceptions.VisibleDeprecationWarning)
        with (folder / name).open("rb") as stream, old:
            try:
                content = ArraysOnly(stream, encoding="latin1").load()
                images = np.asarray(content["data"]).reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1)
                labels = np.array(content["fine_labels"])
            except Exception as error:  # a damaged pickle raises many exception types
                raise UserError(f"data_dir: {folder / name} is not a file of CIFAR-100 ({error})") from error
        parts.append(_check_part(folder, part, images, labels))
    return parts


class ArraysOnly(pickle.Unpickler):
    """Unpickles arrays, texts, numbers, lists and dictionaries, and refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        # the published files name numpy.core, newer versions of NumPy call it numpy._core
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return super().find_class(module, name)
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no data needs; nothing of it was loaded")


def _check_part(file: Path, part: str, images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Images and labels as tensors; raises a UserError that names what is wrong with them."""
    if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE, 3) or not len(images):
        raise UserError(
            f"data_dir: {file} has x_{part} {images.dtype} {images.shape}, wanted uint8 [images, {SIZE}, {SIZE}, 3]"
        )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise UserError(f"data_dir: {file} has y_{part} {labels.dtype} {labels.shape}, wanted integers [{len(images)}]")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise UserError(f"data_dir: {file} must have y_{part} in 0..{CLASSES - 1}, has {labels.min()}..{labels.max()}")
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))
