"""Small networks, muP or not, a few training steps on them, and all of their state by name."""

import copy
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet


def mlp(width: int) -> nn.Module:
    return MLPNet(4, (width, width), 3, readout_zero_init=False)


def gpt2(width: int) -> nn.Module:
    return GPT2Net(width, layers=1, heads=2, vocabulary=30, context=11)


def mup(build: Callable[[int], nn.Module], width: int, init: str = "fan_in", base: int = 4) -> nn.Module:
    """The model with base shapes."""
    return mupscale.set_base_shapes(build(width), build(base), build(2 * base), init=init)


def tokens() -> Tensor:
    return torch.randint(30, (4, 9))


def features() -> Tensor:
    return torch.randn(6, 4)


def backward(model: nn.Module, inputs: Tensor) -> Tensor:
    """Leaves gradients on the model; the loss."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    loss = model(inputs.to(dtype) if inputs.is_floating_point() else inputs).sub(0.3).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, inputs: Callable[[], Tensor], steps: int = 3) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        backward(model, inputs())
        optimizer.step()


def take_steps(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    clip: float | None = None,
) -> list[float]:
    """Takes a step on each batch; the losses before them."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        if clip is not None:
            mupscale.clip_grad_norm_(model, clip)
        optimizer.step()
        losses.append(value.item())
    return losses


def added_noise(narrow: nn.Module, wide: nn.Module, noise: Any, **settings: Any) -> dict[str, Tensor]:
    """The noise itself: an upscale with it minus one without."""
    clean = copy.deepcopy(wide)
    mupscale.upscale(narrow, wide, noise=noise, **settings)
    mupscale.upscale(narrow, clean, **settings)
    return {name: (p.detach().double() - clean.get_parameter(name).detach()) for name, p in wide.named_parameters()}


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.003, eps=1e-3, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.003, eps=1e-3, weight_decay=0.1),
}


def named_state(model: nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, cloned, by name."""
    tensors = chain(model.named_parameters(), model.named_buffers(remove_duplicate=False))
    answer = {name: tensor.detach().clone() for name, tensor in tensors}
    for optimizer in optimizers:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                answer[f"{name}/{key}"] = value.detach().clone()
    return answer


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name
