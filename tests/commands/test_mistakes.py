"""What is about the user's input ends with one line; the user's own code, training and bugs keep their traceback.

A full disk ends a run with one line, too: the file system, the last good checkpoint, and the command to go on.
"""

import errno
import os
from collections.abc import Callable
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
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.commands.mistakes import IN_TRAINING, TRACEBACK, full_disk, line_about
from mupscale.models.checkpoint_files import CheckpointFiles

RUN = Path("runs/default/version_0")


def raised(call: Callable[[], object]) -> Exception:
    """What a call raises, with the traceback that it has in a command."""
    namespace: dict[str, Any] = {"__name__": "mupscale.commands.somewhere", "call": call}
    code = compile(
        "def run():\n    try:\n        call()\n    except Exception as error:\n        return error", "x", "exec"
    )
    exec(code, namespace)
    return namespace["run"]()


def of_library(source: str, module: str = "torch.optim.adam") -> Exception:
    """What code of a library raises."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(f"def call():\n    {source}", "x", "exec"), namespace)
    return raised(namespace["call"])


# --- the rule


def test_what_a_library_raises_is_one_line_with_its_section() -> None:
    line = line_about(of_library("raise RuntimeError('fused and\\n  foreach.')"))
    assert line == f"model.optimizer: fused and foreach (RuntimeError in torch.optim.adam; {TRACEBACK}=1 shows where)"
    line = line_about(of_library("{}['gelu_fsat']", "transformers.activations"))
    assert line is not None
    assert line.startswith("model: there is no 'gelu_fsat' (KeyError in transformers.activations; ")
    assert len(line_about(of_library("raise ValueError('x' * 10_000)")) or "") < 800


def test_what_mupscale_or_the_users_code_raises_keeps_its_traceback() -> None:
    assert line_about(of_library("raise KeyError('bug')", "mupscale.widening.plan")) is None
    assert line_about(of_library("raise RuntimeError('mine')", "my_model")) is None
    assert line_about(raised(lambda: torch.ones(2) @ torch.ones(3))) is None  # of this file, which is no library


def test_what_is_raised_in_training_keeps_its_traceback() -> None:
    for module, expected in (("torch.optim.adam", False), ("torch.optim.lr_scheduler", True)):
        error = of_library("1 / 0", module)
        error.add_note(IN_TRAINING)
        assert (line_about(error) is not None) is expected


def test_memory_and_the_system() -> None:
    assert "does not fit into memory" in (line_about(raised(lambda: bytearray(10**17))) or "")
    huge = raised(lambda: torch.empty(10**16))
    assert "does not fit into memory; choose smaller sizes" in (line_about(huge) or "")
    assert line_about(raised(lambda: open("/nowhere/x"))) == "/nowhere/x: no such file or directory"  # noqa: SIM115
    assert line_about(OSError(errno.ELOOP, "Too many links", "loop")) == "loop: too many links"


def test_the_traceback_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small(Path("c.yaml"))
    both = ["fit", "--config", "c.yaml", "--model.optimizer.fused=true", "--model.optimizer.foreach=true"]
    assert "`fused` and `foreach` cannot be `True` together" in refused(*both)
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(ValueError, match="cannot be `True` together") as caught:
        main(both)
    assert isinstance(caught.value.__cause__, RuntimeError)


# --- a run


@pytest.mark.slow
def test_the_users_own_code_keeps_its_traceback(in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("failing.py").write_text(
        "import torch\n"
        "from mupscale.models.mlp import MLP\n"
        "class Mine(MLP):\n"
        "    def loss(self, batch):\n"
        "        return torch.ones(2) @ torch.ones(3)\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    with pytest.raises(RuntimeError) as caught:
        main(["fit", "--config", small(Path("c.yaml")), "--model=failing.Mine"])
    assert caught.traceback[-1].path.name == "failing.py"


# --- a full disk


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
    monkeypatch.setattr("mupscale.commands.mistakes.ROOM", 2**62)  # torch's error counts only where little is left
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # in the thread of TensorBoard
@pytest.mark.usefixtures("in_an_empty_folder")
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
