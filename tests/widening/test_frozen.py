"""Frozen parameters: the wide model trains what the narrow one trains."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
from nets import take_steps
from torch import nn
from torch.optim import Optimizer

import mupscale
from mupscale.errors import UserError


class Net(nn.Sequential):
    width_groups: ClassVar[Any] = {"first": {"0.*": 0, "2.weight": 1}, "second": {"2.*": 0, "4.weight": 1}}


def build(width: int) -> Net:
    layers = nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    return Net(*layers).double()


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained_only(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def train(model: nn.Module, optimizer: Any, steps: int = 5) -> list[float]:
    torch.manual_seed(1)
    x, y = torch.randn(6, 5).double(), torch.randn(6, 3).double()
    return take_steps(model, optimizer, [x] * steps, lambda model, x: (model(x) - y).square().mean())


def models() -> tuple[Net, Net]:
    """A narrow model with a frozen layer, and a wide one without."""
    torch.manual_seed(0)
    narrow, wide = build(8), build(16)
    narrow[2].requires_grad_(False)
    return narrow, wide


@pytest.mark.parametrize("held", [nn.Module.parameters, trained_only])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_layers_stay_frozen(held: Callable[[nn.Module], Any], device: str) -> None:
    narrow, wide = models()
    wide.to(device)
    optimizer = adamw(held(narrow))
    train(narrow, optimizer)
    report = mupscale.upscale(narrow, wide, optimizer)
    assert report.notes == ()
    before = wide[2].weight.clone()
    assert train(wide, report.optimizer) == pytest.approx(train(narrow, optimizer), rel=1e-12)
    assert torch.equal(wide[2].weight, before)


def test_what_was_frozen_for_a_while_is_trained_again() -> None:
    narrow, wide = models()
    wide[2].requires_grad_(False)
    optimizer = adamw(narrow.parameters())
    train(narrow, optimizer)
    narrow[2].requires_grad_(True)
    narrow[0].requires_grad_(False)
    train(narrow, optimizer)
    report = mupscale.upscale(narrow, wide, optimizer)
    assert frozen(wide) == ["0.weight", "0.bias"]
    assert train(wide, report.optimizer) == pytest.approx(train(narrow, optimizer), rel=1e-12)
    narrow[0].requires_grad_(True)
    wide[0].requires_grad_(True)
    assert train(wide, report.optimizer) == pytest.approx(train(narrow, optimizer), rel=1e-12)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_wide_optimizer_that_lacks_what_is_trained_is_refused(optimizer: Any) -> None:
    narrow, wide = models()
    wide[4].requires_grad_(False)
    wide_opt = optimizer(trained_only(wide), lr=0.01)
    with pytest.raises(UserError, match=r"'4\.weight' is trained in the narrow model, but frozen in the wide one"):
        mupscale.upscale(narrow, wide, optimizer(narrow.parameters(), lr=0.01), wide_opt)
    assert frozen(wide) == ["4.weight", "4.bias"]


def test_a_batch_norm_that_evaluates_inside_a_training_model_stays_so():
    """Its statistics, and with them the losses, would change in training mode."""

    def normed(width: int) -> nn.Module:
        hidden = nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.5)
        return nn.Sequential(
            nn.Sequential(*hidden), nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        )

    torch.manual_seed(0)
    narrow, wide = normed(4).double(), normed(8).double()
    for part in (narrow[0][1], narrow[0][3], wide[2]):  # the last one in the wide model alone
        part.eval()
    optimizer = adamw(narrow.parameters())
    train(narrow, optimizer)
    report = mupscale.upscale(narrow, wide, optimizer)
    assert [name for name, module in wide.named_modules() if not module.training] == ["0.1", "0.3"]
    statistics = wide[0][1].running_mean.clone()
    assert train(wide, report.optimizer) == pytest.approx(train(narrow, optimizer), rel=1e-12)
    assert torch.equal(wide[0][1].running_mean, statistics)
    assert not torch.equal(wide[2].running_mean, torch.zeros(8))
