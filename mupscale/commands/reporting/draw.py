"""The figures of a report: each group's mean curve, where growth methods end, and runs that grow in the middle."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from mupscale.commands import figures
from mupscale.commands.reporting.compare import Spread, spread
from mupscale.commands.reporting.groups import PLACES, Group
from mupscale.commands.reporting.methods import FINAL, VALIDATION, Methods
from mupscale.commands.reporting.midrun import (
    BUDGETS,
    LOSSES,
    Comparison,
    Loss,
    Midrun,
    MidrunRun,
    spent_by,
    step_costs,
)
from mupscale.commands.reporting.page import Picture, data_uri
from mupscale.commands.reporting.reach import FEWEST, SHARE, Numbers, finite_losses, trailing_means
from mupscale.commands.reporting.runs import FloatArray, LoggedRun
from mupscale.commands.reporting.words import capital, metric_name

T = TypeVar("T")

POINTS = 600
"""The most points that a line is drawn with: more than a screen shows."""

PAPERS, OTHERS = 0, 2
"""Places in the palette of the paper's growth method and of the others, where rows have names."""

Axis = Literal["steps", "flops"]
AXES: dict[Axis, str] = {"steps": "steps", "flops": "training FLOPs"}
"""The horizontal axes, and their labels."""

Line = tuple[FloatArray, FloatArray]
"""The steps, or what was spent, and the values of a curve."""

CurveOf = Callable[[LoggedRun], Line]
"""Gives the steps and values of a run's curve."""


# --- groups and growth methods


def draw_figures(folder: Path, groups: list[Group], numbers: Numbers, methods: list[Methods]) -> list[Picture]:
    """Draws training loss and every validation metric, against steps and against FLOPs; methods on their own first."""
    windows = numbers.windows
    mean = f"mean over {windows.length}" if windows.epochs else f"running mean over {windows.length}"
    drawn = []
    for name, each in numbered("methods", methods):
        drawn += draw_ends(folder / f"{name}_ends", each)
        drawn += draw_methods(folder / name, f"Training loss of growth methods, {mean}", each)
    drawn += draw_pair(folder / "training_loss", "training loss", f"Training loss, {mean}", groups, windows.of)
    for metric in numbers.metrics:
        path, label = folder / metric.replace("/", "_"), metric_name(metric)
        drawn += draw_pair(path, label, capital(label), groups, validations(metric), figures.higher_is_better(metric))
    return drawn


def numbered(name: str, things: list[T]) -> list[tuple[str, T]]:
    """Things with names for their files: the name itself if there is one thing, and with numbers if there are more."""
    return [(name if len(things) == 1 else f"{name}_{index}", thing) for index, thing in enumerate(things, 1)]


def draw_pair(
    path: Path, label: str, title: str, groups: list[Group], curve_of: CurveOf, is_maximised: bool | None = False
) -> list[Picture]:
    """Draws one quantity against steps and against FLOPs, the latter for groups that logged FLOPs."""
    curves = [(group, curve) for group in groups if (curve := mean_curve(group, curve_of)) is not None]
    has_seeds = any(len(group.not_diverged) > 1 for group, _ in curves)
    seeds = ": mean over seeds, and the range from the lowest to the highest" if has_seeds else ""
    drawn = []
    for axis, x_label in AXES.items():
        bands = [band(group, curve, axis) for group, curve in curves if np.isfinite(getattr(curve, axis)).all()]
        file, name = path.with_name(f"{path.name}_{axis}"), f"{title}, against {x_label}"
        drawn += draw_bands(file, bands, x_label, label, name, seeds, is_maximised)
    return drawn


def draw_bands(
    path: Path,
    bands: list[figures.Band],
    x_label: str,
    y_label: str,
    title: str,
    more: str = "",
    is_maximised: bool | None = False,
) -> list[Picture]:
    """A picture of bands, with its caption; none if there are no bands."""
    if not bands:
        return []
    paths = figures.bands(path, bands, x_label, y_label, higher_is_better=bool(is_maximised))
    return [Picture(data_uri(paths[0]), title, f"{capital(title)}{more}.")]


def draw_methods(path: Path, title: str, methods: Methods) -> list[Picture]:
    """Draws the training loss of each growth method, and from scratch, against steps: means over seeds, no ranges."""
    named = {method.name: method.group for method in methods.all if method.group is not None}
    if methods.scratch is not None:
        named[methods.scratch.name] = methods.scratch
    bands = []
    for name, group in named.items():
        curve = mean_curve(group, methods.numbers.windows.of)
        if curve is not None:
            line = band(group, curve, "steps")
            bands.append(line._replace(label=name, low=line.y, high=line.y))
    return draw_bands(path, bands, AXES["steps"], "training loss", title, ": means over seeds, the lowest end first")


def draw_ends(path: Path, methods: Methods) -> list[Picture]:
    """Draws where the growth methods and from scratch end, seed by seed: training loss, and validation loss if any."""
    rows = []
    for method in methods.all:
        losses = [list(method.losses[name].values()) for name in (FINAL, VALIDATION)]
        rows.append(figures.Dots(method.name, PAPERS if method.is_papers else OTHERS, losses))
    if methods.scratch is not None:
        runs = methods.scratch.counted
        losses = [[run.final for run in runs], [run.last(VALIDATION) for run in runs]]
        rows.append(figures.Dots(methods.scratch.name, PLACES["scratch"], losses))
    rows = sorted((row for row in rows if has_finite(row.panels[0])), key=lambda row: fmean(row.panels[0]))
    if not rows:
        return []
    labels = ["training loss at the end"]
    if any(has_finite(row.panels[1]) for row in rows):
        labels.append("validation loss at the end")
    title, paths = "Where growth methods end", figures.dots(path, rows, labels)
    return [Picture(data_uri(paths[0]), title, f"{title}: a dot for each seed, and a stroke at the mean.")]


