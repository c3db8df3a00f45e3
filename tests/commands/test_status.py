"""The line that says how far long work is."""

import sys

import pytest

from mupscale.commands import terminal
from mupscale.commands.terminal import Status


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal, "time", made)
    return made


def test_lines_come_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Status() as show:
        for second in range(64):
            clock.now = second
            show("networks trained", second, 64)
    assert capsys.readouterr().err.splitlines() == [
        "networks trained: 2 of 64, 2 s",
        "networks trained: 32 of 64, 32 s",
        "networks trained: 62 of 64, 62 s",
    ]


def test_short_work_shows_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Status() as show:
        clock.now = 1.5
        show("steps", 1, 2)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_line(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Status() as show:
        for clock.now in (2.0, 2.1, 2.5):
            show("steps", int(10 * clock.now), 100)
    line = "steps: 20 of 100, 2 s"
    assert capsys.readouterr().err == f"\r{line}\rsteps: 25 of 100, 2 s\r{' ' * len(line)}\r"
