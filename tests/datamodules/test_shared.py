"""Data modules of one process hold their data together, and free it with the last of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
from lightning.pytorch import LightningDataModule
from stand_ins import trainer_stub

from mupscale.datamodules import cifar100, covertype, token_files
from mupscale.datamodules import files as module
from mupscale.datamodules.cifar100 import CIFAR100
from mupscale.datamodules.covertype import SAMPLE, Covertype
from mupscale.datamodules.fineweb import JARGON, FineWeb


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_held", WeakValueDictionary())
    monkeypatch.setattr(module, "_verified", set())


# ---- the data modules


def covertype_folder(folder: Path) -> None:
    shutil.copy(SAMPLE, folder / "covertype.npz")


def cifar100_folder(folder: Path) -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, images in (("train", 20), ("test", 10)):
        arrays[f"x_{part}"] = draw.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = draw.integers(0, 100, images, dtype=np.uint8)
    np.savez(folder / "cifar100.npz", **arrays)


def fineweb_folder(folder: Path) -> None:
    shutil.copytree(JARGON, folder, dirs_exist_ok=True)


MODULES: dict[str, tuple[Callable[..., LightningDataModule], Callable[[Path], None], tuple[Any, str]]] = {
    "Covertype": (Covertype, covertype_folder, (covertype, "_read")),
    "CIFAR100": (CIFAR100, cifar100_folder, (cifar100, "read")),
    "FineWeb, resident": (lambda **a: FineWeb(resident=True, **a), fineweb_folder, (token_files.TokenFolder, "tokens")),
    "FineWeb, mapped": (lambda **a: FineWeb(resident=False, **a), fineweb_folder, (token_files.TokenFolder, "tokens")),
}


class Data:
    """Data modules of one kind, on a folder of their own."""

    def __init__(self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.make, write, (owner, name) = MODULES[kind]
        self.folder = folder
        write(folder)
        self.reads = 0
        read = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            self.reads += 1
            return read(*arguments)

        monkeypatch.setattr(owner, name, counted)

    def __call__(self, device: str = "cpu", folder: Path | None = None, **options: Any) -> LightningDataModule:
        data = self.make(data_dir=str(folder or self.folder), **{"batch_size": 8, **options})
        data.trainer = trainer_stub(device)  # type: ignore[assignment]
        data.prepare_data()
        data.setup()
        return data


@pytest.fixture(params=MODULES)
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    folder = tmp_path / "data"
    folder.mkdir()
    return Data(request.param, folder, monkeypatch)


def made_of(data: LightningDataModule) -> tuple[Any, ...]:
    return tuple(
        loader._made_of() for loader in (data.train_dataloader(), data.val_dataloader(), data.predict_dataloader())
    )


def test_data_modules_of_one_file_and_device_share_their_data(data: Data):
    first = data()
    reads = data.reads
    others = [data(batch_size=batch_size) for batch_size in (8, 4)]
    assert reads > 0
    assert data.reads == reads
    assert {made_of(first)} == {made_of(other) for other in others}
    assert first.train_dataloader().order == others[0].train_dataloader().order
    assert first.train_dataloader().order != others[1].train_dataloader().order


def test_data_is_freed_after_its_last_data_module(data: Data):
    modules = [data(), data()]
    reads = data.reads
    modules.pop()
    assert len(module._held) > 0
    modules.pop()
    assert len(module._held) == 0
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
    of_device = data(device="meta")
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
