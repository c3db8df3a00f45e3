"""Random command lines and damaged files, by a seed: every command works, or ends with one line and no traceback."""

import contextlib
import logging
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import command_lines, damaged_files, make_workshop, outcome
from training_runs import LIGHTNING_WARNINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(*LIGHTNING_WARNINGS, "ignore:You defined a `validation_step`:UserWarning"),
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    logging.disable(logging.WARNING)
    yield make_workshop(tmp_path_factory.mktemp("fuzz") / "workshop")
    logging.disable(logging.NOTSET)


@contextlib.contextmanager
def copied(workshop: Path, place: Path) -> Iterator[None]:
    """In a fresh copy of the workshop."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(workshop, place, symlinks=True)
    with contextlib.chdir(place):
        yield


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_random_command_lines(count: int, workshop: Path, tmp_path: Path) -> None:
    with contextlib.chdir(workshop):
        lines = list(command_lines(count, seed=count))
    wrong, refused = [], 0
    for line in lines:
        with copied(workshop, tmp_path / "work"):
            found = outcome(shlex.split(line))
        wrong += [f"{line}: {found}"] if found.startswith("WRONG") else []
        refused += found.startswith("error: ")
    assert wrong == []
    assert refused > count / 2  # the lines are bad ones


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_damaged_files(count: int, workshop: Path, tmp_path: Path) -> None:
    wrong, refused = [], 0
    for name, spoil, words in damaged_files(count, seed=count):
        with copied(workshop, tmp_path / "work"):
            spoil()
            found = outcome(words)
        wrong += [f"{name} {shlex.join(words)}: {found}"] if found.startswith("WRONG") else []
        refused += found.startswith("error: ")
    assert wrong == []
    assert refused > count / 3
