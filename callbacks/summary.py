"""Prints a summary at the start and the end of a run, and shows width and loss in the progress bar."""

import math
import shlex
import time
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from mupscale.callbacks.strides import Strides
from mupscale.callbacks.upscale import growth_text, swaps_of
from mupscale.models._lightning import ClockedBar
from mupscale.models.base import Growable
from mupscale.schedules import WarmupCosine, WarmupStableDecay


class WidthBar(ClockedBar, Strides):
    """A progress bar that shows the width, the loss, and what the module logs to it, drawn once a second."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self._drawn = 0.0

    def is_due(self, current: int, total: int | float) -> bool:
        # by the clock, not by steps: to show the loss is to wait for the device
        now = time.monotonic()
        if now < self._drawn + 1 and current != total:
            return False
        self._drawn = now
        return True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.fit_loop.restarted_mid_epoch:  # whose beginning, which sets these, was in another process
            self.train_progress_bar.total = trainer.num_training_batches
            self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_steps(self, trainer: Trainer, pl_module: LightningModule, batch: Any, losses: Sequence[float]) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.on_train_batch_end(trainer, pl_module, None, batch, done - 1)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if isinstance(pl_module, Growable) and pl_module.train_loss is not None:
            size = {key: value for key, value in pl_module.size._asdict().items() if value is not None}
            return {**size, "loss": float(pl_module.train_loss), **metrics}
        return metrics


class Summary(Callback):
    """Prints the model and the planned growths at the start of a run, and the results at its end."""

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        to_come = [swap for swap in swaps_of(trainer) if swap.at_step >= trainer.global_step]
        growth = "".join(f", {swap.target.replace('=', ' ', 1)} from step {swap.at_step}" for swap in to_come)
        print(f"step {trainer.global_step}: {type(pl_module).__name__}, {size(pl_module)}{growth}", flush=True)
        warn_of_rate_zero(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = pl_module.train_loss if isinstance(pl_module, Growable) else None
        if loss is not None and trainer.world_size > 1:
            loss = trainer.strategy.reduce(loss, reduce_op="mean")  # of the whole batch: a rank has its share
        if not trainer.is_global_zero:
            return
        lines = [f"{trainer.global_step} steps, {size(pl_module)}"]
        for done in (swap.summary for swap in swaps_of(trainer) if swap.summary):
            lines.append(
                f"  step {done['step']}: {growth_text(done)} in {done['seconds']:.2f} s; "
                f"loss {done['loss_before']:.6f} just before, {done['loss_after']:.6f} just after"
            )
        if loss is not None:
            lines.append(f"  training loss of the last batch {float(loss):.6f}")
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val/"):
                lines.append(f"  {name} {float(value):.4f}")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                folder = shlex.quote(str(logger.log_dir))  # TensorBoard would smooth the width too
                lines.append(f"  curves: tensorboard --logdir {folder}, at http://localhost:6006/?smoothing=0")
        print("\n".join(lines), flush=True)


def warn_of_rate_zero(trainer: Trainer) -> None:
    """Warns of a schedule that falls to zero long before the run ends: the rest of the steps would change nothing."""
    steps = trainer.estimated_stepping_batches
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler
        if not isinstance(schedule, WarmupCosine | WarmupStableDecay) or config.interval != "step":
            continue
        end, falls = schedule.steps, isinstance(schedule, WarmupCosine) or bool(schedule.decay)
        if falls and end is not None and math.isfinite(steps) and steps - end > max(1, steps / 100):
            rank_zero_warn(
                f"model.lr_scheduler: the rate of {type(schedule).__name__} is zero from step {end} on, and "
                f"the run has {steps} steps: the last {steps - end} change nothing. Set its steps to {steps}"
            )


def size(module: LightningModule) -> str:
    shape = f"{module.size}, " if isinstance(module, Growable) else ""
    return f"{shape}{sum(parameter.numel() for parameter in module.parameters()):,} parameters"
