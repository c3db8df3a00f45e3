"""The random numbers of one run, among several in one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "PL_GLOBAL_SEED"
"""Where Lightning's `seed_everything` leaves the seed of a run, and data modules find it."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Gives what runs inside the random numbers of a run with this seed, and leaves those outside alone."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(seed)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
