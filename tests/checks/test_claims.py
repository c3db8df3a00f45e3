"""Every growth method keeps what it claims, and nothing else: deviations of function and training, in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from architectures import CASES, Case, cross_entropy
from tiers import slow_except
from torch import nn
from torch.optim import Optimizer

import mupscale
from mupscale.checks.verify import ClaimCheck, check_claim
from mupscale.errors import UserError
from mupscale.methods import (
    AKI,
    FPI,
    Duplication,
    GrowthMethod,
    HyperCloning,
    Lemon,
    LiGO,
    Net2Net,
    ShrinkAndPad,
    ZeroPadding,
)
from mupscale.methods.base import Claim
from mupscale.models.gpt2 import GPT2Net

RULES: dict[str, Any] = {"state": "carry", "hyperparameters": "table"}

METHODS: dict[str, Callable[[], GrowthMethod]] = {
    "duplication": Duplication,
    "duplication, reset": lambda: Duplication(state="reset"),
    "duplication, same rates": lambda: Duplication(hyperparameters="same"),
    "net2net": Net2Net,
    "net2net, as published": lambda: Net2Net(state="reset", hyperparameters="same"),
    "zero padding": ZeroPadding,
    "hypercloning": HyperCloning,
    "hypercloning, rules": lambda: HyperCloning(**RULES),
    "diagonal": lambda: HyperCloning("diagonal"),
    "diagonal, rules": lambda: HyperCloning("diagonal", **RULES),
    "noisy": lambda: HyperCloning("noisy"),
    "noisy, rules": lambda: HyperCloning("noisy", **RULES),
    "shrink and pad": ShrinkAndPad,
    "shrink and pad, rules": lambda: ShrinkAndPad(**RULES),
    "lemon": Lemon,
    "lemon, one rate per tensor": lambda: Lemon(hyperparameters="same"),
    "fpi": FPI,
    "aki": AKI,
    "aki, rules": lambda: AKI(**RULES),
    "ligo": lambda: LiGO(steps=20, lr=0.05),
}

EXACT = ("duplication", "net2net", "zero padding", "lemon")
"""They preserve the training as they are; of the others, some of those with the rules do."""

CHANGED = ("shrink", "aki", "ligo")
"""How the names of methods begin that change the function."""

GPT2_BY_HEADS = Case(
    lambda width: GPT2Net(width, layers=2, head_dim=4, vocabulary=30, context=11, tied=False),
    4, 8, 24, CASES["gpt2_untied"].batch, init="constant",
)  # fmt: skip

MODELS = {name: CASES[name] for name in ("mlp", "resnet18", "gpt2_untied", "llama")} | {"gpt2_by_heads": GPT2_BY_HEADS}

EQUAL_LAYERS = replace(CASES["mlp"], narrow=(8, 8, 8), wide=(24, 24, 24))
"""In which a layer has a next one of the same shape, which AKI needs."""

FRACTIONS = {
    "mlp by 5/3": replace(CASES["mlp"], narrow=(12, 12, 12), wide=(20, 20, 20)),
    "gpt2 by 3/2": Case(
        lambda size: GPT2Net(
            size[0], attention_width=size[1], feed_forward=size[2],
            layers=2, head_dim=4, vocabulary=30, context=11, tied=False,
        ),
        (4, 4, 16), (8, 8, 32), (8, 12, 48), CASES["gpt2_untied"].batch, init="constant",
    ),
}  # fmt: skip

NORMS_OVER_WIDTH = ("gpt2_untied", "gpt2_by_heads", "llama")


def adamw(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.003, eps=1e-3, weight_decay=0.1)


def sgd(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def measured(
    model: str, method: GrowthMethod, *, mup: bool = False, optimizer: Callable[..., Optimizer] = adamw
) -> ClaimCheck:
    case = EQUAL_LAYERS if model == "mlp" and isinstance(method, AKI) else (MODELS | FRACTIONS)[model]
    torch.manual_seed(0)
    models = [(case.build_mup if mup else case.build)(size) for size in (case.narrow, case.wide)]
    return check_claim(*models, method, optimizer=optimizer, batches=case.batches(), loss=cross_entropy)


UNPADDED = [method for method in METHODS if not method.startswith(("zero", "shrink"))]
CELLS = [*product(MODELS, METHODS), *product(FRACTIONS, UNPADDED)]

FAST = [("mlp", method) for method in ("duplication", "zero padding", "diagonal, rules", "lemon", "ligo")]
KEPT = [*(("mlp", method) for method in METHODS), ("gpt2_by_heads", "net2net"), ("llama", "zero padding")]
KEPT += [*(("mlp by 5/3", method) for method in UNPADDED), ("gpt2 by 3/2", "lemon")]


@pytest.mark.parametrize(("model", "method"), slow_except(CELLS, *FAST, ("mlp by 5/3", "net2net"), kept=KEPT))
def test_claims(model: str, method: str):
    check = measured(model, METHODS[method]())
    assert check.holds, check
    padded_norm = method == "zero padding" and model in NORMS_OVER_WIDTH
    preserved = not padded_norm and not method.startswith(CHANGED)
    by_the_rules = method.endswith(", rules") or method in EXACT
    assert check.claim == Claim(preserved, by_the_rules and preserved and "noisy" not in method)
    # what is not preserved shows
    least = 1e-5 if model in FRACTIONS else 5e-4 if method.startswith("aki") else 1e-3
    assert check.claim.function or check.static > least
    assert check.claim.dynamics or check.dynamic > 1e-5


MUP_FAST = [("mlp", "net2net"), ("mlp", "zero padding"), ("mlp by 5/3", "net2net")]
MUP_KEPT = [("gpt2_untied", "diagonal, rules"), ("mlp by 5/3", "lemon"), ("mlp by 5/3", "ligo")]
MUP_KEPT.append(("gpt2 by 3/2", "diagonal, rules"))


@pytest.mark.parametrize(("model", "method"), slow_except(CELLS, *MUP_FAST, kept=MUP_KEPT))
def test_claims_under_mup_with_sgd(model: str, method: str):
    """Which has a degree of 1, and a multiplier that falls with the width."""
    check = measured(model, METHODS[method](), mup=True, optimizer=sgd)
    assert check.holds, check


@pytest.mark.parametrize("method", [ZeroPadding, ShrinkAndPad])
def test_padding_by_a_fraction_is_refused(method: Callable[[], GrowthMethod]):
    with pytest.raises(UserError, match=r"axis 0 of .* does not grow by a whole factor \(12 → 20\). Choose a multiple"):
        measured("mlp by 5/3", method())


@pytest.mark.slow
def test_shrinking_by_one_is_zero_padding():
    for model in ("mlp", "llama"):
        assert measured(model, ShrinkAndPad(1.0, **RULES)) == replace(
            measured(model, ZeroPadding()), method="ShrinkAndPad"
        )


def test_a_method_that_learns_is_left_as_it_was():
    method = LiGO(steps=2)
    measured("mlp", method)
    with pytest.raises(UserError, match="its maps are not learned yet"):
        method.check(mupscale.plan(*(MODELS["mlp"].build(size) for size in ((8, 12, 6), (16, 36, 24)))))


def hidden_layers(activation: type[nn.Module], outputs: nn.Module | None = None) -> Callable[[int], nn.Module]:
    def build(width: int) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(6, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, 4)]
        return nn.Sequential(*layers, *([] if outputs is None else [outputs]))

    return build


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sub(0.3).square().mean()


def measured_on(
    build: Callable[[int], nn.Module], method: GrowthMethod, optimizer: Callable[..., Optimizer] = adamw
) -> ClaimCheck:
    torch.manual_seed(1)
    batches = [torch.randn(5, 6) for _ in range(4)]
    return check_claim(build(4), build(8), method, optimizer=optimizer, batches=batches, loss=squares)


DECAY: dict[str, tuple[Callable[..., Optimizer], bool]] = {
    "SGD": (partial(torch.optim.SGD, lr=0.05, momentum=0.9), True),
    "Adam": (partial(torch.optim.Adam, lr=0.003, eps=1e-3), False),
    "Adam, decoupled": (partial(torch.optim.Adam, lr=0.003, eps=1e-3, decoupled_weight_decay=True), True),
    "AdamW": (partial(torch.optim.AdamW, lr=0.003, eps=1e-3), True),
    "NAdam": (partial(torch.optim.NAdam, lr=0.003, eps=1e-3), False),
    "NAdam, decoupled": (partial(torch.optim.NAdam, lr=0.003, eps=1e-3, decoupled_weight_decay=True), True),
    "RAdam": (partial(torch.optim.RAdam, lr=0.003, eps=1e-3, betas=(0.9, 0.9)), False),
    "Adamax": (partial(torch.optim.Adamax, lr=0.003, eps=1e-3), False),
    "RMSprop": (partial(torch.optim.RMSprop, lr=0.003, eps=1e-3), False),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.003, eps=1e-3), False),
}
"""Whether the diagonal variant preserves the training by an optimizer with weight decay."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DECAY)
def test_diagonal_copies_are_not_preserved_by_an_update_that_normalises_their_decay(name: str):
    optimizer, preserved = DECAY[name]
    method, build = HyperCloning("diagonal", **RULES), hidden_layers(nn.Tanh)
    check = measured_on(build, method, partial(optimizer, weight_decay=0.1))
    assert check.holds, check
    assert check.claim == Claim(True, preserved)
    assert preserved or check.dynamic > 1e-4
    without_decay = measured_on(build, method, partial(optimizer, weight_decay=0.0))
    decayed = partial(optimizer, weight_decay=0.1)
    without_matrix = measured_on(lambda width: nn.Sequential(*build(width)[:2], build(width)[4]), method, decayed)
    for other in (without_decay, without_matrix):
        assert other.holds, other
        assert other.claim == Claim(True, True)


