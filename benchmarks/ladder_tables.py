"""Writes the tables and pictures of docs/results/ladder.md from the CSV files of its runs.

python -m benchmarks ladder_tables
"""

import argparse
import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks.ladder import DEPTHS, FULL, LARGE_BATCH, RUNG, SUNK, WIDTH, Ladder, Size, Way
from mupscale.commands.reporting.compare import t_quantile

PAGE = Path(__file__).parents[1] / "docs" / "results" / "ladder.md"
RUNS = PAGE.with_suffix("") / "runs.csv"
BASELINES = {
    "target": "S, target size", "envelope": "S, best of all sizes", "base exists": "S, target size, if the base exists"
}  # fmt: skip
DIRECTIONS = ("width", "depth", "both")

Curve = dict[float, float]
"""Validation losses of a fixed size, by the binary logarithm of the budget."""


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
    def arm(self) -> tuple[str, Size, Way]:
        """What is chosen beforehand, whatever the budget: the start is relative to the size that it grows to."""
        width = self.size.width // self.start.width
        return self.direction, self.start._replace(width=width), self.way


class Interval(NamedTuple):
    """Of the compute of a fixed size over that of a run that grows: its geometric mean over seeds, and a t interval.

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
        """By size, rate and seed."""
        self.grown: dict[tuple[Growth, float], dict[int, float]] = defaultdict(dict)
        """By growth and budget: losses by seed."""
        with path.open() as file:
            for row in csv.DictReader(file):
                base_layers = int(row["base_layers"]) if row["base_layers"] else None
                size, seed = Size(int(row["width"]), int(row["layers"])), int(row["seed"])
                budget, loss, rate = (float(row[key]) for key in ("budget", "loss", "lr"))
                if not row["from_width"]:
                    self.fixed[size._replace(base_layers=base_layers), rate, seed][budget] = loss
                elif rate == ladder.lr:
                    start = Size(int(row["from_width"]), int(row["from_layers"]), base_layers)
                    way = Way(row["depth"], row["method"], float(row["noise"]))
                    self.grown[Growth(start, size, int(row["grown_at"]), way), budget][seed] = loss
        self.sizes = sorted({size for size, _, _ in self.fixed}, key=order_sizes)
        self.seeds = sorted({seed for _, _, seed in self.fixed})

    def losses(self, size: Size, budget: float) -> list[float]:
        """At the common rate, by seed."""
        curves = [self.fixed.get((size, self.ladder.lr, seed), {}) for seed in self.seeds]
        return [curve[budget] for curve in curves if budget in curve]

    def best_fixed(self, budget: float) -> tuple[Size, float]:
        """The size with the lowest mean loss, and that loss."""
        means = {size: mean(losses) for size in self.sizes if (losses := self.losses(size, budget))}
        best = min(means, key=lambda size: means[size])
        return best, means[best]

    def points(self, direction: str) -> list[tuple[Growth, float]]:
        """Growths and their budgets; in width those by the best method."""
        found = [point for point in self.grown if point[0].direction == direction]
        if direction == "width":
            found = [point for point in found if point[0].way == WIDTH[0]]
        return sorted(found, key=lambda p: (p[0].size, p[1], order_sizes(p[0].start)[::-1], p[0].way, p[0].at))

    def confidence(self, direction: str) -> float:
        """Of an interval: the best of so many arms was chosen."""
        arms = {growth.arm for growth, _ in self.points(direction)}
        return 1 - 0.05 / (len(WIDTH) if direction == "width" else len(arms))

    def advantage(self, growth: Growth, budget: float, against: str, straight: bool = False) -> Interval:
        """S against one of BASELINES."""
        shares, is_bound = [], False
        for seed, loss in self.grown[growth, budget].items():
            sizes = self.sizes if against == "envelope" else [growth.size]
            curves = [self.fixed.get((size, self.ladder.lr, seed), {}) for size in sizes]
            reached = [power for curve in curves if (power := reach(curve, loss, straight)) is not None]
            if not reached:
                reached, is_bound = [max(power for curve in curves for power in curve)], True
            spent = math.log2(2**budget - 2**growth.at) if against == "base exists" else budget
            shares.append(min(reached) - spent)
        return interval(shares, self.confidence(growth.direction))._replace(is_bound=is_bound)


def order_sizes(size: Size) -> tuple[int, int, int]:
    return size.width, size.layers, size.base_layers or 0


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


def interval(shares: list[float], confidence: float) -> Interval:
    """From binary logarithms, one for each seed."""
    centre = mean(shares)
    if len(shares) == 1:
        return Interval(1, 2**centre, math.nan, math.nan)
    half = t_quantile(confidence, len(shares) - 1) * stdev(shares) / math.sqrt(len(shares))
    return Interval(len(shares), 2**centre, 2 ** (centre - half), 2 ** (centre + half))


def show_losses(losses: Iterable[float]) -> str:
    losses = sorted(losses)
    if len(losses) == 1:
        return f"{losses[0]:.3f}"
    return f"{mean(losses):.3f} ({losses[0]:.3f}–{losses[-1]:.3f})"


def show_budget(power: float) -> str:
    return {0.5: "√2 B", 0: "B"}.get(power, f"B/{2**-power:g}")


def show_size(size: Size) -> str:
    return f"{size.width} × {size.layers}" + (", 1/L" if size.base_layers else "")


def show_way(way: Way) -> str:
    width = f"{way.method}, {way.noise:g}" if way.method else ""
    return ", ".join(part for part in (way.depth, width) if part)


def mark_lowest(losses: Iterable[float]) -> list[str]:
    losses = list(losses)
    return [f"**{loss:.3f}**" if loss == min(losses) else f"{loss:.3f}" for loss in losses]


def make_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def fixed_table(ends: Ends) -> str:
    budgets = sorted({budget for curve in ends.fixed.values() for budget in curve})
    rows = []
    for size in ends.sizes:
        cells = [f"{mean(losses):.3f}" if (losses := ends.losses(size, budget)) else "" for budget in budgets]
        best = [
            f"**{cell}**" if ends.best_fixed(b)[0] == size else cell for cell, b in zip(cells, budgets, strict=True)
        ]
        rows.append([show_size(size), f"{FULL.parameters(size) / 1e6:.1f} M", *best])
    return make_table(["width × layers", "parameters", *map(show_budget, budgets)], rows)


def rates_table(ends: Ends) -> str:
    rows, rates = [], [factor * FULL.lr for factor in (0.5, 1, 2)]
    for size in ends.sizes:
        curves = [ends.fixed.get((size, rate, 0), {}) for rate in rates]
        if all(curves):
            budget = sorted(curves[1])[2]
            rows.append([show_size(size), show_budget(budget), *mark_lowest(curve[budget] for curve in curves)])
    return make_table(["width × layers", "budget", *(f"{rate:g}" for rate in rates)], rows)


def advantage_table(ends: Ends, direction: str) -> str:
    rows = []
    for growth, budget in ends.points(direction):
        losses = ends.grown[growth, budget].values()
        best, best_loss = ends.best_fixed(budget)
        advantages = [str(ends.advantage(growth, budget, against)) for against in BASELINES]
        rows.append([
            *show_point(growth, budget), str(len(losses)), show_losses(losses),
            show_losses(ends.losses(growth.size, budget)), f"{show_size(best)}: {best_loss:.3f}", *advantages,
        ])  # fmt: skip
    header = ["", "how", "budget", "grown at", "seeds", "loss, grown", "target size", "best fixed size"]
    return make_table([*header, *BASELINES.values()], rows)


def methods_table(ends: Ends) -> str:
    """Three ways to grow in width, over common seeds."""
    rows = []
    for growth, budget in ends.points("width"):
        ways = [growth._replace(way=way) for way in WIDTH]
        common = set.intersection(*(set(ends.grown[each, budget]) for each in ways))
        means = [mean(ends.grown[each, budget][seed] for seed in common) for each in ways]
        start, _, *point = show_point(growth, budget)
        rows.append([start, *point, str(len(common)), *mark_lowest(means)])
    return make_table(["", "budget", "grown at", "common seeds", *map(show_way, WIDTH)], rows)


def noise_table(ends: Ends) -> str:
    """Levels of noise of the ways to grow in width, one seed."""
    levels = sorted({growth.way.noise for growth, _ in ends.grown if growth.direction == "width"})
    rows = []
    for growth, budget in ends.points("width"):
        for method in ("duplication", "diagonal"):
            ways = [growth._replace(way=Way("", method, level)) for level in levels]
            losses = {each.way.noise: loss for each in ways if (loss := ends.grown.get((each, budget), {}).get(0))}
            if max(losses) > WIDTH[0].noise:
                marked = dict(zip(losses, mark_lowest(losses.values()), strict=True))
                start, _, *point = show_point(growth, budget)
                rows.append([start, method, *point, *(marked.get(level, "") for level in levels)])
    return make_table(["", "how", "budget", "grown at", *(f"{level:g}" for level in levels)], rows)


def interpolation_note(ends: Ends) -> str:
    def largest_ratio(against: str) -> float:
        points = [point for direction in DIRECTIONS for point in ends.points(direction)]
        means = [[ends.advantage(*point, against, straight=line).mean for line in (True, False)] for point in points]
        return max(line / parabola for line, parabola in means)

    ratios = [f"{largest_ratio(against) - 1:.0%}".replace("%", " %") for against in ("target", "envelope")]
    return (
        f"With straight lines between budgets instead of parabolas, S is at most {ratios[0]} (target size) and\n"
        f"{ratios[1]} (best of all sizes) larger."
    )


def show_tokens(ladder: Ladder, size: Size, budget: float) -> str:
    tokens = ladder.rows * ladder.context * ladder.budget(budget) / ladder.flops(size)
    return f"{tokens / ladder.parameters(size):.0f}"


def show_point(growth: Growth, budget: float, ladder: Ladder = FULL) -> list[str]:
    start, size = growth.start, growth.size
    ends = (str(start.width), str(size.width)) if growth.direction == "width" else (show_size(start), show_size(size))
    share = 100 * 2 ** (growth.at - budget)
    return [
        " → ".join(ends),
        show_way(growth.way),
        f"{show_budget(budget)}, {show_tokens(ladder, size, budget)} tokens per parameter",
        f"{share:g} %",
    ]


def summary_table(ends: Ends) -> str:
    """For each target and budget, the lowest mean loss of each direction, over the seeds that were run."""
    lowest: dict[tuple[Size, float], dict[str, tuple[float, Growth]]] = defaultdict(dict)
    for direction in DIRECTIONS:
        for growth, budget in ends.points(direction):
            found = lowest[growth.size, budget]
            loss = mean(ends.grown[growth, budget].values())
            found[direction] = min(found.get(direction, (math.inf, growth)), (loss, growth))
    rows = []
    for (size, budget), found in sorted(lowest.items()):
        best, best_loss = ends.best_fixed(budget)
        cells = []
        for direction in DIRECTIONS:
            if direction not in found:
                cells.append("")
                continue
            loss, growth = found[direction]
            start = "" if direction == "width" else f" from {show_size(growth.start)}"
            way = "" if direction == "width" else f"{growth.way.depth} at "
            seeds = len(ends.grown[growth, budget])
            share = 100 * 2 ** (growth.at - budget)
            cells.append(f"{loss:.3f} ({way}{share:g} %{start}; {seeds} seed{'s' * (seeds > 1)})")
        target = f"{mean(ends.losses(size, budget)):.3f}"
        tokens = f"{show_size(size)}, {show_tokens(FULL, size, budget)}"
        rows.append([tokens, show_budget(budget), target, f"{best_loss:.3f} ({show_size(best)})", *cells])
    header = ["target, tokens per parameter", "budget", "target from scratch", "best fixed size"]
    return make_table([*header, *(f"grown in {name}" for name in DIRECTIONS)], rows)


def jumps_table(_: Ends) -> str:
    """What growth in depth does to the validation loss at once."""
    jumps: dict[tuple[str, str], set[tuple[float, float]]] = defaultdict(set)
    with RUNS.open() as file:
        for row in csv.DictReader(file):
            if row["depth"]:
                key = f"{row['from_layers']} → {row['layers']}", show_way(Way(row["depth"], row["method"], 1.0))
                before, after = (float(row[f"loss_{side}_growth"]) for side in ("before", "after"))
                jumps[key].add((before, after - before))
    rows = []
    for key, found in sorted(jumps.items()):
        before, rises = ([pair[place] for pair in found] for place in (0, 1))
        rows.append([*key, str(len(found)), f"{min(before):.3f}–{max(before):.3f}", show_losses(rises)])
    return make_table(["layers", "how", "growths", "loss before", "rise at the growth"], rows)


def large_batch_table(_: Ends) -> str:
    ends = Ends(RUNS.parent / "large_batch" / "runs.csv", LARGE_BATCH)
    rows = [[show_size(size), "", "", show_losses(ends.losses(size, 0))] for size in ends.sizes]
    for direction in DIRECTIONS[1:]:
        for growth, budget in ends.points(direction):
            sizes, way, _, share = show_point(growth, budget, LARGE_BATCH)
            rows.append([sizes, way, share, show_losses(ends.grown[growth, budget].values())])
    return make_table(["", "how", "grown at", "validation loss"], rows)


def depths_table(_: Ends) -> str:
    ends = Ends(RUNS.parent / "depths" / "runs.csv", DEPTHS)
    rates = sorted({rate for _, rate, _ in ends.fixed})
    rows = []
    for size in ends.sizes:
        losses = [mean(ends.fixed[size, rate, 0].values()) for rate in rates]
        rows.append([str(size.layers), *mark_lowest(losses)])
    return make_table(["layers", *(f"{rate:.3g}" for rate in rates)], rows)


def rung_table(_: Ends) -> str:
    ends = Ends(RUNS.parent / "rung" / "runs.csv", RUNG)
    budgets = sorted({budget for curve in ends.fixed.values() for budget in curve})
    rows = [[show_size(RUNG.top), show_budget(b), "", show_losses(ends.losses(RUNG.top, b)), ""] for b in budgets]
    for direction in DIRECTIONS:
        for growth, budget in ends.points(direction):
            sizes, way, _, share = show_point(growth, budget, RUNG)
            loss = show_losses(ends.grown[growth, budget].values())
            how = f"{way} at {share}"
            rows.append([sizes, show_budget(budget), how, loss, str(ends.advantage(growth, budget, "target"))])
    return make_table(["", "budget", "how", "validation loss", "S, target size"], rows)


STABLE = 85e6
"""Tokens that the start of the `sunk` ladder reads before its loss begins to rise."""


def sunk_table(_: Ends) -> str:
    """What a start that exists reaches, trained on as it is or grown, and, in brackets, S against the target size."""
    ends = Ends(RUNS.parent / "sunk" / "runs.csv", SUNK)
    budgets = sorted({budget for _, budget in ends.grown})

    def show_loss(growth: Growth, budget: float) -> str:
        loss, tokens = f"{mean(ends.grown[growth, budget].values()):.3f}", growth.at * SUNK.parameters(growth.start)
        if growth.size == growth.start:
            tokens += SUNK.rows * SUNK.context * SUNK.budget(budget) / SUNK.flops(growth.start)
            return loss if tokens < STABLE else "unstable"
        share = ends.advantage(growth, budget, "target")
        return f"{loss} ({'> ' * share.is_bound}{share.mean:.1f})"

    rows = []
    growths = {growth for growth, _ in ends.grown if growth.at * SUNK.parameters(growth.start) < STABLE}
    for growth in sorted(growths, key=lambda each: (each.at, order_sizes(each.size))):
        how = "as it is" if growth.size == growth.start else f"to {show_size(growth.size)}: {show_way(growth.way)}"
        rows.append([f"{growth.at:g}", how, *(show_loss(growth, budget) for budget in budgets)])
    for size in ends.sizes:
        rows.append(["0", f"{show_size(size)} from scratch", *(f"{mean(ends.losses(size, b)):.3f}" for b in budgets)])
    return make_table(["base", "trained on", *(show_budget(budget).replace("B", "C") for budget in budgets)], rows)


def released_table(_: Ends) -> str:
    """For each way to train a released checkpoint on, the loss at the best of its rates, by share of its compute."""
    losses: dict[tuple[str, float], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (RUNS.parent / "released.csv").open() as file:
        for row in csv.DictReader(file):
            losses[row["arm"], float(row["share"])][float(row["lr"])].append(float(row["loss"]))
    shares = sorted({share for _, share in losses})
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in losses):
        best = [min((mean(found), rate) for rate, found in losses[arm, share].items()) for share in shares]
        rows.append([arm, *(f"{loss:.3f} ({rate:g})" for loss, rate in best)])
    return make_table(["trained on", *(f"{share:g} of its compute" for share in shares)], rows)


PARTS = {
    "summary": summary_table,
    "width": partial(advantage_table, direction="width"),
    "depth": partial(advantage_table, direction="depth"),
    "both": partial(advantage_table, direction="both"),
    "jumps": jumps_table,
    "lines": interpolation_note,
    "fixed": fixed_table,
    "methods": methods_table,
    "noises": noise_table,
    "rates": rates_table,
    "large_batch": large_batch_table,
    "depths": depths_table,
    "rung": rung_table,
    "sunk": sunk_table,
    "released": released_table,
}
"""Parts of the page, by the names in its comments."""


def fill_page(text: str, ends: Ends) -> str:
    """The page with all of its parts computed again."""
    pattern = re.compile(r"<!-- (\w+) -->\n.*?\n<!-- end -->", flags=re.DOTALL)
    return pattern.sub(lambda found: f"<!-- {found[1]} -->\n\n{PARTS[found[1]](ends)}\n\n<!-- end -->", text)


def draw_losses(ends: Ends, axes: Any) -> None:
    colours, styles = {64: "#9aa5b1", 128: "#d9822b", 256: "#2f6f9f"}, {2: ":", 4: "--", 8: "-"}
    for size in ends.sizes:
        if not size.base_layers:
            budgets = sorted(ends.fixed[size, FULL.lr, 0])
            losses = [mean(ends.losses(size, budget)) for budget in budgets]
            axes.plot(budgets, losses, styles[size.layers], color=colours[size.width], lw=1.5, label=show_size(size))
    for place, (kind, (marker, colour)) in enumerate(MARKERS.items()):
        grown = [(b + 0.05 * (place - 2), mean(ends.grown[growth, b].values())) for growth, b in find_kind(ends, kind)]
        if grown:
            axes.scatter(*zip(*grown, strict=True), marker=marker, color=colour, zorder=3, s=18, label=f"grown: {kind}")
    axes.set(xlabel="log₂ of the compute, in units of B", ylabel="validation loss", ylim=(3.5, 5.4), xlim=(-7.2, 0.7))


def draw_advantages(ends: Ends, axes: Any, against: str) -> None:
    """S over tokens per parameter; with three seeds a point is filled and has its interval as a bar."""
    for place, (kind, (marker, colour)) in enumerate(MARKERS.items()):
        drawn: dict[str, int] = defaultdict(int)
        for growth, budget in find_kind(ends, kind):
            found, tokens = ends.advantage(growth, budget, against), show_tokens(FULL, growth.size, budget)
            at = float(tokens) * 2 ** (0.16 * (place - 2) + 0.03 * (drawn[tokens] - 1.5))
            drawn[tokens] += 1
            if found.is_bound:
                axes.plot(at, found.mean, "^", color=colour, ms=9, mfc="none")
            if found.seeds > 2:
                bar = [[found.mean - found.low], [found.high - found.mean]]
                axes.errorbar(at, found.mean, bar, fmt=marker, color=colour, ms=5, lw=0.6, alpha=0.7)
            else:
                axes.plot(at, found.mean, marker, color=colour, mfc="none", ms=5)
        axes.plot([], [], marker, color=colour, label=kind)
    axes.axhline(1, color="black", lw=0.8)
    axes.set(
        xscale="log", xticks=[5, 10, 20], xticklabels=["5", "10", "20"], ylim=(0.5, 1.6), xlabel="tokens per parameter"
    )
    axes.minorticks_off()
    axes.set_title(BASELINES[against], fontsize=10)


MARKERS = {
    "width": ("s", "#b3261e"), "stack": ("o", "#2e7d32"), "interleave": ("D", "#1591a5"), "identity": ("v", "#6b7280"),
    "both": ("P", "#6a3d9a"),
}  # fmt: skip


def find_kind(ends: Ends, kind: str) -> list[tuple[Growth, float]]:
    """Growths in depth, the most by far, are told apart by the way they grow."""
    points = [point for direction in DIRECTIONS for point in ends.points(direction)]
    return [
        (growth, budget) for growth, budget in points
        if kind == (growth.way.depth if growth.direction == "depth" else growth.direction)
    ]  # fmt: skip


def draw(ends: Ends, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (axes, detail) = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained", width_ratios=(1.5, 1))
    for each in (axes, detail):
        draw_losses(ends, each)
    axes.legend(ncols=2, fontsize=8, title="width × layers")
    detail.set(xlim=(-1.2, 0.55), ylim=(3.54, 3.86), ylabel="", xticks=(-1, -0.5, 0, 0.5))
    figure.savefig(folder / "losses.png", dpi=110, metadata={"Software": None})
    figure, both = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for axes, against in zip(both, BASELINES, strict=False):
        draw_advantages(ends, axes, against)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(folder / "advantages.png", dpi=110, metadata={"Software": None})


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    ends = Ends(RUNS)
    PAGE.write_text(fill_page(PAGE.read_text(), ends))
    draw(ends, RUNS.parent)
