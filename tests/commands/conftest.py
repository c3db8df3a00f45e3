"""Figures that are not drawn, and commands that run as processes of their own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from program_server import WITHOUT_FIGURES, Server


def save_blank(drawn: Any, path: Path) -> list[Path]:
    """In the place of `mupscale.commands.figures.save`: a figure is laid out, and its files stay empty."""
    paths = [path.with_name(f"{path.name}.{ending}") for ending in ("png", "pdf")]
    for each in paths:
        each.touch()
    return paths


@pytest.fixture
def rendered_figures() -> None:
    """Figures are rendered."""


@pytest.fixture
def drawn_sweeps() -> None:
    """Sweeps draw figures, into empty files."""


@pytest.fixture(autouse=True)
def _cheap_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second. Only tests with one of the fixtures above are about them."""
    if "rendered_figures" not in request.fixturenames:
        monkeypatch.setattr("mupscale.commands.figures.save", save_blank)
    if "drawn_sweeps" not in request.fixturenames:
        monkeypatch.setattr("mupscale.commands.lab.sweep.draw_sweep", lambda *_: [])


@pytest.fixture
def start_server() -> Iterator[Callable[[Path], Server]]:
    """Starts a server in a folder, which it makes; it ends with the test."""
    with ExitStack() as servers:

        def start(folder: Path) -> Server:
            folder.mkdir(exist_ok=True)
            return servers.enter_context(Server(folder, **WITHOUT_FIGURES))

        yield start
