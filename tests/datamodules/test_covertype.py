"""Covertype: a genuine sample, a stratified split, standardised on its training part, resident on a device."""

import gzip
import hashlib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from by_position import assert_same
from lightning.pytorch import seed_everything
from stand_ins import names, serving, trainer_stub
from torch import Tensor

from mupscale.datamodules import covertype
from mupscale.datamodules.covertype import SAMPLE, Covertype, stratified
from mupscale.datamodules.resident import ResidentLoader
from mupscale.errors import UserError


@pytest.fixture(scope="module")
def sample() -> tuple[np.ndarray, np.ndarray]:
    with np.load(SAMPLE) as arrays:
        return arrays["X"], arrays["y"]


@pytest.fixture(scope="module")
def data() -> Covertype:
    module = Covertype()
    module.setup()
    return module


def rows(loader) -> tuple[Tensor, Tensor]:
    features, labels = zip(*loader, strict=True)
    return torch.cat(features), torch.cat(labels)


def write(folder: Path, features: np.ndarray, labels: np.ndarray) -> str:
    np.savez(folder / "covertype.npz", X=features, y=labels)
    return str(folder)


# ---- the embedded sample


def test_the_sample_is_what_was_drawn_from_the_published_rows(sample):
    """Compared row by row with the full set when it was drawn; the digest says that it still is that."""
    features, labels = sample
    digest = hashlib.sha256(features.tobytes() + labels.tobytes()).hexdigest()
    assert digest == "d9ae52a9edb6160bf7451f832bc647f79fc9d58df9c2eba788b7407263a4100c"
    # row 27 of the published file is the first one drawn
    assert features[0, :10].tolist() == [2962, 148, 16, 323, 23, 5916, 240, 236, 120, 3395]
    assert labels[0] == 2


# ---- the split


def test_stratified_rounds_by_largest_remainder():
    labels = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    # of four rows 2.0, 1.2 and 0.8: the third class gets the row that rounding down leaves over
    assert torch.bincount(labels[stratified(labels, 4, seed=0)]).tolist() == [2, 1, 1]
    assert stratified(labels, 10, seed=0).tolist() == list(range(10))
    assert len(stratified(labels, 0, seed=0)) == 0


def test_split_is_disjoint_whole_and_stratified(tmp_path: Path, sample):
    numbered = sample[0].copy()
    # binary columns are not changed, so they can carry the number of the row
    numbered[:, 10], numbered[:, 11] = np.divmod(np.arange(7500), 100)
    data = Covertype(write(tmp_path, numbered, sample[1]), batch_size=1500)
    data.setup()
    parts = [rows(loader) for loader in (data.train_dataloader(), data.val_dataloader())]
    train, held_out = ((x[:, 10] * 100 + x[:, 11]).long() for x, _ in parts)
    assert (len(train), len(held_out)) == (6000, 1500)
    assert torch.cat([train, held_out]).sort().values.tolist() == list(range(7500))
    for numbers, (_, labels) in zip((train, held_out), parts, strict=True):
        assert torch.equal(labels, torch.from_numpy(sample[1].astype(np.int64))[numbers] - 1)
    counts = np.bincount(sample[1])[1:]
    for count, share in zip(counts, torch.bincount(parts[1][1]).tolist(), strict=True):
        assert abs(share - count / 5) < 1


def test_a_fifth_is_rounded_up(tmp_path: Path, sample):
    """Of the full set's 581,012 rows that leaves the 464,809 that the paper trains on."""
    data = Covertype(write(tmp_path, sample[0][:7492], sample[1][:7492]), batch_size=1)
    data.setup()
    assert (len(data.train_dataloader()), len(data.val_dataloader())) == (5993, 1499)


def test_the_split_follows_the_seed_of_the_data_alone():
    seed_everything(5, verbose=False)
    default, zero, five = Covertype(), Covertype(seed=0), Covertype(seed=5)
    for data in (default, zero, five):
        data.setup()
    held_out = [rows(data.val_dataloader())[0] for data in (default, zero, five)]
    assert torch.equal(held_out[0], held_out[1])
    assert not torch.equal(held_out[0], held_out[2])
    order = default.train_dataloader()
    assert_same(order.batch_at(0, 0), ResidentLoader(order.tensors, 2000, shuffle=True, seed=5).batch_at(0, 0))


# ---- values


