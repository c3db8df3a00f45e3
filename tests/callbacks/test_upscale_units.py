"""Units and buffers that are not saved inside `Trainer.fit`: the curve goes on, and checkpoints resume."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from tiers import slow_except
from tiny_modules import ADAMW, OPTIMIZERS
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import Checkpoints, assert_identical, fit, gap, rates, state

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.models.mlp import MLP


class Net(nn.Module):
    """Inputs times sqrt(width), and a gain of 1 + w before a readout that is the input layer once more."""

    width_roles = {"gain": "readout"}  # noqa: RUF012

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inputs, self.hidden = nn.Linear(6, width, bias=False), nn.Linear(width, width)
        self.gain = nn.Parameter(0.3 * torch.randn(width))
        self.register_buffer("scale", torch.tensor(math.sqrt(width)), persistent=False)
        self.register_buffer("units", torch.arange(width), persistent=False)

    def width_rescale(self, wide: "Net") -> dict[str, Any]:
        k = wide.width / self.width
        return {"inputs.weight": k**-0.5, "gain": (k**0.5, 1.0)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x) * self.scale
        x = F.rms_norm(x + self.hidden(x).relu(), x.shape[-1:]) * (1 + self.gain)
        return (x @ self.inputs.weight)[:, :3] + 0 * len(self.units)


class Module(MLP):
    def build(self, width: Any) -> nn.Module:
        return Net(width)


def make(width: int = 8, **kwargs: Any) -> Module:
    return Module(width, **{"base_width": 4, "inputs": 6, "outputs": 3, "optimizer": ADAMW} | kwargs)


@pytest.mark.parametrize("optimizer", slow_except(OPTIMIZERS, "adamw"))
def test_the_curve_goes_on_through_two_growths_in_units(optimizer: str, tmp_path: Path) -> None:
    build = partial(make, optimizer=OPTIMIZERS[optimizer])
    settings: Any = {"steps": 24, "gradient_clip_val": 0.05}
    narrow = fit(build(), tmp_path, **settings)
    wide = fit(build(), tmp_path, UpscaleCallback(5, 16), UpscaleCallback(12, 48), **settings)
    assert wide.module.width == 48
    assert narrow.losses.std() > 0.01, "something must happen"
    assert gap(narrow, wide) < 1e-11
    net = wide.module.net
    assert net.scale.item() == math.sqrt(48)  # computed in float64
    assert torch.equal(net.units, torch.arange(48))


def test_checkpoints_after_a_growth_in_units_resume(tmp_path: Path) -> None:
    settings: Any = {"precision": "32-true", "steps": 9}

    def callbacks() -> list[Any]:
        return [UpscaleCallback(3, 16), EMAWeightAveraging(decay=0.8)]

    whole = fit(make(), tmp_path, *callbacks(), Checkpoints(tmp_path), enable_checkpointing=True, **settings)
    for saved in ("pre-upscale-3", "step=6"):
        path = tmp_path / f"{saved}.ckpt"
        resumed = fit(make(), tmp_path / "again", *callbacks(), ckpt=path, **settings)
        assert torch.equal(resumed.losses, whole.losses[torch.load(path, weights_only=True)["global_step"] :])
        assert_identical(state(resumed), state(whole))
        assert rates(resumed) == rates(whole)
