"""Finds the first step whose loss is not finite."""

import math

import torch
from torch import Tensor

from mupscale.errors import UserError
from mupscale.models.checkpoint import Width


class NonFiniteLoss(UserError):
    """Stops a run because its training loss is NaN or infinite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class RecentLosses:
    """The losses since the last check, on their device. Adding one launches no kernel."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._places: list[tuple[int, Width | None]] = []

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, step: int, width: Width | None, loss: Tensor) -> None:
        self._losses.append(loss)
        self._places.append((step, width))

    def clear(self) -> None:
        self._losses.clear()
        self._places.clear()

    def first_bad(self) -> tuple[int, Width | None, float] | None:
        """The step, the width and the loss of the first one that is not finite; waits for the device."""
        if not self._losses:
            return None
        losses = torch.stack([loss.float() for loss in self._losses]).tolist()
        rows = zip(self._places, losses, strict=True)
        return next(((*place, loss) for place, loss in rows if not math.isfinite(loss)), None)


def described(bad: tuple[int, Width | None, float]) -> str:
    step, width, loss = bad
    at_width = "" if width is None else f", width {width}"
    return f"the training loss is {loss} at step {step} (the first step is 0){at_width}"
