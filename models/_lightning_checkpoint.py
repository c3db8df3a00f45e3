"""A ModelCheckpoint with its private methods under public names.

Private names of Lightning, as in `_lightning.py`.
"""

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from mupscale.atomic import partial, replacing
from mupscale.models._lightning import is_remote, run_folder
from mupscale.models._lightning_loop import steps_before_validation
from mupscale.models.checkpoint_files import files_of


class OpenCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint with `save_now`, `write`, and `removes`, which decides about older checkpoints."""

    resumable: tuple[int, Path] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.written: dict[str, None] = {}  # and not deleted, in their order

    def save_now(self, trainer: Trainer) -> None:
        """Saves as at the end of an interval; the present step is kept as the last even if it is not among the best."""
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._last_time_checked = time.monotonic()
        if self._last_global_step_saved == trainer.global_step:
            self._save_last_checkpoint(trainer, candidates)
        elif self.save_last:
            path = Path(self.format_checkpoint_name(candidates, self.CHECKPOINT_NAME_LAST))
            self._save_checkpoint(trainer, str(self.free_path(path, trainer)))

    def lacks_metric(self, trainer: Trainer) -> bool:
        """Whether the best checkpoints are kept by a metric that is not there, though there was a validation."""
        is_measured = self.save_top_k != 0 and trainer.fit_loop.epoch_loop.val_loop._has_run
        return is_measured and self.monitor is not None and self.monitor not in self._monitor_candidates(trainer)

    def on_missing_metric(self, trainer: Trainer) -> None:
        """Called if a checkpoint is due, but `lacks_metric`; where Lightning would end the run, nothing is saved."""

    def free_path(self, path: Path, trainer: Trainer) -> Path:
        """The path, or one like it where a file is that must not be overwritten."""
        return path

    def write(self, trainer: Trainer, path: Path) -> None:
        """Writes a checkpoint that is due."""
        if trainer.is_global_zero and path.is_dir():
            shutil.rmtree(path)  # its files have other names, by which they must not change
        trainer.strategy.barrier()
        self.written[str(path)] = None
        with files_of(trainer).deferring():
            super()._save_checkpoint(trainer, str(path))
        if not self.save_weights_only:
            self.resumable = trainer.global_step, path

    def kept(self) -> set[str]:
        """The checkpoints that the policy keeps, of those that it has written."""
        if self.save_top_k == -1:
            return set(self.written)
        return {self.best_model_path, self.last_model_path, *self.best_k_models}

    def relink(self, trainer: Trainer, path: Path) -> None:
        """Makes the link to the last checkpoint point to this one, as it does once that is saved."""
        if self.save_last and not self.last_model_path:
            self.last_model_path = self.format_checkpoint_name(
                self._monitor_candidates(trainer), self.CHECKPOINT_NAME_LAST
            )
        if self.save_last == "link":
            self._link_checkpoint(trainer, str(path), self.last_model_path)

    def mark(self, step: int, path: str) -> None:
        """Notes what was saved last."""
        self._last_global_step_saved = step
        self._last_checkpoint_saved = path

    def progress(self) -> dict[str, Any]:
        """What Lightning does not save of a ModelCheckpoint, but a run that is resumed must know."""
        return {
            "written": list(self.written),
            "last_step": self._last_global_step_saved,
            "last_path": self._last_checkpoint_saved,
            "is_deferred": self._defer_save_until_validation,
        }

    def restore_progress(self, progress: dict[str, Any]) -> None:
        self.written = dict.fromkeys(progress["written"])
        self.mark(progress["last_step"], progress["last_path"])
        self._defer_save_until_validation = progress["is_deferred"]

    def has_saved(self, step: int) -> bool:
        return bool(self._last_global_step_saved == step)

    def resumable_at(self, step: int) -> Path | None:
        """The checkpoint of a step, if this has written one from which a run can be resumed."""
        return self.resumable[1] if self.resumable is not None and self.resumable[0] == step else None

    def is_idle_at(self, step: int) -> bool:
        """Whether nothing is to be saved at the end of the batch of this step."""
        every = self._every_n_train_steps
        return self._train_time_interval is None and (every < 1 or step % every != 0)

    def idle_steps(self, trainer: Trainer) -> float:
        """How many of the next steps, with the validations and the ends of epochs among them, bring nothing to save."""
        if self._train_time_interval is not None:
            return 0
        every = self._every_n_train_steps
        by_steps = every - 1 - trainer.global_step % every if every >= 1 else math.inf
        left = trainer.num_training_batches - trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if self._defer_save_until_validation:
            return min(by_steps, steps_before_validation(trainer))
        if self._every_n_epochs < 1:
            return by_steps
        if (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            return min(by_steps, steps_before_validation(trainer))
        return min(by_steps, left)

    def triggers(self) -> dict[str, Any]:
        """The arguments that say when to save."""
        return {
            "every_n_train_steps": self._every_n_train_steps,
            "every_n_epochs": self._every_n_epochs,
            "train_time_interval": self._train_time_interval,
            "save_on_train_epoch_end": self._save_on_train_epoch_end,
        }

    def resume_points(self, folder: Path) -> set[Path]:
        """Further checkpoints from which `ckpt_path="last"` may go on; `folder` is that of this callback."""
        return set()

    def removes(self, previous: Path, current: Path) -> bool:
        raise NotImplementedError

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self.resumable = None  # it may be of the middle of a step

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """A process that was killed may have left a link to a checkpoint that it had just deleted."""
        found = super()._find_last_checkpoints(trainer)
        folder = self.dirpath or run_folder(trainer, trainer.log_dir)
        if folder is None or is_remote(folder):
            return found
        own = Path(folder) if self.dirpath else Path(folder) / "checkpoints"
        return {path for path in found if Path(path).exists()} | {str(path) for path in self.resume_points(own)}

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.lacks_metric(trainer):
            self.on_missing_metric(trainer)
        else:
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if is_remote(filepath):
            super()._save_checkpoint(trainer, filepath)
            return
        self.mark(trainer.global_step, filepath)  # before, because the checkpoint holds both of these
        self._defer_save_until_validation = False
        self.write(trainer, Path(filepath))

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        if is_remote(previous):
            return super()._should_remove_checkpoint(trainer, previous, current)
        return self.removes(Path(previous), Path(current))

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        remove = super()._remove_checkpoint
        files_of(trainer).later(lambda: remove(trainer, filepath))
        self.written.pop(filepath, None)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        path, link = Path(filepath), Path(linkpath)
        if trainer.is_global_zero and path.absolute() != link.absolute():
            files_of(trainer).later(lambda: replace_link(path, link))
        trainer.strategy.barrier()


def replace_link(path: Path, link: Path) -> None:
    """Links to a checkpoint, if it is there, in one operation: a process that is killed in it leaves the old link."""
    if not path.exists():
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    with replacing(link, partial(link)) as new:
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(path, link.parent))
