"""Writes the tables and pictures of docs/results/ladder.md from the CSV files of its runs.

python -m experiments.ladder_tables
"""

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from experiments.ladder import Ladder, Size, Way, read_ladder, read_way
from mupscale.commands import figures
from mupscale.commands.reporting.compare import compare
from mupscale.text_tables import read_csv

PAGE = Path(__file__).parents[1] / "docs" / "results" / "ladder.md"
RUNS = PAGE.with_suffix("") / "runs.csv"
NAMES = "full", "large_batch", "depths", "rung", "sunk", "sunk_slow"
FULL, LARGE_BATCH, DEPTHS, RUNG, SUNK, SUNK_SLOW = map(read_ladder, NAMES)
WIDTH = tuple(map(read_way, ("diagonal-1", "duplication-1", "duplication-0.24")))
BASELINES = {
    "target": "S, target size", "envelope": "S, best of all sizes", "base exists": "S, target size, if the base exists"
}  # fmt: skip
DIRECTIONS = ("width", "depth", "both")

Curve = dict[float, float]
"""Validation losses of a fixed size, by the binary logarithm of the budget."""
Table = dict[tuple[str, ...], dict[str, Any]]
"""Numbers or texts by the titles of their row, and by that of their column."""


class Growth(NamedTuple):
    start: Size
    size: Size
    at: int
    way: Way

    @property
    def direction(self) -> str:
        if self.start.layers == self.size.layers:
            return "width"
        return "depth" if self.start.width == self.size.width else "both"

    @property
    def kind(self) -> str:
        """Growths in depth, the most by far, are told apart by the way they grow."""
        return self.way.depth if self.direction == "depth" else self.direction

    @property
    def arm(self) -> tuple[str, Size, Way]:
        """What is chosen beforehand, whatever the budget: the start is relative to the size that it grows to."""
        width = self.size.width // self.start.width
        return self.direction, self.start._replace(width=width), self.way


class Interval(NamedTuple):
    """The compute of a fixed size over that of a run that grows: its geometric mean over seeds, and a t interval.

    A bound is a mean over seeds of which at least one ends lower than every budget of the fixed size.
    """

    seeds: int
    mean: float
    low: float
    high: float
    is_bound: bool = False

    def __str__(self) -> str:
        if self.is_bound:
            return f"> {self.mean:.2f}"
        return f"{self.mean:.2f} ({self.low:.2f}–{self.high:.2f})" if self.seeds > 1 else f"{self.mean:.2f}"


