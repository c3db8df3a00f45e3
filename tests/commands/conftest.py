"""Fixtures for commands that run as processes of their own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from program_server import WITHOUT_FIGURES, Server


@pytest.fixture
def start_server() -> Iterator[Callable[[Path], Server]]:
    """Starts a server in a folder, which it makes; it ends with the test."""
    with ExitStack() as servers:

        def start(folder: Path) -> Server:
            folder.mkdir(exist_ok=True)
            return servers.enter_context(Server(folder, **WITHOUT_FIGURES))

        yield start
