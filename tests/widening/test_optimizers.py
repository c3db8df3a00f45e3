"""Table 1 of the paper with the numbers written out, and the registry of optimizers."""

import math

import pytest
import torch

import mupscale
from mupscale.widening import optimizers as rules
from mupscale.widening import table
from mupscale.widening.optimizers import Sized, rule_of
from mupscale.widening.table import Scale

SHAPES = ((6, 4), (18, 8))
MATRIX, VECTOR, READOUT, SCALAR = (
    Sized(Scale(1 / k_in, 1 / k_out, k_out * k_in), *SHAPES) for k_out, k_in in ((3, 2), (3, 1), (1, 2), (1, 1))
)

# (lr, eps, weight decay) multipliers
EXPECTED = {
    "sgd": {MATRIX: (3 / 2, 1 / 3, 2 / 3), VECTOR: (3, 1 / 3, 1 / 3), READOUT: (1 / 2, 1, 2), SCALAR: (1, 1, 1)},
    "adam_coupled": {
        MATRIX: (1 / 2, 1 / 3, 2 / 3),
        VECTOR: (1, 1 / 3, 1 / 3),
        READOUT: (1 / 2, 1, 2),
        SCALAR: (1, 1, 1),
    },
    "adam_decoupled": {MATRIX: (1 / 2, 1 / 3, 2), VECTOR: (1, 1 / 3, 1), READOUT: (1 / 2, 1, 2), SCALAR: (1, 1, 1)},
}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(18, 8))]


@pytest.mark.parametrize(
    ("optimizer", "row"),
    [
        (torch.optim.SGD(parameters(), momentum=0.9), "sgd"),
        (torch.optim.Adam(parameters()), "adam_coupled"),
        (torch.optim.Adam(parameters(), decoupled_weight_decay=True), "adam_decoupled"),
        (torch.optim.AdamW(parameters()), "adam_decoupled"),
        (torch.optim.NAdam(parameters()), "adam_coupled"),
        (torch.optim.NAdam(parameters(), decoupled_weight_decay=True), "adam_decoupled"),
        (torch.optim.RAdam(parameters(), decoupled_weight_decay=True), "adam_decoupled"),
        (torch.optim.Adamax(parameters()), "adam_coupled"),
        (torch.optim.RMSprop(parameters()), "adam_coupled"),
        (torch.optim.Adagrad(parameters()), "adam_coupled"),
    ],
)
def test_hyperparameters(optimizer: torch.optim.Optimizer, row: str):
    for factors, expected in EXPECTED[row].items():
        assert rule_of(optimizer).scale(optimizer.param_groups[0], factors) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("adjust", "ratio"),
    [(None, math.sqrt(6 / 4) / math.sqrt(18 / 8)), ("match_rms_adamw", math.sqrt(6) / math.sqrt(18))],
)
def test_muon(adjust: str | None, ratio: float):
    optimizer = torch.optim.Muon(parameters(), adjust_lr_fn=adjust)
    lr = math.sqrt(3 / 2) * ratio
    assert rule_of(optimizer).scale(optimizer.param_groups[0], MATRIX) == pytest.approx((lr, math.sqrt(2 / 3), 1 / lr))


@pytest.mark.parametrize(
    ("optimizer", "factors"),
    [
        (torch.optim.SGD(parameters()), (4, 1 / 4, 1 / 4)),
        (torch.optim.Adam(parameters()), (1, 1 / 4, 1 / 4)),
        (torch.optim.AdamW(parameters()), (1, 1 / 4, 1)),
        (torch.optim.Muon(parameters()), (1, 1 / 4, 1)),
    ],
)
def test_four_times_as_many_layers(optimizer: torch.optim.Optimizer, factors: tuple[float, float, float]):
    """Rows of Table 1 of CompleteP: with branches of a quarter, gradients are quarters."""
    rule, group = rule_of(optimizer), optimizer.param_groups[0]
    deeper = MATRIX._replace(scale=table.deeper(MATRIX.scale, 1 / 4, 4))
    wider = rule.scale(group, MATRIX)
    expected = [number * factor for number, factor in zip(wider, factors, strict=True)]
    assert rule.scale(group, deeper) == pytest.approx(expected)


class Lion(torch.optim.Optimizer):
    """Sign momentum: a user's optimizer."""

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 1 - group["beta"])
                # a smooth sign, as rounding must not decide the direction of a vanishing gradient
                update = momentum / momentum.abs().mean().clamp(min=1e-300)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def test_unknown_optimizers_are_an_error_and_three_lines_register_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "_REGISTRY", dict(rules._REGISTRY))
    with pytest.raises(ValueError, match=r"Lion is not registered.*register_optimizer\(Lion"):
        rule_of(Lion(parameters()))
    mupscale.register_optimizer(Lion, degree=0, state={"exp_avg": 1}, decoupled_weight_decay=True)
    assert rule_of(Lion(parameters())).scale({}, MATRIX) == pytest.approx((1 / 2, 1 / 3, 2))

    torch.manual_seed(0)
    narrow, wide = (torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.Tanh(), torch.nn.Linear(n, 2)) for n in (4, 12))
    batches = [torch.randn(8, 3) for _ in range(3)]
    verdict = mupscale.verify(
        narrow, wide, optimizer=Lion, batches=batches, loss=lambda m, x: (m(x) - 1).square().mean(), steps=20
    )
    assert verdict.passed, verdict
