"""Gradients that wait in an accumulation window: the wide step is the one that the narrow run would have made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import OPTIMIZERS, features, mlp, mup
from torch import Tensor, nn

import mupscale
from mupscale.methods import Duplication, GrowthMethod, HyperCloning, Lemon, Net2Net, ZeroPadding

METHODS: dict[str, tuple[Callable[[], GrowthMethod], int]] = {
    "duplication": (Duplication, 12),
    "by 5/3": (Duplication, 10),
    "diagonal": (lambda: HyperCloning("diagonal", state="carry", hyperparameters="table"), 12),
    "net2net": (Net2Net, 12),
    "lemon": (Lemon, 12),
    "zero padding": (ZeroPadding, 12),
}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.double()).sub(0.3).square().mean()


def pairs(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> list[float]:
    """Trains with a step after every second batch, the first of which may be a second one; the losses."""
    losses = []
    for number, batch in enumerate(batches):
        losses.append(loss(model, batch))
        losses[-1].backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [each.item() for each in losses]


@pytest.mark.parametrize("with_base_shapes", [False, True], ids=["plain", "mup"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", METHODS)
def test_a_growth_inside_an_accumulation_window(name: str, optimizer: str, with_base_shapes: bool):
    if with_base_shapes and METHODS[name][0] is ZeroPadding:
        pytest.skip("under muP rates are those of the width, which are right for copies alone")
    method, width = METHODS[name][0](), METHODS[name][1]
    torch.manual_seed(0)
    narrow, reference, wide = ((mup(mlp, n, base=2) if with_base_shapes else mlp(n)).double() for n in (6, 6, width))
    reference.load_state_dict(narrow.state_dict())
    batches = [features() for _ in range(12)]
    before, control = (OPTIMIZERS[optimizer](model.parameters()) for model in (narrow, reference))
    for model, own in ((narrow, before), (reference, control)):
        pairs(model, own, batches[:1])
        loss(model, batches[1]).backward()  # the first half of a step
    report = mupscale.upscale(narrow, wide, before, method=method)
    assert pairs(wide, report.optimizer, batches[2:]) == pytest.approx(
        pairs(reference, control, batches[2:]), rel=1e-12
    )


def test_a_unit():
    """The gradient falls by the unit by which the weight grows."""

    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3, bias=False)).double()

    torch.manual_seed(0)
    narrow, wide = build(6), build(12)
    loss(narrow, features()).backward()
    mupscale.upscale(narrow, wide, hints=mupscale.Hints(rescale={"2.weight": 0.25}))
    torch.testing.assert_close(wide[2].weight.grad, narrow[2].weight.grad.repeat_interleave(2, 1) * 4)
    torch.testing.assert_close(wide[0].weight.grad, narrow[0].weight.grad.repeat_interleave(2, 0) / 2)


def test_gradients_that_are_none_or_frozen_or_of_the_wide_model_itself():
    narrow, wide = mlp(4), mlp(8)
    for model in (narrow, wide):
        loss(model.double(), features()).backward()
    narrow.layers[0].weight.requires_grad_(False)
    narrow.layers[1].weight.grad = None
    mupscale.upscale(narrow, wide)
    without = {name for name, parameter in wide.named_parameters() if parameter.grad is None}
    assert without == {"layers.0.weight", "layers.1.weight"}
    torch.testing.assert_close(wide.readout.weight.grad, narrow.readout.weight.grad.repeat_interleave(2, 1))


def test_consume_frees_gradients_and_the_report_says_so():
    narrow, wide, other = mlp(4), mlp(8), mlp(16)
    loss(narrow.double(), features()).backward()
    loss(wide.double(), features()).backward()
    report = mupscale.upscale(narrow, wide, consume=True)
    assert all(parameter.grad is None for model in (narrow, wide) for parameter in model.parameters())
    (note,) = [note for note in report.notes if "gradients" in note]
    assert note.endswith("are lost. Grow between two windows, after zero_grad()")
    assert not any("gradients" in note for note in mupscale.upscale(wide, other, consume=True).notes)
