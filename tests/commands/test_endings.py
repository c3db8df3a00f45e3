"""How runs end before their time: exit codes, one line that says where the run stands, and how to go on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import small, upscale
from lightning.pytorch import Trainer

from mupscale.__main__ import main
from mupscale.callbacks import upscale as swaps
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.summary import Summary
from mupscale.commands import cli
from mupscale.datamodules.covertype import Covertype
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def ended(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """The exit code of a command line, and the last line of its standard error."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    code = exit.value.code
    lines = capfd.readouterr().err.strip().splitlines()
    if isinstance(code, str):  # which python prints, and exits with 1
        return 1, code
    return code, lines[-1] if lines else ""


def before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, step: int = 0) -> None:
    """Sends a signal to this process before a function is called for the first time from a step on."""
    function, sent = getattr(owner, name), []

    def signalled(*arguments: Any, **named: Any) -> Any:
        trainer = next((argument for argument in arguments if isinstance(argument, Trainer)), None)
        if not sent and (trainer is None or trainer.global_step >= step):
            sent.append(number)
            os.kill(os.getpid(), number)
        return function(*arguments, **named)

    monkeypatch.setattr(owner, name, signalled)


MOMENTS: dict[str, tuple[Any, str, int, int | None]] = {
    "parsing": (cli, "import_classes", 0, None),
    "set-up": (Covertype, "setup", 0, 0),
    "sanity check": (MLP, "validation_step", 0, 0),
    "the first batch": (Summary, "on_train_start", 0, 1),
    "a batch": (Curves, "on_train_batch_end", 8, 8),
    "the swap": (swaps, "upscale", 10, 11),
    "validation": (Curves, "on_validation_end", 6, 6),
    "checkpointing": (Curves, "on_save_checkpoint", 10, 10),
    "the last step": (Curves, "on_train_batch_end", 20, 20),
    "the end": (Curves, "on_train_end", 20, 20),
}
"""A function that the signal comes before, the step from which on it does, and the step at which the run then is."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_ends_with_143_and_says_how_to_go_on(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    owner, name, step, at = MOMENTS[moment]
    config = small(tmp_path / "c.yaml", upscale(10, 16), enable_progress_bar=False)
    before(monkeypatch, owner, name, signal.SIGTERM, step)
    code, line = ended(capfd, "fit", "--config", config)
    monkeypatch.undo()
    print(moment, code, line)
    assert code == 143
    assert line.startswith("terminated; ")
