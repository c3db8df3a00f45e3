"""The callbacks of a run, for the command line and for a `Trainer` of your own."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar

from mupscale.callbacks import log_files
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.strides import RateMonitor
from mupscale.callbacks.summary import Summary, WidthBar
from mupscale.callbacks.tensorboard import LossFirstLogger
from mupscale.errors import UserError

LOG_EVERY = 10
"""Steps between two points of a curve."""

SAVE_EVERY = 500
"""Steps between two checkpoints."""


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
        log_files.delete(trainer)


def default_callbacks(given: Sequence[Callback], *, logger: bool = True, progress_bar: bool = True) -> list[Callback]:
    """The callbacks of every run, except those of a kind that is in `given` or is switched off."""
    answer: list[tuple[type, Callback]] = [(Curves, Curves()), (Summary, Summary()), (ExactResume, ExactResume())]
    if logger:
        answer.append((LearningRateMonitor, RateMonitor(logging_interval="step")))
    if progress_bar:
        answer.append((ProgressBar, WidthBar()))
    return [default for kind, default in answer if not any(isinstance(callback, kind) for callback in given)]
