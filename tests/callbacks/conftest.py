"""Fixtures for tests of callbacks."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def double() -> Iterator[None]:
    """WeightAveraging builds the network before the trainer's precision is set; float32 would round averages."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
