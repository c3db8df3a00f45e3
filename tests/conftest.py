"""One thread a test process, and a program that a test starts: the suite runs one process per core."""

import functools
import gc
import importlib.metadata
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected: imports take a quarter less time
importlib.metadata.entry_points = functools.lru_cache(importlib.metadata.entry_points)
"""Each Trainer looks through all installed packages, which takes nine tenths of the time to make it."""

import torch  # noqa: E402

import mupscale  # noqa: E402, F401  first, so that torchvision can be imported beside a CPU-only torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # for programs that fixtures start before a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also runs what is marked exhaustive, such as all cells of grids"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_collection_finish() -> None:
    """What was imported stays. Collections, of which every run of a sweep makes one, need not go through it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """A test must not depend on those before it, nor on the shell: it ignores Ctrl-C for what runs in the background,
    and so does Lightning after the first one. After a fit that fails, Lightning leaves its handler of SIGTERM. A sweep
    leaves its loggers quiet."""
    torch.manual_seed(0)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.INFO)  # as its import does
    os.environ.pop("PL_GLOBAL_SEED", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    # a filter and a level of a logger outlast a test
    loggers = [
        logging.getLogger(f"lightning.pytorch.{name}")
        for name in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector")
    ]
    before = [(logger, logger.level, list(logger.filters)) for logger in loggers]
    yield
    for logger, level, filters in before:
        logger.setLevel(level)
        logger.filters = filters
