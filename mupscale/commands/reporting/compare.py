"""One comparison for all: two arms, seed by seed, with an interval.

An arm is a set of runs that differ in their seeds only. The difference of two arms is the mean of the differences seed
by seed, with its interval by Student's t over these differences. Where one of several arms was chosen because it ends
lowest, chance has helped it: among m pairs of arms the interval is that of 1 - 0.05 / m.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Losses = Mapping[Any, float]
"""The losses of an arm by seed. Infinite if the run diverged."""

ERROR = 0.05
"""How often an interval may miss the true difference."""


class Spread(NamedTuple):
    """A mean over runs, and its range."""

    mean: float
    min: float
    max: float
    runs: int


def spread_of(values: Sequence[float]) -> Spread | None:
    """The mean and range of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return Spread(statistics.fmean(finite), min(finite), max(finite), len(finite)) if finite else None


class ArmDifference(NamedTuple):
    """By how much the first of two arms ends lower, over their common seeds."""

    seeds: list[Any]
    mean: float
    """The mean difference over common seeds; the difference of the means if there are none."""
    low: float
    high: float
    """The interval; infinite with one seed."""
    pairs: int
    """Among how many pairs of arms this one was chosen."""


def mean_of(losses: Losses) -> float:
    """Infinite without losses, or if a run diverged: an arm is not to win by the runs that did not."""
    values = list(losses.values())
    return statistics.fmean(values) if values and all(map(math.isfinite, values)) else math.inf


def compare(ours: Losses, theirs: Losses, pairs: int = 1) -> ArmDifference:
    """By how much our arm ends lower than theirs. `pairs`: among how many pairs of arms this one was chosen.

    >>> round(compare({0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.3, 1: 1.4, 2: 1.6}).low, 2)
    0.19
    """
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return ArmDifference([], mean_of(theirs) - mean_of(ours), -math.inf, math.inf, pairs)
    differences = [theirs[seed] - ours[seed] for seed in seeds]
    mean = statistics.fmean(differences)
    if len(seeds) == 1 or not math.isfinite(mean):
        return ArmDifference(seeds, mean, -math.inf, math.inf, pairs)
    error = statistics.stdev(differences) / math.sqrt(len(seeds))
    margin = t_quantile(1 - ERROR / pairs, len(seeds) - 1) * error
    return ArmDifference(seeds, mean, mean - margin, mean + margin, pairs)


def t_quantile(level: float, freedom: int) -> float:
    """Student's t within which chance stays with probability `level`, on both sides together.

    >>> round(t_quantile(0.95, 4), 3)
    2.776
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # t = sqrt(freedom) tan(angle); the probability grows with the angle
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability_within(angle: float, freedom: int) -> float:
    """The probability of |t| < sqrt(freedom) tan(angle): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for index in range(1 + freedom % 2, freedom, 2):
        total += term
        term *= cosine**2 * index / (index + 1)
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
