"""The exponent by which an optimum moves with the width: known curves give known exponents and errors."""

import math

import pytest

from mupscale.commands.lab.transfer import Optimum, Panel, WidthCurve, drift_of, drift_rows, optimum_of
from mupscale.commands.widths import Growth
from mupscale.text_tables import as_csv

LEVELS = [0.1, 0.2, 0.4, 0.8, 1.6]
INF = math.inf


def bowl(best: float) -> list[float]:
    """Losses whose logarithmic parabola is lowest at `best`."""
    return [1 + math.log(level / best) ** 2 for level in LEVELS]


def test_the_parabola_finds_an_optimum_between_the_levels() -> None:
    assert optimum_of(LEVELS, bowl(0.3)).value == pytest.approx(0.3)
    assert optimum_of([1, 2, 8], [math.log(x / 3) ** 2 for x in (1, 2, 8)]).value == pytest.approx(3)  # uneven
    assert optimum_of([1, 2, 4], [1, 0, 1]) == Optimum(2.0, False)
    assert optimum_of([1, 2, 4], [1, 1, 1]) == Optimum(1, True)


@pytest.mark.parametrize(
    ("losses", "best"),
    [([1, 2, 3, 4, 5], 0.1), ([5, 4, 3, 2, 1], 1.6), ([3, 2, 1, INF, INF], 0.4), ([INF, 1, 2, 3, 4], 0.2)],
)
def test_at_the_edge_it_is_the_best_value_and_marked(losses: list[float], best: float) -> None:
    assert optimum_of(LEVELS, losses) == Optimum(best, True)


def test_the_exponent_and_its_error_of_the_seeds() -> None:
    widths = [64, 128, 256]
    slow, fast = -0.5, -0.3  # of two seeds
    curves = [[bowl(0.6 * (w / 64) ** slow), bowl(0.6 * (w / 64) ** fast)] for w in widths]
    drift = drift_of(widths, LEVELS, curves)
    assert drift.exponent == pytest.approx(-0.4, abs=0.02)
    assert drift.error == pytest.approx(0.1, abs=0.001)  # half the difference of two
    assert drift.error_from == "2 seeds"
    assert drift.at_edge == 0
    assert str(drift._replace(exponent=-0.4, error=0.1)) == "width^(-0.40 ± 0.10), by 2 seeds"
    assert drift._replace(exponent=-0.0004, error=0.1).power == "width^(0.00 ± 0.10)"


def test_the_sentence_and_the_table() -> None:
    values = {level: [loss] for level, loss in zip(LEVELS, [1, 2, 3, 4, 5], strict=True)}
    curves = [WidthCurve(Growth(64, 128), values), WidthCurve(Growth(128, 256), values)]
    panel = Panel("lr", "model.optimizer.lr", LEVELS, curves)
    assert "goes as width^0.00, of unknown error; at 2 of 2 widths it is at the edge" in panel.drift_sentence()
    assert panel.title.endswith("\nits optimum is at the edge of the grid at 2 of 2 widths")
    head, first, _ = as_csv(drift_rows([panel])).splitlines()
    assert head == "sweep,key,before,after,optimum,at edge,exponent,error,error from"
    assert first.startswith("lr,model.optimizer.lr,64,128,0.1,yes,0.0,,")
    noise = Panel("noise", "std", [0.0, 1.0], [WidthCurve(Growth(1, 2), {0.0: [1.0], 1.0: [2.0]})])
    assert noise.drift is None
    assert "no exponent" in noise.drift_sentence()
    diverged = WidthCurve(Growth(1, 2), {1: [2.0, 3.0], 2: [INF]})
    assert diverged.of_seeds([1, 2], 2) == [[2.0, INF], [3.0, INF]]
