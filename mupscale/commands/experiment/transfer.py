"""Whether optima stay where they are as the width grows: the table, the figure and the verdict of the protocol
transfer.
"""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mupscale.commands import figures
from mupscale.commands.config import brief
from mupscale.commands.experiment.file import Description, Growth
from mupscale.commands.sweep.results import Results, in_order, metric_label, shown_value
from mupscale.commands.sweep.study import write

STAYS = 1
"""Grid cells that an optimum may move by and still count as one that transfers: its neighbours are as good as it, to
within noise.
"""

ABOVE = 3
"""Times the worst optimum: what is worse is cut off in the figure."""


@dataclass(frozen=True)
class Line:
    """A sweep at one width: the metric of each seed by value of its axis; infinite if it diverged."""

    growth: Growth
    values: dict[Any, list[float]]

    def mean(self, value: Any) -> float:
        return sum(self.values[value]) / len(self.values[value])

    @property
    def optimum(self) -> Any:
        return min(self.values, key=self.mean)


@dataclass(frozen=True)
class Panel:
    """A sweep at all widths."""

    name: str
    key: str
    levels: list[Any]
    lines: list[Line]

    @property
    def moved(self) -> int:
        """By how many cells of the grid the optimum moves over the widths."""
        places = [self.levels.index(line.optimum) for line in self.lines]
        return max(places) - min(places)

    def verdict(self) -> str:
        optima = ", ".join(
            f"{brief(line.optimum)} at {line.growth.before} → {line.growth.after}" for line in self.lines
        )
        cells = (
            "stays in its cell"
            if not self.moved
            else f"moves by {self.moved} cell{'s' if self.moved > 1 else ''} of the grid"
        )
        edge = [
            line for line in self.lines if line.optimum in (self.levels[0], self.levels[-1]) and len(self.levels) > 2
        ]
        warning = (
            f"; at {len(edge)} of {len(self.lines)} widths it is at the edge of the grid, which should be wider"
            if edge
            else ""
        )
        return f"{self.name}: the optimum of {self.key} {cells} ({optima}): it {self.word}{warning}"

    @property
    def word(self) -> str:
        return "transfers" if self.moved <= STAYS else "does not transfer"


def write_transfer(out: Path, description: Description, sweeps: dict[str, list[Results]]) -> str:
    """Writes transfer.csv, .png and .pdf; the verdict in words."""
    panels = [panel(name, description.growths, results) for name, results in sweeps.items()]
    write_table(out / "transfer.csv", panels, description)
    paths = draw(out / "transfer", panels, metric_label(description.metric))
    wrote = f"wrote {', '.join(str(path) for path in [out / 'transfer.csv', *paths])}"
    return "\n".join([*(panel.verdict() for panel in panels), wrote])


def panel(name: str, growths: list[Growth], sweeps: list[Results]) -> Panel:
    (axis,) = sweeps[0].settings.axes
    lines = [
        Line(growth, {outcome.point[axis.key]: outcome.values for outcome in results.outcomes})
        for growth, results in zip(growths, sweeps, strict=True)
    ]
    return Panel(name, axis.key, in_order(axis), lines)


def write_table(path: Path, panels: list[Panel], description: Description) -> None:
    """A row for each sweep, width and value; `optimum` marks the best value of its width."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    seeds = [f"seed {seed}" for seed in description.seeds]
    table.writerow(["sweep", "key", "before", "after", "value", description.metric, *seeds, "optimum"])
    for each in panels:
        for line in each.lines:
            for level in each.levels:
                values = [shown_value(value) for value in line.values[level]]
                values += [""] * (len(seeds) - len(values))  # one that diverges ends its trial
                best = "*" if level == line.optimum else ""
                table.writerow(
                    [
                        each.name,
                        each.key,
                        line.growth.before,
                        line.growth.after,
                        level,
                        shown_value(line.mean(level)),
                        *values,
                        best,
                    ]
                )
    write(path, text.getvalue())


def draw(path: Path, panels: list[Panel], label: str) -> list[Path]:
    """A panel for each sweep: the metric over the value, a line for each width with its range over seeds, each optimum
    starred.
    """
    from matplotlib import colormaps

    drawn, first = figures.figure(5.2 * len(panels), 4.0)
    first.remove()
    for column, each in enumerate(panels):
        ax = drawn.add_subplot(1, len(panels), column + 1)
        logarithmic = figures.is_positive(each.levels)
        for index, line in enumerate(each.lines):
            colour = colormaps[figures.COLOURS](0.9 * index / max(1, len(each.lines) - 1))
            there = [level for level in each.levels if math.isfinite(line.mean(level))]
            x = [level if logarithmic else each.levels.index(level) for level in there]
            lows, highs = ([end(line.values[level]) for level in there] for end in (min, max))
            ax.fill_between(x, lows, highs, color=colour, alpha=0.15, linewidth=0)
            ax.plot(x, [line.mean(level) for level in there], marker="o", markersize=3.5, color=colour,
                    label=f"{line.growth.before} → {line.growth.after}")  # fmt: skip
            best = x[there.index(line.optimum)]
            ax.scatter([best], [line.mean(line.optimum)], s=150, **{**figures.STAR, "color": colour})
        if logarithmic:
            ax.set_xscale("log")
        positions = each.levels if logarithmic else range(len(each.levels))
        if len(each.levels) <= 12:
            ax.set_xticks(list(positions), [figures.tick(level) for level in each.levels])
            ax.minorticks_off()
        ax.set_ylim(*shown_range(each))
        ax.set_xlabel(each.key)
        ax.set_ylabel(label)
        ax.set_title(f"the optimum {each.word}", fontsize=9)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    return figures.save(drawn, path)


def shown_range(each: Panel) -> tuple[float, float]:
    """All of it, but no more than a few times above the optima, where the lines differ."""
    means = [mean for line in each.lines for level in each.levels if math.isfinite(mean := line.mean(level))]
    low, high = min(means), max(means)
    if low > 0:
        high = min(high, ABOVE * max(line.mean(line.optimum) for line in each.lines))
    margin = 0.06 * (high - low)
    return low - margin, high + margin
