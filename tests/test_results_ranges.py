"""Ranges in sentences on the pages of results are computed here from the CSV files beside them."""

import csv
import re
from collections.abc import Callable, Iterable
from statistics import mean

import pytest
from paths import ROOT
from result_rows import read_rows

from experiments.ladder import Size, Way
from experiments.ladder_tables import FULL, PAGE, RUNS, Ends, Growth, Interval, count_tokens, read_sunk

GUIDE, OVERVIEW = ROOT / "docs" / "should_i_grow.md", ROOT / "docs" / "results" / "README.md"
Point = tuple[Growth, float]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return Ends(RUNS)


def words(path: object) -> str:
    return " ".join(path.read_text().split())  # type: ignore[attr-defined]


def span(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def tokens(point: Point) -> int:
    return count_tokens(FULL, point[0].size, point[1])


def means(ends: Ends, name: str, against: str, keep: Callable[[Growth, float], bool]) -> list[float]:
    return [ends.advantage(*point, against).mean for point in ends.points(name) if keep(*point)]


def test_ranges_of_the_guide(ends: Ends) -> None:
    text = words(GUIDE)

    def is_half(growth: Growth, budget: float) -> bool:
        return growth.size.layers == 2 * growth.start.layers and tokens((growth, budget)) <= 10

    def is_late(growth: Growth, budget: float) -> bool:
        return tokens((growth, budget)) == 20

    def is_too_large(growth: Growth, budget: float) -> bool:
        """Another size than the target is the best one."""
        return ends.best_fixed(budget)[0] != growth.size

    small, large, width = (
        span(means(ends, name, "envelope", keep))
        for name, keep in (
            ("stack", lambda growth, budget: growth.size.width == 128),
            ("stack", lambda growth, budget: growth.size.width == 256 and is_too_large(growth, budget)),
            ("width", is_too_large),
        )
    )
    assert f"{small} (`stack`, width 128), {large} (256), {width} (width)" in text
    half = span(means(ends, "stack", "target", is_half))
    assert f"S of {half} against the target" in text
    assert f"the factor is {half} at 5 and 10 tokens" in text
    early = span(means(ends, "width", "target", lambda growth, budget: growth.at - budget == -2))
    assert f"noise of 1.0 | S of {early} against" in text
    late = [span(means(ends, name, "target", is_late)) for name in ("width", "stack")]
    assert f"S of {late[0]} (width), {late[1]} (`stack`) against" in text
    paid = [
        span(means(ends, name, "base exists", keep))
        for name, keep in (
            ("width", lambda *_: True),
            ("stack", lambda growth, _: growth.size.layers == 2 * growth.start.layers),
        )
    ]
    assert f"{paid[0]} (width), {paid[1]} (`stack`, half" in text
    identity = span(means(ends, "identity", "target", lambda *_: True))
    assert f"S of {identity} against the target, one seed" in text
    from_two = span(means(ends, "stack", "target", lambda growth, _: growth.start == Size(128, 2)))
    assert f"for 2 → 8, which became {from_two}." in text


def test_stacking_from_two_layers_over_the_seeds_that_have_all_sizes(ends: Ends) -> None:
    """Seed 2 has no run of 256 × 2 at B, so that its curve ends at B/2, below which both growths end."""
    assert sorted(ends.fixed[Size(256, 2), 0.0078, 2]) == sorted(ends.fixed[Size(256, 2), 0.0078, 0])[:-1]
    complete, growths = Ends(RUNS), [Growth(Size(256, 2), Size(256, 8), at, Way("stack")) for at in (-3, -2)]
    for growth in growths:
        del complete.grown[growth, -1][2]
    found = [complete.advantage(growth, -1, "envelope").mean for growth in growths]
    given = [ends.advantage(growth, -1, "envelope").mean for growth in growths]
    sentence = "it is {:.2f} and {:.2f}, not {:.2f} and {:.2f}."
    assert sentence.format(*found, *given) in words(PAGE)
    assert "but S ({:.2f} and {:.2f} over the two seeds with all sizes)".format(*found) in words(GUIDE)


def test_the_overview_is_short() -> None:
    summary = OVERVIEW.read_text().split("\n|")[0]
    assert len(re.findall(r"\S*\w\S*", summary)) <= 200


def test_in_how_many_places_stacking_pays(ends: Ends) -> None:
    found = [
        ends.advantage(*point, "target")
        for point in ends.points("stack")
        if point[0].start.layers == 4 and tokens(point) <= 10
    ]
    assert (len(found), sum(each.mean > 1.1 and each.low > 1 for each in found)) == (8, 3)
    assert all("in three of eight places with an" in words(page) or "in three of eight places." in words(page)
               for page in (GUIDE, OVERVIEW))  # fmt: skip
    assert f"at both widths and both moments of growth, S is {span(each.mean for each in found)}." in words(PAGE)


def test_differences_between_ways_to_grow_in_depth(ends: Ends) -> None:
    def gaps(name: str) -> list[float]:
        """By how much runs end above `stack`, by common seeds."""
        answer = []
        for growth, budget in ends.points(name):
            stacked = ends.grown.get(
                (growth._replace(start=growth.start._replace(base_layers=0), way=Way("stack")), budget), {}
            )
            answer += [loss - stacked[seed] for seed, loss in ends.grown[growth, budget].items() if seed in stacked]
        return answer

    text = words(PAGE)
    assert f"`stack` ends lower, by {span(gaps('identity'), 3)}." in text
    assert f"**`interleave`, from 1/L**, ends {span(gaps('interleave'), 3)} above `stack`" in text


def test_the_rates_in_sentences(ends: Ends) -> None:
    late = {
        size: {rate: ends.fixed[size, rate, 0][power] for rate in (0.0039, 0.0078, 0.0156)}
        for size in ends.sizes if not size.base_layers
        for power in [sorted(ends.fixed[size, 0.0078, 0])[:3][-1]]
    }  # fmt: skip
    over = {size: losses[0.0078] - min(losses.values()) for size, losses in late.items()}
    assert f"every size is within {max(over.values()):.3f} of its best rate" in words(PAGE)
    starts = {growth.start._replace(base_layers=0) for growth, _ in ends.grown}
    better = {size: gain for size, gain in over.items() if min(late[size], key=late[size].__getitem__) == 0.0156}
    named = "64 × 8, 128 × 2 and 128 × 8"
    gains = [better[size] for size in (Size(64, 8), Size(128, 2), Size(128, 8))]
    assert starts & set(better) == {Size(64, 8), Size(128, 2), Size(128, 8)}
    assert f"{named}, are better at 0.0156 by {gains[0]:.3f}, {gains[1]:.3f} and {gains[2]:.3f}" in words(PAGE)


def test_first_runs_and_seeds_differ_by_as_much_as_is_said(ends: Ends) -> None:
    first = read_rows("ladder/repeated.csv")
    second = {(row["run"], float(row["budget"])): float(row["loss"]) for row in read_rows("ladder/runs.csv")}
    largest = max(abs(float(row["loss"]) - second[row["run"], float(row["budget"])]) for row in first)
    assert f"[the first](ladder/repeated.csv) differ from them by at most {largest:.3f}." in words(PAGE)
    spreads = sorted(max(losses) - min(losses) for size in ends.sizes for power in ends.budgets
                     if len(losses := ends.losses(size, power)) > 1)  # fmt: skip
    assert f"differ by at most {spreads[-3]:.3f}, except" in words(PAGE)


def test_what_a_start_that_exists_saves() -> None:
    ends, shares = read_sunk(), []
    budgets = sorted({budget for _, budget in ends.grown})
    for (growth, budget), losses in ends.grown.items():
        if growth.size == growth.start:
            continue
        shorter = [ends.grown[growth, each] for each in budgets if each < budget]
        unstable = any(each[seed] < loss for each in shorter for seed, loss in losses.items())
        found = ends.advantage(growth, budget, "target")
        if not unstable and not found.is_bound:
            shares.append(found.mean)
    assert f"the target needs {span(shares, 1)} times as much" in words(PAGE)


@pytest.mark.parametrize("ladder", ["", "depths/", "large_batch/", "rung/", "sunk/"])
def test_every_end_has_its_curve(ladder: str) -> None:
    """The last point of a branch is the training loss at its end."""
    last = {(row["run"], float(row["branch"])): row for row in read_rows(f"ladder/{ladder}curves.csv") if row["branch"]}
    for row in read_rows(f"ladder/{ladder}runs.csv"):
        point = last[row["run"], float(row["budget"])]
        assert point["tokens"] == row["tokens"]
        assert float(point["train_loss"]) == pytest.approx(float(row["train_loss"]), abs=6e-4)


@pytest.mark.parametrize(
    ("name", "column", "counts"),
    [("midrun_gpt2", "validation_loss", (14, 16)), ("midrun_mlp", "training_loss", (7, 8)),
     ("midrun_mlp", "validation_loss", (5, 8))],
)  # fmt: skip
def test_how_often_centred_noise_ends_lower(name: str, column: str, counts: tuple[int, int]) -> None:
    losses: dict[tuple[str, str, str], list[float]] = {}
    for row in read_rows(f"{name}/midrun.csv"):
        losses.setdefault((row["schedule"], row["budget"], row["arm"]), []).append(float(row[column]))
    pairs = [
        (mean(found), mean(losses[schedule, budget, paper]))
        for (schedule, budget, arm), found in losses.items()
        if (schedule, budget, paper := arm.replace("(centred)", "(paper)")) in losses and paper != arm
    ]
    assert (sum(centred < paper for centred, paper in pairs), len(pairs)) == counts
    assert f"in {counts[0]} of {counts[1]}" in words(ROOT / "docs" / "results" / "paper.md")


def test_no_run_with_a_falling_rate_and_adamw_would_stop_early() -> None:
    assert all(row["step of lowest val/loss"] == row["steps"] for row in read_rows("mlp_adamw_decay/summary.csv"))
    assert "has its lowest validation loss at its last step" in words(ROOT / "docs" / "results" / "paper.md")


def test_a_released_checkpoint_by_the_rule_for_the_best_of_several() -> None:
    rows = list(csv.DictReader((RUNS.parent / "released.csv").read_text().splitlines()))
    rises = [float(r["loss_before"]) for r in rows if r["arm"].endswith("stack")], [
        float(r["loss_before"]) for r in rows if r["arm"].endswith("identity") and r["lr"] == "0.001"]  # fmt: skip
    assert f"throws its loss up by {mean(rises[0]) - mean(rises[1]):.2f} first" in words(PAGE)


def test_single_advantages_in_sentences(ends: Ends) -> None:
    text = words(PAGE)

    def find(start: Size, size: Size, way: Way, point: float, budget: float, against: str = "target") -> Interval:
        return ends.advantage(Growth(start, size, point, way), budget, against)

    diagonal, stack = Way("", "diagonal", 1.0), Way("stack")
    at_5 = means(
        ends, "width", "target", lambda growth, budget: growth.at - budget == -2 and tokens((growth, budget)) == 5
    )
    wide = find(Size(128, 8), Size(256, 8), diagonal, -2, 0)
    late = find(Size(64, 8), Size(128, 8), diagonal, -4, -2)
    assert f"S is {span(at_5)} at 5 tokens per parameter" in text
    assert f"it falls to {wide.mean:.2f} for 128 → 256 at 10, and to {late.mean:.2f} for 64 → 128 at 20" in text
    assert f"at 20 the interval of {late.mean:.2f} contains 1" in text
    assert late.low < 1 < late.high
    paid = [find(Size(128, 8), Size(256, 8), diagonal, -2, 0, "base exists"),
            find(Size(64, 8), Size(128, 8), diagonal, -5, -3, "base exists")]  # fmt: skip
    assert f"S is {paid[0].mean:.2f} for 128 → 256, and {paid[1].mean:.2f} for 64 → 128" in text
    at_b = means(ends, "interleave", "envelope", lambda growth, budget: budget == 0 and growth.start.layers == 4)
    assert f"Against all sizes, S is {span(at_b)} at B" in text

    def shares(layers: int, budget: int) -> str:
        found = [find(Size(128, layers), Size(128, 8), stack, budget - back, budget).mean for back in (2, 1)]
        return f"{found[0]:.2f} and {found[1]:.2f}"

    both = find(Size(128, 2), Size(128, 8), stack, -4, -2)
    assert f"from 2 layers S is {both.mean:.2f} against the target, with an interval from {both.low:.2f} to" in text
    assert f"to {both.high:.2f};" in text
    assert f"4 → 8 layers ({shares(4, -4)} at 5 tokens per parameter, {shares(4, -3)} at 10, where" in text
    assert f"2 → 8 ({shares(2, -4)} at 5, {shares(2, -3)} at 10, for 1.4; {both.mean:.2f} at 20, for" in text
    envelope = find(Size(128, 2), Size(128, 8), stack, -4, -2, "envelope")
    assert f"against every fixed size ({envelope.mean:.2f})" in text
    assert max(means(ends, "stack", "envelope", lambda growth, _: growth.size.width == 128)) < 1.05


def test_growing_late_in_width_is_worse_only_with_the_diagonal_variant(ends: Ends) -> None:
    better: dict[str, int] = {}
    for (growth, budget), losses in ends.grown.items():
        early = ends.grown.get((growth._replace(at=growth.at - 1), budget), {})
        if growth.direction == "width" and growth.at - budget == -1:
            wins = sum(loss < early[seed] for seed, loss in losses.items() if seed in early)
            better[growth.way.method] = better.get(growth.way.method, 0) + wins
    assert better["diagonal"] == 0 < better["duplication"]
    assert "Growing in width at 50 % never beats growing at 25 % with the diagonal" in words(GUIDE)


def test_what_the_rises_are(ends: Ends) -> None:
    rises = [mean(ends.rises[point]) for point in ends.grown if point[0].way.noise == 4]
    assert f"the loss rises at the growth, by {span(rises, 1)}:" in words(PAGE)
    plain = [
        found for (growth, _), found in ends.rises.items() if growth.direction == "width" and growth.way.noise <= 1
    ]
    other = [abs(rise) for found in plain for rise in found]
    assert f"before and after it differ by at most {max(other):.3f}." in words(PAGE)
