"""Learning-rate schedules relative to the base rate of each group: muP and upscales give groups different rates."""

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale.arguments import refuse_unless_whole
from mupscale.errors import UserError


class WarmupStableDecay(LRScheduler):
    """Linear warm-up over `warmup` steps, constant rate, then linear decay to 0 over the last share `decay` of `steps`.

        WarmupStableDecay(optimizer, warmup=100)                            # constant after the warm-up
        WarmupStableDecay(optimizer, warmup=100, steps=1500, decay=0.2)     # falls over the last 300 steps

    In a configuration:

        lr_scheduler:
          class_path: mupscale.schedules.WarmupStableDecay
          init_args: {warmup: 100, steps: 1500, decay: 0.2}

    Examples:
        >>> import mupscale
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
        >>> schedule = mupscale.schedules.WarmupStableDecay(optimizer, warmup=2, steps=6, decay=0.5)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.05, 0.1, 0.1, 0.1, 0.067, 0.033]
    """

    def __init__(
        self, optimizer: Optimizer, warmup: int = 0, steps: int | None = None, decay: float = 0.0, last_epoch: int = -1
    ) -> None:
        """
        Args:
            optimizer: The optimizer to schedule.
            warmup: Steps until the full rate. The first step has 1 / warmup of it.
            steps: The length of the run; required if the rate decays. The rate is zero after it.
            decay: The share of the run, at its end, over which the rate falls.
        """
        refuse_bad_schedule(warmup, steps)
        if not 0 <= decay <= 1:
            raise UserError(f"decay is the share of the steps over which the rate falls, from 0 to 1; got {decay}")
        if decay and steps is None:
            raise UserError(f"a decay of {decay} needs steps: the length of the run, such as trainer.max_steps")
        self.warmup, self.steps, self.decay = warmup, steps, decay
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        return scaled(self.base_lrs, warmed_up(self.last_epoch, self.warmup) * self._decayed())

    def _decayed(self) -> float:
        if not self.decay or self.steps is None:
            return 1.0
        return min(1.0, max(0.0, (self.steps - self.last_epoch) / (self.decay * self.steps)))


class WarmupCosine(LRScheduler):
    """Linear warm-up over `warmup` steps, then cosine decay to zero at `steps`.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
        >>> schedule = mupscale.schedules.WarmupCosine(optimizer, steps=6, warmup=2)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.05, 0.1, 0.1, 0.085, 0.05, 0.015]
    """

    def __init__(self, optimizer: Optimizer, steps: int, warmup: int = 0, last_epoch: int = -1) -> None:
        """
        Args:
            optimizer: The optimizer to schedule.
            steps: The length of the run. The rate is zero after it.
            warmup: Steps until the full rate. The first step has 1 / warmup of it.
        """
        refuse_bad_schedule(warmup, steps)
        self.warmup, self.steps = warmup, steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        share = (self.last_epoch - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, share)))
        return scaled(self.base_lrs, warmed_up(self.last_epoch, self.warmup) * cosine)


def warmed_up(step: int, warmup: int) -> float:
    """The share of the rate that a step has during the warm-up; steps are counted from 0."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def scaled(rates: list[Any], factor: float) -> list[Any]:
    return [rate * factor for rate in rates]


def refuse_bad_schedule(warmup: Any, steps: Any) -> None:
    refuse_unless_whole("warmup", warmup, least=0)
    if steps is not None:
        refuse_unless_whole("steps", steps)
        if warmup >= steps:
            raise UserError(f"a warm-up of {warmup} steps is as long as the run, which has {steps}")
