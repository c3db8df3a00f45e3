"""State rules: what becomes of the optimizer state of new copies, and their own count and rate."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input import assert_refused, linear, stepped
from nets import backward, features, mlp, take_steps, train
from tiers import slow_except
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale
from mupscale.errors import UserError
from mupscale.methods import Duplication
from mupscale.widening.growth import copy_index, source_index
from mupscale.widening.records import new_copies

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, eps=1e-30),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.95), eps=1e-30, weight_decay=0.0),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, eps=1e-30, weight_decay=0.0, amsgrad=True),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
}


def grown(name: str, **settings: Any) -> tuple[nn.Module, Optimizer, mupscale.Plan]:
    """A model that was widened after 30 steps."""
    torch.manual_seed(0)
    narrow, wide = mlp(4).double(), mlp(12).double()
    optimizer = OPTIMIZERS[name](narrow.parameters())
    train(narrow, optimizer, features, steps=30)
    report = mupscale.upscale(narrow, wide, optimizer, method=Duplication(**settings))
    return wide, report.optimizer, report.plan


def follow(model: nn.Module, optimizer: Optimizer, steps: int = 20) -> list[dict[str, Tensor]]:
    """The weights after each of some steps on gradients that do not depend on them."""
    generator = torch.Generator().manual_seed(2)
    weights = []
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()
        weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return weights


def test_which_entries_are_new():
    plan = mupscale.plan(mlp(2), mlp(6))
    assert new_copies(plan.parameters["layers.0.bias"]).tolist() == [False, True, True] * 2
    matrix = new_copies(plan.parameters["layers.1.weight"])
    assert matrix.sum() == 36 - 4
    assert not matrix[::3, ::3].any()
    assert not new_copies(plan.parameters["readout.bias"]).any()
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2)) for n in (4, 8))
    in_blocks = mupscale.plan(
        narrow, wide, hints=mupscale.Hints(blocks={"0.weight": {0: 2}, "1.weight": {1: 2}})
    ).parameters["1.weight"]
    assert new_copies(in_blocks)[0].tolist() == [False, False, True, True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_new_copies_move_as_under_an_optimizer_that_starts_anew(name: str):
    """And the others as if all state had been carried; for 20 steps, with the same gradients."""
    wide, optimizer, plan = grown(name, state="reset_new_copies")
    carried = follow(*grown(name)[:2])
    fresh = follow(*grown(name, state="reset")[:2])
    for ours, old, new in zip(follow(wide, optimizer), carried, fresh, strict=True):
        for parameter_name, entry in plan.parameters.items():
            expected = torch.where(new_copies(entry), new[parameter_name], old[parameter_name])
            torch.testing.assert_close(ours[parameter_name], expected, rtol=0, atol=1e-12)
    if name != "sgd":
        assert max(float((a - b).abs().max()) for a, b in zip(carried[0].values(), fresh[0].values(), strict=True)) > 0


def test_a_warm_up_goes_on_through_a_second_growth():
    """Which carries the state: copies of a new copy are as new as it is, and training stays exact."""
    narrow, optimizer, _ = grown("adamw", state="reset_new_copies", rewarm_steps=10)
    train(narrow, optimizer, features, steps=3)
    wide = mlp(24).double()
    report = mupscale.upscale(narrow, wide, optimizer)
    torch.manual_seed(5)
    for _ in range(20):
        batch = features()
        before, after = (backward(model, batch) for model in (narrow, wide))
        assert float(after) == pytest.approx(float(before), rel=1e-10)
        optimizer.step()
        report.optimizer.step()


# --- bad input


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam])
def test_an_optimizer_of_unknown_count_is_refused(kind: type[Optimizer]):
    def build() -> tuple[nn.Module, nn.Module, dict[str, Any]]:
        narrow, wide = linear(4, 8)
        optimizer = stepped(narrow, kind(narrow.parameters()), 12)
        return narrow, wide, {"narrow_opt": optimizer, "method": Duplication(state="reset_new_copies")}

    assert_refused(build, (kind.__name__, "not known", "Use carry or reset"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"state": "keep"}, "state rule must be one of carry, reset, reset_new_copies; got 'keep'"),
        ({"rewarm_steps": 3}, "rewarm_steps = 3 needs the state rule reset_new_copies, got 'carry'"),
        (
            {"state": "reset_new_copies", "rewarm_steps": -1},
            "rewarm_steps must be a whole number of at least 0, got -1",
        ),
    ],
)
def test_bad_input_is_refused(settings: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        Duplication(**settings)


# --- copies, and pairs restored by hand


def fractional() -> tuple[nn.Module, Optimizer, nn.Module, Optimizer]:
    torch.manual_seed(0)
    narrow, wide = mlp(6).double(), mlp(10).double()
    optimizer = torch.optim.AdamW(narrow.named_parameters(), lr=0.01)
    train(narrow, optimizer, features, steps=10)
    return narrow, optimizer, wide, mupscale.upscale(narrow, wide, optimizer).optimizer


def restored(wide: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    buffer = io.BytesIO()
    torch.save((wide.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    model = mlp(10).double()
    model.load_state_dict(weights)
    named = dict(model.named_parameters())
    names = [group["param_names"] for group in state["param_groups"]]
    again = torch.optim.AdamW([{"params": [(name, named[name]) for name in group]} for group in names])
    again.load_state_dict(state)
    return model, mupscale.attach(model, again)


@pytest.mark.parametrize("copied", [lambda *pair: copy.deepcopy(pair), restored])
def test_copies_and_restored_pairs_train_as_the_narrow_run(copied: Callable[..., Any]):
    narrow, narrow_opt, *pair = fractional()
    wide, wide_opt = copied(*pair)
    for seed in range(20):
        torch.manual_seed(seed)
        batch = [features().double()]
        losses = [
            take_steps(*pair, batch, lambda model, x: model(x).square().mean(), clip=0.05)
            for pair in ((narrow, narrow_opt), (wide, wide_opt))
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)


OWN_COUNT = ("adam", "adamw", "adamax")


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
    optimizer = OPTIMIZERS[name](model.parameters())
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


@pytest.mark.parametrize("rewarm_steps", slow_except([0, 4], 4))
@pytest.mark.parametrize("name", slow_except(OWN_COUNT, "adamw"))
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
    fresh = OPTIMIZERS[name](narrow.parameters())
    report = mupscale.upscale(narrow, wide, fresh, method=Duplication("reset_new_copies", rewarm_steps=4))
    for step in range(1, 7):
        for key, moved in moves(wide, report.optimizer, [report.plan]).items():
            expected = (ages([report.plan], key, [step]) / 4).clamp(max=1).double()
            torch.testing.assert_close(moved, expected, rtol=1e-6, atol=0, msg=f"{key} in step {step}")
