"""Models by their number of layers: what is built, what makes a layer the identity, and checkpoints of any depth."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_modules import gpt2, mlp, resnet
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import Checkpoints, fit, state

import mupscale
from mupscale.errors import UserError
from mupscale.models.base import Growable
from mupscale.models.checkpoint import Size, load_checkpoint
from mupscale.models.resnet import BasicBlock


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(x))


class Own(Growable):
    """A module of somebody's own, without a constructor."""

    def build(self, width: int, layers: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), *(Residual(width) for _ in range(layers)), mupscale.Readout(width, 3))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class WidthOnly(Own):
    def build(self, width: int) -> nn.Module:
        return super().build(width, 1)


# --- what is built


def test_a_module_is_built_with_its_layers() -> None:
    module = Own(8, 4, layers=3)
    assert module.size == Size(8, 3)
    assert str(module.size) == "width 8 and 3 layers"
    assert [len(list(net.children())) - 2 for net in (module.network(8), module.network(8, 5))] == [3, 5]
    assert len(list(module.rebuild(16, 4).children())) - 2 == 4
    assert module.size == Size(16, 4)
    assert len(list(module.rebuild(8).children())) - 2 == 4, "as many as before"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Own(8, 4), "model.layers: Own needs the number of layers; give it"),
        (lambda: WidthOnly(8, 4, layers=2), "model.layers = 2: WidthOnly has a fixed number of layers"),
        (lambda: Own(8, 4, layers=0), "model.layers must be a whole number of at least 1, or a list of them; got 0"),
        (lambda: mlp(layers=2.5), "model.layers must be a whole number of at least 1, or a list of them; got 2.5"),
        (lambda: resnet(layers=2), "model.layers of a ResNet18 is a list, the blocks of each stage; got 2"),
        (lambda: mlp(layers=2, base_layers=0), "model.base_layers must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_numbers_of_layers_are_refused(make: Callable[[], Growable], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make()


# --- what makes a layer the identity


@pytest.mark.parametrize("training", [True, False])
def test_a_block_of_a_resnet_without_residual_outputs_is_the_identity(training: bool) -> None:
    block, x = BasicBlock(4, 4, 1).train(training), torch.randn(3, 4, 5, 5).relu()
    nn.init.normal_(block.bn2.bias)
    for name in block.residual_outputs:
        assert not torch.equal(block(x), x)
        nn.init.zeros_(block.get_parameter(name))
    y = block(x)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert block.bn2.weight.grad is not None
    assert (block.bn2.weight.grad.abs() > 1e-3).all(), "it learns from its first step on"


def test_a_block_of_an_mlp_without_residual_outputs_is_the_identity() -> None:
    net: Any = mlp(layers=4, base_layers=2).network(8, 4)
    block, x = net.blocks[0], torch.randn(3, 8)
    assert block.branch_multiplier == 0.5
    torch.testing.assert_close(block(x), x + 0.5 * block.outer(block.inner(x).relu()))
    for name in block.residual_outputs:
        assert not torch.equal(block(x), x)
        nn.init.zeros_(block.get_parameter(name))
    assert torch.equal(block(x), x)


# --- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(("make", "deep", "shallow"), [(mlp, 4, 2), (gpt2, 3, 1), (resnet, [2, 3, 1, 2], [2, 2, 2, 2])])
def test_a_checkpoint_of_any_depth_resumes(
    make: Callable[..., Growable], deep: Any, shallow: Any, tmp_path: Path
) -> None:
    whole = fit(make(layers=deep), tmp_path, Checkpoints(tmp_path), enable_checkpointing=True, steps=6)
    resumed = fit(make(layers=shallow), tmp_path, ckpt=tmp_path / "step=3.ckpt", steps=6)
    assert resumed.module.size.layers == deep
    assert torch.equal(resumed.losses, whole.losses[3:])
    for name, tensor in state(whole).items():
        assert torch.equal(state(resumed)[name], tensor), name
    saved = load_checkpoint(tmp_path / "step=3.ckpt")
    assert saved["hyper_parameters"]["layers"] == deep
    with pytest.raises(UserError, match=re.escape(f"its layers is {deep}, but model.layers is {shallow}; set")):
        fit(make(layers=shallow, init_from=str(tmp_path / "step=3.ckpt")), tmp_path, steps=1)
