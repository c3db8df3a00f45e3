"""Writes the tables of docs/results/ladder.md, and its picture, from the CSV file of its runs.

python -m benchmarks ladder_tables
"""

import argparse
import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.ladder import FULL, LR, Size

PAGE = Path(__file__).parents[1] / "docs" / "results" / "ladder.md"
RUNS = PAGE.with_suffix("") / "runs.csv"
ARMS = (("diagonal", 1.0), ("duplication", 1.0), ("duplication", 0.24))
"""Methods of growth, the best first, and the std of their noise."""
CONFIDENCE = 1 - 0.05 / len(ARMS)
"""The first was chosen among all of them."""
BASELINES = {
    "target": "S, target size", "envelope": "S, best of all sizes", "base exists": "S, target size, if the base exists"
}  # fmt: skip

Curve = dict[float, float]
"""Validation losses of a fixed size, by the binary logarithm of the budget."""


class Growth(NamedTuple):
    narrow: int
    wide: Size
    at: int
    method: str
    noise: float


class Interval(NamedTuple):
    """Of the compute of a fixed size over that of a run that grows: its geometric mean over seeds, and a t interval."""

    seeds: int
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f}–{self.high:.2f})" if self.seeds > 1 else f"{self.mean:.2f}"


class Ends:
    """The losses at the ends of all runs."""

    def __init__(self, path: Path) -> None:
        self.fixed: dict[tuple[Size, float, int], Curve] = defaultdict(dict)
        """By size, rate and seed."""
        self.grown: dict[tuple[Growth, float], dict[int, float]] = defaultdict(dict)
        """By growth and budget: losses by seed."""
        with path.open() as file:
            for row in csv.DictReader(file):
                size, seed = Size(int(row["width"]), int(row["layers"])), int(row["seed"])
                budget, loss, rate = (float(row[key]) for key in ("budget", "loss", "lr"))
                if not row["from_width"]:
                    self.fixed[size, rate, seed][budget] = loss
                elif rate == LR:
                    at, noise = int(row["grown_at"]), float(row["noise"])
                    growth = Growth(int(row["from_width"]), size, at, row["method"], noise)
                    self.grown[growth, budget][seed] = loss
        self.sizes = sorted({size for size, _, _ in self.fixed})
        self.seeds = sorted({seed for _, _, seed in self.fixed})

    def losses(self, size: Size, budget: float) -> list[float]:
        """At the common rate, by seed."""
        curves = [self.fixed[size, LR, seed] for seed in self.seeds]
        return [curve[budget] for curve in curves if budget in curve]

    def best_fixed(self, budget: float) -> tuple[Size, float]:
        """The size with the lowest mean loss, and that loss."""
        means = {size: mean(losses) for size in self.sizes if (losses := self.losses(size, budget))}
        best = min(means, key=lambda size: means[size])
        return best, means[best]

    def points(self) -> list[tuple[Growth, float]]:
        """Growths by the best method, and their budgets."""
        found = [(growth, budget) for growth, budget in self.grown if growth[-2:] == ARMS[0]]
        return sorted(found, key=lambda point: (point[0].narrow, point[1], point[0].at))

    def advantage(
        self, growth: Growth, budget: float, against: str, confidence: float = CONFIDENCE, straight: bool = False
    ) -> Interval:
        """S against one of BASELINES."""
        shares = []
        for seed, loss in self.grown[growth, budget].items():
            sizes = self.sizes if against == "envelope" else [growth.wide]
            reached = [
                power for size in sizes if (power := reach(self.fixed[size, LR, seed], loss, straight)) is not None
            ]
            spent = math.log2(2**budget - 2**growth.at) if against == "base exists" else budget
            shares.append(min(reached) - spent)
        return interval(shares, confidence)


def reach(curve: Curve, loss: float, straight: bool = False) -> float | None:
    """The binary logarithm of the first budget at which a curve comes down to `loss`; None if it never does.

    Between two budgets the curve is the parabola through them and the nearest other one, or a straight line.
    """
    powers = sorted(curve)
    for place, (left, right) in enumerate(pairwise(powers)):
        if not curve[left] >= loss > curve[right]:
            continue
        guess = left + (right - left) * (curve[left] - loss) / (curve[left] - curve[right])
        if straight:
            return guess
        others = powers[max(0, place - 1) : place] + powers[place + 2 : place + 3]
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
    """From binary logarithms, for one, two or three seeds."""
    centre = mean(shares)
    if len(shares) == 1:
        return Interval(1, 2**centre, math.nan, math.nan)
    tail = (1 + confidence) / 2
    # quantiles of Student's t with one and with two degrees of freedom
    t = math.tan(math.pi * (tail - 0.5)) if len(shares) == 2 else (2 * tail - 1) / math.sqrt(2 * tail * (1 - tail))
    half = t * stdev(shares) / math.sqrt(len(shares))
    return Interval(len(shares), 2**centre, 2 ** (centre - half), 2 ** (centre + half))


def show_losses(losses: Iterable[float]) -> str:
    lowest, *_, highest = sorted(losses)
    return f"{mean(losses):.3f} ({lowest:.3f}–{highest:.3f})"


