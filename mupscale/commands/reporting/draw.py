"""The pictures of a report: mean curves of runs that differ in their seeds, against steps, FLOPs or a budget."""

import base64
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mupscale.commands import figures
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.reach import Numbers
from mupscale.commands.reporting.runs import FloatArray, Line, LoggedRun
from mupscale.commands.reporting.words import capital, metric_name

POINTS = 600
"""The most points that a line is drawn with: more than a screen shows."""

AXES: dict[str, tuple[str, Callable[[LoggedRun, FloatArray], FloatArray]]] = {
    "steps": ("steps", lambda run, steps: steps),
    "flops": ("training FLOPs", LoggedRun.flops_over),
}
"""The horizontal axes: their labels, and where a run is on them after steps."""


class Picture(NamedTuple):
    source: str
    alt: str
    caption: str = ""


CurveOf = Callable[[LoggedRun], Line]
"""Gives the steps and values of a run's curve."""


def draw_figures(folder: Path, numbers: Numbers) -> list[Picture]:
    """Draws training loss and every validation metric, against steps and, for groups that logged them, FLOPs."""
    groups, windows = numbers.groups, numbers.windows
    curves: dict[str, tuple[str, CurveOf]] = {"training_loss": (f"Training loss, {windows.words}", windows.of)}
    for metric in numbers.metrics:
        curves[metric] = capital(metric_name(metric)), partial(LoggedRun.validations, metric=metric)
    has_seeds = any(len(group.not_diverged) > 1 for group in groups)
    seeds = ": mean over seeds, and the range from the lowest to the highest" if has_seeds else ""
    drawn = []
    for name, (title, curve_of) in curves.items():
        for axis, (x_label, _) in AXES.items():
            lines = [mean_band(group, curve_of, axis) for group in groups]
            path, labels = folder / f"{name.replace('/', '_')}_{axis}", (x_label, metric_name(name))
            drawn += draw_bands(path, lines, *labels, f"{title}, against {x_label}", seeds)
    return drawn


def draw_bands(
    path: Path, bands: Sequence[figures.Band | None], x_label: str, y_label: str, title: str, more: str = ""
) -> list[Picture]:
    """A picture of the bands that there are, with its caption; none if there are none."""
    lines = [band for band in bands if band is not None]
    return [picture(figures.bands(path, lines, x_label, y_label)[0], title, more)] if lines else []


def picture(path: Path, title: str, more: str | None = None) -> Picture:
    """A picture with the caption `title` and `more`; without a caption if that is None."""
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return Picture(source, title, "" if more is None else f"{capital(title)}{more}.")


# --- mean curves


def mean_band(group: Group, curve_of: CurveOf, axis: str = "steps") -> figures.Band | None:
    """The curves of the runs that have not diverged; None if one has logged no FLOPs and these are the axis."""
    _, place_at = AXES[axis]
    curves = []
    for run in group.not_diverged:
        steps, values = curve_of(run)
        curves.append((place_at(run, steps), values))
    if not all(np.isfinite(x).all() for x, _ in curves):
        return None
    marks: list[float] = []
    for run in group.not_diverged[:1]:
        marks = place_at(run, np.array([step for step in run.growths if step > 0], dtype=float)).tolist()
    return band_of(group.name, group.place, curves, marks)


def band_of(name: str, place: int, curves: list[Line], marks: Sequence[float] = ()) -> figures.Band | None:
    """The mean of curves, as far as all of them go, and their range; None if there is no place that all reach."""
    curves = [(x, y) for x, y in curves if len(x)]
    start, end = max((x[0] for x, _ in curves), default=1.0), min((x[-1] for x, _ in curves), default=0.0)
    if start > end:
        return None
    x = np.unique(np.concatenate([x[(x >= start) & (x <= end)] for x, _ in curves]))
    kept = np.unique(np.append(np.arange(0, len(x), math.ceil(len(x) / POINTS)), len(x) - 1))
    values = np.stack([np.interp(x[kept], *curve) for curve in curves])
    mean, low, high = (each(0).tolist() for each in (values.mean, values.min, values.max))
    return figures.Band(name, place, x[kept].tolist(), mean, low, high, marks)


def without_range(band: figures.Band | None) -> figures.Band | None:
    return band and band._replace(low=band.y, high=band.y)
