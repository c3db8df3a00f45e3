"""Modes in which models are compared: everything in one precision, and without dropout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

OperationWatcher = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], None]
"""Reads an operation, its arguments, those by name, and its result."""


class WithoutDropout(TorchFunctionMode):
    """Functions that drop units drop none meanwhile, also inside of attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


_DROPPING = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


class Precision(TorchFunctionMode):
    """Everything is computed in one dtype, float64 or float32, on one device, so that a comparison shows more than
    rounding.

    A request for a smaller dtype becomes one for this one. What is read in a smaller dtype, or from another device, is
    converted, and so is what is made in float32 because no dtype is named: `torch.zeros(n)`.

    `ran` is called with every operation.
    """

    def __init__(
        self,
        ran: OperationWatcher = lambda func, args, kwargs, result: None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self._larger = _LARGER[dtype]
        self.ran, self.device = ran, device
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
        kwargs = {name: self._converted(value, makes_new) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if makes_new and isinstance(result, Tensor) and result.dtype in self._larger:
            dtype = self._larger[result.dtype]
            takes_gradients = result.requires_grad and result.is_leaf  # with respect to it
            result = result.detach().to(dtype).requires_grad_() if takes_gradients else result.to(dtype)
        self.ran(func, args, kwargs, result)
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
"""What other dtypes become, by the dtype of all computation."""

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
