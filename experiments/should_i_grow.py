"""Does growing save compute? An estimate from the runs of docs/results/ladder.md, or "not known" outside of them.

    python -m experiments.should_i_grow --have 128x8 --want 256x8 --tokens 1e8

S is the compute that a network trained from scratch needs for the validation loss at which the grown one ends, over the
compute of growing: above 1, growing saves. Its logarithm is fitted by least squares. Against the target, the runs
support one number for each kind of growth: with the tokens per parameter, the moment of growth or the sizes as well,
half of the runs predict the other half less well. Against the best of all sizes, it depends on the width and the tokens
per parameter of the target too. For a small network that exists, S is that against the target without the compute
before the growth.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.ladder import AS_IT_IS, Size, read_size
from experiments.ladder_tables import BASELINES, FULL, RUNG, RUNS, Ends, Growth, count_tokens, show_size
from mupscale.commands.reporting.compare import t_quantile

LEVEL = 0.95
SHARE = 0.25
"""The share of the compute before the growth: as good as later or better for width, not clearly worse for depth."""
SLACK = 1.1
"""How far outside the tokens per parameter of the runs an estimate is still made, as a factor."""
KINDS = {"width": "width", "stack": "depth", "both": "both"}
"""The kinds of growth that are fitted, each with the best of its methods, by their names in `Ends.points`."""
HOW = {
    "width": "diagonal with centred noise of 1.0",
    "depth": "depth: stack",
    "both": "depth: interleave, and diagonal with centred noise of 1.0",
}
FITTED = "target", "envelope"


class Point(NamedTuple):
    """One growth at one budget, over its seeds."""

    growth: Growth
    tokens: int
    """Per parameter of the target."""
    seeds: int
    advantages: dict[str, float]
    """S by baseline; the bound where S is one."""

    def features(self, baseline: str) -> list[float]:
        kinds = [float(self.growth.direction == direction) for direction in HOW]
        if baseline == "target":
            return kinds
        return [*kinds, math.log2(self.tokens), math.log2(self.growth.size.width)]


class Estimate(NamedTuple):
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def read_points() -> list[Point]:
    """The growths of all runs: those of each direction together, by size and budget."""
    found = []
    rung = Ends(RUNS.parent / "rung" / "runs.csv", RUNG)
    for kind in KINDS:
        for ends, baselines in (Ends(RUNS), FITTED), (rung, FITTED[:1]):  # the rung has no other sizes
            for growth, budget in ends.points(kind):
                advantages = {name: ends.advantage(growth, budget, name).mean for name in baselines}
                tokens = count_tokens(ends.ladder, growth.size, budget)
                found.append(Point(growth, tokens, len(ends.grown[growth, budget]), advantages))
    return found


def estimate(points: Sequence[Point], wanted: Point, baseline: str) -> Estimate:
    """S of a growth, with the interval in which another growth falls."""
    points = [point for point in points if baseline in point.advantages]
    features, at = np.array([point.features(baseline) for point in points]), np.array(wanted.features(baseline))
    logarithms = np.log([point.advantages[baseline] for point in points])
    inverse = np.linalg.pinv(features.T @ features)
    solution, freedom = inverse @ features.T @ logarithms, len(points) - len(at)
    deviation = math.sqrt(np.sum((logarithms - features @ solution) ** 2) / freedom)
    mean, margin = at @ solution, t_quantile(LEVEL, freedom) * deviation * math.sqrt(1 + at @ inverse @ at)
    return Estimate(*map(math.exp, (mean, mean - margin, mean + margin)))


def find_gap(known: Sequence[Point], wanted: Point) -> str:
    """Says what the runs of this kind have instead of what is wanted; nothing if they cover it."""
    want = wanted.growth.size
    seen = {ratios(point.growth) for point in known}
    if ratios(wanted.growth) not in seen:
        texts = [f"{width:g} times the width and {layers:g} times the layers" for width, layers in sorted(seen)]
        return f"Such runs grow to {' or '.join(texts)}"
    for name in ("width", "layers"):
        sizes = sorted(getattr(point.growth.size, name) for point in known)
        if not sizes[0] <= getattr(want, name) <= sizes[-1]:
            return f"Such runs grow to {name} {sizes[0]} to {sizes[-1]}"
    tokens = sorted(point.tokens for point in known)
    if not tokens[0] / SLACK <= wanted.tokens <= tokens[-1] * SLACK:
        return f"Such runs have {tokens[0]} to {tokens[-1]} tokens per parameter"
    return ""


def ratios(growth: Growth) -> tuple[float, float]:
    return growth.size.width / growth.start.width, growth.size.layers / growth.start.layers


def predict_half(points: Sequence[Point], baseline: str) -> Iterator[tuple[float, Estimate, float]]:
    """Lists, for each growth, S, its estimate from the other half of the growths, and the mean of that half.

    The halves are every second growth of each direction.
    """
    known = [point for point in points if baseline in point.advantages]
    by_kind = [[point for point in known if point.growth.direction == direction] for direction in HOW]
    for parity in (0, 1):
        half = [point for of_kind in by_kind for point in of_kind[parity::2]]
        mean = math.exp(np.mean([math.log(point.advantages[baseline]) for point in half]))
        for of_kind in by_kind:
            for point in of_kind[1 - parity :: 2]:
                yield point.advantages[baseline], estimate(half, point, baseline), mean


def show_score(points: Sequence[Point]) -> str:
    lines = ["Each half of the growths estimated from the other half:"]
    for baseline in FITTED:
        rows = list(predict_half(points, baseline))
        inside = sum(found.low <= seen <= found.high for seen, found, _ in rows)
        off = show_error((found.mean, seen) for seen, found, _ in rows)
        of_mean = show_error((mean, seen) for seen, _, mean in rows)
        lines.append(
            f"  {BASELINES[baseline]}: {inside} of {len(rows)} inside their interval; {off} off on average "
            f"(the mean of that half: {of_mean})"
        )
    return "\n".join(lines)


def show_error(pairs: Iterable[tuple[float, float]]) -> str:
    return f"{100 * math.exp(np.mean([abs(math.log(one / other)) for one, other in pairs])) - 100:.0f} %"


def answer(points: Sequence[Point], have: Size, want: Size, tokens: float) -> str:
    """What the runs say of a growth at 25 % of the compute that trains the target on so many tokens."""
    growth = Growth(have, want, 0, AS_IT_IS)
    wanted = Point(growth, round(tokens / FULL.parameters(want)), 0, {})
    title = f"{show_size(have)} → {show_size(want)}, {wanted.tokens} tokens per parameter"
    if have == want or have.width > want.width or have.layers > want.layers:
        return f"{title}: nothing grows"
    known = [point for point in points if point.growth.direction == growth.direction]
    if gap := find_gap(known, wanted):
        return f"{title}: not known. {gap}"
    target, envelope = (estimate(points, wanted, baseline) for baseline in FITTED)
    exists = Estimate(*(bound / (1 - SHARE) for bound in target))
    runs = sum(point.seeds for point in known)
    sizes = dict.fromkeys(f"{show_size(point.growth.start)} → {show_size(point.growth.size)}" for point in known)
    return f"""{title}, grown at {100 * SHARE:.0f} % of the compute, {HOW[growth.direction]}
  {BASELINES["target"]}: {target}
  {BASELINES["envelope"]}: {envelope}
  {BASELINES["base exists"]}: {exists}
From {runs} runs with AdamW: {", ".join(sizes)}. Not known: other texts and optimizers.
{show_score(points)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--have", metavar="WIDTHxLAYERS", type=read_size, required=True, help="the small network")
    parser.add_argument("--want", metavar="WIDTHxLAYERS", type=read_size, required=True, help="the size it grows to")
    parser.add_argument("--tokens", type=float, required=True, help="on which your compute would train the large one")
    options = parser.parse_args(arguments)
    print(answer(read_points(), options.have, options.want, options.tokens))


if __name__ == "__main__":
    main()
