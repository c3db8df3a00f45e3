"""What all data modules have in common: seeds, ranks, batches by position, and data that is held once in a process."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from by_position import assert_same, check_positions, parts
from lightning.pytorch import LightningDataModule, seed_everything
from stand_ins import trainer_stub, write_cifar100

from mupscale.datamodules import cifar100, covertype, files, token_files
from mupscale.datamodules.cifar100 import CIFAR100
from mupscale.datamodules.covertype import SAMPLE, Covertype
from mupscale.datamodules.fineweb import JARGON, FineWeb
from mupscale.datamodules.resident import ResidentLoader


def copy_sample(folder: Path) -> None:
    shutil.copy(SAMPLE, folder / "covertype.npz")


def copy_jargon(folder: Path) -> None:
    shutil.copytree(JARGON, folder, dirs_exist_ok=True)


ROWS = {"batch_size": 32, "context": 512}
MODULES: dict[str, tuple[type[Any], dict[str, Any], Callable[[Path], None], tuple[Any, str]]] = {
    "Covertype": (Covertype, {"batch_size": 1000}, copy_sample, (covertype, "_read")),
    "CIFAR100": (CIFAR100, {"batch_size": 16}, write_cifar100, (cifar100, "read_images")),
    "FineWeb, resident": (FineWeb, {**ROWS, "resident": True}, copy_jargon, (token_files.TokenFolder, "tokens")),
    "FineWeb, mapped": (FineWeb, {**ROWS, "resident": False}, copy_jargon, (token_files.TokenFolder, "tokens")),
}
"""By its name: the class, its options, what writes its files, and the function that reads them."""


class Data:
    """Data modules of one kind, on a folder of their own."""

    def __init__(self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind, self.options, write, (owner, name) = MODULES[kind]
        self.folder = folder
        folder.mkdir()
        write(folder)
        self.reads = 0
        read = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            self.reads += 1
            return read(*arguments)

        monkeypatch.setattr(owner, name, counted)

    def __call__(
        self, trainer: dict[str, Any] | None = None, folder: Path | None = None, **options: Any
    ) -> LightningDataModule:
        data = self.kind(data_dir=str(folder or self.folder), **{**self.options, **options})
        data.trainer = trainer_stub(**trainer or {})
        data.prepare_data()
        data.setup()
        return data


@pytest.fixture(params=MODULES)
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    monkeypatch.setattr(files, "_held", WeakValueDictionary())
    monkeypatch.setattr(files, "_verified", set())
    return Data(request.param, tmp_path / "data", monkeypatch)


def loaders(data: LightningDataModule) -> list[ResidentLoader]:
    return [data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]


def made_of(data: LightningDataModule) -> tuple[Any, ...]:
    return tuple(loader._made_of() for loader in loaders(data))


def labels(loader: ResidentLoader) -> torch.Tensor:
    """The last part of all batches; of FineWeb, whole rows."""
    return torch.cat([parts(batch)[-1] for batch in loader])


# ---- seeds


def assert_same_data(ours: LightningDataModule, theirs: LightningDataModule) -> None:
    for mine, other in zip(loaders(ours), loaders(theirs), strict=True):
        assert mine.state_dict() == other.state_dict()
        for _ in range(2):
            for batch, expected in zip(mine, other, strict=True):
                assert_same(batch, expected)


@pytest.mark.parametrize("seed", [None, 0])
def test_with_the_seed_0_all_is_as_with_the_data_seed_0(data: Data, seed: int | None):
    if seed is not None:
        seed_everything(seed, verbose=False)
    assert_same_data(data(), data(seed=0))


def test_the_order_follows_the_seed_of_the_run_and_what_is_held_out_does_not(data: Data):
    runs = []
    for seed in (5, 6, 5):
        seed_everything(seed, verbose=False)
        runs.append(data())
        assert runs[-1].train_dataloader().state_dict()["seed"] == seed
    first, other, again = (labels(run.train_dataloader()) for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for mine, others in zip(loaders(runs[0])[1:], loaders(runs[1])[1:], strict=True):
        assert mine.order == others.order  # which names the very tensors
    assert made_of(runs[0]) == made_of(runs[1])


def test_a_seed_of_the_data_is_not_that_of_the_run(data: Data):
    before = data(seed=3)
    seed_everything(5, verbose=False)
    assert_same_data(data(seed=3), before)


def test_the_seed_is_read_at_the_first_setup_and_kept(data: Data):
    seed_everything(3, verbose=False)
    module = data()
    assert module.seed is None
    seed_everything(4, verbose=False)
    module.setup("validate")
    assert module.train_dataloader().state_dict()["seed"] == 3


@pytest.mark.parametrize("kind", [Covertype, CIFAR100, FineWeb])
@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_a_seed_that_is_none_is_refused(kind: Callable[..., LightningDataModule], seed: Any):
    with pytest.raises(ValueError, match=r"data\.seed"):
        kind(seed=seed)


# ---- batches


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_together_see_the_batches_of_one(data: Data, ranks: int):
    alone = data(seed=0)
    shares = [{"rank": rank, "num_replicas": ranks} for rank in range(ranks)]
    modules = [data({"distributed_sampler_kwargs": share}, seed=0) for share in shares]
    for number in (0, 1):
        for whole, *pieces in zip(*(loaders(module)[number] for module in (alone, *modules)), strict=True):
            together = map(torch.cat, zip(*map(parts, pieces), strict=True))
            assert_same(parts(whole), tuple(together))


@pytest.mark.parametrize("number", [0, 1, 3], ids=["train", "val", "predict"])
def test_by_position_batches_are_those_of_iteration(data: Data, number: int):
    def make(seed: int) -> ResidentLoader:
        seed_everything(seed, verbose=False)
        return loaders(data())[number]

    kept = make(0)
    check_positions(make, follows_seed=number == 0)
    assert kept.order == make(0).order


def test_overfitting_sees_the_same_rows_every_epoch(data: Data):
    for overfit in (1, 0):
        loader = data({"overfit_batches": overfit}).train_dataloader()
        assert torch.equal(labels(loader), labels(loader)) is bool(overfit)


# ---- what is held


def test_data_modules_of_one_file_and_device_share_their_data(data: Data):
    first = data()
    reads = data.reads
    others = [data(batch_size=batch_size) for batch_size in (data.options["batch_size"], 4)]
    assert reads > 0
    assert data.reads == reads
    assert {made_of(first)} == {made_of(other) for other in others}
    assert first.train_dataloader().order == others[0].train_dataloader().order
    assert first.train_dataloader().order != others[1].train_dataloader().order


def test_data_is_freed_after_its_last_data_module(data: Data):
    modules = [data(), data()]
    reads = data.reads
    modules.pop()
    assert len(files._held) > 0
    modules.pop()
    assert len(files._held) == 0
    data()
    assert data.reads == 2 * reads


def test_a_loader_shares_the_data_of_a_module_that_is_gone(data: Data):
    loader = data().train_dataloader()
    assert data().train_dataloader().order == loader.order


def test_data_of_another_file_version_or_device_is_another(data: Data, tmp_path: Path):
    first = data()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(data.folder, elsewhere)
    of_file = data(folder=elsewhere)
    of_device = data({"device": "meta"})
    for file in (path for path in data.folder.rglob("*") if path.is_file()):
        status = file.stat()
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    of_version = data()
    held = [first, of_file, of_device, of_version]
    assert len({made_of(each) for each in held}) == len(held)


def test_a_checked_folder_is_checked_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checks: list[token_files.TokenFolder] = []
    verify = token_files.TokenFolder.verify

    def counted(folder: token_files.TokenFolder) -> None:
        checks.append(folder)
        verify(folder)

    monkeypatch.setattr(token_files.TokenFolder, "verify", counted)
    folder = tmp_path / "tokens"
    shutil.copytree(JARGON, folder)
    for _ in range(3):
        FineWeb(str(folder)).prepare_data()
    assert len(checks) == 1
    file = next(folder.glob("train/*.ds.index"))
    content = bytearray(file.read_bytes())
    content[6] ^= 1  # the first document ends far behind the second
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ValueError, match="is damaged"):
            FineWeb(str(folder)).prepare_data()
    assert len(checks) == 3
