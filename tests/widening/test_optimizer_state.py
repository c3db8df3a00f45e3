"""Optimizer state across widths: moved by parameter name, in its own dtype, and training goes on."""

import pytest
import torch
from mup_optimizers import MuAdamW
from nets import assert_same, backward, features, mlp, mup, named_state, train
from torch import nn
from torch.optim import Optimizer

import mupscale
from mupscale.widening.growth import duplicate


def test_frozen_parameters_and_parameters_without_state():
    narrow, wide = mlp(4), mlp(8)
    narrow.layers[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(narrow.parameters())
    report = mupscale.upscale(narrow, wide, optimizer)  # before the first step nothing has state
    assert not report.optimizer.state
    train(narrow, optimizer, features)
    state = mupscale.upscale(narrow, wide, optimizer).optimizer.state
    assert wide.layers[0].weight not in state
    assert set(state[wide.layers[1].weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_state_is_moved_by_name_into_groups_of_another_order():
    narrow, wide = mup(mlp, 8), mup(mlp, 16)
    narrow_opt = MuAdamW(narrow)
    train(narrow, narrow_opt, features)
    wide_opt = MuAdamW(list(reversed(list(wide.parameters()))))
    mupscale.upscale(narrow, wide, narrow_opt, wide_opt)
    for name, parameter in wide.named_parameters():
        source = narrow_opt.state[narrow.get_parameter(name)]
        assert wide_opt.state[parameter]["exp_avg"].shape == parameter.shape
        factor = 1 if name == "readout.bias" else 2
        largest = source["exp_avg"].abs().max().item() / factor
        assert wide_opt.state[parameter]["exp_avg"].abs().max() == pytest.approx(largest, rel=1e-6)


def test_lists_of_optimizers_are_paired_in_order():
    def optimizers(model: nn.Module) -> list[Optimizer]:
        return [
            torch.optim.SGD(model.layers.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(model.readout.parameters(), lr=0.01),
        ]

    torch.manual_seed(0)
    narrow = mlp(4)
    narrow_opts = optimizers(narrow)
    backward(narrow, features())
    for optimizer in narrow_opts:
        optimizer.step()
    wide, again = mlp(8), mlp(8)
    given = optimizers(again)
    made = mupscale.upscale(narrow, wide, narrow_opts).optimizer
    assert mupscale.upscale(narrow, again, tuple(narrow_opts), given).optimizer == given
    assert [type(optimizer) for optimizer in made] == [torch.optim.SGD, torch.optim.AdamW]
    assert set(made[0].state) == set(wide.layers.parameters())
    assert set(made[1].state) == set(wide.readout.parameters())
    assert_same(named_state(wide, *made), named_state(again, *given))
    assert isinstance(mupscale.upscale(narrow, wide, narrow_opts[:1]).optimizer, list)
    assert mupscale.upscale(narrow, wide).optimizer is None


def test_hyperparameters_off_the_rule_are_noted():
    narrow, wide = mup(mlp, 8), mup(mlp, 16)
    narrow_opt = MuAdamW(narrow, lr=0.1)
    report = mupscale.upscale(narrow, wide, narrow_opt, torch.optim.AdamW(wide.parameters(), lr=0.1))
    assert [note.partition(" is ")[0] for note in report.notes] == [
        "wide_opt: lr",
        "wide_opt: eps",
        "wide_opt: weight_decay",
    ]
    assert "lr is 1 times (of layers.0.weight) and 4 times (of layers.1.weight) what continues" in report.notes[0]
    assert report.notes[0] in str(report)
    for lr in (0.1, 0.05):  # another base constant is a decision, not a mistake
        assert mupscale.upscale(narrow, wide, narrow_opt, MuAdamW(wide, lr=lr)).notes == ()
    assert mupscale.upscale(narrow, wide, narrow_opt).notes == ()


@pytest.mark.parametrize(("before", "after"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_dtypes(before: torch.dtype, after: torch.dtype):
    """State in its parameter's dtype follows the parameter; state and counters in another keep it."""
    torch.manual_seed(0)
    narrow, wide = mlp(4).to(before), mlp(8).to(after)
    narrow_opt = torch.optim.AdamW(narrow.parameters())
    train(narrow, narrow_opt, features)
    for state in narrow_opt.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].double()
    report = mupscale.upscale(narrow, wide, narrow_opt)
    for name, parameter in wide.named_parameters():
        source, state = narrow.get_parameter(name), report.optimizer.state[parameter]
        entry = report.plan.parameters[name]
        assert parameter.dtype == state["exp_avg"].dtype == after
        assert (state["step"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.float64)
        assert state["step"] == 3
        # powers of two: exact but for the one rounding to the target's dtype
        for got, old, scale in (
            (parameter, source, entry.scale.weight),
            (state["exp_avg"], narrow_opt.state[source]["exp_avg"], entry.scale.gradient),
            (state["exp_avg_sq"], narrow_opt.state[source]["exp_avg_sq"], entry.scale.gradient**2),
        ):
            assert torch.equal(got.detach(), (duplicate(old.detach().double(), entry.layouts) * scale).to(got.dtype))
    backward(wide, features())


def adagrad(model: nn.Module, eps: float = 1e-10) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, eps=eps, initial_accumulator_value=0.3)


def assert_equal_losses(narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, wide_opt: Optimizer) -> None:
    for _ in range(15):
        batch = features()
        losses = [backward(model, batch).item() for model in (narrow, wide)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        narrow_opt.step()
        wide_opt.step()


@pytest.mark.parametrize("eps", [1e-10, 0.0])
def test_a_reset_adagrad_begins_with_its_sum_in_the_units_of_the_wide_gradient(eps: float):
    """So that one that has not stepped yet continues exactly, also after a second growth."""
    torch.manual_seed(0)
    narrow, middle, wide = (mlp(width).double() for width in (4, 8, 24))
    before = adagrad(narrow, eps)
    between = mupscale.upscale(narrow, middle, before, method=mupscale.methods.Duplication(state="reset")).optimizer
    after = mupscale.upscale(middle, wide, between, method=mupscale.methods.Duplication(state="reset")).optimizer
    assert after.state[wide.layers[1].weight]["sum"].unique().item() == pytest.approx(0.3 / 36, rel=1e-14)
    assert after.state[wide.readout.weight]["sum"].unique().item() == 0.3
    assert_equal_losses(narrow, before, wide, after)
