"""bert2BERT's FPI and AKI: what new units are made of."""

from collections.abc import Callable

import pytest
import torch
from bad_input import assert_refused
from nets import features, gpt2, mup, train
from torch import nn

import mupscale
from mupscale.methods import AKI, FPI, Net2Net
from mupscale.models.mlp import MLPNet
from mupscale.widening.growth import copy_index, source_index


def deep(width: int) -> nn.Module:
    return MLPNet(4, (width,) * 4, 3, readout_zero_init=False).double()


def grown(method: Net2Net, narrow: nn.Module, wide: nn.Module) -> mupscale.Plan:
    return mupscale.upscale(narrow, wide, method=method).plan


def test_fpi_is_net2net_as_published():
    narrow, wide, other = deep(6), deep(18), deep(18)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=0.1)
    train(narrow, optimizer, features)
    mupscale.upscale(narrow, wide, method=Net2Net(seed=4))
    report = mupscale.upscale(narrow, other, optimizer, method=FPI(seed=4))
    assert all(torch.equal(a, b) for a, b in zip(wide.parameters(), other.parameters(), strict=True))
    assert {group["lr"] for group in report.optimizer.param_groups} == {0.1}
    assert not report.optimizer.state


def test_new_units_are_those_of_the_next_layer():
    """Written out: layer 1 takes new rows from layer 2, spread over the copies of its own inputs."""
    torch.manual_seed(0)
    narrow, wide = deep(6), deep(18)
    plan = grown(AKI(seed=4), narrow, wide)
    for index, from_next in ((1, True), (2, True), (3, False)):
        rows, columns = plan.parameters[f"layers.{index}.weight"].layouts
        unit, source = source_index(rows), source_index(columns)
        shares = 1 / torch.bincount(source)[source].double()
        own, following = (narrow.layers[min(i, 3)] for i in (index, index + 1))
        expected, bias = (own.weight[unit][:, source] * shares).detach(), own.bias[unit].detach()
        new = copy_index(rows) > 0
        if from_next:
            expected[new] = (following.weight[unit][:, source] * shares).detach()[new]
            bias[new] = following.bias.detach()[unit][new]
        torch.testing.assert_close(wide.layers[index].weight.detach(), expected)
        torch.testing.assert_close(wide.layers[index].bias.detach(), bias)
    first = plan.parameters["layers.0.weight"]
    assert torch.equal(wide.layers[0].weight, narrow.layers[0].weight[source_index(first.layouts[0])])


@pytest.mark.parametrize("build", [lambda width: MLPNet(4, (width,), 3), lambda width: mup(gpt2, width)])
def test_a_model_without_a_next_layer(build: Callable[[int], nn.Module]):
    named = type(build(8)).__name__
    assert_refused(
        lambda: (build(8), build(16), {"method": AKI()}),
        (f"AKI: no layer of {named} has a next one of the same shape", "Use FPI"),
    )
