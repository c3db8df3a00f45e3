"""The infinite-width limits of docs/theory.md: networks that the library trains and upscales approach them."""

import math
import runpy
from dataclasses import replace

import pytest
from paths import ROOT

THEORY = runpy.run_path(str(ROOT / "docs/theory_figure.py"))
three_layer_limit, four_layer_limit = THEORY["three_layer_limit"], THEORY["four_layer_limit"]


def logistic_slope(y: float) -> float:
    return -1 / (1 + math.exp(y))


RUN = THEORY["Training"](logistic_slope, lr=0.3, steps=5, lr_up=0.2, steps_up=6, x=0.9, sigma=1.1)


@pytest.mark.parametrize("limit", [three_layer_limit, lambda run: four_layer_limit(run, 3)], ids=["three", "four"])
def test_without_noise_training_goes_on(limit):
    """Dynamic equivalence: the same learning rate on the widened network continues the narrow run."""
    whole = limit(replace(RUN, steps=RUN.steps + RUN.steps_up, steps_up=0)).before
    split = limit(replace(RUN, lr_up=RUN.lr))
    assert split.before + split.after[1:] == pytest.approx(whole, rel=1e-12)


def test_a_smaller_learning_rate_takes_back_the_noise_on_three_layers():
    """The paper's relation γ σ⁴ = γ↑ (σ² + σ_C²)(σ² + σ_A²)."""
    variance = RUN.sigma**2
    lr_up = RUN.lr * variance**2 / ((variance + 0.5**2) * (variance + 0.7**2))
    noisy = three_layer_limit(replace(RUN, lr_up=lr_up), noise_A=0.7, noise_C=0.5)
    assert noisy.after == pytest.approx(three_layer_limit(replace(RUN, lr_up=RUN.lr)).after, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three layers", pytest.param("four layers", marks=pytest.mark.exhaustive)])
def test_finite_networks_approach_the_limit_as_one_over_the_root_of_the_width(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    fewer = {32: 48, 64: 48, 128: 48, 256: 32}  # than the figure has: the widest take most of the time
    monkeypatch.setitem(THEORY["errors"].__globals__, "SEEDS", fewer)
    before, after = THEORY["errors"](THEORY["examples"]()[name])
    assert THEORY["log_log_slope"](before) == pytest.approx(-0.5, abs=0.15)
    assert THEORY["log_log_slope"](after) == pytest.approx(-0.5, abs=0.15)
