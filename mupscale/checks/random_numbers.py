"""The generators of torch, Python and numpy: seeded alike for two models, and restored."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seeds all of them: a loss may draw from any, for a mix of samples or a mask."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def generators_kept(devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Restores all of them at the end; of those of CUDA devices the given ones, by default all."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
