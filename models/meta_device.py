"""Networks on the meta device, where tensors have shapes but no values."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mupscale._torch import tree_map

DRAWS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
"""Functions that fill a tensor with random numbers. Others, such as Xavier's, call one of these."""


class WithoutDraws(TorchFunctionMode):
    """Skips random numbers for tensors on the meta device, which have no values: they take most of the time there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def on_meta(value: Any) -> Any:
    """A tensor with the shape of this one, on the meta device; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    moved = value.detach().to("meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(moved, value.requires_grad)
    return moved.requires_grad_(value.requires_grad)


def module_on_meta(module: nn.Module | None) -> nn.Module | None:
    """A copy of a module on the meta device, made without copying its weights; itself if it cannot be copied."""
    if module is None:
        return None
    tensors = [*module.parameters(), *module.buffers()]
    try:
        return copy.deepcopy(module, {id(tensor): on_meta(tensor) for tensor in tensors}).to("meta")
    except Exception:  # whatever its attributes raise; perhaps `loss` does not use it
        return module


@contextmanager
def meta_attributes(module: LightningModule, net: nn.Module) -> Iterator[None]:
    """All that a module holds is on the meta device meanwhile, with `net` as its network; then it has its own again."""
    attributes = vars(module)
    modules = {name: module_on_meta(part) for name, part in attributes["_modules"].items() if name != "net"}
    others = {name: tree_map(on_meta, value) for name, value in attributes.items() if name not in ("_modules", "net")}
    object.__setattr__(module, "__dict__", {**others, "_modules": {**modules, "net": net}})
    try:
        yield
    finally:
        object.__setattr__(module, "__dict__", attributes)
