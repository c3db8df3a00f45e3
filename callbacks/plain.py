"""The callbacks of a run, for the command line and for a `Trainer` of your own; what it prints; its progress bar."""

import math
import shlex
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from mupscale.callbacks.curves import Curves
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.strides import RateMonitor, Strides
from mupscale.callbacks.tensorboard import LossFirstLogger, delete_logs
from mupscale.callbacks.upscale import growth_text, swaps_of
from mupscale.errors import UserError
from mupscale.models._lightning import ClockedBar
from mupscale.models.base import Growable
from mupscale.schedules import WarmupCosine, WarmupStableDecay

LOG_EVERY = 10
"""Steps between two points of a curve."""

SAVE_EVERY = 500


def run_settings(
    folder: str | Path, *callbacks: Callback, save_every: int = SAVE_EVERY, progress_bar: bool = True
) -> dict[str, Any]:
    """Arguments of a `Trainer` whose run has curves and checkpoints in `folder`, and resumes exactly.

    They are what `python -m mupscale fit` uses: loss, rates, samples, FLOPs and throughput in TensorBoard with the
    losses first; checkpoints that survive a crash, and one where the run is stopped; and a resume by
    `ckpt_path="last"` that continues with the very next batch, as if the run had not been interrupted. The
    same call starts a run and resumes it.

    Args:
        folder: The folder of this run alone.
        callbacks: Further callbacks, such as `UpscaleCallback`; one of a kind that is added here replaces it.
        save_every: The steps between two checkpoints.
        progress_bar: Show a progress bar.

    Examples:
        from mupscale.callbacks.plain import run_settings
        trainer = Trainer(max_steps=600, **run_settings("runs/mine", UpscaleCallback(300, hparams={"hidden": 512})))
        trainer.fit(module, data, ckpt_path="last")
    """
    # the run continues in its folder
    warnings.filterwarnings("ignore", r"(Checkpoint|Experiment logs) directory .* exists and is not empty")
    given = list(callbacks)
    if not any(isinstance(callback, ModelCheckpoint) for callback in given):
        given.append(RunCheckpoint(filename="{step}", save_last="link", every_n_train_steps=save_every))
    path = Path(folder)
    return {
        "logger": LossFirstLogger(path.parent, path.name, "", default_hp_metric=False),
        "callbacks": [OneRun(), *default_callbacks(given, progress_bar=progress_bar), *given],
        "log_every_n_steps": LOG_EVERY,
        "enable_model_summary": False,
        "enable_progress_bar": progress_bar,
    }


class OneRun(Callback):
    """Keeps a folder to one run: a new run may start only where none has a checkpoint, and removes its curves."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None or not trainer.is_global_zero or trainer.log_dir is None:
            return
        found = next(Path(trainer.log_dir).glob("checkpoints/**/*.ckpt"), None)
        if found is not None:
            raise UserError(
                f"{trainer.log_dir} has the checkpoints of a run ({found.name}). Go on with it, "
                'fit(..., ckpt_path="last"), or name another folder for a new run'
            )
        delete_logs(trainer)


def default_callbacks(given: Sequence[Callback], *, logger: bool = True, progress_bar: bool = True) -> list[Callback]:
    """The callbacks of every run, except those of a kind that is in `given` or is switched off."""
    answer: list[tuple[type, Callback]] = [(Curves, Curves()), (Summary, Summary()), (ExactResume, ExactResume())]
    if logger:
        answer.append((LearningRateMonitor, RateMonitor(logging_interval="step")))
    if progress_bar:
        answer.append((ProgressBar, WidthBar()))
    return [default for kind, default in answer if not any(isinstance(callback, kind) for callback in given)]


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
        if done == len(losses):  # of an epoch that may have begun without hooks
            self.on_train_epoch_start(trainer, pl_module)
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
