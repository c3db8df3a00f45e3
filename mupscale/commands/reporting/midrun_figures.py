"""The figures of an experiment of protocol midrun."""

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mupscale.commands import figures
from mupscale.commands.reporting.compare import Spread, spread
from mupscale.commands.reporting.midrun import (
    BUDGETS,
    FIXED,
    LOSSES,
    Arm,
    Comparison,
    Loss,
    Midrun,
    MidrunRun,
    cost_key,
)
from mupscale.commands.reporting.runs import FloatArray
from mupscale.commands.reporting.windows import FEWEST, SHARE, finite_losses, trailing_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = dict(zip(FIXED, ("-", "--", ":"), strict=True))
"""Of the lines of fixed widths."""

GROWN = (0, 1, 3, 4, 5, 6, 7)
"""Places in the palette of lines of runs that grow; fixed widths have the one that is left out."""

SHOWN_FROM = 0.1
"""The share of the budget from which on all of the fixed widths' curves are shown: losses before are far higher."""


def draw_midrun(midrun: Midrun, folder: Path, name: str) -> list[Path]:
    """Draws two figures for each schedule; returns the PNGs."""
    drawn = []
    for schedule, comparisons in midrun.schedules.items():
        drawn.append(draw_ends(folder / f"{name}_{schedule}", comparisons)[0])
        drawn += draw_curves(folder / f"{name}_{schedule}_curves", comparisons)[:1]
    return drawn


# --- the losses at the end


def draw_ends(path: Path, comparisons: list[Comparison]) -> list[Path]:
    """Draws the losses at the end against the share of the budget after which runs grow.

    There is a column for each budget, and a row for validation and one for training.
    """
    losses = [loss for loss in LOSSES if all(comparison.has(loss) for comparison in comparisons)]
    figure, first = figures.figure(5.2 * len(comparisons), 3.9 * max(1, len(losses)))
    first.remove()
    for row, loss in enumerate(losses):
        for column, comparison in enumerate(comparisons):
            ax = figure.add_subplot(len(losses), len(comparisons), row * len(comparisons) + column + 1)
            draw_comparison(ax, comparison, loss)
            ax.set_title(BUDGETS[comparison.budget], fontsize=10)
            ax.set_xlabel("share of the budget after which a run grows, %")
            ax.set_ylabel(f"{loss} loss at the end")
            ax.grid(alpha=0.3)
            ax.legend(fontsize=8)
    return figures.save(figure, path)


def draw_comparison(ax: "Axes", comparison: Comparison, loss: Loss) -> None:
    """Draws a horizontal line with its range for each fixed width, and a line over the shares for each noise."""
    palette = figures.LIGHT.palette
    shares = [100 * arm.share for arm in comparison.growths] or [0, 100]
    ends = [min(shares) - 5, max(shares) + 5]
    for arm in comparison.fixed:
        found = spread(comparison.values(arm, loss))
        if found is not None:
            ax.fill_between(ends, found.low, found.high, color=palette[2], alpha=0.18, linewidth=0)
            ax.plot(ends, [found.mean] * 2, color=palette[2], linestyle=STYLES[arm.fixed], label=f"fixed {arm}")
    for place, noise in enumerate(dict.fromkeys(arm.noise for arm in comparison.growths)):
        points: list[tuple[float, Spread]] = []
        for arm in comparison.growths:
            found = spread(comparison.values(arm, loss)) if arm.noise == noise else None
            if found is not None:
                points.append((100 * arm.share, found))
        if not points:
            continue
        colour = palette[GROWN[place % len(GROWN)]]
        x, means = [share for share, _ in points], [found.mean for _, found in points]
        lows, highs = [found.low for _, found in points], [found.high for _, found in points]
        ax.fill_between(x, lows, highs, color=colour, alpha=0.2, linewidth=0)
        ax.plot(x, means, color=colour, marker="o", markersize=4, label=f"grown, {noise}")


# --- curves


def draw_curves(path: Path, comparisons: list[Comparison]) -> list[Path]:
    """Draws the training loss against the share of the budget that is spent, with a panel for each budget.

    Runs that grow are drawn from their growth on, those with the noise that ends lowest. Nothing is drawn if no run has
    logged a loss.
    """
    drawn = [(comparison.budget, lines) for comparison in comparisons if (lines := lines_of(comparison))]
    if not drawn:
        return []
    figure, first = figures.figure(5.2 * len(drawn), 3.9)
    first.remove()
    for column, (budget, lines) in enumerate(drawn, 1):
        ax = figure.add_subplot(1, len(drawn), column)
        palette = figures.LIGHT.palette
        colours = cycle(palette[place] for place in GROWN)
        for arm, (x, y) in lines.items():
            if arm.fixed:
                ax.plot(x, y, color=palette[2], linestyle=STYLES[arm.fixed], label=f"fixed {arm}")
            else:
                ax.plot(x, y, color=next(colours), label=str(arm))
        ax.set_ylim(*shown(lines))
        ax.set_title(BUDGETS[budget], fontsize=10)
        ax.set_xlabel("share of the budget that is spent, %")
        ax.set_ylabel("training loss")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    return figures.save(figure, path)


def lines_of(comparison: Comparison) -> dict[Arm, tuple[FloatArray, FloatArray]]:
    """The mean curve of each arm: the share of the budget in percent, and the loss."""
    best = comparison.best(comparison.growths, next((loss for loss in LOSSES if comparison.has(loss)), "training"))
    answer = {}
    for arm, runs in comparison.arms.items():
        if arm.fixed or (best is not None and arm.noise == best.noise):
            curves = [curve for run in runs if len((curve := curve_of(run, comparison))[0])]
            if curves:
                answer[arm] = mean_of(curves)
    return answer


def curve_of(run: MidrunRun, comparison: Comparison) -> tuple[FloatArray, FloatArray]:
    """The share of the budget in percent, and the running mean of the loss over the last of it.

    Of a run that grows, only losses since then count: at the narrow width, a share of the budget is many more steps.
    """
    assert run.logged is not None
    sizes = run.logged.start_size, run.logged.end_size
    start, end = (comparison.costs[cost_key(size, comparison.costs)] for size in sizes)
    at_step = run.at_step or 0
    percent = 100 / (at_step * start + (run.steps - at_step) * end)
    steps, losses = finite_losses(run.logged)
    grown = steps > at_step
    spent = percent * (at_step * start + (steps[grown] - at_step) * end)
    fewest = (FEWEST - 0.5) * run.logged.interval * end * percent  # half an interval less, lest rounding decide
    return trailing_means(spent, losses[grown], spent, max(100 * SHARE, fewest))


def mean_of(curves: list[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """The mean over seeds, as far as all of them go."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    x = curves[0][0]
    x = x[(x >= first) & (x <= last)]
    return x, np.mean([np.interp(x, *curve) for curve in curves], axis=0)


def shown(lines: dict[Arm, tuple[FloatArray, FloatArray]]) -> tuple[float, float]:
    """The range of losses that is shown: all of the fixed widths, without their beginnings."""
    low = min(float(y.min()) for _, y in lines.values())
    tops = [float(y[x >= 100 * SHOWN_FROM].max(initial=low)) for arm, (x, y) in lines.items() if arm.fixed]
    high = max(tops, default=max(float(y.max()) for _, y in lines.values()))
    room = 0.05 * (high - low) or 0.1
    return low - room, high + room
