"""The infinite-width limits: against the paper's equations written out, and against networks that the library trains
and upscales.
"""

import math
import runpy
from dataclasses import replace

import pytest
from paths import ROOT

from mupscale.checks.limits import Limit, Training, four_layer_limit, three_layer_limit

THEORY = runpy.run_path(str(ROOT / "docs/theory_figure.py"))


def logistic_slope(y: float) -> float:
    return -1 / (1 + math.exp(y))


RUN = Training(logistic_slope, lr=0.3, steps=5, lr_up=0.2, steps_up=6, x=0.9, sigma=1.1)
SQUARED = Training(lambda y: y - 2, lr=0.1, steps=4, lr_up=0.07, steps_up=5, x=1.2, sigma=0.8)


def three_layers_by_the_paper(run: Training, A: float, C: float) -> Limit:
    """Both recursions of Appendix "Example: 3-layer MLP", in its notation."""
    T, g, g_up, x2, s = run.steps + 1, run.lr, run.lr_up, run.x**2, run.sigma
    L: dict[int, float] = {}
    y: dict[int, float] = {}
    for t in range(T):
        y[t] = -g * x2 * s**4 * sum(L[u] for u in range(t))
        L[t] = run.slope(y[t])
    for t in range(T, T + run.steps_up + 1):
        y[t] = -g * x2 * s**4 * sum(L[u] for u in range(T - 1))
        y[t] -= g_up * x2 * (s**2 + C**2) * (s**2 + A**2) * sum(L[u] for u in range(T, t))
        L[t] = run.slope(y[t])
    outputs = [y[t] for t in sorted(y)]
    return Limit(outputs[:T], outputs[T:])


def four_layers_by_the_paper(run: Training, k: int, A: float, B: float, C: float, D: float) -> Limit:
    """The recursions of Appendix "Example: 4-layer MLP", in its notation and with its sums."""
    T, g, g_up, x2, s = run.steps + 1, run.lr, run.lr_up, run.x**2, run.sigma
    s_A, s_D = s**2 + A**2, s**2 + D**2
    L: dict[int, float] = {}
    y: dict[int, float] = {}
    M: dict[int, float] = {}
    N: dict[int, float] = {}
    M_: dict[int, float] = {}
    N_: dict[int, float] = {}

    def double_sum(first: int, end: int, X: dict[int, float]) -> float:
        return sum(L[u] * sum(L[v] * X[v] for v in range(first, u)) for u in range(first, end))

    for t in range(T):
        M[t] = 1 + g**2 * x2 * s**4 * double_sum(0, t, M)
        N[t] = -g * x2 * s**2 * sum(L[u] for u in range(t)) + g**2 * x2 * s**4 * double_sum(0, t, N)
        y[t] = s**4 * N[t] - g * s**2 * sum(L[u] * (M[u] * M[t] * s**4 * x2 + N[u] * N[t] * s**4) for u in range(t))
        L[t] = run.slope(y[t])
    for t in range(T, T + run.steps_up + 1):
        for X in (M, N):
            crossing = g * s**2 * sum(L[v] * X[v] for v in range(T - 1)) * sum(L[u] for u in range(T, t))
            X[t] = g**2 * x2 * s**4 * double_sum(0, T - 1, X) + g_up * x2 * s_D * (
                crossing + g_up * s_A * double_sum(T, t, X)
            )
        N[t] -= g * x2 * s**2 * sum(L[u] for u in range(T - 1))
        M_[t] = 1 + g_up**2 * x2 * s_D * s_A * double_sum(T, t, M_)
        N_[t] = -g_up * x2 * s_D * (sum(L[u] for u in range(T, t)) - g_up * s_A * double_sum(T, t, N_))
        y[t] = s**4 * (N[t] + N_[t]) + (s**2 * B**2 + s**2 * A**2 / k + A**2 * B**2) * N_[t]
        for u in range(T - 1):
            y[t] -= s**2 * g * L[u] * (M[u] * (M[t] + M_[t]) * s**4 * x2 + N[u] * (N[t] + N_[t]) * s**4)
        for u in range(T, t):
            overlap = x2 * s**4 * (M[u] + M_[u]) * (M[t] + M_[t]) + s**4 * (N[u] + N_[u]) * (N[t] + N_[t])
            overlap += M_[u] * M_[t] * (s**2 * D**2 / k + s**2 * C**2 + C**2 * D**2) * x2
            overlap += N_[u] * N_[t] * (s**2 * A**2 / k + s**2 * B**2 + A**2 * B**2)
            y[t] -= s_A * g_up * L[u] * overlap
        L[t] = run.slope(y[t])
    outputs = [y[t] for t in sorted(y)]
    return Limit(outputs[:T], outputs[T:])


def close(limit: Limit, expected: Limit) -> bool:
    return all(
        mine == pytest.approx(theirs, rel=1e-12, abs=1e-14) for mine, theirs in zip(limit, expected, strict=True)
    )


@pytest.mark.parametrize("run", [RUN, SQUARED, replace(RUN, steps=0), replace(SQUARED, steps_up=0)])
def test_three_layers_follow_the_papers_equations(run: Training):
    assert close(three_layer_limit(run, noise_A=0.7, noise_C=0.5), three_layers_by_the_paper(run, A=0.7, C=0.5))


@pytest.mark.parametrize("run", [RUN, SQUARED, replace(RUN, steps=0), replace(SQUARED, steps_up=0)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_four_layers_follow_the_papers_equations(run: Training, k: int):
    limit = four_layer_limit(run, k, noise_A=0.7, noise_B=0.4, noise_C=1.3, noise_D=0.5)
    assert close(limit, four_layers_by_the_paper(run, k, A=0.7, B=0.4, C=1.3, D=0.5))


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
