"""Fixtures for tests of callbacks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


@pytest.fixture
def double() -> Iterator[None]:
    """WeightAveraging builds the network before the trainer's precision is set; float32 would round averages."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each batch that goes through Lightning's own loop."""
    counted: list[int] = []
    original = _TrainingEpochLoop.advance

    def advance(self: Any, fetcher: Any) -> None:
        counted.append(1)
        original(self, fetcher)

    monkeypatch.setattr(_TrainingEpochLoop, "advance", advance)
    return counted
