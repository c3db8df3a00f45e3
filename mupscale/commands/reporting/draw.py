"""The figures of a report: each group's mean curve, with the range over its seeds."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np

from mupscale.commands import figures
from mupscale.commands.reporting.groups import Group, Role
from mupscale.commands.reporting.methods import VALIDATION, Methods
from mupscale.commands.reporting.numbers import Numbers
from mupscale.commands.reporting.runs import FloatArray, LoggedRun
from mupscale.commands.reporting.words import capital, metric_name

POINTS = 600
"""The most points that a line is drawn with: more than a screen shows."""

PLACES: dict[Role, int] = {"upscaled": 0, "scratch": 1, "base": 2}
"""Places in the palette that the first group of each role has, in all figures."""

PAPERS, OTHERS = 0, 2
"""Places in the palette of the paper's growth method and of the others, where rows have names."""

Axis = Literal["steps", "flops"]
AXES: dict[Axis, str] = {"steps": "steps", "flops": "training FLOPs"}
"""The horizontal axes, and their labels."""

CurveOf = Callable[[LoggedRun], tuple[FloatArray, FloatArray]]
"""Gives the steps and values of a run's curve."""


class ReportFigure(NamedTuple):
    """A figure, as PNG on white, PDF, and PNG on black."""

    title: str
    caption: str
    png: Path
    pdf: Path
    dark: Path


class MeanCurve(NamedTuple):
    """The mean of a group's curves over its runs, and their range."""

    steps: FloatArray
    flops: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def draw_figures(folder: Path, groups: list[Group], numbers: Numbers, methods: list[Methods]) -> list[ReportFigure]:
    """Draws training loss and every validation metric, against steps and against FLOPs; methods on their own first."""
    windows = numbers.windows
    mean = f"mean over {windows.length}" if windows.epochs else f"running mean over {windows.length}"
    drawn = []
    for index, each in enumerate(methods, 1):
        name = "methods" if len(methods) == 1 else f"methods_{index}"
        drawn += draw_ends(folder / f"{name}_ends", each)
        drawn += draw_methods(folder / name, f"Training loss of growth methods, {mean}", each, groups)
    drawn += draw_pair(folder / "training_loss", "training loss", f"Training loss, {mean}", groups, windows.of, False)
    for metric in numbers.metrics:
        path, label = folder / metric.replace("/", "_"), metric_name(metric)
        drawn += draw_pair(
            path, label, capital(label), groups, validations(metric), bool(figures.higher_is_better(metric))
        )
    return drawn


def draw_pair(
    path: Path, label: str, title: str, groups: list[Group], curve_of: CurveOf, is_maximised: bool
) -> list[ReportFigure]:
    """Draws one quantity against steps and against FLOPs, the latter for groups that logged FLOPs."""
    curves = [(group, curve) for group in groups if (curve := mean_curve(group, curve_of)) is not None]
    has_seeds = any(len(group.not_diverged) > 1 for group, _ in curves)
    seeds = ": mean over seeds, and the range from the lowest to the highest" if has_seeds else ""
    drawn = []
    for axis, x_label in AXES.items():
        bands = [band(group, curve, axis, place_of(group, groups)) for group, curve in curves if is_drawn(curve, axis)]
        if not bands:
            continue
        (png, pdf), dark = figures.bands(
            path.with_name(f"{path.name}_{axis}"), bands, x_label, label, higher_is_better=is_maximised
        )
        name = f"{title}, against {x_label}"
        drawn.append(ReportFigure(name, f"{name}{seeds}.", png, pdf, dark))
    return drawn


def draw_methods(path: Path, title: str, methods: Methods, groups: list[Group]) -> list[ReportFigure]:
    """Draws the training loss of each growth method, and from scratch, against steps: means over seeds, no ranges."""
    named = {method.name: method.group for method in methods.all if method.group is not None}
    if methods.scratch is not None:
        named[methods.scratch.name] = methods.scratch
    bands = []
    for name, group in named.items():
        curve = mean_curve(group, methods.numbers.windows.of)
        if curve is not None:
            line = band(group, curve, "steps", place_of(group, groups))
            bands.append(line._replace(label=name, low=line.y, high=line.y))
    if not bands:
        return []
    (png, pdf), dark = figures.bands(path, bands, AXES["steps"], "training loss")
    return [ReportFigure(title, f"{title}: means over seeds, those that end lowest first.", png, pdf, dark)]


