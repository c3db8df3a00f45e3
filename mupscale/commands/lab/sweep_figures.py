"""The figures of a sweep: the metric over the axes, and training curves over the levels of one of them."""

import math
import statistics
from pathlib import Path
from typing import Any

from mupscale.callbacks.trial_metric import window_of
from mupscale.commands import figures
from mupscale.commands.config import brief, labels
from mupscale.commands.event_files import read_log
from mupscale.commands.lab.space import Axis, Outcome, Settings, point_text

POINTS = 60
"""The most points of a curve: each is the mean of several steps."""


def draw_sweep(out: Path, settings: Settings, outcomes: list[Outcome], best: Outcome) -> list[Path]:
    """Draws the metric over the axes, and training curves over the levels of one of them, in PNG and PDF."""
    axes = [axis for axis in settings.axes if len(axis.values) != 1]
    if not axes:
        return []
    label = metric_label(settings.metric)
    values = [outcome.value for outcome in outcomes]
    if len(axes) == 1:
        key = axes[0].key
        levels = [level(outcome.point[key]) for outcome in outcomes]
        paths = figures.profile(out / "profile", levels, values, key, label)
    else:
        x, y = axes if len(axes) == 2 else most_influential(axes, outcomes)
        label = f"{label} (best over {len(axes) - 2} more)" if len(axes) > 2 else label
        places = [(level(outcome.point[x.key]), level(outcome.point[y.key])) for outcome in outcomes]
        paths = draw_plane(out, x, y, list(zip(places, values, strict=True)), label)
    colour = next((axis for axis in axes if "noise" in axis.key), axes[-1])
    return [*paths, *draw_curves(out / "curves", settings, outcomes, best, colour)]


def draw_plane(out: Path, x: Axis, y: Axis, found: list[tuple[tuple[Any, Any], float]], label: str) -> list[Path]:
    """Draws the metric over two axes; of trials that differ in the other axes, the best."""
    if x.bounds or y.bounds:
        return figures.scatter(out / "scatter", [(*place, value) for place, value in found], x.key, y.key, label)

    def best_at(a: Any, b: Any) -> float | None:
        return min((value for place, value in found if place == (a, b)), default=None)

    return figures.heatmap(out / "heatmap", in_order(x), in_order(y), best_at, x.key, y.key, label)


def draw_curves(path: Path, settings: Settings, outcomes: list[Outcome], best: Outcome, colour: Axis) -> list[Path]:
    """Draws training curves by the level of one axis, the others at their best where they have levels."""
    others = [axis for axis in settings.axes if axis != colour and len(axis.values) > 1]
    fixed = {axis.key: best.point[axis.key] for axis in others}
    lines = []
    for outcome in outcomes:
        if math.isfinite(outcome.value) and all(outcome.point[key] == value for key, value in fixed.items()):
            x, y = mean_curve([training_curve(run) for run in outcome.runs])
            if x:
                lines.append(figures.Curve(level(outcome.point[colour.key]), x, y))
    if not lines:
        return []
    title = f"at {point_text(fixed, labels([axis.key for axis in settings.axes]))}" if fixed else ""
    return figures.curves(path, lines, "step", "training loss", colour.key, title)


def metric_label(metric: str) -> str:
    """A metric as figures and tables name it."""
    part = window_of(metric)
    if part is None:
        return metric
    return "training loss, last epoch" if part == "epoch" else f"training loss, {metric.replace('_', ' ')} of steps"


def in_order(axis: Axis) -> list[Any]:
    """The levels of an axis: numbers in order of size, others as they are listed."""
    return sorted(axis.values) if figures.is_ordered(axis.values) else [level(value) for value in axis.values]


def level(value: Any) -> Any:
    """A value as figures take it: a dictionary or a list as text."""
    return brief(value) if isinstance(value, dict | list) else value


def most_influential(axes: list[Axis], outcomes: list[Outcome]) -> list[Axis]:
    """The two axes between whose levels the best values differ most, in the order of the axes."""

    def spread(axis: Axis) -> float:
        levels: dict[str, float] = {}
        for outcome in outcomes:
            name = brief(outcome.point[axis.key])
            levels[name] = min(levels.get(name, math.inf), outcome.value)
        finite = [value for value in levels.values() if math.isfinite(value)]
        return statistics.pvariance(finite) if len(finite) > 1 else 0.0

    chosen = sorted(axes, key=spread, reverse=True)[:2]
    return [axis for axis in axes if axis in chosen]


def training_curve(run: Path) -> list[tuple[int, float]]:
    """The training loss by step, from a run's TensorBoard logs."""
    return [(step - 1, loss) for step, loss in sorted(read_log(run).loss.items())]


def mean_curve(curves: list[list[tuple[int, float]]]) -> tuple[list[float], list[float]]:
    """The mean of curves over their common steps, with neighbouring points merged."""
    tables = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    size = max(1, math.ceil(len(steps) / POINTS))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    y = [statistics.fmean(table[step] for step in group for table in tables) for group in groups]
    return [statistics.fmean(group) for group in groups], y