def has_finite(values: Sequence[float]) -> bool:
    return any(map(math.isfinite, values))


# --- mean curves


class MeanCurve(NamedTuple):
    """The mean of a group's curves over its runs, and their range."""

    steps: FloatArray
    flops: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def mean_curve(group: Group, curve_of: CurveOf) -> MeanCurve | None:
    """The mean of the runs that have not diverged, as far as all of them go; None if there is no such step."""
    runs = [(run, curve) for run in group.not_diverged if len((curve := curve_of(run))[0])]
    if not runs:
        return None
    steps, values = on_common_places([curve for _, curve in runs])
    if not len(steps):
        return None
    flops = np.mean([run.flops_over(steps) for run, _ in runs], axis=0)
    return MeanCurve(steps, flops, values.mean(0), values.min(0), values.max(0))


def on_common_places(curves: list[Line]) -> Line:
    """Where curves have values, as far as all of them go, and the values of each there."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    places = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for x, _ in curves]))
    return places, np.stack([np.interp(places, x, y) for x, y in curves])


def band(group: Group, curve: MeanCurve, axis: Axis) -> figures.Band:
    every = math.ceil(len(curve.steps) / POINTS)
    kept = np.unique(np.append(np.arange(0, len(curve.steps), every), len(curve.steps) - 1))
    run = group.not_diverged[0]
    growths = [step for step in run.growths if step > 0]
    return figures.Band(
        label=group.name,
        colour=group.place,
        x=getattr(curve, axis)[kept].tolist(),
        y=curve.mean[kept].tolist(),
        low=curve.low[kept].tolist(),
        high=curve.high[kept].tolist(),
        marks=growths if axis == "steps" else [run.flops_at(step) for step in growths],
    )


def validations(metric: str) -> CurveOf:
    """Gives the finite values of a validation metric."""

    def curve_of(run: LoggedRun) -> Line:
        values = run.log.validation.get(metric, {})
        steps = sorted(step for step, value in values.items() if math.isfinite(value))
        return np.array(steps, dtype=float), np.array([values[step] for step in steps], dtype=float)

    return curve_of


# --- protocol midrun


def draw_midrun(midrun: Midrun, folder: Path, name: str) -> list[Picture]:
    """Draws, for each schedule and budget, losses at the end over the share of the budget after which runs grow, and
    training curves over the share that is spent.
    """
    drawn = []
    for each in midrun.comparisons:
        file, where = f"{name}_{each.schedule}_{each.budget}", f"at {BUDGETS[each.budget]}, {each.schedule}"
        for loss in LOSSES:
            if each.has(loss):
                labels = "share of the budget after which a run grows, %", f"{loss} loss at the end"
                drawn += draw_bands(folder / f"{file}_{loss}", ends_of(each, loss), *labels, f"{labels[1]} {where}")
        labels = "share of the budget that is spent, %", "training loss"
        drawn += draw_bands(folder / f"{file}_curves", lines_of(each), *labels, f"{labels[1]} {where}")
    return drawn


def ends_of(comparison: Comparison, loss: Loss) -> list[figures.Band]:
    """A horizontal line with its range for each fixed width, and a line over the shares for each noise."""
    found = {arm: each for arm in comparison.arms if (each := spread([*comparison.losses(arm, loss).values()]))}
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for arm, each in found.items():
        if arm.fixed:
            lines[f"fixed {arm}"] = [(0.0, each), (100.0, each)]
        else:
            lines.setdefault(f"grown, {arm.noise}", []).append((100 * arm.share, each))
    bands = []
    for colour, (label, points) in enumerate(lines.items()):
        x, means, lows, highs = zip(*((at, each.mean, each.low, each.high) for at, each in points), strict=True)
        bands.append(figures.Band(label, colour, x, means, lows, highs))
    return bands


def lines_of(comparison: Comparison) -> list[figures.Band]:
    """The mean curve of each arm over its seeds: the share of the budget in percent, and the loss.

    Runs that grow are drawn from their growth on, those with the noise that ends lowest.
    """
    best = comparison.best(comparison.growths, next((loss for loss in LOSSES if comparison.has(loss)), "training"))
    answer: list[figures.Band] = []
    for arm, runs in comparison.arms.items():
        if arm.fixed or (best is not None and arm.noise == best.noise):
            curves = [curve for run in runs if len((curve := curve_of(run, comparison))[0])]
            if curves:
                places, values = on_common_places(curves)
                mean = values.mean(0).tolist()
                answer.append(figures.Band(str(arm), len(answer), places.tolist(), mean, mean, mean))
    return answer


def curve_of(run: MidrunRun, comparison: Comparison) -> Line:
    """The share of the budget in percent, and the running mean of the loss over the last of it.

    Of a run that grows, only losses since then count: at the narrow width, a share of the budget is many more steps.
    """
    assert run.logged is not None
    at_step, costs = run.row["grown_at_step"] or 0, comparison.costs
    percent = 100 / spent_by(run.row["steps"], run.logged, at_step, costs)
    steps, losses = finite_losses(run.logged)
    grown = steps > at_step
    spent = percent * spent_by(steps[grown], run.logged, at_step, costs)
    end = step_costs(run.logged, costs)[1]
    fewest = (FEWEST - 0.5) * run.logged.interval * end * percent  # half an interval less, lest rounding decide
    return trailing_means(spent, losses[grown], spent, max(100 * SHARE, fewest))
