"""New copies of several growths: each has the count and the warm-up of its own birth."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import mlp
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale
from mupscale.methods import Duplication
from mupscale.widening.growth import copy_index, source_index

LR = 0.1
OWN_COUNT: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=LR, eps=1e-30),
    "adamw": lambda params: torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), eps=1e-30, weight_decay=0.0),
    "adamax": lambda params: torch.optim.Adamax(params, lr=LR),
}


def ages(plans: list[mupscale.Plan], name: str, steps: list[int]) -> Tensor:
    """The steps since each entry of a parameter was born, after `steps[i]` steps from growth i on; inf: never new."""
    age = torch.full(plans[0].parameters[name].narrow_shape, float("inf"))
    for plan, count in zip(plans, steps, strict=True):
        entry = plan.parameters[name]
        new = torch.zeros([1] * age.ndim, dtype=torch.bool)
        for axis, layout in enumerate(entry.layouts):
            age = age.index_select(axis, source_index(layout))
            new = new | (copy_index(layout) > 0).view([-1 if other == axis else 1 for other in range(age.ndim)])
        age = torch.where(new, torch.zeros(()), age) + count
    return age


def trained(name: str) -> tuple[nn.Module, Optimizer]:
    """A model after 300 steps on gradients of 1."""
    torch.manual_seed(0)
    model = mlp(4).double()
    optimizer = OWN_COUNT[name](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(300):
        optimizer.step()
    return model, optimizer


def moves(model: nn.Module, optimizer: Any, plans: list[mupscale.Plan]) -> dict[str, Tensor]:
    """How far a step moves each parameter, in units of its rate, on gradients of 1 in the units of the first model.

    With constant gradients Adam and Adamax move each entry by its rate in every step, whatever its age.
    """
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = math.prod(plan.parameters[name].scale.gradient for plan in plans)
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: (before[name] - p.detach()) / rates[id(p)] for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("rewarm_steps", [0, 4])
@pytest.mark.parametrize("name", OWN_COUNT)
def test_entries_of_two_growths_have_the_count_and_the_warm_up_of_their_own_birth(name: str, rewarm_steps: int):
    """If copies of the first growth were taken for old ones after the second, they would move by up to 3 · lr."""
    model, optimizer = trained(name)
    plans: list[mupscale.Plan] = []
    steps: list[int] = []
    for width, between in ((8, 6), (24, 3)):
        wide = mlp(width).double()
        report = mupscale.upscale(
            model, wide, optimizer, method=Duplication("reset_new_copies", rewarm_steps=rewarm_steps)
        )
        model, optimizer = wide, report.optimizer
        plans, steps = [*plans, report.plan], [*steps, 0]
        for _ in range(between):
            steps[-1] += 1
            for key, moved in moves(model, optimizer, plans).items():
                expected = (ages(plans, key, steps) / max(rewarm_steps, 1)).clamp(max=1).double()
                torch.testing.assert_close(moved, expected, rtol=1e-6, atol=0, msg=f"{key} at {width}, {steps}")


@pytest.mark.parametrize("name", OWN_COUNT)
def test_new_copies_are_rewarmed_in_an_optimizer_that_has_not_stepped(name: str):
    """It has no state yet that could say which entries are new."""
    torch.manual_seed(0)
    narrow, wide = mlp(4).double(), mlp(12).double()
    fresh = OWN_COUNT[name](narrow.parameters())
    report = mupscale.upscale(narrow, wide, fresh, method=Duplication("reset_new_copies", rewarm_steps=4))
    for step in range(1, 7):
        for key, moved in moves(wide, report.optimizer, [report.plan]).items():
            expected = (ages([report.plan], key, [step]) / 4).clamp(max=1).double()
            torch.testing.assert_close(moved, expected, rtol=1e-6, atol=0, msg=f"{key} in step {step}")
