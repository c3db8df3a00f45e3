"""Comparisons: seed by seed, with intervals that keep their promise, also for the best of several; edges of grids."""

import math
import statistics

import pytest

from mupscale.commands.reporting.compare import (
    chosen_without_seed,
    compare,
    compare_best,
    is_edge,
    mean_of,
    rank,
    spread,
    t_quantile,
)

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042}
"""The table of textbooks: two-sided, 95 %."""


@pytest.mark.parametrize(("freedom", "wanted"), STUDENT.items())
def test_students_t(freedom: int, wanted: float):
    assert t_quantile(0.95, freedom) == pytest.approx(wanted, abs=5e-4)


def test_differences_are_those_of_pairs():
    found = compare({0: 1.0, 1: 1.1, 2: 1.2, 7: 0.0}, {2: 1.6, 0: 1.3, 1: 1.4})
    assert found.seeds == [0, 1, 2]
    assert found.mean == pytest.approx(1 / 3)
    margin = 4.3027 * statistics.stdev([0.3, 0.3, 0.4]) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((1 / 3 - margin, 1 / 3 + margin), abs=1e-4)
    assert (found.outcome, found.is_clear) == ("lower", True)
    assert str(found) == "lower by 0.333 (95 % interval 0.19 to 0.48, 3 seeds)"
    assert found.words(2.0) == "lower by 0.333, 17 % (95 % interval 0.19 to 0.48, 3 seeds)"


def test_what_cannot_be_told_apart():
    found = compare({0: 1.0, 1: 1.5}, {0: 1.1, 1: 1.4, 2: 9.0})
    assert (found.outcome, found.is_clear) == ("cannot be told apart", False)
    assert str(found).endswith(": they cannot be told apart")


def test_one_seed_and_none():
    one = compare({0: 1.0}, {0: 2.0})
    assert (one.outcome, one.is_clear, str(one)) == (
        "one seed proves nothing", False, "lower by 1 (one seed proves nothing)",
    )  # fmt: skip
    none = compare({0: 1.0}, {1: 2.0})
    assert (none.mean, none.outcome) == (1.0, "no seed is common to both")


def test_an_arm_with_a_run_that_diverged_cannot_win():
    arms = {"a": {0: 0.1, 1: math.inf}, "b": {0: 0.3, 1: 0.3}, "c": {0: 0.2, 1: 0.2}, "d": {}}
    assert rank(arms) == ["c", "b"]
    assert mean_of(arms["a"]) == mean_of(arms["d"]) == math.inf
    assert spread([0.1, math.inf]) == (0.1, 0.1, 0.1, 1)
    assert compare_best({"a": arms["a"]}, arms) is None


def test_a_choice_widens_the_interval_and_shows_the_mean_without_it():
    ours = {"a": {0: 1.0, 1: 1.2, 2: 1.1}, "b": {0: 1.3, 1: 1.0, 2: 1.2}}
    theirs = {"c": {0: 1.5, 1: 1.6, 2: 1.9}, "d": {0: 1.8, 1: 1.9, 2: 1.6}}
    found = compare_best(ours, theirs)
    assert found is not None
    first, second, difference = found
    assert (first, second, difference.pairs) == ("a", "c", 4)
    plain = compare(ours["a"], theirs["c"])
    assert (difference.high - difference.mean) / (plain.high - plain.mean) == pytest.approx(
        t_quantile(1 - 0.05 / 4, 2) / t_quantile(0.95, 2)
    )
    assert difference.left_out == chosen_without_seed(ours, theirs)
    assert "98.8 % interval" in str(difference)
    assert "with each seed left out of the choice" in str(difference)


def test_the_choice_for_a_seed_is_made_by_the_others():
    ours = {"a": {0: 0.0, 1: 5.0, 2: 5.0}, "b": {0: 4.0, 1: 1.0, 2: 1.0}}
    theirs = {"c": {0: 3.0, 1: 3.0, 2: 3.0}}
    # seed 0: b is chosen (1 < 5), 3 - 4; seed 1: a and b are equal in 0 and 2 (2.5), a comes first, 3 - 5; seed 2: too
    assert chosen_without_seed(ours, theirs) == pytest.approx((-1 - 2 - 2) / 3)
    assert chosen_without_seed({"a": {0: 1.0}}, theirs) is None


@pytest.mark.parametrize(
    ("best", "means", "edge"),
    [
        (2.0, {1.0: 3.0, 2.0: 1.0, 4.0: 3.0}, False),
        (1.0, {1.0: 1.0, 2.0: 2.0, 4.0: 3.0}, True),
        (4.0, {1.0: 3.0, 4.0: 1.0, 2.0: 2.0}, True),
        (0.0, {0.0: 1.0, 2.0: 2.0, 4.0: 3.0}, False),
        (2.0, {1.0: 3.0, 2.0: 1.0, 4.0: math.inf}, True),
        (0.0, {0.0: 1.0, 2.0: math.inf, 4.0: math.inf}, True),
        (1.0, {1.0: 1.0, 2.0: 2.0}, False),
    ],
    ids=["inside", "least", "largest", "no noise", "beside divergence", "no noise, beside divergence", "two"],
)
def test_edges(best: float, means: dict[float, float], edge: bool):
    assert is_edge(best, means) is edge
