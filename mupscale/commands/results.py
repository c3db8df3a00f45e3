"""The numbers of a run: its length in run.json as it begins, and what came of it in result.json as it ends."""

import json
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from mupscale.atomic import write_durably
from mupscale.callbacks import log_files
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.strides import Strides
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.run_folder import RESULT, write_run
from mupscale.models._lightning import callbacks_of, is_trial_run
from mupscale.models.base import Growable


class ResultFile(Strides):
    """Writes the length of a run to run.json, and what came of it to result.json.

    Its saved state: the metrics of the last validation, and its step.
    """

    def __init__(self) -> None:
        self.validation: dict[str, float] = {}
        self.validated_at: int | None = None
        self._folder: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"validation": dict(self.validation), "validated_at": self.validated_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validation = dict(state_dict["validation"])
        self.validated_at = state_dict["validated_at"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = log_files.folder(trainer, trainer.log_dir)  # all ranks must ask for it together

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._folder is None or is_trial_run(trainer) or not trainer.is_global_zero:
            return
        (self._folder / RESULT).unlink(missing_ok=True)  # of a run that is continued beyond its end
        total, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        write_run(
            self._folder,
            steps=int(total) if math.isfinite(total) else None,
            steps_per_epoch=math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else None,
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self.validation = {name: float(value) for name, value in metrics.items() if name.startswith("val/")}
            self.validated_at = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes result.json before the last checkpoint, after which a killed run has nothing left to do."""
        is_trial = any(
            isinstance(callback, TrialMetric) for callback in callbacks_of(trainer)
        )  # `lab` writes that of one
        if self._folder is not None and not is_trial and not is_trial_run(trainer) and trainer.is_global_zero:
            write_result(self._folder, self.numbers(trainer))

    def on_scores(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)

    def numbers(self, trainer: Trainer) -> dict[str, Any]:
        """What result.json holds of a fit that has ended."""
        module, callbacks = trainer.lightning_module, callbacks_of(trainer)
        spent = next((callback.spent for callback in callbacks if isinstance(callback, Curves)), {})
        growths = [callback.summary for callback in callbacks if isinstance(callback, UpscaleCallback)]
        return {
            "steps": trainer.global_step,
            **({"width": None} if not isinstance(module, Growable) else module.size._asdict()),
            **{name: amount for name, amount in spent.items() if math.isfinite(amount)},
            "validation": self.validation,
            "validated_at": self.validated_at,
            "growths": sorted(filter(None, growths), key=lambda growth: growth["step"]),
        }


def write_result(folder: Path, numbers: dict[str, Any]) -> None:
    """Writes result.json whole. JSON has no NaN and no infinity: they are written as texts."""
    text = json.dumps(_spell_out(numbers), indent=1, allow_nan=False) + "\n"
    write_durably(folder / RESULT, text.encode())


def _spell_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spell_out(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_spell_out(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
