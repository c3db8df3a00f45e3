"""The numbers of the pages of results come from the CSV files beside them."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import pytest
from paths import ROOT

from experiments.ladder import Size, Way, plan_runs
from experiments.ladder_tables import (
    BASELINES,
    DEPTHS,
    DIRECTIONS,
    FULL,
    PAGE,
    PARTS,
    RUNG,
    RUNS,
    WIDTH,
    Ends,
    Growth,
    fill_page,
    parabola,
    reach,
    read_sunk,
)
from mupscale.commands.reporting.compare import compare

GUIDE = ROOT / "docs" / "should_i_grow.md"
ROWS = list(csv.DictReader(RUNS.read_text().splitlines()))


@pytest.fixture(scope="module")
def ends() -> Ends:
    return Ends(RUNS)


def test_the_parts_of_the_page_are_computed_from_the_runs(ends: Ends) -> None:
    text = PAGE.read_text()
    assert fill_page(text, ends) == text, "run: python -m experiments.ladder_tables"


def test_other_losses_make_another_page(tmp_path: Path) -> None:
    changed = RUNS.read_text().replace(",3.7988,", ",3.7888,", 1)
    assert changed != RUNS.read_text()
    (tmp_path / "runs.csv").write_text(changed)
    text = PAGE.read_text()
    assert fill_page(text, Ends(tmp_path / "runs.csv")) != text


def test_losses_and_advantages_in_sentences_are_those_of_the_tables(ends: Ends) -> None:
    tables = "".join(PARTS[name](ends) for name in re.findall(r"<!-- (\w+) -->", PAGE.read_text()) if name != "end")
    results = PAGE.read_text().partition("## Results")[2]
    sentences = re.sub(r"<!-- \w+ -->.*?<!-- end -->", "", results, flags=re.DOTALL)
    losses = {f"{float(row['loss']):.3f}" for row in ROWS}
    numbers = set(re.findall(r"(?<![\d.])[1-5]\.\d{2,3}(?!\d)", sentences)) - {"2.11"}  # the version of torch
    assert len(numbers) >= 8
    for number in numbers:
        assert number in tables or number in losses, number


def test_the_best_rate_is_the_same_at_every_depth() -> None:
    ends = Ends(RUNS.parent / "depths" / "runs.csv", DEPTHS)
    rates = sorted({rate for _, rate, _ in ends.fixed})
    assert [rate / DEPTHS.lr for rate in rates] == [0.25, 0.5, 1, 2, 4]
    best = [min(rates, key=lambda rate: next(iter(ends.fixed[size, rate, 0].values()))) for size in ends.sizes]
    assert best == [DEPTHS.lr] * 4
    assert "is the same at 2, 4, 8 and 16 layers" in PAGE.read_text()


def test_the_rung_in_sentences() -> None:
    """Which prediction was met."""
    ends = Ends(RUNS.parent / "rung" / "runs.csv", RUNG)
    width, stack, interleave = (
        ends.advantage(growth, 0.0, "target") for way in (WIDTH[0], Way("stack"), Way("interleave"))
        for growth, _ in ends.grown if growth.way == way
    )  # fmt: skip
    assert interleave.is_bound
    assert width.mean < 1.1 < stack.mean < 1.4
    text = " ".join(PAGE.read_text().split())
    assert f"**Width ended a little below its prediction**: {width.mean:.2f}, where" in text
    assert f"**Depth by `stack` met its own**: {stack.mean:.2f}, for" in text
    page = " ".join(GUIDE.read_text().split())
    assert f"The runs gave {width.mean:.2f} and {stack.mean:.2f}." in page


def test_depth_pays_at_10_tokens_per_parameter(ends: Ends) -> None:
    """By the rule of the page: S above 1.1 against the best of all sizes, and an interval above 1."""
    half, quarter = (
        ends.advantage(Growth(Size(256, layers), Size(256, 8), -2, Way("stack")), 0.0, "envelope") for layers in (4, 2)
    )
    both = ends.advantage(*next(point for point in ends.points("both") if point[1] == 0), "envelope")
    for found in (half, both):
        assert found.seeds == 3
        assert found.mean > 1.1
        assert found.low > 1
    assert quarter.is_bound
    assert quarter.seeds == 3
    paths = PAGE, ROOT / "README.md", ROOT / "docs" / "results" / "README.md"
    text, first, overview = (" ".join(path.read_text().split()) for path in paths)
    assert f"{half.mean:.2f} times the compute (4 → 8 layers, 25 %; interval {half.low:.2f} to {half.high:.2f}," in text
    assert f"or more than {quarter.mean:.2f} times (2 → 8). Growth in both pays too: {both.mean:.2f} " in text
    assert f"({both.low:.2f} to {both.high:.2f})" in text
    assert f"needs {half.mean:.2f} (more than {quarter.mean:.2f}) times its compute" in first
    assert f"needs {half.mean:.2f} times the compute (4 → 8 layers) or more than {quarter.mean:.2f} times" in overview


def test_rows_of_the_ladder_in_the_readme(ends: Ends) -> None:
    def show(losses: Iterable[float]) -> str:
        return f"{mean(losses):.3f}"

    def grown(growth: Growth, budget: float) -> str:
        """Bold if it is lower than its target by an interval for the best of several arms."""
        losses, curves = ends.grown[growth, budget], ends.curves(growth.size)
        target = {seed: curve[budget] for seed, curve in curves.items() if budget in curve}
        is_lower = compare(target, losses, ends.count_arms(growth.direction)).high < 0
        return f"**{show(losses.values())}**" if is_lower else show(losses.values())

    text = (ROOT / "README.md").read_text()
    width = [point for point in ends.points("width") if point[0].start.width == 128 and point[0].at - point[1] == -2]
    low, high = [grown(*point) for point in width]
    target, later = [show(ends.losses(*point)) for point in ((Size(256, 8), -1), (Size(256, 8), 0))]
    assert f"at 5 (10) tokens per parameter | {target} ({later}) | {low} ({high}) | 1× |" in text
    stacked = [grown(Growth(Size(256, layers), Size(256, 8), -2, Way("stack")), 0.0) for layers in (4, 2)]
    assert f"stacked, at 10 tokens per parameter | {later} | {stacked[0]} ({stacked[1]}) | 1× |" in text


def test_should_i_grow(ends: Ends) -> None:
    text = re.sub(r"```.*?```", "", GUIDE.read_text(), flags=re.DOTALL)  # without what a command prints
    assert len(re.findall(r"\S*\w\S*", text)) <= 600
    assert text.count("![") == 1
    means = {"1.09", "1.29", "1.25"} | {  # of the rung, tested above, and its prediction
        f"{ends.advantage(*point, against).mean:.2f}"
        for direction in DIRECTIONS
        for point in ends.points(direction)
        for against in BASELINES
    }
    numbers = set(re.findall(r"(?<![\d.])\d\.\d{2}(?!\d)", text))
    assert len(numbers) >= 12
    assert numbers <= means


def test_a_start_that_exists_in_sentences() -> None:
    """Differences between the best growth and training on as it is, by tokens per parameter of the start."""
    ends, text = read_sunk(), " ".join(PAGE.read_text().split())

    def gain(start: int, budget: float) -> float:
        growths = {growth for growth, _ in ends.grown if growth.at == start}
        means = {growth: mean(ends.grown[growth, budget].values()) for growth in growths}
        as_it_is = next(growth for growth in means if growth.size == growth.start)
        return means.pop(as_it_is) - min(means.values())

    assert f"ends {gain(20, -2):.3f} below it from 20 tokens per parameter, and {-gain(5, -2):.3f} above" in text
    assert f"With half of C it ends {gain(20, -1):.3f} and {gain(5, -1):.3f} below it" in text
    assert f"by {gain(80, -3):.3f} with an eighth of C" in text


def test_a_released_checkpoint_in_sentences() -> None:
    rows = csv.DictReader((RUNS.parent / "released.csv").read_text().splitlines())
    losses = {(row["arm"], row["lr"], row["seed"]): float(row["loss"]) for row in rows if row["share"] == "1.0"}
    gains = [losses["as it is", "0.002", s] - losses["twice as deep, stack", "0.002", s] for s in ("0", "1")]
    assert min(gains) > 0
    for page, text in (
        (PAGE, "{:.3f} below training it on as it is, in both"),
        (GUIDE, "| {:.3f} below training it on (two seeds) |"),
    ):
        assert text.format(mean(gains)) in " ".join(page.read_text().split())


def test_the_page_counts_its_runs() -> None:
    planned = {run.name for run in plan_runs(FULL, [0, 1, 2])}
    made = {row["run"] for row in ROWS}
    assert made <= planned
    assert f"{len(made)} of the {len(planned)} planned runs" in " ".join(PAGE.read_text().split())


def test_every_run_has_spent_its_budget() -> None:
    """Both parts of a run that grows together, by the tokens of each."""
    for row in ROWS:
        size = Size(int(row["width"]), int(row["layers"]))
        tokens, step = int(row["tokens"]), FULL.rows * FULL.context
        spent = 0.0
        if row["from_width"]:
            start = Size(int(row["from_width"]), int(row["from_layers"]))
            first_steps = round(FULL.budget(float(row["grown_at"])) / FULL.flops(start))
            spent, tokens = FULL.budget(float(row["grown_at"])), tokens - first_steps * step
        spent += tokens / step * FULL.flops(size)
        assert spent == pytest.approx(float(row["flops"]), rel=1e-4)
        assert abs(spent - FULL.budget(float(row["budget"]))) <= FULL.flops(size)


def test_a_curve_reaches_a_loss_on_its_parabola() -> None:
    curve = {power: 4 - 0.5 * power + 0.1 * power**2 for power in (-2.0, -1.0, 0.0, 0.5)}
    for power in (-1.7, -0.4, 0.3):
        loss = 4 - 0.5 * power + 0.1 * power**2
        assert parabola(curve, (-2.0, -1.0, 0.0), power) == pytest.approx(loss)
        assert reach(curve, loss) == pytest.approx(power)
    assert reach(curve, 3.7) is None
    assert reach(curve, 6.0) is None
    assert reach({0.0: 4.0, 1.0: 3.0}, 3.25, straight=True) == pytest.approx(0.75)
