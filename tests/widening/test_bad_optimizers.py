"""Optimizers that cannot be continued: a ValueError says what is wrong and what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bad_input import Cases, Input, assert_refused, linear, stepped
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer, RAdam

import mupscale
from mupscale.widening import optimizers


class Tuned(AdamW):
    """A subclass may update in any way: it is not known how it scales."""


class Demanding(SGD):
    def __init__(self, params: Any, *, secret: int) -> None:
        super().__init__(params, lr=0.1)


def stepped_by(make: Callable[[Any], Optimizer], steps: int = 1) -> Callable[[], Input]:
    def build() -> Input:
        narrow, wide = linear(4, 8)
        return narrow, wide, {"narrow_opt": stepped(narrow, make(narrow.parameters()), steps)}

    return build


def damaged(damage: Callable[[nn.Module, Optimizer], Any]) -> Callable[[], Input]:
    """AdamW after a step, damaged."""

    def build() -> Input:
        narrow, wide, settings = stepped_by(AdamW)()
        damage(narrow, settings["narrow_opt"])
        return narrow, wide, settings

    return build


def both(make: Callable[[nn.Module, nn.Module], dict[str, Any]]) -> Callable[[], Input]:
    """Optimizers of both models."""

    def build() -> Input:
        narrow, wide = linear(4, 8)
        return narrow, wide, make(narrow, wide)

    return build


def of_another_model(narrow: nn.Module, wide: nn.Module) -> dict[str, Any]:
    other, _ = linear(4, 8)
    return {"narrow_opt": stepped(other, AdamW(other.parameters()))}


def muon_on_unlike_pieces() -> Input:
    narrow, wide = (nn.Sequential(nn.Linear(w + 2, w, bias=False)) for w in (4, 8))
    hints = mupscale.Hints(blocks={"0.weight": {1: [(4, 1, 2), (2, 1, 1)]}})
    return narrow, wide, {"narrow_opt": Muon(narrow.parameters()), "hints": hints}


OTHERS = (torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS)

BAD: Cases = {
    **{
        kind.__name__: (
            both(lambda narrow, wide, kind=kind: {"narrow_opt": kind(narrow.parameters())}),
            (f"{kind.__name__} is not homogeneous", "narrow_opt=None", "Adagrad, Adam, AdamW"),
        )
        for kind in OTHERS
    },
    "outside the registry": (
        stepped_by(Tuned),
        ("test_bad_optimizers.Tuned is not registered", "mupscale.register_optimizer(Tuned, degree=0 or 1"),
    ),
    "of another model": (
        both(of_another_model), ("a parameter of shape (4, 4) that is not in the narrow model", "another model"),
    ),
    "state of another shape": (
        damaged(lambda model, optimizer: optimizer.state[model[0].weight].update(exp_avg=torch.zeros(2, 2))),
        ("'exp_avg' of '0.weight' has shape (2, 2)", "(4, 4)", "does not belong to this model"),
    ),
    "nan in the state": (
        damaged(lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"].fill_(torch.nan)),
        ("'exp_avg' of '0.weight'", "NaN", "earlier checkpoint"),
    ),
    "state that no rule covers": (
        damaged(lambda model, optimizer: optimizer.state[model[1].bias].update(history=torch.zeros(3, 7))),
        ("'history' of '1.bias'", "(3, 7)", "no rule covers", "register the optimizer"),
    ),
    "state of a parameter without group": (
        damaged(lambda model, optimizer: optimizer.param_groups[0]["params"].pop()), ("in none of its groups",),
    ),
    "a wide one of another class": (
        both(lambda narrow, wide: {"narrow_opt": SGD(narrow.parameters()), "wide_opt": AdamW(wide.parameters())}),
        ("the state of SGD cannot move into AdamW", "same class"),
    ),
    "a wide one lacking a parameter": (
        both(lambda narrow, wide: {"narrow_opt": stepped(narrow, AdamW(narrow.parameters())),
                                   "wide_opt": AdamW(wide[0].parameters())}),
        ("'1.weight' has optimizer state, but wide_opt does not hold it", "build it over all parameters"),
    ),
    "lists of different lengths": (
        both(lambda narrow, wide: {"narrow_opt": [SGD(part.parameters()) for part in narrow],
                                   "wide_opt": [SGD(wide.parameters())]}),
        ("2 narrow optimizers and 1 wide ones", "one for each"),
    ),
    "a wide one alone": (
        both(lambda narrow, wide: {"wide_opt": SGD(wide.parameters())}),
        ("0 narrow optimizers and 1 wide ones", "one for each"),
    ),
    "RAdam too early": (
        stepped_by(RAdam, 3),
        ("'0.weight'", "RAdam's variance term is still off", "at its next step, 4", "train a few more steps"),
    ),
    "RAdam that never gets ready": (
        stepped_by(partial(RAdam, betas=(0.9, 0.5)), 9), ("'0.weight'", "β₂ = 0.5", "never switches on"),
    ),
    "Muon on unlike pieces": (
        muon_on_unlike_pieces, ("'0.weight'", "needs a learning rate for each entry", "Muon", "give it to AdamW"),
    ),
    "one that cannot be rebuilt": (
        stepped_by(partial(Demanding, secret=1)),
        ("Demanding cannot be built from its defaults", "'secret'", "give wide_opt yourself"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(optimizers._REGISTRY, Demanding, optimizers._REGISTRY[SGD])
    assert_refused(*BAD[case])
