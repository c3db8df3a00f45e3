"""CIFAR-100: torchvision's files and numbers, its transforms pixel by pixel, and the same batches on any ranks and
after any resume.
"""

import hashlib
import io
import pickle
import struct
import tarfile
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from programs import start_fork, wait_for_fork
from stand_ins import Attack, image_arrays, names, serving, trainer_stub
from torch import Tensor
from torchvision.datasets import CIFAR100 as Published
from torchvision.transforms import functional as TF

from mupscale.datamodules.cifar100 import (
    CIFAR100,
    augment,
    channel_statistics,
    normalisation_table,
    padded,
    read_images,
    unpack,
)
from mupscale.datamodules.resident import joint_batch
from mupscale.errors import UserError

pytestmark = pytest.mark.filterwarnings(  # torchvision, on Python 3.12
    "ignore:Python 3.14 will, by default, filter extracted tar archives:DeprecationWarning"
)

TRAIN, TEST, BATCH = 70, 20, 16  # four whole batches and six images over
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """No two pixels in a place are likely to be equal."""
    return image_arrays(TRAIN, TEST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, arrays: Arrays) -> str:
    path = tmp_path_factory.mktemp("data")
    np.savez(path / "cifar100.npz", **arrays)
    return str(path)


def module(folder: str, **options) -> CIFAR100:
    data = CIFAR100(folder, **{"batch_size": BATCH, **options})
    data.setup()
    return data


def epoch(loader) -> list[list[Tensor]]:
    return [list(batch) for batch in loader]


def torchvision(
    image: np.ndarray, statistics: tuple[Tensor, Tensor], top: int = 4, left: int = 4, flip: bool = False
) -> Tensor:
    """What torchvision's transforms make of one image on given parameters; by default, without augmentation."""
    picture = TF.crop(TF.pad(TF.to_pil_image(image), [4]), top, left, 32, 32)
    picture = TF.hflip(picture) if flip else picture
    return TF.normalize(TF.to_tensor(picture), *(statistic.tolist() for statistic in statistics))


# ---- pure functions


def test_statistics_are_those_of_the_pixels():
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    images[0, :, :, 0] = 255  # half black, half white
    images[..., 1] = 51  # constant
    images[:, ::4, :, 2] = 204  # a quarter
    mean, deviation = channel_statistics(images)
    assert mean.tolist() == [0.5, 0.2, 0.2]
    torch.testing.assert_close(
        deviation, torch.tensor([0.5, 1.0, 0.8 * 3**0.5 / 4], dtype=torch.float64), rtol=1e-15, atol=0
    )


def test_every_crop_and_flip_is_torchvisions_bit_by_bit(arrays: Arrays):
    parameters = list(product(range(9), range(9), (False, True)))
    rows = torch.arange(len(parameters)) % TRAIN
    tops, lefts, flips = (torch.tensor(column) for column in zip(*parameters, strict=True))
    images = torch.from_numpy(arrays["x_train"])
    statistics = channel_statistics(images)
    ours = augment(padded(images), rows, tops, lefts, flips, normalisation_table(*statistics))
    theirs = [
        torchvision(arrays["x_train"][row], statistics, *some)
        for row, some in zip(rows.tolist(), parameters, strict=True)
    ]
    assert torch.equal(ours, torch.stack(theirs))
    assert (ours.dtype, ours.shape) == (torch.float32, (162, 3, 32, 32))
    assert ours.is_contiguous(memory_format=torch.channels_last)


# ---- batches


