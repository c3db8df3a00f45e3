"""Modules that train in a second on the CPU, with their optimizers, schedules and data."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from mupscale.models.base import Growable
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18
from mupscale.models.tasks import LanguageModel

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=1e-1)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}

SCHEDULES = {
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10)),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 60),
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=27), schedules.CosineAnnealingLR(optimizer, 40)],
        [27],
    ),
    "ReduceLROnPlateau": lambda optimizer: schedules.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.5
    ),
}


def mlp(width: Any = 8, **kwargs: Any) -> MLP:
    kwargs = {
        "base_width": [4] * 3 if isinstance(width, list) else 4,
        "inputs": 6,
        "outputs": 3,
        "optimizer": ADAMW,
    } | kwargs
    return MLP(width, **kwargs)


def resnet(width: int = 2, **kwargs: Any) -> ResNet18:
    return ResNet18(width, base_width=2, outputs=3, **kwargs)


def gpt2(width: int = 8, **kwargs: Any) -> GPT2:
    return GPT2(width, base_width=4, heads=2, vocabulary=11, context=8, **{"layers": 2, **kwargs})


class NetInUnits(nn.Module):
    """Inputs times sqrt(width), a gain of 1 + w before a readout that is the input layer once more, and buffers that
    are not saved."""

    width_roles = {"gain": "readout"}  # noqa: RUF012

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.inputs, self.hidden = nn.Linear(6, width, bias=False), nn.Linear(width, width)
        self.gain = nn.Parameter(0.3 * torch.randn(width))
        self.register_buffer("scale", torch.tensor(math.sqrt(width)), persistent=False)
        self.register_buffer("units", torch.arange(width), persistent=False)

    def width_rescale(self, wide: "NetInUnits") -> dict[str, Any]:
        k = wide.width / self.width
        return {"inputs.weight": k**-0.5, "gain": (k**0.5, 1.0)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x) * self.scale
        x = F.rms_norm(x + self.hidden(x).relu(), x.shape[-1:]) * (1 + self.gain)
        return (x @ self.inputs.weight)[:, :3] + 0 * len(self.units)


class InUnits(MLP):
    def __init__(self, width: int = 8, **kwargs: Any) -> None:
        super().__init__(width, **{"base_width": 4, "inputs": 6, "outputs": 3, "optimizer": ADAMW} | kwargs)

    def build(self, width: Any) -> nn.Module:
        return NetInUnits(width)


MODELS: dict[str, tuple[Callable[..., Growable], Any]] = {
    "mlp": (mlp, 24),
    "mlp of unequal widths": (partial(mlp, [8, 4, 12]), [16, 12, 24]),
    "resnet18": (resnet, 4),
    "gpt2": (gpt2, 24),
}
"""Each with the width that it grows to."""


def rows(module: LightningModule, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """So many rows of training data for a module; those with a true `takes_images` get images, as ResNet18 does."""
    generator = torch.Generator().manual_seed(7)
    if isinstance(module, LanguageModel):
        return ((torch.randint(11, (count, 1), generator=generator) + torch.arange(9)) % 11,)
    takes_images = isinstance(module, ResNet18) or getattr(module, "takes_images", False)
    shape = (3, 8, 8) if takes_images else (6,)
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs.flatten(1)[:, :3].argmax(1)