class Ends:
    """The losses at the ends of all runs."""

    def __init__(self, path: Path, ladder: Ladder = FULL) -> None:
        self.ladder = ladder
        self.fixed: dict[tuple[Size, float, int], Curve] = defaultdict(dict)
        """Losses of fixed sizes, by size, rate and seed."""
        self.grown: dict[tuple[Growth, float], dict[int, float]] = defaultdict(dict)
        """Losses by seed, by growth and budget."""
        self.rises: dict[tuple[Growth, float], list[float]] = defaultdict(list)
        """The rise of the loss at the growth, by growth and budget."""
        for row in read_csv(path):
            size, base_layers = Size(int(row["width"]), int(row["layers"])), int(row["base_layers"] or 0)
            budget, loss, rate, seed = float(row["budget"]), float(row["loss"]), float(row["lr"]), int(row["seed"])
            if not row["from_width"]:
                self.fixed[size._replace(base_layers=base_layers), rate, seed][budget] = loss
            elif rate == ladder.lr:
                start = Size(int(row["from_width"]), int(row["from_layers"]), base_layers)
                way = Way(row["depth"], row["method"], float(row["noise"]))
                point = Growth(start, size, int(row["grown_at"]), way), budget
                self.grown[point][seed] = loss
                self.rises[point].append(float(row["loss_after_growth"]) - float(row["loss_before_growth"]))
        self.sizes = sorted({size for size, _, _ in self.fixed})
        self.budgets = sorted({budget for curve in self.fixed.values() for budget in curve})

    def curves(self, size: Size) -> dict[int, Curve]:
        """Curves at the common rate, by seed."""
        own = size, self.ladder.lr
        return {seed: curve for (*key, seed), curve in self.fixed.items() if tuple(key) == own}

    def losses(self, size: Size, budget: float) -> list[float]:
        return [curve[budget] for curve in self.curves(size).values() if budget in curve]

    def mean_losses(self, size: Size) -> Curve:
        return {budget: mean(losses) for budget in self.budgets if (losses := self.losses(size, budget))}

    def best_fixed(self, budget: float) -> tuple[Size, float]:
        """The size with the lowest mean loss, and that loss."""
        means = {size: self.mean_losses(size).get(budget, math.inf) for size in self.sizes}
        best = min(self.sizes, key=means.__getitem__)
        return best, means[best]

    def points(self, name: str) -> list[tuple[Growth, float]]:
        """Growths of a direction or a kind, and their budgets; in width those by the best method."""
        found = [point for point in self.grown if name in (point[0].direction, point[0].kind)]
        if name == "width":
            found = [point for point in found if point[0].way == WIDTH[0]]
        return sorted(found, key=lambda p: (p[0].size, p[1], p[0].start[::-1], p[0].way, p[0].at))

    def count_arms(self, direction: str) -> int:
        """Among how many arms the best was chosen."""
        return len(WIDTH) if direction == "width" else len({growth.arm for growth, _ in self.points(direction)})

    def advantage(self, growth: Growth, budget: float, against: str, straight: bool = False) -> Interval:
        """S against one of BASELINES."""
        needed, is_bound = {}, False
        for seed, loss in self.grown[growth, budget].items():
            sizes = self.sizes if against == "envelope" else [growth.size]
            curves = [self.curves(size).get(seed, {}) for size in sizes]
            reached = [power for curve in curves if (power := reach(curve, loss, straight)) is not None]
            if not reached:
                reached, is_bound = [max(power for curve in curves for power in curve)], True
            needed[seed] = min(reached)
        spent = math.log2(2**budget - 2**growth.at) if against == "base exists" else budget
        found = compare(dict.fromkeys(needed, spent), needed, self.count_arms(growth.direction))
        return Interval(len(needed), 2**found.mean, 2**found.low, 2**found.high, is_bound)


def reach(curve: Curve, loss: float, straight: bool = False) -> float | None:
    """The binary logarithm of the first budget at which a curve comes down to `loss`; None if it never does.

    Between two budgets the curve is the parabola through them and the nearest other one, or a straight line.
    """
    powers = sorted(curve)
    for place, (left, right) in enumerate(pairwise(powers)):
        if not curve[left] >= loss > curve[right]:
            continue
        guess = left + (right - left) * (curve[left] - loss) / (curve[left] - curve[right])
        others = powers[max(0, place - 1) : place] + powers[place + 2 : place + 3]
        if straight or not others:
            return guess
        third = min(others, key=lambda power: abs(power - guess))
        low, high = left, right
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if parabola(curve, (left, right, third), middle) > loss else (low, middle)
        return high
    return None


def parabola(curve: Curve, powers: Iterable[float], at: float) -> float:
    a, b, c = powers
    first = (curve[b] - curve[a]) / (b - a)
    second = ((curve[c] - curve[b]) / (c - b) - first) / (c - a)
    return curve[a] + (at - a) * (first + (at - b) * second)


# --- words of the tables


def show_losses(losses: Iterable[float]) -> str:
    losses = sorted(losses)
    spread = f" ({losses[0]:.3f}–{losses[-1]:.3f})" if len(losses) > 1 else ""
    return f"{mean(losses):.3f}{spread}"


def show_budget(power: float) -> str:
    return {0.5: "√2 B", 0: "B"}.get(power, f"B/{2**-power:.3g}")


def show_size(size: Size) -> str:
    return f"{size.width} × {size.layers}" + (", 1/L" if size.base_layers else "")


def show_way(way: Way) -> str:
    width = f"{way.method}, {way.noise:g}" if way.method else ""
    return ", ".join(part for part in (way.depth, width) if part)


