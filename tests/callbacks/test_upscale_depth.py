"""Growth in depth inside `fit`: the loss after the swap, and every way to add layers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow_except
from tiny_modules import ADAMW, SGD, gpt2, mlp, resnet
from torch import nn
from training_runs import assert_identical, fit, gap, rates, state

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.models.base import Growable
from mupscale.models.checkpoint import Size
from mupscale.models.gpt2 import Block
from mupscale.models.mlp import ResidualBlock
from mupscale.models.resnet import BasicBlock

completep = partial(gpt2, layers=2, base_layers=2)
Make = Callable[..., Growable]

MODELS: dict[str, tuple[Make, Any, Any]] = {
    "mlp": (partial(mlp, layers=2), 4, 12),
    "gpt2": (gpt2, 3, 16),
    "gpt2 under CompleteP": (completep, 4, 16),
    "resnet18": (partial(resnet, optimizer=SGD), [3, 2, 2, 4], 4),
}
"""Each with the layers and the width that it grows to."""


@pytest.mark.parametrize("wider", slow_except([False, True], True, kept=[]))
@pytest.mark.parametrize("model", slow_except(MODELS, "mlp", kept=["gpt2 under CompleteP"]))
def test_new_layers_that_add_nothing_keep_the_loss(model: str, wider: bool, tmp_path: Path) -> None:
    make, layers, width = MODELS[model]
    growth = UpscaleCallback(5, width if wider else None, layers=layers, noise=None)
    run = fit(make(), tmp_path, growth, steps=12)
    assert run.module.size == Size(width if wider else make().width, layers)
    before, after = growth.summary["loss_before"], growth.summary["loss_after"]
    assert after == pytest.approx(before, abs=1e-12)
    alone = fit(make(), tmp_path, steps=12)
    assert torch.equal(run.losses[:5], alone.losses[:5])
    assert run.losses[5].item() == pytest.approx(alone.losses[5].item(), abs=1e-12)
    assert gap(run, alone) > 1e-6, "new layers learn"


BLOCKS = {"mlp": ResidualBlock, "gpt2 under CompleteP": Block, "resnet18": BasicBlock}


@pytest.mark.slow
@pytest.mark.parametrize("model", slow_except(BLOCKS, kept=["mlp"]))
def test_what_a_layer_does_not_declare_is_found(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run whose layers do not say what makes them the identity is, to the bit, that of layers that do."""
    make, layers, width = MODELS[model]
    declared = fit(make(), tmp_path, UpscaleCallback(5, width, layers=layers, noise=None), steps=9)
    names = BLOCKS[model].residual_outputs
    monkeypatch.delattr(BLOCKS[model], "residual_outputs")
    growth = UpscaleCallback(5, width, layers=layers, noise=None)
    found = fit(make(), tmp_path, growth, steps=9)
    residual = growth.hints.residual
    assert {name.split(".", 3 if model != "resnet18" else 5)[-1] for name in residual} == set(names)
    assert set(residual.values()) == {0.0}
    assert torch.equal(found.losses, declared.losses)
    assert_identical(state(found), state(declared))


class PostNorm(nn.Module):
    """A layer that normalises the sum of its branch and what it gets."""

    def __init__(self, width: int, branch_multiplier: float) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.inner(x).relu())


def test_layers_that_cannot_be_the_identity_are_refused_at_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mupscale.models.mlp.ResidualBlock", PostNorm)
    message = r"UpscaleCallback.layers = 4: no layer of 'net.blocks' can be made the identity: .*post-norm"
    with pytest.raises(UserError, match=message):
        fit(mlp(layers=2), tmp_path, UpscaleCallback(5, layers=4, noise=None), steps=8)
    run = fit(mlp(layers=2), tmp_path, UpscaleCallback(5, layers=4, depth="stack", noise=None), steps=8)
    assert (run.module.size.layers, len(run.losses)) == (4, 8)


@pytest.mark.slow
def test_rates_after_the_growth_are_those_of_the_deep_model(tmp_path: Path) -> None:
    """By CompleteP: eps of blocks halves; every rate and decay is as before, also of what was rescaled."""
    for depth in ("identity", "interleave", "random"):
        grown = fit(
            completep(optimizer=ADAMW), tmp_path, UpscaleCallback(3, layers=4, depth=depth, noise=None), steps=5
        )
        fresh = fit(completep(layers=4, optimizer=ADAMW), tmp_path, steps=5)
        assert rates(grown) == rates(fresh)
        for key in ("eps", "weight_decay"):
            groups = (run.trainer.optimizers[0].param_groups for run in (grown, fresh))
            levels = [sorted((group[key], len(group["params"])) for group in each) for each in groups]
            assert levels[0] == levels[1]


@pytest.mark.slow
def test_growths_in_width_and_depth_follow_each_other(tmp_path: Path) -> None:
    growths = [
        UpscaleCallback(3, layers=4, noise=None),
        UpscaleCallback(6, 16, noise=None),
        UpscaleCallback(9, 32, layers=8, depth="stack", noise=None),
    ]
    run = fit(completep(), tmp_path, *growths, steps=12)
    assert run.module.size == Size(32, 8)
    assert [growth.summary["step"] for growth in growths] == [3, 6, 9]
    assert growths[0].summary["loss_after"] == pytest.approx(growths[0].summary["loss_before"], abs=1e-12)
    assert growths[1].summary["loss_after"] == pytest.approx(growths[1].summary["loss_before"], abs=1e-12)
    assert growths[2].summary["after"] == "width=32, layers=8"
