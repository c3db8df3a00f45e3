"""Small models with optimizers of different numbers, and stacks of them."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from tiny_modules import gpt2, mlp, resnet, rows
from torch import Tensor
from torch.optim import Optimizer

import mupscale
from mupscale.methods import Duplication, Lemon, Net2Net
from mupscale.models.base import Growable
from mupscale.stacking.stack import Stack

MODELS: dict[str, tuple[Callable[..., Growable], Any]] = {"mlp": (mlp, 24), "resnet": (resnet, 4), "gpt2": (gpt2, 24)}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, i: torch.optim.AdamW(
        p, lr=1e-2 * 2 ** (i % 3), betas=(0.9 - 0.05 * i, 0.99), eps=10.0 ** (-8 + i), weight_decay=0.1 * i
    ),
    "adam": lambda p, i: torch.optim.Adam(p, lr=1e-2 / (1 + i), weight_decay=0.01 * i, amsgrad=True),
    "sgd": lambda p, i: torch.optim.SGD(
        p, lr=0.1 / (1 + i), momentum=0.9 - 0.1 * i, dampening=0.1 * i, weight_decay=0.01 * i
    ),
    "nesterov": lambda p, i: torch.optim.SGD(p, lr=0.1, momentum=0.5 + 0.1 * i, nesterov=True),
    "plain sgd": lambda p, i: torch.optim.SGD(p, lr=0.1 / (1 + i)),
}


def made(model: str, optimizer: str, index: int, width: Any = None) -> tuple[Growable, Any]:
    build = MODELS[model][0]
    torch.manual_seed(index)
    module = build(*([] if width is None else [width]), optimizer=lambda p: OPTIMIZERS[optimizer](p, index))
    module.configure_model()
    module.double()
    return module, module.configure_optimizers()


Rules = list[dict[str, Any]]
"""Arguments of `upscale` for models that grow, one after another."""

CARRIED: Rules = [{}]
MIXED: Rules = [
    {"method": Duplication()},
    {"method": Duplication(state="reset_new_copies")},
    {"method": Duplication(state="reset_new_copies", rewarm_steps=30)},
    {"method": Duplication(state="reset")},
]
UNLIKE: Rules = [
    {},
    {"method": Net2Net()},
    {"method": Lemon()},
    {"method": Net2Net(state="reset_new_copies", rewarm_steps=10)},
]


def grown(
    model: str, optimizer: str, index: int, pair: tuple[Growable, Optimizer], rules: Rules
) -> tuple[Growable, Any]:
    wide, _ = made(model, optimizer, index, MODELS[model][1])
    wide.to(next(pair[0].parameters()))
    noise = mupscale.AdditiveNoise(0.1 * index)
    rule = rules[index % len(rules)]
    report = mupscale.upscale(pair[0].net, wide.net, pair[1], noise=noise, seed=index, **rule)
    return wide, report.optimizer


def loss_of(model: Any, batch: Any) -> Tensor:
    return model.mappable_loss(batch)


def batches(module: LightningModule, count: int) -> list[Any]:
    data = rows(module, 8 * count, torch.float64)
    parts = [tuple(tensor[8 * i : 8 * (i + 1)] for tensor in data) for i in range(count)]
    return [part if len(part) > 1 else part[0] for part in parts]


def stacked(pairs: list[tuple[Growable, Optimizer]], kernel: bool = True, *, compiled: bool = False) -> Stack:
    modules, optimizers = zip(*pairs, strict=True)
    return Stack(modules, optimizers, loss_of, modules[0].stacked_losses() if kernel else None, compiled=compiled)
