"""The results of protocol transfer: whether optima stay the same as the width grows, and by which power they move."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mupscale.atomic import write_text
from mupscale.commands import figures
from mupscale.commands.config import brief
from mupscale.commands.lab.file import Description
from mupscale.commands.lab.sweep import Sweep, in_order, metric_label, seed_cells
from mupscale.commands.reporting.compare import chosen_without_seed, is_edge
from mupscale.commands.widths import Growth, width_number
from mupscale.text_tables import as_csv

STAYS = 1
"""By how many grid cells an optimum may move and still count as stable: the true one may lie between two cells."""


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
    """The drift of the optimum over the widths. `curves` are losses by width, seed and level; infinite if diverged."""
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


@dataclass(frozen=True)
class WidthCurve:
    """A sweep at one width: the metric of each seed by value of its axis; infinite if it diverged."""

    growth: Growth
    values: dict[Any, list[float]]

    def mean(self, value: Any) -> float:
        return sum(self.values[value]) / len(self.values[value])

    @property
    def means(self) -> dict[Any, float]:
        return {value: self.mean(value) for value in self.values}

    @property
    def optimum(self) -> Any:
        return min(self.values, key=self.mean)

    def of_seeds(self, levels: list[Any], seeds: int) -> list[list[float]]:
        """The losses by seed and level; seeds after one that diverged are not run, and count as diverged."""
        return [[dict(enumerate(self.values[level])).get(seed, math.inf) for level in levels] for seed in range(seeds)]


@dataclass
class Panel:
    """A sweep at all widths."""

    name: str
    key: str
    levels: list[Any]
    curves: list[WidthCurve]

    @property
    def moved(self) -> int:
        """By how many cells of the grid the optimum moves over the widths."""
        places = [self.levels.index(curve.optimum) for curve in self.curves]
        return max(places) - min(places)

    @cached_property
    def drift(self) -> Drift | None:
        """By which power of the width the optimum moves; None if the grid is not one of positive numbers."""
        if not figures.is_positive(self.levels):
            return None
        seeds = max(len(values) for curve in self.curves for values in curve.values.values())
        widths = [width_number(curve.growth.before) for curve in self.curves]
        return drift_of(widths, self.levels, [curve.of_seeds(self.levels, seeds) for curve in self.curves])

    @property
    def price(self) -> str:
        """What tuning at the first growth costs at the last one, in words; empty if they have the same optimum.

        With several seeds, its own best value is chosen for each seed by the others, so that chance does not help it.
        """
        first, last = self.curves[0], self.curves[-1]
        if first.optimum == last.optimum:
            return ""
        means = last.means  # a level that diverged has fewer seeds, and is not the best without any of them
        levels = {level: dict(enumerate(last.values[level])) for level in means if math.isfinite(means[level])}
        got, best = last.mean(first.optimum), last.mean(last.optimum)
        if not math.isfinite(got):
            return f"; with the optimum of {first.growth}, {last.growth} diverges"
        lower = chosen_without_seed(levels, {first.optimum: levels[first.optimum]})
        lower = got - best if lower is None else lower
        share = f"{100 * abs(lower / best):.3g} % {'above' if lower > 0 else 'below'} its best" if best else "apart"
        return f"; with the optimum of {first.growth}, {last.growth} ends {share}"

    @property
    def word(self) -> str:
        return "transfers" if self.moved <= STAYS else "does not transfer"

    def verdict(self) -> str:
        optima = ", ".join(f"{brief(curve.optimum)} at {curve.growth}" for curve in self.curves)
        move = "stays in its cell"
        if self.moved:
            move = f"moves by {self.moved} cell{'s' if self.moved > 1 else ''} of the grid"
        is_ordered = figures.is_ordered(self.levels)
        at_edge = sum(is_ordered and is_edge(curve.optimum, curve.means) for curve in self.curves)
        warning = self._edge_words(at_edge, "make the grid wider")
        return f"{self.name}: the optimum of {self.key} {move} ({optima}): it {self.word}{self.price}{warning}"

    def _edge_words(self, count: int, advice: str) -> str:
        widths = f"{count} of {len(self.curves)} widths"
        edge = f"; at {widths} it is at the edge of the grid, or beside a run that diverged: {advice}"
        return edge if count else ""

    @property
    def title(self) -> str:
        if self.drift is None:
            return f"{self.name} {self.word}"
        goes = f"its optimum goes as {self.drift.power}"
        if self.drift.at_edge:
            goes = f"its optimum is at the edge of the grid at {self.drift.at_edge} of {len(self.curves)} widths"
        return f"{self.name} {self.word}\n{goes}"

    def drift_sentence(self) -> str:
        if self.drift is None:
            return f"{self.name}: {self.key} has no exponent, because its grid is not one of positive numbers"
        edge = self._edge_words(self.drift.at_edge, "no exponent to rely on")
        return f"{self.name}: the optimum of {self.key} goes as {self.drift}{edge}"


def write_transfer(out: Path, description: Description, sweeps: dict[str, Sweep]) -> list[str]:
    """Writes transfer.csv, .png and .pdf, and drift.csv; returns the verdict in words. Sweeps are by their names."""
    panels = []
    for name, (axis,) in description.sweeps.items():
        curves = []
        for growth in description.growths:
            outcomes = sweeps[f"{growth.name}/{name}"].outcomes
            curves.append(WidthCurve(growth, {outcome.point[axis.key]: outcome.values for outcome in outcomes}))
        panels.append(Panel(name, axis.key, in_order(axis), curves))
    write_text(out / "transfer.csv", as_csv(trial_rows(panels, description)))
    write_text(out / "drift.csv", as_csv(drift_rows(panels), DRIFT_HEAD))
    paths = draw(out / "transfer", panels, metric_label(description.metric))
    lines = [line for panel in panels for line in (panel.verdict(), panel.drift_sentence())]
    return [*lines, f"wrote {', '.join(map(str, [out / 'transfer.csv', out / 'drift.csv', *paths]))}"]


def trial_rows(panels: list[Panel], description: Description) -> list[dict[str, Any]]:
    """A row for each sweep, width and value; `optimum` marks the best value of its width."""
    rows = []
    seeds = [f"seed {seed}" for seed in description.seeds]
    for panel in panels:
        for curve in panel.curves:
            for level in panel.levels:
                row = {**row_head(panel, curve), "value": level, description.metric: curve.mean(level)}
                row |= seed_cells(seeds, curve.values[level])
                rows.append({**row, "optimum": "*" if level == curve.optimum else ""})
    return rows


def row_head(panel: Panel, curve: WidthCurve) -> dict[str, Any]:
    return {"sweep": panel.name, "key": panel.key, "before": curve.growth.before, "after": curve.growth.after}


DRIFT_HEAD = ("sweep", "key", "before", "after", "optimum", "at edge", "exponent", "error", "error from")


def drift_rows(panels: list[Panel]) -> list[dict[str, Any]]:
    """A row for each sweep and width: the optimum by a parabola, and the exponent of the sweep."""
    rows = []
    for panel in panels:
        drift = panel.drift
        if drift is None:
            continue
        for curve, optimum in zip(panel.curves, drift.optima, strict=True):
            values = (*row_head(panel, curve).values(), optimum.value, "yes" if optimum.at_edge else "")
            rows.append(dict(zip(DRIFT_HEAD, (*values, drift.exponent, drift.error, drift.error_from), strict=True)))
    return rows


def draw(path: Path, panels: list[Panel], label: str) -> list[Path]:
    """Draws the metric over the value, a panel for each sweep and a line for each width, with its range over seeds.

    Each optimum is starred.
    """
    figure, axes = figures.panels(5.2 * len(panels), 4.5, columns=len(panels))
    for ax, each in zip(axes, panels, strict=True):
        figures.draw_profiles(ax, each.levels, {str(curve.growth): curve.values for curve in each.curves})
        ax.set_xlabel(each.key)
        ax.set_ylabel(label)
        ax.set_title(each.title, fontsize=10, parse_math=False)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=10)
    return figures.save(figure, path)
