"""The figures of a report: each group's mean curve, where growth methods end, and runs that grow in the middle."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from mupscale.commands import figures
from mupscale.commands.reporting.compare import spread
from mupscale.commands.reporting.groups import PLACES, Group
from mupscale.commands.reporting.methods import FINAL, VALIDATION, Methods
from mupscale.commands.reporting.midrun import (
    BUDGETS,
    FIXED,
    LOSSES,
    Arm,
    Comparison,
    Loss,
    Midrun,
    MidrunRun,
    spent_by,
    step_costs,
)
from mupscale.commands.reporting.page import Picture, data_uri, read_pictures
from mupscale.commands.reporting.reach import FEWEST, SHARE, Numbers, finite_losses, trailing_means
from mupscale.commands.reporting.runs import FloatArray, LoggedRun
from mupscale.commands.reporting.words import capital, metric_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

STYLES: dict[str, str] = dict(zip(FIXED, ("-", "--", ":"), strict=True))
"""Of the lines of fixed widths."""

GROWN = (0, 1, 3, 4, 5, 6, 7)
"""Places in the palette of lines of runs that grow; fixed widths have the one that is left out."""

SHOWN_FROM = 0.1
"""The share of the budget from which on all of the fixed widths' curves are shown: losses before are far higher."""


def picture_of(title: str, caption: str, paths: tuple[list[Path], Path]) -> Picture:
    """A figure, which was saved twice, on the page. Only the page shows the dark one."""
    (png, _), dark = paths
    answer = Picture(data_uri(png), title, data_uri(dark), caption)
    dark.unlink()
    return answer


# --- groups and growth methods


def draw_figures(folder: Path, groups: list[Group], numbers: Numbers, methods: list[Methods]) -> list[Picture]:
    """Draws training loss and every validation metric, against steps and against FLOPs; methods on their own first."""
    windows = numbers.windows
    mean = f"mean over {windows.length}" if windows.epochs else f"running mean over {windows.length}"
    drawn = []
    for index, each in enumerate(methods, 1):
        name = "methods" if len(methods) == 1 else f"methods_{index}"
        drawn += draw_ends(folder / f"{name}_ends", each)
        drawn += draw_methods(folder / name, f"Training loss of growth methods, {mean}", each)
    drawn += draw_pair(folder / "training_loss", "training loss", f"Training loss, {mean}", groups, windows.of, False)
    for metric in numbers.metrics:
        path, label = folder / metric.replace("/", "_"), metric_name(metric)
        is_maximised = bool(figures.higher_is_better(metric))
        drawn += draw_pair(path, label, capital(label), groups, validations(metric), is_maximised)
    return drawn


def draw_pair(
    path: Path, label: str, title: str, groups: list[Group], curve_of: CurveOf, is_maximised: bool
) -> list[Picture]:
    """Draws one quantity against steps and against FLOPs, the latter for groups that logged FLOPs."""
    curves = [(group, curve) for group in groups if (curve := mean_curve(group, curve_of)) is not None]
    has_seeds = any(len(group.not_diverged) > 1 for group, _ in curves)
    seeds = ": mean over seeds, and the range from the lowest to the highest" if has_seeds else ""
    drawn = []
    for axis, x_label in AXES.items():
        bands = [band(group, curve, axis) for group, curve in curves if np.isfinite(getattr(curve, axis)).all()]
        if bands:
            file, name = path.with_name(f"{path.name}_{axis}"), f"{title}, against {x_label}"
            paths = figures.bands(file, bands, x_label, label, higher_is_better=is_maximised)
            drawn.append(picture_of(name, f"{name}{seeds}.", paths))
    return drawn


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
    if not bands:
        return []
    paths = figures.bands(path, bands, AXES["steps"], "training loss")
    return [picture_of(title, f"{title}: means over seeds, those that end lowest first.", paths)]


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
    title = "Where growth methods end"
    caption = f"{title}: a dot for each seed, and a stroke at the mean."
    return [picture_of(title, caption, figures.dots(path, rows, labels))]


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
    """Draws two figures for each schedule."""
    schedules: dict[str, list[Comparison]] = {}
    for comparison in midrun.comparisons:
        schedules.setdefault(comparison.schedule, []).append(comparison)
    drawn = []
    for schedule, comparisons in schedules.items():
        drawn += draw_shares(folder / f"{name}_{schedule}", comparisons)[:1]
        drawn += draw_spent(folder / f"{name}_{schedule}_curves", comparisons)[:1]
    return read_pictures(drawn)


