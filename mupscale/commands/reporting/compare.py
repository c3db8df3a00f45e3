"""One comparison for all: two arms, seed by seed, with an interval; the best of several; and edges of grids.

An arm is a set of runs that differ in their seeds only. The difference of two arms is the mean of the differences seed
by seed, with its interval by Student's t over these differences. Where one of several arms was chosen because it ends
lowest, chance has helped it: among m pairs of arms the interval is that of 1 - 0.05 / m, and the mean with every seed
left out of the choice, which chance does not help, is given beside it.
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


def spread(values: Sequence[float]) -> Spread | None:
    """The mean and range of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return Spread(statistics.fmean(finite), min(finite), max(finite), len(finite)) if finite else None


class Difference(NamedTuple):
    """By how much the first of two arms ends lower, over their common seeds."""

    seeds: list[Any]
    mean: float
    """Of the differences of the seeds; of the means of the arms if they have no common seed."""
    low: float
    high: float
    """The interval; infinite with one seed."""
    pairs: int
    """Among how many pairs of arms this one was chosen."""
    left_out: float | None = None
    """The mean with every seed left out of the choice; None if nothing was chosen."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves no doubt which arm ends lower."""
        return len(self.seeds) > 1 and (self.low > 0 or self.high < 0)

    @property
    def outcome(self) -> str:
        """`lower`, `higher`, or why neither can be said."""
        if not self.seeds:
            return "no seed is common to both"
        if len(self.seeds) == 1:
            return "one seed proves nothing"
        if not self.is_clear:
            return "cannot be told apart"
        return "lower" if self.mean > 0 else "higher"

    def __str__(self) -> str:
        return self.words()

    def words(self, reference: float = 0.0) -> str:
        """`lower by 0.02, 5 % (95 % interval 0.01 to 0.03, 5 seeds)`; the share is that of `reference`."""
        amount = f"{'lower' if self.mean > 0 else 'higher'} by {abs(self.mean):.3g}"
        if reference:
            amount += f", {100 * abs(self.mean / reference):.2g} %"
        if len(self.seeds) < 2:
            return f"{amount} ({self.outcome})"
        low, high = (self.low, self.high) if self.mean > 0 else (-self.high, -self.low)
        level = f"{100 * (1 - ERROR / self.pairs):.3g} % interval {low:.2g} to {high:.2g}, {len(self.seeds)} seeds"
        if self.left_out is not None:
            kept = "lower" if self.left_out > 0 else "higher"
            level += f"; {kept} by {abs(self.left_out):.2g} with each seed left out of the choice"
        return f"{amount} ({level}){'' if self.is_clear else ': they cannot be told apart'}"


def mean_of(losses: Losses) -> float:
    """Infinite without losses, or if a run diverged: an arm is not to win by the runs that did not."""
    values = list(losses.values())
    return statistics.fmean(values) if values and all(map(math.isfinite, values)) else math.inf


def rank(arms: Mapping[Any, Losses]) -> list[Any]:
    """The arms without a diverged run, the lowest mean first."""
    means = {name: mean_of(losses) for name, losses in arms.items()}
    return sorted((name for name in means if math.isfinite(means[name])), key=means.__getitem__)


def compare(ours: Losses, theirs: Losses, pairs: int = 1) -> Difference:
    """By how much our arm ends lower than theirs. `pairs`: among how many pairs of arms this one was chosen.

    >>> compare({0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.3, 1: 1.4, 2: 1.6}).outcome
    'lower'
    """
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return Difference([], mean_of(theirs) - mean_of(ours), -math.inf, math.inf, pairs)
    differences = [theirs[seed] - ours[seed] for seed in seeds]
    mean = statistics.fmean(differences)
    if len(seeds) == 1 or not math.isfinite(mean):
        return Difference(seeds, mean, -math.inf, math.inf, pairs)
    error = statistics.stdev(differences) / math.sqrt(len(seeds))
    margin = t_quantile(1 - ERROR / pairs, len(seeds) - 1) * error
    return Difference(seeds, mean, mean - margin, mean + margin, pairs)


def compare_best(ours: Mapping[Any, Losses], theirs: Mapping[Any, Losses]) -> tuple[Any, Any, Difference] | None:
    """The lowest of our arms, the lowest of theirs, and by how much ours is lower, corrected for the choice.

    None if a side has no arm without a diverged run. If both are the same arms, the two lowest are compared.
    """
    first, second = rank(ours), rank(theirs)
    is_same = ours is theirs
    if is_same:
        second = second[1:]
    if not first or not second:
        return None
    pairs = len(first) * (len(first) - 1) // 2 if is_same else len(first) * len(second)
    found = compare(ours[first[0]], theirs[second[0]], pairs)
    if pairs > 1 and len(found.seeds) > 1:
        ours, theirs = {name: ours[name] for name in first}, {name: theirs[name] for name in rank(theirs)}
        found = found._replace(left_out=chosen_without_seed(ours, ours if is_same else theirs))
    return first[0], second[0], found


def chosen_without_seed(ours: Mapping[Any, Losses], theirs: Mapping[Any, Losses]) -> float | None:
    """By how much our best arm is lower than theirs if, for each seed, both are chosen by the other seeds.

    If both are the same arms, the best is compared with the second. None if there are not two common seeds.
    """
    arms = [*ours.values(), *theirs.values()]
    seeds = [seed for seed in arms[0] if all(seed in losses for losses in arms)]
    if len(seeds) < 2:
        return None
    found = []
    for seed in seeds:
        first, second = (rank({name: _without(seed, arms[name]) for name in arms}) for arms in (ours, theirs))
        second = second[1:] if ours is theirs else second
        if not first or not second:
            return None
        found.append(theirs[second[0]][seed] - ours[first[0]][seed])
    return statistics.fmean(found)


def _without(seed: Any, losses: Losses) -> Losses:
    return {other: loss for other, loss in losses.items() if other != seed}


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


# --- grids


def is_edge(best: Any, means: Mapping[Any, float]) -> bool:
    """Whether better values may lie beyond the best of a grid: it is at an end, or beside one that diverged.

    `means` are the losses by the values of an ordered axis; infinite if a run diverged. A grid of fewer than three has
    no inside. No values are below zero.
    """
    levels = sorted(means)
    if len(levels) < 3:
        return False
    place = levels.index(best)
    if place == len(levels) - 1 or (place == 0 and best != 0):
        return True
    around = levels[max(place - 1, 0) : place + 2]
    return not all(math.isfinite(means[level]) for level in around)
