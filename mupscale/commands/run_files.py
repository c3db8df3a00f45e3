"""The files of a run: finds its folder and claims it, and writes config.yaml, run.json and result.json."""

import itertools
import json
import math
import uuid
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from mupscale.atomic import write_durably
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.strides import Strides
from mupscale.callbacks.tensorboard import delete_logs
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.callbacks.upscale import swaps_of
from mupscale.commands.arguments import refuse_output_folder
from mupscale.commands.checkpoints import identity_of, newest_checkpoint
from mupscale.commands.run_folder import LOCK, RESULT, RUN, Claim, Leftovers, Taken, write_run
from mupscale.errors import UserError
from mupscale.models._lightning import callbacks_in, forget_version, is_remote, is_trial_run, run_folder
from mupscale.models.base import Growable


class RunStart:
    """Finds and claims the folders of a run. `resumed` is the folder of a run to continue."""

    def __init__(self, resumed: Path | None) -> None:
        self.resumed = resumed
        self.leftovers = Leftovers()
        self._claims: list[Claim] = []

    def folder_without_logger(self, root: str | None) -> Path:
        """A folder for a run without a logger: the root itself, or version_0 and so on in it, whichever is free."""
        if self.resumed is not None:
            return self.resumed
        place = Path(root or ".").absolute()
        if getattr(rank_zero_only, "rank", 0) != 0:
            return place  # that of the first rank is taken
        refuse_output_folder("trainer.default_root_dir", place)
        for folder in itertools.chain([place], (place / f"version_{number}" for number in itertools.count())):
            # an attempt that died before its first checkpoint is none
            is_attempt = (folder / RUN).exists() and newest_checkpoint(folder)[0] is None
            if not is_attempt and any((folder / name).exists() for name in ("config.yaml", "checkpoints", RUN, LOCK)):
                continue
            leftovers = Leftovers()
            if not folder.exists():
                leftovers.watch(folder)
            try:
                self._claims.append(Claim(folder))
            except Taken:
                continue
            self.leftovers = leftovers
            return folder
        raise AssertionError

    def claim(self, trainer: Trainer, *, takes_next: bool) -> dict[str, Any]:
        """Claims the run's folder, and that of its checkpoints; returns the identity of the run and its folder.

        A logger that `takes_next` finds its version itself: where another process was faster, it looks again.
        """
        folder = self._claims[0].folder if self._claims else self._claimed(trainer, takes_next)
        identity = (None if self.resumed is None else identity_of(self.resumed)) or uuid.uuid4().hex
        self._claims[0].begin()
        write_run(folder, id=identity)
        for policy in callbacks_in(trainer, RunCheckpoint):
            policy.run = identity
            self._claim_checkpoints(policy.dirpath, folder)
        return {"id": identity, "folder": str(folder.resolve())}

    def release(self) -> None:
        for claim in reversed(self._claims):
            claim.release()

    def _claimed(self, trainer: Trainer, takes_next: bool) -> Path:
        while True:
            folder = run_folder(trainer)
            assert folder is not None
            refuse_output_folder("trainer.logger.save_dir", folder)
            leftovers = Leftovers()
            if trainer.loggers:
                leftovers.watch(folder)
            try:
                claim = Claim(folder)
            except Taken:
                if not takes_next:
                    raise
            else:
                has_run = self.resumed is None and (folder / "config.yaml").exists()
                if not has_run or (not takes_next and newest_checkpoint(folder)[0] is None):
                    self._claims.append(claim)
                    self.leftovers = leftovers  # only now: what appeared before may be another process's
                    return folder
                claim.release()
                if not takes_next:
                    raise UserError(
                        f"trainer.logger: {folder} has a run already; to continue it: "
                        f"python -m mupscale resume {folder}"
                    )
            logger = trainer.loggers[0]
            assert isinstance(logger, TensorBoardLogger | CSVLogger)
            forget_version(logger)

    def _claim_checkpoints(self, dirpath: Any, folder: Path) -> None:
        if dirpath is None or is_remote(dirpath) or Path(dirpath).resolve() == folder.resolve():
            return
        refuse_output_folder("checkpoint.dirpath", Path(dirpath))
        claim = Claim(Path(dirpath))
        self._claims.append(claim)
        claim.begin()


class SaveConfig(Callback):
    """Saves config.yaml in the run's folder, and its text in TensorBoard. A run that is resumed has both already."""

    def __init__(self, text: str, resumed: bool) -> None:
        self.text = text
        self.resumed = resumed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        if stage != "fit" or folder is None or is_trial_run(trainer) or not trainer.is_global_zero:
            return
        path = folder / "config.yaml"
        if path.exists() and not self.resumed:
            # An attempt died before its first checkpoint. Its curves would lie under those of this run.
            delete_logs(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, self.text.encode())
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and not self.resumed:
                logger.experiment.add_text("config", f"```yaml\n{self.text}\n```")


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
        self._folder = run_folder(trainer)

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
        is_trial = bool(callbacks_in(trainer, TrialMetric))  # `lab` writes that of one
        if self._folder is not None and not is_trial and not is_trial_run(trainer) and trainer.is_global_zero:
            write_result(self._folder, self.numbers(trainer))

    def on_scores(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)

    def numbers(self, trainer: Trainer) -> dict[str, Any]:
        """What result.json holds of a fit that has ended."""
        module = trainer.lightning_module
        spent = next((curves.spent for curves in callbacks_in(trainer, Curves)), {})
        growths = [swap.summary for swap in swaps_of(trainer)]
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
