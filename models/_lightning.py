"""Every touch of a private name of Lightning, in one place; `tests/test_seams.py` fails when a release moves one.

It stands in models/ because models/ is the lowest package that knows Lightning: callbacks and commands import it too.
"""

import math
import os
import shutil
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar, WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import Profiler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from mupscale.atomic import partial, replacing

# --- modules and trainers


def callbacks_of(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]  # public, but set where type checkers do not look


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    trainer.callbacks = callbacks  # type: ignore[attr-defined]


def datamodule_of(trainer: Trainer) -> LightningDataModule | None:
    return trainer.datamodule  # type: ignore[attr-defined]


def profiler_of(trainer: Trainer) -> Profiler:
    return trainer.profiler  # type: ignore[attr-defined]


def is_trial_run(trainer: Trainer) -> bool:
    """Whether `trainer.fast_dev_run` is on."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def log_interval(trainer: Trainer) -> int:
    """`trainer.log_every_n_steps`."""
    return trainer.log_every_n_steps  # type: ignore[attr-defined]


def trainer_of(module: LightningModule) -> Trainer | None:
    """The trainer a module is attached to, or None; the public `module.trainer` raises without one."""
    return module._trainer


def on_device(trainer: Trainer, batch: Any) -> Any:
    """A batch of a loader as a step gets it: in the run's precision, on its device, after the hooks around that."""
    module = trainer.lightning_module
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch)


def optimizers_of(configured: Any) -> list[Optimizer]:
    """The optimizers in what `configure_optimizers` returned, whichever of the allowed forms it has."""
    optimizers, _, _ = _configure_optimizers(configured)
    return cast(list[Optimizer], optimizers)


def accumulates(trainer: Trainer) -> bool:
    """Whether the batch at hand is not the last of its accumulation window."""
    return bool(trainer.fit_loop._should_accumulate())


def detects_anomalies(trainer: Trainer) -> bool:
    return bool(trainer._detect_anomaly)