def count_tokens(ladder: Ladder, size: Size, budget: float) -> int:
    """Per parameter."""
    return round(ladder.rows * ladder.context * ladder.budget(budget) / ladder.flops(size) / ladder.parameters(size))


def show_point(growth: Growth, budget: float, ladder: Ladder = FULL) -> tuple[str, str, str]:
    """Sizes, budget and moment of a growth."""
    start, size = growth.start, growth.size
    ends = (str(start.width), str(size.width)) if growth.direction == "width" else (show_size(start), show_size(size))
    tokens = f"{count_tokens(ladder, size, budget)} tokens per parameter"
    return " → ".join(ends), f"{show_budget(budget)}, {tokens}", f"{100 * 2 ** (growth.at - budget):g} %"


def make_table(corner: Iterable[str], rows: Table, bold: str = "") -> str:
    """Columns are in the order in which they occur; `bold` is the lowest number of each row, or of each column."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [[*corner, *columns], ["---"] * (len(list(corner)) + len(columns))]
    for titles, row in rows.items():
        cells = [row.get(column, "") for column in columns]
        for place, cell in enumerate(cells):
            if not isinstance(cell, str):
                others = row.values() if bold == "row" else [each.get(columns[place], cell) for each in rows.values()]
                cells[place] = f"**{cell:.3f}**" if bold and cell == min(others) else f"{cell:.3f}"
        lines.append([*titles, *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# --- parts of the page


def fixed_table(ends: Ends) -> str:
    rows: Table = {}
    for size in ends.sizes:
        parameters = f"{ends.ladder.parameters(size) / 1e6:.1f} M"
        rows[show_size(size), parameters] = {show_budget(b): loss for b, loss in ends.mean_losses(size).items()}
    return make_table(["width × layers", "parameters"], rows, bold="column")


def rates_table(ends: Ends) -> str:
    """The table of learning rates: one seed, at the third budget of each size, or the only one."""
    rates, rows = sorted({rate for _, rate, _ in ends.fixed}), {}
    for size in ends.sizes:
        curves = [ends.fixed.get((size, rate, 0), {}) for rate in rates]
        if all(curves):
            *_, budget = sorted(curves[rates.index(ends.ladder.lr)])[:3]
            cells = {f"{rate:.3g}": curve[budget] for rate, curve in zip(rates, curves, strict=True)}
            rows[show_size(size), show_budget(budget)] = cells
    return make_table(["width × layers", "budget"], rows, bold="row")


def growths_table(ends: Ends, *directions: str) -> str:
    rows: Table = {}
    for growth, budget in (point for direction in directions for point in ends.points(direction)):
        losses, (best, best_loss) = ends.grown[growth, budget].values(), ends.best_fixed(budget)
        sizes, *when = show_point(growth, budget, ends.ladder)
        row = rows[sizes, show_way(growth.way), *when] = {
            "rise": f"{round(mean(ends.rises[growth, budget]), 3) + 0.0:.3f}",
            "seeds": str(len(losses)),
            "loss, grown": show_losses(losses),
            "target size": show_losses(ends.losses(growth.size, budget)),
            "best fixed size": f"{show_size(best)}: {best_loss:.3f}",
        }
        if len(ends.budgets) > 1:
            row |= {title: str(ends.advantage(growth, budget, name)) for name, title in BASELINES.items()}
    return make_table(["", "how", "budget", "grown at"], rows)


def small_ladder(name: str, ladder: Ladder) -> str:
    """Both tables of another ladder."""
    ends = Ends(RUNS.parent / name / "runs.csv", ladder)
    return f"{fixed_table(ends)}\n\n{growths_table(ends, *DIRECTIONS)}"


def methods_table(ends: Ends) -> str:
    """Three ways to grow in width, over common seeds."""
    rows: Table = {}
    for growth, budget in ends.points("width"):
        losses = {way: ends.grown[growth._replace(way=way), budget] for way in WIDTH}
        common = set.intersection(*map(set, losses.values()))
        means = {show_way(way): mean(found[seed] for seed in common) for way, found in losses.items()}
        rows[*show_point(growth, budget), str(len(common))] = means
    return make_table(["", "budget", "grown at", "common seeds"], rows, bold="row")


def noise_table(ends: Ends) -> str:
    """Levels of noise of the ways to grow in width, one seed."""
    levels = sorted({growth.way.noise for growth, _ in ends.grown if growth.direction == "width"})
    rows: Table = {}
    for growth, budget in ends.points("width"):
        for method in ("duplication", "diagonal"):
            ways = {level: growth._replace(way=Way("", method, level)) for level in levels}
            losses = {level: ends.grown.get((way, budget), {}).get(0) for level, way in ways.items()}
            found = {f"{level:g}": loss for level, loss in losses.items() if loss}
            if any(losses[level] for level in levels if level > WIDTH[0].noise):
                rows[method, *show_point(growth, budget)] = found
    return make_table(["how", "", "budget", "grown at"], rows, bold="row")


def interpolation_note(ends: Ends) -> str:
    points, largest = [point for direction in DIRECTIONS for point in ends.points(direction)], []
    for against in ("target", "envelope"):
        ratios = [ends.advantage(*each, against, True).mean / ends.advantage(*each, against).mean for each in points]
        largest.append(f"{100 * max(ratios) - 100:.0f} % ({BASELINES[against].removeprefix('S, ')})")
    return f"With straight lines between budgets instead of parabolas, S is at most {' and '.join(largest)} larger."


def read_sunk() -> Ends:
    """Runs from a start that exists. A long start has half the rate, at which it is stable longer; from scratch, all
    have the common rate, which is the better one."""
    path = RUNS.parent / "sunk" / "runs.csv"
    ends, slow = Ends(path, SUNK), Ends(path, SUNK_SLOW)
    ends.grown |= {point: losses for point, losses in slow.grown.items() if point[0].at == 80}
    return ends


def sunk_table(_: Ends) -> str:
    """What a start that exists reaches, trained on as it is or grown, and, in brackets, S against the target size. A
    run is unstable if one with less compute ends lower, in any seed."""
    ends = read_sunk()
    budgets = sorted({budget for _, budget in ends.grown})

    def show_loss(growth: Growth, budget: float) -> str:
        losses = ends.grown[growth, budget]
        shorter = [ends.grown[growth, each] for each in budgets if each < budget]
        if any(each[seed] < loss for each in shorter for seed, loss in losses.items()):
            return "unstable"
        loss = f"{mean(losses.values()):.3f}"
        if growth.size == growth.start:
            return loss
        share = ends.advantage(growth, budget, "target")
        return f"{loss} ({'> ' * share.is_bound}{share.mean:.1f})"

    rows: Table = defaultdict(dict)
    for growth in sorted({growth for growth, _ in ends.grown}, key=lambda each: (each.at, each.size)):
        how = "as it is" if growth.size == growth.start else f"to {show_size(growth.size)}: {show_way(growth.way)}"
        rows[f"{growth.at:g}", how] = {show_budget(budget): show_loss(growth, budget) for budget in budgets}
    for size in ends.sizes:
        losses = ends.mean_losses(size)
        rows["0", f"{show_size(size)} from scratch"] = {show_budget(budget): losses[budget] for budget in budgets}
    return make_table(["base", "trained on"], rows).replace("B", "C")


def released_table(_: Ends) -> str:
    """The loss of each way to train a released checkpoint on, at the best of its rates, by share of its compute."""
    losses: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_csv(RUNS.parent / "released.csv"):
        losses[row["arm"], f"{float(row['share']):g}"][row["lr"]].append(float(row["loss"]))
    rows: Table = defaultdict(dict)
    for (arm, share), by_rate in losses.items():
        loss, rate = min((mean(found), rate) for rate, found in by_rate.items())
        rows[arm,][f"{share} of its compute"] = f"{loss:.3f} ({rate})"
    return make_table(["trained on"], rows)


PARTS: dict[str, Callable[[Ends], str]] = {
    "width": lambda ends: growths_table(ends, "width"),
    "depth": lambda ends: growths_table(ends, "depth"),
    "both": lambda ends: growths_table(ends, "both"),
    "lines": interpolation_note,
    "fixed": fixed_table,
    "methods": methods_table,
    "noises": noise_table,
    "rates": rates_table,
    "large_batch": lambda _: small_ladder("large_batch", LARGE_BATCH),
    "depths": lambda _: rates_table(Ends(RUNS.parent / "depths" / "runs.csv", DEPTHS)),
    "rung": lambda _: small_ladder("rung", RUNG),
    "sunk": sunk_table,
    "released": released_table,
}
"""Parts of the page, by the names in its comments."""


def fill_page(text: str, ends: Ends) -> str:
    """The page with all of its parts computed again."""
    pattern = re.compile(r"<!-- (\w+) -->\n.*?\n<!-- end -->", flags=re.DOTALL)
    return pattern.sub(lambda found: f"<!-- {found[1]} -->\n\n{PARTS[found[1]](ends)}\n\n<!-- end -->", text)


MARKERS = {
    "width": ("s", "#b3261e"), "stack": ("o", "#2e7d32"), "interleave": ("D", "#1591a5"), "identity": ("v", "#6b7280"),
    "both": ("P", "#6a3d9a"),
}  # fmt: skip
"""Markers of points, by the kind of growth."""


def draw(ends: Ends, folder: Path) -> None:
    """Losses over compute; and S over tokens per parameter: with three seeds a point has its interval as a bar."""
    figure, (axes, detail) = figures.panels(9, 4.6, columns=2)
    colours, styles = {64: "#9aa5b1", 128: "#d9822b", 256: "#2f6f9f"}, {2: ":", 4: "--", 8: "-"}
    for each in (axes, detail):
        for size in (size for size in ends.sizes if not size.base_layers):
            curve, style = ends.mean_losses(size), {"linestyle": styles[size.layers], "color": colours[size.width]}
            each.plot(curve.keys(), curve.values(), **style, lw=1.5, label=show_size(size))
        for place, (kind, (marker, colour)) in enumerate(MARKERS.items()):
            grown = [(point[1] + 0.05 * (place - 2), mean(ends.grown[point].values())) for point in ends.points(kind)]
            each.scatter(*zip(*grown, strict=True), marker=marker, color=colour, zorder=3, s=18, label=f"grown: {kind}")
        each.set(xlabel="log₂ of the compute, in units of B", ylabel="validation loss", ylim=(3.5, 5.4))
    axes.legend(ncols=2, fontsize=8, title="width × layers")
    detail.set(xlim=(-1.2, 0.55), ylim=(3.54, 3.86))
    figures.save(figure, folder / "losses")
    figure, both = figures.panels(9, 4, columns=2)
    for axes, against in zip(both, BASELINES, strict=False):
        for place, (kind, (marker, colour)) in enumerate(MARKERS.items()):
            axes.plot([], [], marker, color=colour, label=kind)
            for growth, budget in ends.points(kind):
                found = ends.advantage(growth, budget, against)
                at = count_tokens(FULL, growth.size, budget) * 2 ** (0.16 * (place - 2))
                bar = [[found.mean - found.low], [found.high - found.mean]] if found.seeds > 2 else None
                style = {"fmt": "^" if found.is_bound else marker, "mfc": colour if bar else "none"}
                axes.errorbar(at, found.mean, bar, color=colour, ms=5, lw=0.6, **style)
        axes.axhline(1, color="black", lw=0.8)
        axes.set(xscale="log", xlabel="tokens per parameter", ylim=(0.5, 1.6), title=BASELINES[against])
        axes.set_xticks([5, 10, 20], labels=["5", "10", "20"])
        axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figures.save(figure, folder / "advantages")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    ends = Ends(RUNS)
    PAGE.write_text(fill_page(PAGE.read_text("utf-8"), ends), "utf-8")
    draw(ends, RUNS.parent)


if __name__ == "__main__":
    main()
