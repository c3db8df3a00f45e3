"""How an optimum moves with the width: the exponent of a power law."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Optimum(NamedTuple):
    """The value at which a curve over a grid is lowest. At the edge of the grid the true optimum may lie beyond it."""

    value: float
    at_edge: bool


class Drift(NamedTuple):
    """The optimum is proportional to width^exponent. `error` is one standard error; NaN if it is unknown."""

    exponent: float
    error: float
    error_from: str
    """The source of the error: the seeds, or the fit of a line through the optima."""
    optima: list[Optimum]
    """By width."""

    def __str__(self) -> str:
        return f"{self.power}, {'of unknown error' if math.isnan(self.error) else f'by {self.error_from}'}"

    @property
    def power(self) -> str:
        exponent = f"{round(self.exponent, 2) + 0.0:.2f}"  # never -0.00
        return f"width^{exponent}" if math.isnan(self.error) else f"width^({exponent} ± {self.error:.2f})"

    @property
    def at_edge(self) -> int:
        return sum(optimum.at_edge for optimum in self.optima)


def optimum_of(levels: Sequence[float], losses: Sequence[float]) -> Optimum:
    """The lowest point of the parabola through the best point and its neighbours, over the logarithm of the levels.

    >>> optimum_of([1, 2, 4], [1.0, 0.0, 1.0])
    Optimum(value=2.0, at_edge=False)
    """
    best = min(range(len(levels)), key=lambda index: losses[index])
    around = range(best - 1, best + 2)
    if best in (0, len(levels) - 1) or not all(math.isfinite(losses[index]) for index in around):
        return Optimum(levels[best], True)  # beside a run that diverged it is at the edge of what trains
    x = [math.log(levels[index]) for index in around]
    y = [losses[index] for index in around]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curvature = (right - left) / (x[2] - x[0])
    if curvature <= 0:
        return Optimum(levels[best], False)  # all three are equal
    return Optimum(math.exp((x[0] + x[1]) / 2 - left / (2 * curvature)), False)


def drift_of(widths: Sequence[float], levels: Sequence[float], curves: Sequence[Sequence[Sequence[float]]]) -> Drift:
    """The drift of the optimum over the widths.

    Args:
        widths: At least two.
        levels: The grid, in order; all positive.
        curves: The losses by width, seed and level; infinite where a run diverged.
    """
    means = [[statistics.fmean(each) for each in zip(*of_seeds, strict=True)] for of_seeds in curves]
    optima = [optimum_of(levels, losses) for losses in means]
    exponent, error = line(widths, optima)
    seeds = len(curves[0])
    if seeds == 1:
        return Drift(exponent, error, "the residuals of the fit, one seed", optima)
    slopes = []
    for seed in range(seeds):
        slopes.append(line(widths, [optimum_of(levels, of_seeds[seed]) for of_seeds in curves])[0])
    return Drift(exponent, statistics.stdev(slopes) / math.sqrt(seeds), f"{seeds} seeds", optima)


def line(widths: Sequence[float], optima: Sequence[Optimum]) -> tuple[float, float]:
    """The slope of the logarithm of the optima over that of the widths, and its standard error; NaN of two widths."""
    x = [math.log(width) for width in widths]
    y = [math.log(optimum.value) for optimum in optima]
    fit = statistics.linear_regression(x, y)
    residuals = [b - fit.slope * a - fit.intercept for a, b in zip(x, y, strict=True)]
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    freedom = len(x) - 2
    error = math.sqrt(sum(r * r for r in residuals) / freedom / spread) if freedom else math.nan
    return fit.slope, error