def restore_callback_metrics(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    """Puts back metrics that schedulers and callbacks read, as they were when a checkpoint was written."""
    trainer._logger_connector._callback_metrics.update(metrics)


def close_writer(logger: TensorBoardLogger) -> None:
    """Closes the event file of a logger; the next value it logs opens another."""
    if logger._experiment is not None:
        logger._experiment.close()
        logger._experiment = None


def forget_version(logger: TensorBoardLogger | CSVLogger) -> None:
    """Makes a logger look for a free version again."""
    logger._version = None


def enter_hook(module: LightningModule, name: str | None) -> str | None:
    """Tells `self.log` which hook runs from here on, None for where it is an error; returns the one before."""
    outer = module._current_fx_name
    module.__dict__["_current_fx_name"] = name  # past nn.Module's own __setattr__, which takes longer than most hooks
    return outer


# --- weight averaging


def averaging_callbacks(module: LightningModule) -> list[WeightAveraging]:
    """The EMA callbacks of a run that hold an average already."""
    trainer = trainer_of(module)
    callbacks = [] if trainer is None else callbacks_of(trainer)
    return [c for c in callbacks if isinstance(c, WeightAveraging) and c._average_model is not None]


def average_of(callback: WeightAveraging) -> AveragedModel:
    assert callback._average_model is not None
    return callback._average_model


def set_average(callback: WeightAveraging, average: AveragedModel) -> None:
    callback._average_model = average


def average_device(callback: WeightAveraging, module: LightningModule) -> torch.device:
    """Where a callback keeps its average."""
    return torch.device(callback._device or module.device)


def averaged_copy(callback: WeightAveraging, module: LightningModule) -> AveragedModel:
    """A new average, of the module as it is."""
    device = average_device(callback, module)
    return AveragedModel(module, device=device, use_buffers=callback._use_buffers, **callback._kwargs)


# --- the training loop


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over batches, its private parts under public names."""

    def __init__(self, loop: _TrainingEpochLoop) -> None:
        """Takes the place of another loop, which may have data, and counters, already."""
        super().__init__(loop.trainer, loop.min_steps, loop.max_steps)
        self.__dict__.update(loop.__dict__)

    @property
    def log_connector(self) -> Any:
        """What collects the values of `self.log`."""
        return self.trainer._logger_connector

    @property
    def logged(self) -> Any:
        """What `self.log` has logged in this epoch."""
        return self._results

    @property
    def is_at_last_batch(self) -> bool:
        return bool(self._num_ready_batches_reached())

    def warn_once(self, message: str) -> None:
        self._warning_cache.warn(message)

    def step_arguments(self, batch: Any, batch_idx: int) -> Any:
        return self._build_kwargs(OrderedDict(), batch, batch_idx)


def hands_over_the_iterator(data_fetcher: Any) -> bool:
    """Whether `training_step` takes the iterator over batches, and not a batch."""
    return isinstance(data_fetcher, _DataLoaderIterDataFetcher)


def finish_loaded_step(trainer: Trainer) -> None:
    """Finishes the step in which the loaded checkpoint was written, and leaves the loops between two steps."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    # or plateau schedulers are passed over at the end of this epoch, for want of the metrics restored here
    fit._restarting = False
    if not loop.restarting or loop.val_loop.restarted_mid_evaluation:
        if fit.resumed_on_epoch_end and loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        return
    if fit.restarted_mid_epoch and (loop.restarted_on_train_batch_end or loop.restarted_on_last):
        # as at the end of a validation, if it was written before, at the end of the batch
        validated = loop.restarted_on_last
        if not validated:
            loop.batch_progress.increment_completed()
            if loop.batch_progress.is_last_batch:
                epochs: Any = fit.epoch_progress
                for count in (epochs.total, epochs.current):  # Lightning has counted it as over
                    count.processed -= 1
                    count.completed -= 1
        loop.reset_restart_stage()
        loop.val_loop.restarting = False
        loop._skip_next_val = validated
        assert fit._data_fetcher is not None
        loop.on_advance_end(fit._data_fetcher)
        if not loop.batch_progress.is_last_batch and not (trainer.should_stop and fit._can_stop_early):
            loop._batches_that_stepped -= 1  # the loop will count it when it restarts
            batches = max(loop.val_loop.max_batches, default=0)
            if loop._should_check_val_fx(fit._data_fetcher) and math.isfinite(batches):
                loop.val_loop.batch_progress.total.increment_by(-int(batches))  # and the batches of this validation
            return
        fit.on_advance_end()
        fit.reset_restart_stage()
    elif fit.restarted_on_epoch_end:
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        fit.epoch_progress.increment_completed()
        fit.reset_restart_stage()
    elif fit.restarted_on_epoch_start:
        fit.epoch_progress.current.ready += 1  # Lightning takes it back, but does not count it again
    elif not loop.restarted_on_last:
        return
    # a new epoch begins: the loop of batches must not restart in the old one
    loop.restarting = False
    loop.reset_restart_stage()


# --- base classes whose private methods are overridden


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

    def free_path(self, path: Path, trainer: Trainer) -> Path:
        """The path, or one like it where a file is that must not be overwritten."""
        return path

    def write(self, trainer: Trainer, path: Path) -> None:
        """Writes a checkpoint that is due."""
        if trainer.is_global_zero and path.is_dir():
            shutil.rmtree(path)  # its files have other names, by which they must not change
        trainer.strategy.barrier()
        self.written[str(path)] = None
        self.mark(trainer.global_step, str(path))  # the checkpoint holds both of these
        self._defer_save_until_validation = False
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
        if self.save_last == "link" and path.exists():
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

    def triggers(self) -> dict[str, Any]:
        """The arguments that say when to save."""
        return {
            "every_n_train_steps": self._every_n_train_steps,
            "every_n_epochs": self._every_n_epochs,
            "train_time_interval": self._train_time_interval,
            "save_on_train_epoch_end": self._save_on_train_epoch_end,
        }

    def removes(self, previous: Path, current: Path) -> bool:
        raise NotImplementedError

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self.resumable = None  # it may be of the middle of a step

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if is_remote(filepath):
            super()._save_checkpoint(trainer, filepath)
            return
        self.write(trainer, Path(filepath))
        self.mark(trainer.global_step, filepath)

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        if is_remote(previous):
            return super()._should_remove_checkpoint(trainer, previous, current)
        return self.removes(Path(previous), Path(current))

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        self.written.pop(filepath, None)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        """In one operation: a process that is killed in it leaves the old link."""
        path, link = Path(filepath), Path(linkpath)
        if trainer.is_global_zero and path.absolute() != link.absolute():
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)
            with replacing(link, partial(link)) as new:
                new.unlink(missing_ok=True)
                new.symlink_to(os.path.relpath(path, link.parent))
        trainer.strategy.barrier()


def is_remote(path: Any) -> bool:
    """Whether a path is not one of this machine's file systems."""
    return "://" in str(path)


class ClockedBar(TQDMProgressBar):
    """A progress bar that is drawn when `is_due` says so."""

    def is_due(self, current: int, total: int | float) -> bool:
        raise NotImplementedError

    def _should_update(self, current: int, total: int | float) -> bool:
        return self.is_enabled and self.is_due(current, total)


class OpenCLI(LightningCLI):
    """A LightningCLI with hooks where it has none: when a checkpoint is named, and before the trainer is made."""

    def on_checkpoint_path(self) -> None:
        """Called after parsing; Lightning itself would lay the checkpoint's arguments over the configuration."""

    def on_trainer_config(self, config: Any) -> None:
        """Called with the arguments of the trainer, its callbacks made, just before it is made."""

    def section(self, key: str) -> Any:
        """A top-level part of the configuration, inside a subcommand or not."""
        return self._get(self.config, key)

    def parser_of(self, command: str) -> LightningArgumentParser:
        return self._parser(command)

    def _parse_ckpt_path(self) -> None:
        self.on_checkpoint_path()

    def _instantiate_trainer(self, config: Any, callbacks: list[Callback]) -> Trainer:
        self.on_trainer_config(config)
        return super()._instantiate_trainer(config, callbacks)
