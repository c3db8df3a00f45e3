"""Models that compute in float32 inside, judged in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NoFloat32(TorchFunctionMode):
    """Every request for float32 inside a model becomes one for float64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(_double, args), **{name: _double(value) for name, value in (kwargs or {}).items()})


def _double(argument: Any) -> Any:
    if argument is torch.float32:
        return torch.float64
    if isinstance(argument, str) and argument == "torch.FloatTensor":
        return "torch.DoubleTensor"
    return argument


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """New tensors are float64, and so is what a model asks for as float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with NoFloat32():
            yield
    finally:
        torch.set_default_dtype(before)
