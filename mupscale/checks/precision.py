"""Models that compute in several precisions inside, whatever their weights, made to compute in one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mupscale._torch import is_under_transform

Operation = Callable[[Callable[..., Any], tuple[Any, ...], Any], None]
"""Reads an operation, its arguments and its result."""


class Precision(TorchFunctionMode):
    """Everything is computed in one dtype, float64 or float32, on one device, so that a comparison shows more than
    rounding.

    A request for a smaller dtype becomes one for this one. What is read in a smaller dtype, or from another device, is
    converted, and so is what is made in float32 because no dtype is named: `torch.zeros(n)`.

    `seen` is called with every tensor that an operation makes, `ran` with every operation,
    its arguments and its result.
    """

    def __init__(
        self,
        seen: Callable[[Tensor], None] = lambda tensor: None,
        ran: Operation = lambda func, args, result: None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self._larger = _LARGER[dtype]
        self.seen, self.ran, self.device = seen, ran, device
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are left alone."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if _DTYPE_OF.get(func) in self._larger:
            func = _METHOD_OF[self._larger[_DTYPE_OF[func]]]
        makes_new = kwargs.get("out") is None and _makes_new(func)
        args = tuple(self._converted(value, makes_new) for value in args)
        result = func(*args, **{name: self._converted(value, makes_new) for name, value in kwargs.items()})
        if makes_new and isinstance(result, Tensor) and result.dtype in self._larger:
            dtype = self._larger[result.dtype]
            result = result.detach().to(dtype).requires_grad_() if _is_source(result) else result.to(dtype)
        self.ran(func, args, result)
        if isinstance(result, Tensor) and result.is_floating_point() and not is_under_transform(result):
            self.seen(result.detach())
        return result

    def _converted(self, value: Any, tensors: bool) -> Any:
        if type(value) is torch.dtype:
            return self._larger.get(value, value)
        if tensors and isinstance(value, Tensor):
            return self.converted(value)
        if tensors and type(value) in (list, tuple) and any(isinstance(each, Tensor) for each in value):
            return type(value)(self._converted(each, tensors) for each in value)
        return value

    def converted(self, tensor: Tensor) -> Tensor:
        """The tensor in no smaller dtype, on the device."""
        if tensor.dtype in self._larger:
            tensor = tensor.to(self._larger[tensor.dtype])
        return tensor if self.device is None or tensor.device == self.device else tensor.to(self.device)


_HALF = (torch.bfloat16, torch.float16)
_LARGER = {
    torch.float64: dict.fromkeys((torch.float32, *_HALF), torch.float64) | {torch.complex64: torch.complex128},
    torch.float32: dict.fromkeys(_HALF, torch.float32),
}
"""By the dtype of all computation, what others become."""

_METHOD_OF = {torch.float64: torch.Tensor.double, torch.float32: torch.Tensor.float}
_DTYPE_OF: dict[Any, torch.dtype] = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


@lru_cache(1024)
def _makes_new(func: Callable[..., Any]) -> bool:
    """Whether an operation makes a new tensor, instead of writing into one or reading an attribute of it."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__", "__setitem__", "backward"):
        return False
    return not (name.endswith("_") and not name.endswith("__")) and (not name.startswith("__i") or name in _READING)


_READING = ("__index__", "__int__", "__invert__")
"""Methods that change nothing, though they begin as the in-place ones do."""


def _is_source(tensor: Tensor) -> bool:
    """Whether gradients are taken with respect to a tensor that was just made."""
    return tensor.requires_grad and tensor.is_leaf