def draw_shares(path: Path, comparisons: list[Comparison]) -> list[Path]:
    """Draws the losses at the end against the share of the budget after which runs grow.

    There is a column for each budget, and a row for validation and one for training.
    """
    losses = [loss for loss in LOSSES if all(comparison.has(loss) for comparison in comparisons)]
    size = 5.2 * len(comparisons), 3.9 * max(1, len(losses))
    figure, axes = figures.panels(*size, len(losses), len(comparisons))
    panels = [(comparison, loss) for loss in losses for comparison in comparisons]
    for ax, (comparison, loss) in zip(axes, panels, strict=True):
        draw_comparison(ax, comparison, loss)
        label_panel(ax, comparison, "share of the budget after which a run grows, %", f"{loss} loss at the end")
    return figures.save(figure, path)


def label_panel(ax: "Axes", comparison: Comparison, x_label: str, y_label: str) -> None:
    ax.set_title(BUDGETS[comparison.budget], fontsize=10)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)


def draw_comparison(ax: "Axes", comparison: Comparison, loss: Loss) -> None:
    """Draws a horizontal line with its range for each fixed width, and a line over the shares for each noise."""
    palette = figures.LIGHT.palette
    shares = [100 * arm.share for arm in comparison.growths] or [0, 100]
    ends = [min(shares) - 5, max(shares) + 5]
    found = {arm: each for arm in comparison.arms if (each := spread([*comparison.losses(arm, loss).values()]))}
    for arm in comparison.fixed:
        if arm in found:
            ax.fill_between(ends, found[arm].low, found[arm].high, color=palette[2], alpha=0.18, linewidth=0)
            ax.plot(ends, [found[arm].mean] * 2, color=palette[2], linestyle=STYLES[arm.fixed], label=f"fixed {arm}")
    for place, noise in enumerate(dict.fromkeys(arm.noise for arm in comparison.growths)):
        grown = [arm for arm in comparison.growths if arm.noise == noise and arm in found]
        if not grown:
            continue
        colour = palette[GROWN[place % len(GROWN)]]
        x = [100 * arm.share for arm in grown]
        lows, highs = [found[arm].low for arm in grown], [found[arm].high for arm in grown]
        ax.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
        ax.plot(x, [found[arm].mean for arm in grown], color=colour, marker="o", markersize=4, label=f"grown, {noise}")


def draw_spent(path: Path, comparisons: list[Comparison]) -> list[Path]:
    """Draws the training loss against the share of the budget that is spent, with a panel for each budget.

    Runs that grow are drawn from their growth on, those with the noise that ends lowest. Nothing is drawn if no run has
    logged a loss.
    """
    drawn = [(comparison, lines) for comparison in comparisons if (lines := lines_of(comparison))]
    if not drawn:
        return []
    figure, axes = figures.panels(5.2 * len(drawn), 3.9, columns=len(drawn))
    palette = figures.LIGHT.palette
    for ax, (comparison, lines) in zip(axes, drawn, strict=True):
        colours = cycle(palette[place] for place in GROWN)
        for arm, (x, y) in lines.items():
            if arm.fixed:
                ax.plot(x, y, color=palette[2], linestyle=STYLES[arm.fixed], label=f"fixed {arm}")
            else:
                ax.plot(x, y, color=next(colours), label=str(arm))
        ax.set_ylim(*shown(lines))
        label_panel(ax, comparison, "share of the budget that is spent, %", "training loss")
    return figures.save(figure, path)


def lines_of(comparison: Comparison) -> dict[Arm, Line]:
    """The mean curve of each arm over its seeds: the share of the budget in percent, and the loss."""
    best = comparison.best(comparison.growths, next((loss for loss in LOSSES if comparison.has(loss)), "training"))
    answer = {}
    for arm, runs in comparison.arms.items():
        if arm.fixed or (best is not None and arm.noise == best.noise):
            curves = [curve for run in runs if len((curve := curve_of(run, comparison))[0])]
            if curves:
                places, values = on_common_places(curves)
                answer[arm] = places, values.mean(0)
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


def shown(lines: dict[Arm, Line]) -> tuple[float, float]:
    """The range of losses that is shown: all of the fixed widths, without their beginnings."""
    low = min(float(y.min()) for _, y in lines.values())
    tops = [float(y[x >= 100 * SHOWN_FROM].max(initial=low)) for arm, (x, y) in lines.items() if arm.fixed]
    high = max(tops, default=max(float(y.max()) for _, y in lines.values()))
    room = 0.05 * (high - low) or 0.1
    return low - room, high + room
