"""Dynamic equivalence in float64: architectures × optimizers, widened mid-training, followed for 12 steps, --all 50."""

from functools import partial

import pytest
import torch
from architectures import CASES, Case, cross_entropy
from grid_optimizers import GRID_OPTIMIZERS, float64_newton_schulz, muon_and_adamw
from mup_optimizers import MuAdam, MuAdamW, MuSGD
from tiers import slow_except

import mupscale


@pytest.fixture
def steps(pytestconfig: pytest.Config) -> int:
    return 50 if pytestconfig.getoption("--all") else 12


def check(case: Case, make_optimizer, steps: int, *, mup: bool, clip: float = 0.05) -> mupscale.Verdict:
    torch.manual_seed(0)
    narrow, wide = map(case.build_mup if mup else case.build, (case.narrow, case.wide))
    return mupscale.verify(
        narrow, wide, optimizer=make_optimizer, batches=case.batches(), loss=cross_entropy, steps=steps, clip=clip,
        hints=mupscale.Hints(roles=None if mup else case.plain_roles),
    )  # fmt: skip


def assert_exact(verdict: mupscale.Verdict) -> None:
    assert verdict.passed, verdict
    assert verdict.loss_drift <= 1e-10
    assert verdict.activation_drift <= 1e-8


# the convolutional ones have no hidden matrix of two axes
GRID = [
    (case, name)
    for case in CASES
    for name in GRID_OPTIMIZERS
    if not (name == "muon" and case in ("resnet18", "convnet"))
]

KEPT = [(case, name) for case, name in GRID if case == "mlp" or name == "adamw"]
"""Every optimizer on the MLP, and every architecture with AdamW."""

FAST = [
    *(("mlp", name) for name in ("sgd_nesterov", "radam", "muon")),
    *((case, "adamw") for case in ("mlp", "convnet")),
]


@pytest.mark.parametrize(("case", "optimizer_name"), slow_except(GRID, *FAST, kept=KEPT))
def test_plain_model_with_clipping(case: str, optimizer_name: str, steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", float64_newton_schulz)
    assert_exact(check(CASES[case], GRID_OPTIMIZERS[optimizer_name], steps, mup=False))


MUP_GRID = [(case, make) for case in CASES for make in (MuSGD, MuAdam, MuAdamW)]
MUP_KEPT = [*((case, MuAdamW) for case in CASES), ("llama", MuSGD), ("mlp", MuAdam)]


@pytest.mark.parametrize(("case", "make_optimizer"), slow_except(MUP_GRID, ("mlp", MuAdamW), kept=MUP_KEPT))
def test_mup_model(case: str, make_optimizer, steps: int):
    settings = {"lr": 0.02, "momentum": 0.9} if make_optimizer is MuSGD else {"lr": 0.003, "eps": 1e-3}
    make = partial(make_optimizer, weight_decay=0.1, **settings)
    assert_exact(check(CASES[case], make, steps, mup=True))


def test_clipping_was_active():
    case = CASES["mlp"]
    torch.manual_seed(0)
    model, batch = case.build(case.narrow), case.batches()[0]
    cross_entropy(model, batch).backward()
    assert mupscale.clip_grad_norm_(model, 0.05) > 0.2


@pytest.mark.slow
def test_muon_as_shipped_agrees_to_its_own_precision(steps: int):
    """torch's Newton–Schulz computes in bfloat16."""
    torch.manual_seed(0)
    case = CASES["gpt2_untied"]
    verdict = mupscale.verify(
        case.build(8), case.build(16), optimizer=muon_and_adamw, batches=case.batches(), loss=cross_entropy, steps=steps
    )
    assert verdict.loss_drift <= 1e-2