def test_continuous_columns_are_standardised_on_the_training_part(data: Covertype, sample):
    train, held_out = rows(data.train_dataloader())[0].double(), rows(data.val_dataloader())[0].double()
    assert train[:, :10].mean(0).abs().max() < 1e-6
    assert (train[:, :10].std(0, correction=0) - 1).abs().max() < 1e-6
    # with the deviation of all rows, or of the held-out ones by themselves, these would be 0 and 1
    assert held_out[:, :10].mean(0).abs().max() > 1e-3
    assert (held_out[:, :10].std(0, correction=0) - 1).abs().max() > 1e-3
    assert set(train[:, 10:].unique().tolist()) == set(held_out[:, 10:].unique().tolist()) == {0.0, 1.0}
    # one affine map for both parts: undone, they are the stored rows
    stored = torch.from_numpy(sample[0]).double()
    together = torch.cat([train, held_out])
    scale = stored[:, 0].std() / together[:, 0].std()
    elevations = (together[:, 0] - together[:, 0].mean()) * scale + stored[:, 0].mean()
    torch.testing.assert_close(elevations.sort().values, stored[:, 0].sort().values, rtol=0, atol=1e-2)


def test_evaluation_sees_every_held_out_row_once(data: Covertype):
    validation, test = rows(data.val_dataloader()), rows(data.test_dataloader())
    assert len(validation[1]) == 1500
    assert torch.equal(validation[0], test[0])
    assert torch.equal(validation[0], torch.cat(list(data.predict_dataloader())))


# ---- files of the user's


@pytest.mark.parametrize(
    ("features", "labels", "named"),
    [
        (np.zeros((9, 53)), np.ones(9), r"X \(9, 53\)"),
        (np.zeros((9, 54)), np.ones(8), r"y \(8,\)"),
        (np.zeros((9, 54)), np.arange(9), r"labels 1\.\.7, has \[0, 1,"),
        (np.zeros((9, 54)), np.ones(9), r"covertype\.npz has y of float64, wanted integers 1\.\.7"),
        (np.full((9, 54), np.nan), np.ones(9, int), r"covertype\.npz has NaN or infinite numbers in X"),
        (np.full((9, 54), "1"), np.ones(9, int), r"covertype\.npz has X of <U1, wanted numbers"),
    ],
)
def test_other_data_are_refused(tmp_path: Path, features: np.ndarray, labels: np.ndarray, named: str):
    with pytest.raises(ValueError, match=named):
        Covertype(write(tmp_path, features, labels)).setup()


# ---- what UCI publishes


@pytest.fixture
def archive(sample, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The first hundred rows of the sample in the published format; their checksum is the published one for the time
    being.
    """
    table = np.column_stack([sample[0][:100], sample[1][:100]])
    content = gzip.compress("".join(",".join(map(str, row)) + "\n" for row in table.tolist()).encode())
    monkeypatch.setattr(covertype, "SHA256", hashlib.sha256(content).hexdigest())
    return content


def check_made(folder: Path, sample) -> None:
    with np.load(folder / "covertype.npz") as arrays:
        assert (arrays["X"].dtype, arrays["y"].dtype) == (np.int16, np.uint8)
        assert np.array_equal(arrays["X"], sample[0][:100])
        assert np.array_equal(arrays["y"], sample[1][:100])


def test_the_published_file_put_there_by_hand_is_taken(tmp_path: Path, archive: bytes, sample):
    (tmp_path / "covtype.data.gz").write_bytes(archive)
    data = Covertype(str(tmp_path), batch_size=80)
    data.prepare_data()
    assert names(tmp_path) == ["covertype.npz", "covtype.data.gz"]
    check_made(tmp_path, sample)
    (tmp_path / "covtype.data.gz").unlink()
    data.setup()
    assert len(rows(data.train_dataloader())[1]) == 80


def test_the_published_file_is_fetched_once(
    tmp_path: Path, archive: bytes, sample, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with serving(archive) as url:
        monkeypatch.setattr(covertype, "URL", url)
        Covertype(str(tmp_path / "new")).prepare_data()
    assert "100%" in capsys.readouterr().err
    assert names(tmp_path / "new") == ["covertype.npz"]
    check_made(tmp_path / "new", sample)
    Covertype(str(tmp_path / "new")).prepare_data()  # the server is gone


def test_without_a_network_one_error_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serving(b"") as url:
        monkeypatch.setattr(covertype, "URL", url)
    told = rf"data_dir: .*new lacks .* fetching {url} failed .*refused.*covtype\.data\.gz, or leave data_dir out"
    with warnings.catch_warnings(record=True) as warned, pytest.raises(UserError, match=told):
        Covertype(str(tmp_path / "new")).prepare_data()
    assert not warned
    assert names(tmp_path) == []


def test_tensors_move_to_the_device_of_the_trainer_at_hand():
    data = Covertype()
    data.setup()
    assert next(iter(data.train_dataloader()))[0].device.type == "cpu"
    data.trainer = trainer_stub("meta")
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert {tensor.device.type for tensor in loader.tensors} == {"meta"}
