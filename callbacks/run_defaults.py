"""The callbacks of a run, for the command line and for a `Trainer` of your own; what it prints; its progress bar."""

import math
import shlex
import sys
import time
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from mupscale.callbacks.curves import Curves, RateMonitor
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.growth_schedule import growth_text
from mupscale.callbacks.run_checkpoint import RunCheckpoint, step_of
from mupscale.callbacks.tensorboard import LossFirstLogger, delete_logs, keep_tables
from mupscale.callbacks.upscale import swaps_of
from mupscale.errors import UserError
from mupscale.models._lightning import ClockedBar, callbacks_in, is_trial_run
from mupscale.models.checkpoint import RESUME, run_in, size_of
from mupscale.schedules import WarmupCosine, WarmupStableDecay

LOG_EVERY = 10
"""Steps between two points of a curve."""

SAVE_EVERY = 500


def run_settings(
    folder: str | Path, *callbacks: Callback, save_every: int = SAVE_EVERY, **trainer: Any
) -> dict[str, Any]:
    """Returns arguments of a `Trainer` whose run has curves and checkpoints in `folder`, and resumes exactly.

    They are what `python -m mupscale fit` uses: loss, rates, samples, FLOPs and throughput in TensorBoard with the
    losses first; checkpoints that survive a crash, and one where the run is stopped; and a resume by
    `ckpt_path="last"` that continues with the very next batch, as if the run had not been interrupted. The
    same call starts a run and resumes it.

    Args:
        folder: The folder of this run alone. Its checkpoints are there, whatever the logger is.
        callbacks: Further callbacks, such as `UpscaleCallback`; one of a kind that is added here replaces it. A
            ModelCheckpoint of your own saves beside that of the run.
        save_every: The steps between two checkpoints.
        trainer: Further arguments of the `Trainer`, such as `logger`, `callbacks` and `enable_progress_bar`, which take
            precedence.

    Examples:
        from mupscale.callbacks.run_defaults import run_settings
        trainer = Trainer(max_steps=600, **run_settings("runs/mine", UpscaleCallback(300, hparams={"hidden": 512})))
        trainer.fit(module, data, ckpt_path="last")
    """
    # the run continues in its folder
    warnings.filterwarnings("ignore", r"(Checkpoint|Experiment logs) directory .* exists and is not empty")
    path, further = Path(folder), trainer.pop("callbacks", None) or []
    given = [*callbacks, *(further if isinstance(further, Sequence) else [further])]
    if not any(isinstance(callback, RunCheckpoint) for callback in given):
        checkpoint = RunCheckpoint(path / "checkpoints", "{step}", save_last="link", every_n_train_steps=save_every)
        checkpoint.is_shared = False
        given.append(checkpoint)
    logger = trainer.get("logger")
    if logger is None or logger is True:
        trainer["logger"] = LossFirstLogger(path.parent, path.name, "", default_hp_metric=False)
    loggers = trainer["logger"] if isinstance(trainer["logger"], Sequence) else [trainer["logger"]]
    keep_tables(loggers)  # Lightning deletes them when a run begins, and when it goes on
    bar = trainer.setdefault("enable_progress_bar", True)
    defaults = default_callbacks(given, logger=bool(trainer["logger"]), progress_bar=bar)
    return {
        "default_root_dir": path,
        "log_every_n_steps": LOG_EVERY,
        "enable_model_summary": False,
        **trainer,
        "callbacks": [RefuseUsedFolder(path), *defaults, *given],
    }


class RefuseUsedFolder(Callback):
    """Keeps a folder to one run: a new run may start only where none has a checkpoint, and removes its curves.

    Each run gets an identity, by which its checkpoints are known in folders that it shares with others. When the run
    is interrupted, it prints where the newest checkpoint is, and how the run continues.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._identify(trainer, trainer.strategy.broadcast(uuid.uuid4().hex))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        identity = run_in(checkpoint).get("id")
        if identity is not None and Path(str(trainer.ckpt_path)).resolve().is_relative_to(self.folder.resolve()):
            self._identify(trainer, identity)

    def _identify(self, trainer: Trainer, identity: str) -> None:
        for policy in callbacks_in(trainer, RunCheckpoint):
            policy.run = identity
        for position in callbacks_in(trainer, ExactResume):
            position.run = {"id": identity}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None or not trainer.is_global_zero or is_trial_run(trainer):
            return
        found = next(self.folder.glob("checkpoints/**/*.ckpt"), None)
        if found is not None:
            raise UserError(
                f"{self.folder} has the checkpoints of a run ({found.name}). Go on with it, "
                'fit(..., ckpt_path="last"), or name another folder for a new run'
            )
        delete_logs(trainer, within=self.folder)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt | SIGTERMException) or not trainer.is_global_zero:
            return
        newest = max(self.folder.glob(f"checkpoints/**/{RESUME}/step=*.ckpt"), key=step_of, default=None)
        where = f"stopped at step {trainer.global_step}"
        if newest is None:
            print(f"{where}, before the first checkpoint", file=sys.stderr, flush=True)
            return
        print(
            f"{where}. The newest checkpoint is {newest}. Start the same script again: "
            'fit(..., ckpt_path="last") continues from it',
            file=sys.stderr,
            flush=True,
        )


def default_callbacks(given: Sequence[Callback], *, logger: bool = True, progress_bar: bool = True) -> list[Callback]:
    """The callbacks of every run, except those of a kind that is in `given` or is switched off."""
    answer: list[tuple[type, Callback]] = [(Curves, Curves()), (Summary, Summary()), (ExactResume, ExactResume())]
    if logger:
        answer.append((LearningRateMonitor, RateMonitor(logging_interval="step")))
    if progress_bar:
        answer.append((ProgressBar, GrowthProgressBar()))
    return [default for kind, default in answer if not any(isinstance(callback, kind) for callback in given)]


class GrowthProgressBar(ClockedBar):
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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # with captured steps, `batch_idx` is that of the first one of a block
        super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.fit_loop.batch_idx)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        size, loss = size_of(pl_module), last_loss(trainer)
        metrics = metrics if loss is None else {"loss": float(loss), **metrics}
        return metrics if size is None else {**size.arguments, **metrics}


class Summary(Callback):
    """Prints the model and the planned growths at the start of a run, and the results at its end."""

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        to_come = [swap for swap in swaps_of(trainer) if swap.at_step >= trainer.global_step]
        growth = "".join(f", {swap.target} from step {swap.at_step}" for swap in to_come)
        print(f"step {trainer.global_step}: {type(pl_module).__name__}, {size(pl_module)}{growth}", flush=True)
        warn_of_rate_zero(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = last_loss(trainer)
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


def last_loss(trainer: Trainer) -> Tensor | None:
    """The training loss of the last batch, as the curves of the run have it."""
    return next((curves.loss for curves in callbacks_in(trainer, Curves)), None)


def size(module: LightningModule) -> str:
    own = size_of(module)
    shape = "" if own is None else f"{own}, "
    return f"{shape}{sum(parameter.numel() for parameter in module.parameters()):,} parameters"
