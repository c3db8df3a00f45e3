"""A full disk ends a run with one line: the file system, the last good checkpoint, and the command to go on."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, small, upscale
from lightning.pytorch.strategies import SingleDeviceStrategy
from programs import run_in_fork
from slow_saves import save_in_background
from tensorboard.summary.writer.record_writer import RecordWriter

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
    "ENOSPC": (raised_by_system(errno.ENOSPC), "no space is left on the file system at"),
    "EDQUOT": (raised_by_system(errno.EDQUOT), "the disk quota is used up on the file system at"),
    "EFBIG": (raised_by_system(errno.EFBIG), "a file has reached the largest size allowed on the file system at"),
    "torch": (lambda path: raised_by_torch("/dev/full"), "no space is left on the file system at"),
}
"""Ways in which a write fails, and what the line says of it."""


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
    assert f"the newest checkpoint is {RUN}/checkpoints/epoch=1-step=10.ckpt of step 10" in line
    assert line.endswith(f"make space there, then go on: python -m mupscale resume {RUN}")
    monkeypatch.setattr(SingleDeviceStrategy, "save_checkpoint", save)
    main(["resume", str(RUN)])
    assert newest_checkpoint(RUN)[1]["global_step"] == 20


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("step", [15, 20], ids=["in the middle", "at the end"])
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
    assert f"-step={step - 5}.ckpt of step {step - 5}; make space there" in line
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


def test_the_place_with_the_least_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    without_name = OSError(errno.ENOSPC, "full")
    for fullest in (tmp_path, Path("/proc")):
        monkeypatch.setattr(module, "free", lambda path, fullest=fullest: 0 if path == fullest else 1)
        assert str(full_disk(without_name, [Path("/proc")])).endswith(f" ({fullest})")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_real_one(small_disk: Path, tmp_path: Path) -> None:
    """In a process of its own, to see all that it prints until its end."""
    config = small(tmp_path / "c.yaml", upscale(50, 16), enable_progress_bar=False, max_steps=2000)
    output = tmp_path / "printed.txt"
    command = ["fit", "--config", config, "--trainer.logger.save_dir", str(small_disk)]
    assert run_in_fork(lambda: main(command), output) == 1
    printed = output.read_text()
    assert "Traceback" not in printed
    line = printed.strip().splitlines()[-1]
    assert f"error: no space is left on the file system at {small_disk}" in line
    assert line.endswith(f"python -m mupscale resume {small_disk}/default/version_0")
    path, content = newest_checkpoint(small_disk / "default/version_0")
    assert path is not None
    assert f"step={content['global_step']}.ckpt" in line
