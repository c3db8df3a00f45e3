"""Optimizers that cannot be continued: a ValueError says what is wrong and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input import Input, assert_refused, linear, registry, stepped
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer, RAdam

import mupscale
from mupscale.widening import optimizers

BAD, bad = registry()


class Tuned(AdamW):
    """A subclass may update in any way: it is not known how it scales."""


@bad("test_bad_optimizers.Tuned is not registered", "mupscale.register_optimizer(Tuned, degree=0 or 1")
def optimizer_outside_the_registry() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, Tuned(narrow.parameters()))}


def _not_homogeneous(kind: type[Optimizer]) -> Callable[[], Input]:
    def build() -> Input:
        narrow, wide = linear(4, 8)
        return narrow, wide, {"narrow_opt": kind(narrow.parameters())}

    build.__name__ = kind.__name__.lower()
    return build


for _kind in (torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS):
    bad(f"{_kind.__name__} is not homogeneous", "narrow_opt=None", "Adagrad, Adam, AdamW")(_not_homogeneous(_kind))


@bad("a parameter of shape (4, 4) that is not in the narrow model", "another model")
def optimizer_of_another_model() -> Input:
    narrow, wide = linear(4, 8)
    other, _ = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(other, AdamW(other.parameters()))}


@bad("'exp_avg' of '0.weight' has shape (2, 2)", "(4, 4)", "does not belong to this model")
def state_of_another_shape() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    optimizer.state[narrow[0].weight]["exp_avg"] = torch.zeros(2, 2)
    return narrow, wide, {"narrow_opt": optimizer}


@bad("'exp_avg' of '0.weight'", "NaN", "earlier checkpoint")
def nan_in_the_state() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    optimizer.state[narrow[0].weight]["exp_avg"][1, 1] = torch.nan
    return narrow, wide, {"narrow_opt": optimizer}


@bad("'history' of '1.bias'", "(3, 7)", "no rule covers", "register the optimizer")
def state_that_no_rule_covers() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    optimizer.state[narrow[1].bias]["history"] = torch.zeros(3, 7)
    return narrow, wide, {"narrow_opt": optimizer}


@bad("in none of its groups")
def state_of_a_parameter_without_group() -> Input:
    narrow, wide = linear(4, 8)
    optimizer = stepped(narrow, AdamW(narrow.parameters()))
    optimizer.param_groups[0]["params"].pop()
    return narrow, wide, {"narrow_opt": optimizer}


@bad("the state of SGD cannot move into AdamW", "same class")
def wide_optimizer_of_another_class() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": SGD(narrow.parameters()), "wide_opt": AdamW(wide.parameters())}


@bad("'1.weight' has optimizer state, but wide_opt does not hold it", "build it over all parameters")
def wide_optimizer_lacking_a_parameter() -> Input:
    narrow, wide = linear(4, 8)
    return (
        narrow,
        wide,
        {"narrow_opt": stepped(narrow, AdamW(narrow.parameters())), "wide_opt": AdamW(wide[0].parameters())},
    )


@bad("2 narrow optimizers and 1 wide ones", "one for each")
def lists_of_different_lengths() -> Input:
    narrow, wide = linear(4, 8)
    return (
        narrow,
        wide,
        {"narrow_opt": [SGD(part.parameters()) for part in narrow], "wide_opt": [SGD(wide.parameters())]},
    )


@bad("0 narrow optimizers and 1 wide ones", "one for each")
def wide_optimizer_alone() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"wide_opt": SGD(wide.parameters())}


@bad("'0.weight'", "RAdam's variance term is still off", "at its next step, 4", "train a few more steps")
def radam_too_early() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, RAdam(narrow.parameters()), 3)}


@bad("'0.weight'", "β₂ = 0.5", "never switches on")
def radam_that_never_gets_ready() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, RAdam(narrow.parameters(), betas=(0.9, 0.5)), 9)}


@bad("'0.weight'", "needs a learning rate for each entry", "Muon")
def muon_on_unlike_pieces() -> Input:
    narrow, wide = (nn.Sequential(nn.Linear(w + 2, w, bias=False)) for w in (4, 8))
    return (
        narrow,
        wide,
        {
            "narrow_opt": Muon(narrow.parameters()),
            "hints": mupscale.Hints(blocks={"0.weight": {1: [(4, 1, 2), (2, 1, 1)]}}),
        },
    )


class Demanding(SGD):
    def __init__(self, params: Any, *, secret: int) -> None:
        super().__init__(params, lr=0.1)


@bad("Demanding cannot be built from its defaults", "'secret'", "give wide_opt yourself")
def optimizer_that_cannot_be_rebuilt() -> Input:
    narrow, wide = linear(4, 8)
    return narrow, wide, {"narrow_opt": stepped(narrow, Demanding(narrow.parameters(), secret=1))}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_written(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(optimizers._REGISTRY, Demanding, optimizers._REGISTRY[SGD])
    assert_refused(*BAD[case])
