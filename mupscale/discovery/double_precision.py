"""Models that compute in float32 inside, whatever their weights, made to compute in float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mupscale.discovery.cuts import Cut, cuts_of


class DoublePrecision(TorchFunctionMode):
    """Every request for float32 inside becomes one for float64, so that a comparison shows more than rounding.

    `seen` is called with every tensor that an operation makes, `cut` with the sections into which one cuts an axis.
    """

    def __init__(
        self,
        seen: Callable[[Tensor], None] = lambda tensor: None,
        cut: Callable[[Cut], None] = lambda lengths: None,
    ) -> None:
        super().__init__()
        self.seen, self.cut = seen, cut
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not seen."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        doubled = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_doubled, args), **doubled)
        if not self._paused:
            for lengths in cuts_of(func, args, result):
                self.cut(lengths)
        if not self._paused and isinstance(result, Tensor) and result.is_floating_point():
            self.seen(result.detach())
        return result


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
