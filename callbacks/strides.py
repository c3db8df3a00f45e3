"""Callbacks that can process many steps of a run at once.

If every step of every run called its hooks, stacked runs would spend most of their time in hooks. So the steps between
two events (a log, a checkpoint, a swap) are taken at once. The callbacks receive the losses of all these steps.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor

from mupscale.models._lightning import log_interval, rates_of, steps_before_validation, update_callback_metrics


class Strides(Callback):
    """A callback that needs no batch, epoch or validation hooks for the steps that it declares free."""

    def free_steps(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """How many of the next steps may be taken without its hooks; the step after them has all hooks."""
        return math.inf

    def stride(self, trainer: Trainer, step: int) -> float:
        """How many of the free steps after `step` may be taken, at most, before `on_steps` is called; at least 1."""
        return math.inf

    def on_steps(self, trainer: Trainer, pl_module: LightningModule, batch: Any, losses: Sequence[float]) -> None:
        """Called after free steps with the losses of each, and a batch that is like theirs; counters are advanced."""

    def on_scores(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after a validation among the free steps; `trainer.callback_metrics` has its results."""


class RateMonitor(LearningRateMonitor, Strides):
    """A LearningRateMonitor that can process many steps of a run at once."""

    _names: tuple[Any, list[str]] | None = None
    """An optimizer, and the names of the rates of its groups."""

    _noted: tuple[int, dict[str, float]] | None = None
    """A step whose rates are logged, and these rates: a schedule changes them with the step."""

    def free_steps(self, trainer: Trainer, pl_module: LightningModule) -> float:
        every, step = self._every(trainer), trainer.global_step
        free = math.inf if self.logging_interval == "step" else steps_before_validation(trainer)
        if not every or not trainer.lr_scheduler_configs or (step + 1) % every != 0:
            return free
        return free if self._noted is not None and self._noted[0] == step else 0

    def stride(self, trainer: Trainer, step: int) -> float:
        every = self._every(trainer)
        if not every:
            return math.inf
        if not trainer.lr_scheduler_configs:
            return steps_to(every, step)
        return min(steps_to(every, step), steps_to(every, step + 1))

    def on_steps(self, trainer: Trainer, pl_module: LightningModule, batch: Any, losses: Sequence[float]) -> None:
        every, step = self._every(trainer), trainer.global_step
        if not every:
            return
        if self._noted is not None and self._noted[0] == step - len(losses):
            self._log(trainer, *self._noted)
        self._noted = None
        if trainer.lr_scheduler_configs:
            if (step + 1) % every == 0:
                self._noted = step, self._rates(trainer)
        elif step % every == 0:
            self._log(trainer, step - 1, self._rates(trainer))

    def _log(self, trainer: Trainer, step: int, rates: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(rates, step=step)
        # on the CPU: a copy to the device would wait for the steps under way
        update_callback_metrics(trainer, {name: torch.tensor(rate) for name, rate in rates.items()})

    def _every(self, trainer: Trainer) -> int:
        """How many steps there are between two that are logged; 0 if none is."""
        return 0 if self.logging_interval == "epoch" else log_interval(trainer)

    def _rates(self, trainer: Trainer) -> dict[str, float]:
        optimizer = trainer.optimizers[0]
        if self._names is None or self._names[0] is not optimizer:
            self._names = optimizer, list(rates_of(self, trainer))
        names = self._names[1]
        if len(trainer.optimizers) > 1 or len(names) != len(optimizer.param_groups):
            return rates_of(self, trainer)
        return dict(zip(names, (float(group["lr"]) for group in optimizer.param_groups), strict=True))


def steps_to(multiple: int, step: int) -> int:
    """How many steps it is to the next step that is a multiple."""
    return multiple - step % multiple