def draw_ends(path: Path, methods: Methods) -> list[ReportFigure]:
    """Draws where the growth methods and from scratch end, seed by seed: training loss, and validation loss if any."""
    rows = []
    for method in methods.all:
        losses = [list(table.values()) for table in (methods.finals(method), methods.validations(method))]
        rows.append(figures.Dots(method.name, PAPERS if method.is_papers else OTHERS, losses))
    if methods.scratch is not None:
        runs = methods.numbers.counted(methods.scratch)
        losses = [[run.final for run in runs], [run.last(VALIDATION) for run in runs]]
        rows.append(figures.Dots(methods.scratch.name, PLACES["scratch"], losses))
    rows = sorted((row for row in rows if has_finite(row.panels[0])), key=lambda row: fmean(row.panels[0]))
    if not rows:
        return []
    labels = ["training loss at the end"]
    if any(has_finite(row.panels[1]) for row in rows):
        labels.append("validation loss at the end")
    (png, pdf), dark = figures.dots(path, rows, labels)
    title = "Where growth methods end"
    return [ReportFigure(title, f"{title}: a dot for each seed, and a stroke at the mean.", png, pdf, dark)]


def has_finite(values: Sequence[float]) -> bool:
    return any(map(math.isfinite, values))


def is_drawn(curve: MeanCurve, axis: Axis) -> bool:
    return bool(np.isfinite(getattr(curve, axis)).all())


def band(group: Group, curve: MeanCurve, axis: Axis, place: int) -> figures.Band:
    every = math.ceil(len(curve.steps) / POINTS)
    kept = np.unique(np.append(np.arange(0, len(curve.steps), every), len(curve.steps) - 1))
    run = group.not_diverged[0]
    growths = [step for step in run.growths if step > 0]
    return figures.Band(
        label=group.name,
        colour=place,
        x=getattr(curve, axis)[kept].tolist(),
        y=curve.mean[kept].tolist(),
        low=curve.low[kept].tolist(),
        high=curve.high[kept].tolist(),
        marks=growths if axis == "steps" else [run.flops_at(step) for step in growths],
    )


def place_of(group: Group, groups: list[Group]) -> int:
    """The group's place in the palette: its role's for the first group of a role; the others follow in order."""
    firsts: dict[Role, Group] = {}
    rest = []
    for each in groups:
        if each.role in PLACES and each.role not in firsts:
            firsts[each.role] = each
        else:
            rest.append(each)
    if firsts.get(group.role) is group:
        return PLACES[group.role]
    return len(PLACES) + next(index for index, each in enumerate(rest) if each is group)


# --- curves


def mean_curve(group: Group, curve_of: CurveOf) -> MeanCurve | None:
    """The mean of the runs that have not diverged, as far as all of them go; None if there is no such step."""
    curves = []
    for run in group.not_diverged:
        x, y = curve_of(run)
        if len(x):
            curves.append((run, x, y))
    if not curves:
        return None
    first = max(x[0] for _, x, _ in curves)
    last = min(x[-1] for _, x, _ in curves)
    steps = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for _, x, _ in curves]))
    if not len(steps):
        return None
    values = np.stack([np.interp(steps, x, y) for _, x, y in curves])
    flops = np.mean([run.flops_over(steps) for run, _, _ in curves], axis=0)
    return MeanCurve(steps, flops, values.mean(0), values.min(0), values.max(0))


def validations(metric: str) -> CurveOf:
    """Gives the finite values of a validation metric."""

    def curve_of(run: LoggedRun) -> tuple[FloatArray, FloatArray]:
        values = run.log.validation.get(metric, {})
        steps = sorted(step for step, value in values.items() if math.isfinite(value))
        return np.array(steps, dtype=float), np.array([values[step] for step in steps], dtype=float)

    return curve_of
