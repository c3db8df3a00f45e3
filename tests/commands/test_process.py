"""What commands print on a terminal: it fits, and nothing is lost; and imports without the garbage collector."""

import gc
import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from command_line import small, upscale

from mupscale.__main__ import main
from mupscale.commands import process
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.commands.process import (
    Terminated,
    columns,
    end_now,
    interruptions,
    loaded,
    on_sigterm,
    progress_bar,
    raise_for,
    refuse_folder,
)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture[str]:
    """Standard output is a terminal of 80 columns, with colours."""
    monkeypatch.setattr(process, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return capsys


def test_a_pipe_gets_all_and_no_colour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    main(["plan", "--config", small(Path("c.yaml"), upscale(3, 16))])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "{" not in printed
    assert "layers.1.weight  matrix" in printed
    assert "layers.2.weight  matrix" in printed
    assert columns() is None


def test_a_terminal_gets_bold_headings_and_joined_layers(terminal: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--config", small(Path("c.yaml"), upscale(3, 16))])
    printed = terminal.readouterr().out
    assert "\x1b[1mwidth 8 → 16\x1b[0m\n\x1b[1mparameter\x1b[0m\n" in printed
    assert "layers.{1,2}.weight  ×2" in printed
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in printed.splitlines()) <= 80


# --- output that fails


def finished(config: str) -> int:
    """Trains, and returns the steps of the last checkpoint."""
    main(["fit", "--config", config])
    return newest_checkpoint(Path("runs/default/version_0"))[1]["global_step"]


def test_a_command_goes_on_when_its_reader_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert finished(small(tmp_path / "c.yaml", max_steps=2, enable_progress_bar=False)) == 2
        main(["plan", "--config", str(tmp_path / "c.yaml")])


def test_a_full_output_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        config = small(tmp_path / "c.yaml", max_steps=2, enable_progress_bar=False)
        with pytest.raises(SystemExit) as exit:
            main(["fit", "--config", config])
    lost = "standard output cannot be written (no space left on device); the rest of it is lost"
    assert exit.value.code == f"error: {lost}"
    assert newest_checkpoint(Path("runs/default/version_0"))[1]["global_step"] == 2


def test_a_closed_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert finished(small(tmp_path / "c.yaml", max_steps=2, enable_progress_bar=False)) == 2


def test_an_ascii_terminal_gets_question_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    main(["plan", "--config", small(tmp_path / "c.yaml", upscale(3, 16))])
    stream.seek(0)
    text = stream.read()
    assert text.startswith("width 8 ? 16\n")


@pytest.mark.parametrize(("seconds", "text"), [(process.IN_A_LOG, ""), (0.0, "steps:  50%")])
def test_a_log_gets_the_progress_of_long_work_only(
    seconds: float, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "IN_A_LOG", seconds)
    with progress_bar() as show_progress:
        show_progress("steps", 1, 2)
    found = capsys.readouterr().err
    assert text in found
    assert bool(found) == bool(text)


# --- imports


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_process_raise_unless_it_ignores_them(number: signal.Signals) -> None:
    with pytest.raises(Terminated), on_sigterm(end_now):
        signal.raise_signal(number)
    with interruptions() as seen:
        signal.raise_signal(number)
    with pytest.raises(Terminated):
        raise_for(seen)
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does
    try:
        with on_sigterm(end_now), interruptions() as seen:
            signal.raise_signal(number)
    finally:
        assert signal.signal(number, before) is signal.SIG_IGN
    assert seen == []


def test_ctrl_c_is_an_interrupt() -> None:
    with interruptions() as seen:
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        raise_for(seen)


def test_the_root_is_a_folder_like_others() -> None:
    refuse_folder("--out", Path("/"))
    refuse_folder("--out", Path("/new"))


def test_an_error_switches_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError):
        loaded("no_such_module")
    assert gc.isenabled()
