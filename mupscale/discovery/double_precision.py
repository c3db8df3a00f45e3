"""Models that compute in float32 inside, whatever their weights, made to compute in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class DoublePrecision(TorchFunctionMode):
    """Every request for float32 inside becomes one for float64, so that a comparison shows more than rounding."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        doubled = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **doubled)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
