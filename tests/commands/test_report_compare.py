"""Comparisons: seed by seed, with intervals that keep their promise, also after a choice."""

import math
import statistics

import pytest

from mupscale.commands.reporting.compare import compare, mean_of, spread_of, t_quantile

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


def test_one_seed_and_none():
    one = compare({0: 1.0}, {0: 2.0})
    assert (one.seeds, one.mean, one.low, one.high) == ([0], 1.0, -math.inf, math.inf)
    assert compare({0: 1.0}, {1: 2.0})[:2] == ([], 1.0)


def test_an_arm_with_a_run_that_diverged_has_no_mean():
    assert mean_of({0: 0.1, 1: math.inf}) == mean_of({}) == math.inf
    assert spread_of([0.1, math.inf]) == (0.1, 0.1, 0.1, 1)


def test_a_choice_widens_the_interval():
    ours, theirs = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 1.5, 1: 1.6, 2: 1.9}
    chosen, plain = compare(ours, theirs, 4), compare(ours, theirs)
    assert (chosen.high - chosen.mean) / (plain.high - plain.mean) == pytest.approx(
        t_quantile(1 - 0.05 / 4, 2) / t_quantile(0.95, 2)
    )