def test_every_sample_of_an_epoch_has_its_own_crop_and_flip(
    folder: str, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[list[Tensor]] = []

    def noted(images: Tensor, *draws: Tensor) -> Tensor:
        drawn.append([draw.clone() for draw in draws[:4]])
        return augment(images, *draws)

    monkeypatch.setattr("mupscale.datamodules.cifar100.augment", noted)
    loader = module(folder).train_dataloader()
    for _ in range(15):
        batches = epoch(loader)
        assert len(batches) == 4
        for (images, labels), (rows, *_) in zip(batches, drawn[-4:], strict=True):
            assert (images.dtype, images.shape, labels.dtype) == (torch.float32, (BATCH, 3, 32, 32), torch.int64)
            assert labels.tolist() == arrays["y_train"][rows].tolist()
        assert len({row for rows, *_ in drawn[-4:] for row in rows.tolist()}) == 64
    _, tops, lefts, flips = (torch.cat(draws) for draws in zip(*drawn, strict=True))
    for offsets in (tops, lefts):
        counts = torch.bincount(offsets)
        assert len(counts) == 9
        assert counts.min() > 70  # of 960, in ninths
    assert 0.45 < flips.double().mean() < 0.55
    together = torch.stack([tops, lefts, flips]).double()
    assert torch.corrcoef(together).fill_diagonal_(0).abs().max() < 0.1


def test_evaluation_sees_the_test_images_as_they_are(folder: str, arrays: Arrays):
    data = module(folder)
    statistics = channel_statistics(torch.from_numpy(arrays["x_train"]))
    wanted = torch.stack([torchvision(image, statistics) for image in arrays["x_test"]])
    for loader in (data.val_dataloader(), data.test_dataloader()):
        images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert torch.equal(images, wanted)
        assert labels.tolist() == arrays["y_test"].tolist()
    predicted = list(data.predict_dataloader())
    assert torch.equal(torch.cat(predicted), wanted)
    assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch in predicted)


# ---- the published archive


