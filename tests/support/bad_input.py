"""Bad input of `upscale`: collections of it, and the check that it is refused before anything is written."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import mupscale
from mupscale.widening.records import records_of

Input = tuple[nn.Module, nn.Module, dict[str, Any]]
"""The narrow model, the wide one, and the further arguments of `upscale`."""

Cases = dict[str, tuple[Callable[[], Input], tuple[str, ...]]]
"""Functions that build bad input, by name, and the fragments that the message must contain."""

REMEDY = re.compile(
    r"^(roles|blocks)\b"  # the fault is in the argument itself
    r"|\b(build|call|choose|do it|give|grow|keep|load|move|must be|normalise|pass|register|remove|run|say"
    r"|scale|swap|take|there are|tie|train|untie|use|drop|free)\b",
    re.IGNORECASE,
)
"""Every message says what to do, or what there is to choose from."""


def assert_refused(build: Callable[[], Input], fragments: tuple[str, ...]) -> None:
    """`upscale` raises a ValueError with these fragments and a remedy, and changes nothing."""
    torch.manual_seed(0)
    narrow, wide, settings = build()
    if isinstance(wide_opt := settings.get("wide_opt"), Optimizer):  # one that has state already, which must survive
        for group in wide_opt.param_groups:
            for parameter in group["params"]:
                wide_opt.state[parameter]["step"] = torch.tensor(7.0)
    before = snapshot(narrow, wide, *optimizers(settings))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is checked below
        mupscale.upscale(narrow, wide, **settings, consume=True)
    assert snapshot(narrow, wide, *optimizers(settings)) == before
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message
    assert REMEDY.search(message), f"no remedy in: {message}"


def snapshot(*things: nn.Module | Optimizer) -> list[Any]:
    """Everything an upscale could change, bit by bit."""
    return [_optimizer(thing) if isinstance(thing, Optimizer) else _model(thing) for thing in things]


def _model(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, id(t), _bits(t), _bits(t.grad)) for name, t in tensors] + [records_of(model)]


def _optimizer(optimizer: Optimizer) -> list[Any]:
    groups = [
        {key: value if key != "params" else [*map(id, value)] for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    state = [(id(p), key, _bits(value)) for p, values in optimizer.state.items() for key, value in values.items()]
    return [groups, state, len(optimizer._optimizer_step_pre_hooks)]


def _bits(tensor: Tensor | None) -> Any:
    if not isinstance(tensor, Tensor) or is_lazy(tensor):
        return repr(tensor)
    described = tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
    if tensor.is_meta:
        return described
    return *described, tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def optimizers(settings: dict[str, Any]) -> Iterable[Optimizer]:
    """Those among the arguments of `upscale`."""
    for key in ("narrow_opt", "wide_opt"):
        given = settings.get(key, [])
        yield from [given] if isinstance(given, Optimizer) else given


def linear(narrow: int, wide: int) -> tuple[nn.Module, nn.Module]:
    """Two layers, at two widths."""
    models = [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3)) for width in (narrow, wide)]
    return models[0], models[1]


def stepped(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> Optimizer:
    """The optimizer after some steps on gradients of one."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer
