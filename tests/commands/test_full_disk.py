"""A full disk ends a run with one line: the file system, the last good checkpoint, and the command to go on."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, small, upscale
from lightning.pytorch.strategies import SingleDeviceStrategy
from slow_saves import save_in_background
from tensorboard.summary.writer.record_writer import RecordWriter
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.commands import mistakes as module
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.commands.mistakes import full_disk
from mupscale.models.checkpoint_files import CheckpointFiles

RUN = Path("runs/default/version_0")

full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def raised_by_torch(path: str) -> None:
    torch.save({"a": torch.zeros(100_000)}, path)


def raised_by_system(number: int) -> Any:
    def write(path: str) -> None:
        raise OSError(number, os.strerror(number))

    return write


WRITES: dict[str, tuple[Any, str]] = {
    "EDQUOT": (raised_by_system(errno.EDQUOT), "the disk quota is used up on the file system at"),
    "torch": (lambda path: raised_by_torch("/dev/full"), "no space is left on the file system at"),
}
"""Ways in which a write fails, and what the line says of it."""


@pytest.mark.parametrize(("number", "place"), [(errno.EDQUOT, "/"), (errno.ENOSPC, "/proc")])
def test_a_quota_is_that_of_the_first_place_and_a_full_disk_the_one_without_space(number: int, place: str) -> None:
    assert str(full_disk(OSError(number, ""), [Path("/"), Path("/proc")])).endswith(f"at {place} ({place})")


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
@full
@pytest.mark.parametrize("write", WRITES)
def test_a_checkpoint_that_does_not_fit(write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails, text = WRITES[write]
    save = SingleDeviceStrategy.save_checkpoint

    def full(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if checkpoint["global_step"] >= 15:
            fails(filepath)
        save(self, checkpoint, filepath, storage_options)

    monkeypatch.setattr(SingleDeviceStrategy, "save_checkpoint", full)
    monkeypatch.setattr(module, "ROOM", 2**62)  # torch's error counts only where little space is left
    line = refused("fit", "--config", small(tmp_path / "c.yaml", upscale(10, 16), enable_progress_bar=False))
    assert line.startswith(f"error: {text}")
    assert f"the newest checkpoint is {RUN}/checkpoints/resume/step=10.ckpt of step 10" in line
    assert line.endswith(f"make space there, then go on: python -m mupscale resume {RUN}")
    monkeypatch.setattr(SingleDeviceStrategy, "save_checkpoint", save)
    main(["resume", str(RUN)])
    assert newest_checkpoint(RUN)[1]["global_step"] == 20


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("step", slow_except([15, 20], kept=[15]))
def test_a_checkpoint_in_the_background_that_does_not_fit(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread fails while the run trains; the older checkpoints, which it would have deleted, stay."""
    save = CheckpointFiles._save

    def full(self: CheckpointFiles, checkpoint: dict[str, Any], *arguments: Any) -> None:
        if checkpoint["global_step"] >= step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, checkpoint, *arguments)

    config = small(tmp_path / "c.yaml", upscale(10, 16), enable_progress_bar=False)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFiles, "_save", full)
        save_in_background(patch, 0.01)
        line = refused("fit", "--config", config)
    assert line.startswith("error: no space is left on the file system at")
    assert f"step={step - 5}.ckpt of step {step - 5}; make space there" in line
    main(["resume", str(RUN)])
    assert newest_checkpoint(RUN)[1]["global_step"] == 20


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_curves_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, writes = RecordWriter.write, []

    def full(self: RecordWriter, data: bytes) -> None:
        writes.append(data)
        if len(writes) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    line = refused("fit", "--config", small(tmp_path / "c.yaml", enable_progress_bar=False))
    assert line.startswith("error: no space is left on the file system at")
    assert "; the newest checkpoint is " in line


def test_other_errors_are_not_a_full_disk() -> None:
    assert full_disk(OSError(errno.EACCES, "no")) is None
    assert full_disk(RuntimeError("unexpected pos 64 vs 0")) is None  # there is space
    assert full_disk(ValueError("No space left on device")) is None


def test_the_error_behind_another_one_counts() -> None:
    error = RuntimeError("upscaling failed")
    error.__cause__ = OSError(errno.ENOSPC, "full", "/proc/x")
    assert full_disk(error) == "no space is left on the file system at /proc (/proc/x)"