class Functional(nn.Module):
    """A sigmoid that no module type shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)


@pytest.mark.slow
@pytest.mark.parametrize("method", [ZeroPadding(), ShrinkAndPad(1.0, **RULES)], ids=["zero", "shrink"])
@pytest.mark.parametrize(
    ("activation", "outputs", "preserved"),
    [
        (nn.ReLU, None, True),
        (nn.Sigmoid, None, False),
        (Functional, None, False),
        (nn.Softplus, None, False),
        (nn.Tanh, nn.Sigmoid(), True),
    ],
    ids=["relu", "sigmoid", "functional", "softplus", "outputs"],
)
def test_padding_preserves_the_training_only_if_new_units_never_train(
    method: GrowthMethod, activation: type[nn.Module], outputs: nn.Module | None, preserved: bool
):
    build = hidden_layers(activation, outputs)
    check = measured_on(build, method)
    assert check.holds, check
    assert check.claim == Claim(True, preserved)
    assert preserved or check.dynamic > 0.05
    narrow = build(4)
    assert method.claim(mupscale.plan(narrow, build(8)), narrow, [adamw(list(narrow.parameters()))]) == (True, False)


def test_a_false_claim_is_refuted():
    class Boaster(HyperCloning):
        def claim(self, *_: Any) -> Claim:
            return Claim(True, True)

    class Modest(Duplication):
        def claim(self, *_: Any) -> Claim:
            return Claim(True, False)

    boast, modesty = (measured("mlp", method) for method in (Boaster(), Modest()))
    assert not boast.holds
    assert not modesty.holds
    assert str(boast).startswith("Boaster: function preserved (deviation 0.0e+00), training preserved (deviation ")
    assert str(boast).endswith("): REFUTED")


def test_nothing_to_compare():
    with pytest.raises(UserError, match="at least one step and one batch, got 0 and 1"):
        check_claim(
            nn.Linear(2, 2), nn.Linear(2, 4), Duplication(), optimizer=adamw, batches=[1], loss=cross_entropy, steps=0
        )
