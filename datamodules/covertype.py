"""Forest Covertype: 54 cartographic features, seven kinds of forest.

See README.md beside this file for source and licence.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mupscale.datamodules.files import fetched, read_npz, shared, version_of
from mupscale.datamodules.resident import TensorData, TensorSplit
from mupscale.errors import UserError

CONTINUOUS = 10  # columns 0..9; the other 44 are binary: 4 wilderness areas, 40 soil types
FEATURES, CLASSES = 54, 7
SAMPLE = Path(__file__).with_name("covertype_sample.npz")

# scikit-learn's copy of UCI's file, with its checksum
ARCHIVE = "covtype.data.gz"
URL = "https://ndownloader.figshare.com/files/5976039"
SHA256 = "614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771"


class Covertype(TensorData):
    """Forest Covertype, kept on the training device, 80 % for training and 20 % held out.

    The split is stratified. Continuous columns are standardised with the mean and deviation of the training part,
    binary columns are not changed; labels are 0..6. Validation and test use the held-out rows, prediction uses them
    without labels. Training drops an incomplete last batch. The order resumes exactly, from the state that the training
    loader saves in Lightning's checkpoints.

    Args:
        data_dir: Folder with the full data set as covertype.npz (X: int16 [581012, 54], y: 1..7). If the file is
            missing, the first start makes it from UCI's covtype.data.gz in this folder, or downloads that (11 MB).
            Without `data_dir`, the embedded sample of 7,500 real rows is used.
        batch_size: Rows per batch, over all devices together.
        seed: The seed of the order of batches and of the held-out rows. By default the order follows `seed_everything`,
            and the held-out rows are those of seed 0.
    """

    inputs, classes = FEATURES, CLASSES

    def __init__(self, data_dir: str | None = None, batch_size: int = 2000, seed: int | None = None) -> None:
        super().__init__(batch_size, seed)
        self.data_dir = data_dir

    def prepare_data(self) -> None:
        self._file()

    def load(self, device: torch.device) -> None:
        file, split_seed = self._file(), self.seed or 0
        key = type(self), version_of([file]), split_seed, device
        self._data = shared(key, lambda: _split(file, split_seed, device))

    def _file(self) -> Path:
        """The file to read, which is made if it is missing; raises a UserError if that fails."""
        if self.data_dir is None:
            return SAMPLE
        file = Path(self.data_dir).expanduser() / "covertype.npz"
        if not file.is_file():
            make_npz(file)
        return file


def make_npz(file: Path) -> None:
    """Writes the full set to `file`, from UCI's archive in its folder or, if there is none, from the network."""
    sample = ", or leave data_dir out to use the embedded sample of 7,500 rows"
    with fetched(file.with_name(ARCHIVE), URL, "sha256", SHA256, otherwise=sample) as temporary:
        table = np.loadtxt(temporary / ARCHIVE, dtype=np.int16, delimiter=",")
        finished = temporary / file.name
        np.savez_compressed(finished, X=table[:, :FEATURES], y=table[:, FEATURES].astype(np.uint8))
        os.replace(finished, file)


def stratified(labels: Tensor, rows: int, seed: int) -> Tensor:
    """The ascending indices of `rows` random rows, every class in its share (rounded by largest remainders)."""
    counts = torch.bincount(labels)
    exact = counts * rows  # each share times len(labels): integers, so that rounding has no influence
    shares = exact // len(labels)
    by_remainder = torch.argsort(exact % len(labels), descending=True, stable=True)
    shares[by_remainder[: rows - int(shares.sum())]] += 1
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    picked = [shuffled[labels[shuffled] == label][:share] for label, share in enumerate(shares.tolist())]
    return torch.cat(picked).sort().values


def _split(file: Path, seed: int, device: torch.device) -> TensorSplit:
    """Features and labels of the training rows and of the held-out ones."""
    features, labels = _read(file)
    fifth = -(-len(labels) // 5)  # rounded up: of the full set 464,809 rows are left to train on, as in the paper
    held_out = stratified(labels, fifth, seed)
    is_train = torch.ones(len(labels), dtype=torch.bool)
    is_train[held_out] = False
    x = features.float()
    # in float64: over half a million rows of metres, float32 sums lose digits
    continuous = features[:, :CONTINUOUS].double()
    deviation, mean = torch.std_mean(continuous[is_train], dim=0, correction=0)
    x[:, :CONTINUOUS] = ((continuous - mean) / deviation.where(deviation > 0, 1.0)).float()
    train, rest = ((x[rows].to(device), labels[rows].to(device)) for rows in (is_train, held_out))
    return TensorSplit(train, rest)


def _read(file: Path) -> tuple[Tensor, Tensor]:
    """Features as stored, int16 [rows, 54], and labels 0..6; raises a UserError that names what is wrong with them."""
    features, labels = read_npz(file, ("X", "y"))
    if features.ndim != 2 or features.shape[1] != FEATURES or labels.shape != features.shape[:1]:
        raise UserError(
            f"data_dir: {file} has X {features.shape} and y {labels.shape}, wanted [rows, {FEATURES}], [rows]"
        )
    if len(labels) and labels.dtype.kind not in "iu":
        raise UserError(f"data_dir: {file} has y of {labels.dtype}, wanted integers 1..{CLASSES}")
    if features.dtype.kind not in "biuf":
        raise UserError(f"data_dir: {file} has X of {features.dtype}, wanted numbers")
    if features.dtype.kind == "f" and not np.isfinite(features).all():
        raise UserError(f"data_dir: {file} has NaN or infinite numbers in X")
    if not len(labels) or labels.min() < 1 or labels.max() > CLASSES:
        raise UserError(f"data_dir: {file} must have labels 1..{CLASSES}, has {np.unique(labels)[:20].tolist()}")
    return torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64)) - 1