def show_budget(power: float) -> str:
    return {0.5: "√2 B", 0: "B"}.get(power, f"B/{2**-power:g}")


def show_size(size: Size) -> str:
    return f"{size[0]} × {size[1]}"


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
    rows = []
    for size in ends.sizes:
        curves = [ends.fixed[size, factor * LR, 0] for factor in (0.5, 1, 2)]
        budget = sorted(curves[1])[2]
        losses = [curve[budget] for curve in curves]
        cells = [f"**{loss:.3f}**" if loss == min(losses) else f"{loss:.3f}" for loss in losses]
        rows.append([show_size(size), show_budget(budget), *cells])
    return make_table(["width × layers", "budget", *(f"{factor * LR:g}" for factor in (0.5, 1, 2))], rows)


def advantage_table(ends: Ends) -> str:
    rows = []
    for growth, budget in ends.points():
        losses = ends.grown[growth, budget].values()
        best, best_loss = ends.best_fixed(budget)
        advantages = [str(ends.advantage(growth, budget, against)) for against in BASELINES]
        rows.append([
            *show_point(growth, budget), str(len(losses)), show_losses(losses),
            show_losses(ends.losses(growth.wide, budget)), f"{show_size(best)}: {best_loss:.3f}", *advantages,
        ])  # fmt: skip
    header = ["", "budget", "grown at", "seeds", "loss, grown", "target size", "best fixed size", *BASELINES.values()]
    return make_table(header, rows)


def methods_table(ends: Ends) -> str:
    rows = []
    for growth, budget in ends.points():
        arms = [growth._replace(method=method, noise=noise) for method, noise in ARMS]
        common = set.intersection(*(set(ends.grown[arm, budget]) for arm in arms))
        means = [mean(ends.grown[arm, budget][seed] for seed in common) for arm in arms]
        cells = [f"**{loss:.3f}**" if loss == min(means) else f"{loss:.3f}" for loss in means]
        rows.append([*show_point(growth, budget), str(len(common)), *cells])
    return make_table(["", "budget", "grown at", "common seeds", *(f"{m}, {n:g}" for m, n in ARMS)], rows)


def interpolation_note(ends: Ends) -> str:
    def largest_ratio(against: str) -> float:
        means = [
            [ends.advantage(*point, against, straight=line).mean for line in (True, False)] for point in ends.points()
        ]
        return max(line / parabola for line, parabola in means)

    ratios = [f"{largest_ratio(against) - 1:.0%}".replace("%", " %") for against in ("target", "envelope")]
    return (
        f"With straight lines between budgets instead of parabolas, S is at most {ratios[0]} (target size) and\n"
        f"{ratios[1]} (best of all sizes) larger."
    )


def show_point(growth: Growth, budget: float) -> list[str]:
    tokens = FULL.rows * FULL.context * FULL.budget(budget) / FULL.flops(growth.wide)
    share = 2 ** (growth.at - budget)
    return [
        f"{growth.narrow} → {growth.wide[0]}",
        f"{show_budget(budget)}, {tokens / FULL.parameters(growth.wide):.0f} tokens per parameter",
        f"{share:.0%}".replace("%", " %"),
    ]


PARTS = {
    "fixed": fixed_table,
    "rates": rates_table,
    "advantages": advantage_table,
    "methods": methods_table,
    "lines": interpolation_note,
}
"""Parts of the page, by the names in its comments."""


def fill_page(text: str, ends: Ends) -> str:
    """The page with all of its parts computed again."""
    for name, part in PARTS.items():
        pattern = f"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text, count = re.subn(
            pattern, lambda found, part=part: f"{found[1]}\n{part(ends)}\n{found[2]}", text, flags=re.DOTALL
        )
        assert count == 1, f"{PAGE.name} has {count} parts {name!r}"
    return text


def draw(ends: Ends, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    colours, styles = {64: "#9aa5b1", 128: "#d9822b", 256: "#2f6f9f"}, {2: ":", 4: "--", 8: "-"}
    for size in ends.sizes:
        budgets = sorted(ends.fixed[size, LR, 0])
        losses = [mean(ends.losses(size, budget)) for budget in budgets]
        axes.plot(budgets, losses, styles[size[1]], color=colours[size[0]], lw=1.5, label=show_size(size))
    for (narrow, wide), marker in {(64, 128): "o", (128, 256): "s"}.items():
        grown = [(b, mean(ends.grown[g, b].values())) for g, b in ends.points() if g.narrow == narrow]
        axes.scatter(
            *zip(*grown, strict=True), marker=marker, color="#b3261e", zorder=3, label=f"{narrow} → {wide}, 8 layers"
        )
    axes.set(xlabel="log₂ of the compute, in units of B", ylabel="validation loss", ylim=(3.5, 5.4), xlim=(-7.2, 0.7))
    axes.legend(ncols=2, fontsize=8, title="width × layers")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    ends = Ends(RUNS)
    PAGE.write_text(fill_page(PAGE.read_text(), ends))
    draw(ends, RUNS.with_name("losses.png"))