class Python2Pickler(pickle._Pickler):
    """Writes strings and dtypes as Python 2 and its NumPy did, like the published files."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_string(self, text: str | bytes) -> None:
        content = text.encode() if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_string

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.dtype):
            return NotImplemented
        kind, (name, *_), state = value.__reduce__()
        return kind, (name, 0, 1), state


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.fixture(scope="module")
def members(arrays: Arrays) -> dict[str, bytes]:
    """The files of the python version of CIFAR-100, of a few images."""
    parts = {
        part: {
            "filenames": [f"image_{i:06}.png" for i in range(len(arrays[f"y_{part}"]))],
            "batch_label": f"{part} batch 1 of 1",
            "fine_labels": arrays[f"y_{part}"].tolist(),
            "coarse_labels": (arrays[f"y_{part}"] // 5).tolist(),
            "data": np.ascontiguousarray(arrays[f"x_{part}"].transpose(0, 3, 1, 2)).reshape(-1, 3072),
        }
        for part in ("train", "test")
    }
    meta = {
        "fine_label_names": [f"fine {i}" for i in range(100)],
        "coarse_label_names": [f"coarse {i}" for i in range(20)],
    }
    return {name: pickled(value) for name, value in (*parts.items(), ("meta", meta))}


@pytest.fixture
def archive(members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """cifar-100-python.tar.gz with these members; their checksums are the published ones for the time being."""
    return as_published(members, monkeypatch)


def as_published(members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"cifar-100-python/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in members.items()}
    monkeypatch.setattr(Published, "tgz_md5", hashlib.md5(stream.getvalue()).hexdigest())
    monkeypatch.setattr(Published, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(Published, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(Published, "meta", {**Published.meta, "md5": md5["meta"]})
    return stream.getvalue()


def test_a_pickle_runs_nothing(tmp_path: Path, members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch):
    """Even with the published checksums."""
    monkeypatch.chdir(tmp_path)
    evil = members | {"train": pickle.dumps({"data": Attack(), "fine_labels": []})}
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(as_published(evil, monkeypatch))
    with pytest.raises(UserError, match=r"train is not a file of CIFAR-100 \(it names pathlib"):
        unpack(tmp_path)
    assert names(tmp_path) == ["cifar-100-python.tar.gz"]


def test_an_archive_writes_nothing_outside_of_its_folder(
    tmp_path: Path, members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    archive = as_published(members | {"../../../marker": b""}, monkeypatch)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-100-python.tar.gz").write_bytes(archive)
    with pytest.raises(UserError, match=r"cifar-100-python\.tar\.gz cannot be unpacked .*outside the destination"):
        CIFAR100(str(tmp_path / "data")).prepare_data()
    assert names(tmp_path) == ["data"]
    assert names(tmp_path / "data") == ["cifar-100-python.tar.gz"]


def check_read(folder: Path, arrays: Arrays) -> None:
    for part, (images, labels) in zip(("train", "test"), read_images(folder), strict=True):
        assert np.array_equal(images, arrays[f"x_{part}"])
        assert images.is_contiguous()
        assert labels.tolist() == arrays[f"y_{part}"].tolist()


def test_the_archive_is_fetched_once(
    tmp_path: Path, archive: bytes, arrays: Arrays, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with serving(archive) as url:
        monkeypatch.setattr(Published, "url", url)
        CIFAR100(str(tmp_path / "new")).prepare_data()
    assert "100%" in capsys.readouterr().err
    assert names(tmp_path / "new") == ["cifar-100-python"]
    CIFAR100(str(tmp_path / "new")).prepare_data()  # the server is gone
    check_read(tmp_path / "new", arrays)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_start_together_see_one_whole_folder(tmp_path: Path, archive: bytes, arrays: Arrays):
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(archive)
    forks = [start_fork(CIFAR100(str(tmp_path)).setup) for _ in range(4)]
    assert [wait_for_fork(fork) for fork in forks] == [0] * 4
    assert names(tmp_path) == ["cifar-100-python", "cifar-100-python.tar.gz"]
    check_read(tmp_path, arrays)


@pytest.mark.parametrize("damaged", ["train", "test", "meta"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_folder_is_refused(
    tmp_path: Path, archive: bytes, members: dict[str, bytes], damaged: str, missing: bool
):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, content in members.items():
        if name != damaged:
            (folder / name).write_bytes(content)
        elif not missing:
            (folder / name).write_bytes(content[:-1])
    data = CIFAR100(str(tmp_path))
    data.prepare_data()
    with pytest.raises(ValueError, match="cifar-100-python is damaged or incomplete"):
        data.setup()


# ---- files of the user's


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"x_train": np.zeros((4, 32, 32, 3), np.float32), "y_train": np.zeros(4, int)},
            r"x_train float32 \(4, 32, 32, 3\), wanted uint8",
        ),
        (
            {"x_test": np.zeros((TEST, 3, 32, 32), np.uint8)},
            r"x_test uint8 \(20, 3, 32, 32\), wanted uint8 \[images, 32, 32, 3\]",
        ),
        ({"x_test": np.zeros((0, 32, 32, 3), np.uint8), "y_test": np.zeros(0, int)}, r"x_test uint8 \(0, 32, 32, 3\)"),
        ({"y_train": np.zeros(TRAIN - 1, int)}, r"y_train int64 \(69,\), wanted integers \[70\]"),
        ({"y_test": np.zeros(TEST)}, r"y_test float64 \(20,\), wanted integers \[20\]"),
        ({"y_test": np.arange(TEST) + 81}, r"y_test in 0\.\.99, has 81\.\.100"),
        ({"y_test": np.arange(TEST) - 1}, r"y_test in 0\.\.99, has -1\.\.18"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, arrays: Arrays, changed: Arrays, named: str):
    np.savez(tmp_path / "cifar100.npz", **{**arrays, **changed})
    with pytest.raises(ValueError, match=rf"data_dir: .*cifar100\.npz .*{named}"):
        CIFAR100(str(tmp_path)).setup()


# ---- a GPU


@pytest.mark.gpu
def test_a_gpu_gives_the_same_batches_and_can_capture_them(folder: str):
    host, device = module(folder), CIFAR100(folder, BATCH)
    device.trainer = trainer_stub("cuda")
    device.setup()
    for part in ("train_dataloader", "val_dataloader"):
        for one, other in zip(*(epoch(getattr(data, part)()) for data in (host, device)), strict=True):
            assert torch.equal(one[0], other[0].cpu())
            assert other[0].is_contiguous(memory_format=torch.channels_last)
    loader = device.train_dataloader()
    images = loader.tensors[0]
    rows, tops, lefts = (torch.zeros(BATCH, dtype=torch.int64, device="cuda") for _ in range(3))
    flips = torch.zeros(BATCH, dtype=torch.bool, device="cuda")
    augment(images, rows, tops, lefts, flips, loader.table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = augment(images, rows, tops, lefts, flips, loader.table)
    for value, other in (
        (rows, torch.arange(BATCH)),
        (tops, torch.arange(BATCH) % 9),
        (lefts, 8 - torch.arange(BATCH) % 9),
    ):
        value.copy_(other)
    flips[::2] = True
    graph.replay()
    assert torch.equal(captured, augment(images, rows, tops, lefts, flips, loader.table))


def test_joint_batches_keep_the_layout_of_images(folder: str):
    data = module(folder)
    images, _ = joint_batch([data.train_dataloader(), data.train_dataloader()], 0, 0)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in images)
