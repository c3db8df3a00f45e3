"""Uses of private names of Lightning, with `_lightning_resume.py`; tests/test_seams.py fails if a release changes one.

This file is in models/ because models/ is the lowest package that imports Lightning; callbacks and commands use it too.
"""

import math
import os
import shutil
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar, WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.call import _call_callback_hooks
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
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


def run_folder(trainer: Trainer, log_dir: str | None) -> Path | None:
    """The folder of a run, in which its checkpoints are. `log_dir` is Lightning's: that of all runs, for most loggers
    but these two.
    """
    if not trainer.loggers or isinstance(trainer.loggers[0], TensorBoardLogger | CSVLogger):
        return None if log_dir is None else Path(log_dir)
    logger = trainer.loggers[0]
    version = (
        logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    )  # as ModelCheckpoint spells it
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


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


def schedulers_of(configured: Any) -> list[Any]:
    """The learning-rate schedules in what `configure_optimizers` returned."""
    _, schedulers, _ = _configure_optimizers(configured)
    return [given["scheduler"] if isinstance(given, dict) else given for given in schedulers]


def accumulates(trainer: Trainer) -> bool:
    """Whether the batch at hand is not the last of its accumulation window."""
    return bool(trainer.fit_loop._should_accumulate())


def detects_anomalies(trainer: Trainer) -> bool:
    return bool(trainer._detect_anomaly)


def update_callback_metrics(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    """Sets metrics that schedulers, callbacks and checkpoints read."""
    trainer._logger_connector._callback_metrics.update(metrics)


def is_logged_in_training(trainer: Trainer, name: str) -> bool:
    """Whether the module, or a callback, logs a metric by `self.log` during the steps of this epoch."""
    results = trainer.fit_loop.epoch_loop._results
    return any(metric.meta.name == name for metric in results.values())


def name_arguments_apart(module: LightningModule, data: LightningDataModule | None) -> None:
    """Lets loggers have an argument of the data as `data.NAME` if the module has one of the same name.

    Lightning merges both for its loggers, and ends a run in which they differ.
    """
    if data is None or not hasattr(data, "_hparams_initial"):
        return
    theirs = {name for name in module.hparams_initial if not name.startswith("_")}
    saved = data.hparams_initial
    data._hparams_initial = type(saved)({f"data.{name}" if name in theirs else name: saved[name] for name in saved})


def open_writer(logger: TensorBoardLogger) -> None:
    """Opens the event file of a logger by its absolute path, on the first rank.

    Its thread opens the file again for every write. The working directory may be another one then: jsonargparse
    changes it while it parses the configuration of the next run.
    """
    if logger._experiment is None and getattr(rank_zero_only, "rank", 0) == 0 and not is_remote(logger.log_dir):
        from torch.utils.tensorboard import SummaryWriter

        logger._experiment = SummaryWriter(log_dir=os.path.abspath(logger.log_dir), **logger._kwargs)


def close_writer(logger: TensorBoardLogger) -> None:
    """Closes the event file of a logger; the next value it logs opens another."""
    if logger._experiment is not None:
        logger._experiment.close()
        logger._experiment = None


def forget_version(logger: TensorBoardLogger | CSVLogger) -> None:
    """Makes a logger look for a free version again."""
    logger._version = None


def enter_hook(module: LightningModule, name: str | None) -> str | None:
    """Sets the hook for which `self.log` logs, None to make logging an error; returns the previous one."""
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

    def is_validation_next(self, data_fetcher: Any) -> bool:
        """Whether the step just taken is followed by a validation."""
        return not self._skip_next_val and bool(self._should_check_val_fx(data_fetcher))

    def finish_validation(self, data_fetcher: Any) -> bool:
        """Whether a loop that is resumed has a validation to finish before it trains."""
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            self.val_loop.increment_progress_to_evaluation_end()
        return False

    def warn_once(self, message: str) -> None:
        self._warning_cache.warn(message)

    def step_arguments(self, batch: Any, batch_idx: int) -> Any:
        return self._build_kwargs(OrderedDict(), batch, batch_idx)


def hands_over_the_iterator(data_fetcher: Any) -> bool:
    """Whether `training_step` takes the iterator over batches, and not a batch."""
    return isinstance(data_fetcher, _DataLoaderIterDataFetcher)


# --- many steps at once


def rates_of(monitor: LearningRateMonitor, trainer: Trainer) -> dict[str, float]:
    """The current learning rates, by Lightning's names; this is slow."""
    return monitor._extract_stats(trainer, "step")


def resident_loader(loader: CombinedLoader | None) -> Any | None:
    """The loader of a run that has one, if its batches can be had by their position."""
    only = None if loader is None else loader.iterables
    return only if hasattr(only, "batch_at") else None


def training_loader(trainer: Trainer) -> Any | None:
    """The loader of the training batches, if they can be had by their position."""
    return resident_loader(trainer.fit_loop._combined_loader)


def validation_loader(trainer: Trainer) -> tuple[Any, int] | None:
    """The loader of the validation batches and how many of them count, if they can be had by their position."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loader = resident_loader(loop._combined_loader)
    return None if loader is None else (loader, int(loop.max_batches[0]))


def batches_left(trainer: Trainer) -> int:
    """How many batches of this epoch are still to come."""
    return int(trainer.num_training_batches) - trainer.fit_loop.epoch_loop.batch_progress.current.ready


def validates(trainer: Trainer) -> bool:
    """Whether a run validates at all."""
    return bool(trainer.enable_validation and trainer.fit_loop.epoch_loop.val_loop._max_batches)


class Place(NamedTuple):
    """Where in its data a run is: the epoch, the batches of it that were taken, and those of all epochs."""

    epoch: int
    position: int
    total: int

    def after(self, steps: int) -> "Place":
        return Place(self.epoch, self.position + steps, self.total + steps)

    def next_epoch(self) -> "Place":
        return Place(self.epoch + 1, 0, self.total)


def place_in_data(trainer: Trainer) -> Place:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return Place(epochs.processed, progress.current.ready, progress.total.ready)


def steps_to_validation(trainer: Trainer, place: Place) -> int:
    """How many steps it is to the next that may be followed by a validation, or by the end of the epoch."""
    left, every = int(trainer.num_training_batches) - place.position, trainer.val_check_batch
    if not isinstance(every, int) or not validates(trainer):
        return left
    done = place.total if trainer.check_val_every_n_epoch is None else place.position
    return min(left, every - done % every)


def steps_before_validation(trainer: Trainer) -> int:
    """How many of the next steps are followed by neither a validation nor the end of an epoch."""
    return steps_to_validation(trainer, place_in_data(trainer)) - 1


def is_followed_by_validation(trainer: Trainer, place: Place) -> bool:
    """Whether the step that leads to this place is followed by a validation, as Lightning decides it."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not isinstance(every, int) or not validates(trainer):
        return False
    done = place.total if epochs is None else place.position
    return done % every == 0 and (epochs is None or (place.epoch + 1) % epochs == 0)


def steps_before_the_end(trainer: Trainer) -> float:
    """How many steps the run has before its last one."""
    fit = trainer.fit_loop
    steps = math.inf
    if trainer.max_steps != -1:
        steps = trainer.max_steps - trainer.global_step - 1
    if trainer.max_epochs not in (None, -1):
        current: Any = fit.epoch_progress.current
        epochs = trainer.max_epochs - current.processed - 1
        steps = min(steps, epochs * int(trainer.num_training_batches) + batches_left(trainer) - 1)
    return steps


def epochs_are_plain(trainer: Trainer) -> bool:
    """Whether nothing but counting, and validating, is to be done at the end of an epoch."""
    by_step = all(
        config.interval == "step" and not config.reduce_on_plateau and config.frequency == 1
        for config in trainer.lr_scheduler_configs
    )
    options: Any = trainer  # set where type checkers do not look
    return by_step and not options.reload_dataloaders_every_n_epochs and options._val_check_time_interval is None


def pass_steps(trainer: Trainer, count: int) -> None:
    """Counts optimizer steps of one epoch that were taken outside of the loops."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.fetched += count
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length
    loop.batch_progress.increment_by(count, is_last_batch=fetcher.done)
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    optimizer.step.increment_by(count)
    optimizer.zero_grad.increment_by(count)
    loop._batches_that_stepped += count
    trainer._logger_connector._first_loop_iter = loop.batch_progress.current.ready == 1
    if trainer.lr_scheduler_configs:
        assert count == 1
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)


def validate_outside(trainer: Trainer, batches: int, scores: dict[str, float]) -> None:
    """Does what Lightning does at the end of a validation, for one that was made outside of the loops."""
    trainer.validating = True
    pass_validation(trainer, batches, scores, trainer.fit_loop.epoch_loop._batches_that_stepped)
    for hook in ("on_validation_epoch_end", "on_validation_end"):
        _call_callback_hooks(trainer, hook)
    trainer.training = True
    trainer.fit_loop.epoch_loop._skip_next_val = True


def pass_validation(trainer: Trainer, batches: int, scores: dict[str, float], step: int) -> None:
    """Counts a validation that was made outside of the loops after a step, and logs its results."""
    progress, connector = trainer.fit_loop.epoch_loop.val_loop.batch_progress, trainer._logger_connector
    progress.reset_on_run()
    progress.increment_by(batches, is_last_batch=True)
    trainer.fit_loop.epoch_loop.val_loop._has_run = True
    metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in scores.items()}
    for known in (connector._callback_metrics, connector._logged_metrics):
        known.update(metrics)
    logged = {**scores, "epoch": trainer.current_epoch}
    for logger in trainer.loggers:
        logger.log_metrics(logged, step=step)


def pass_epoch(trainer: Trainer) -> None:
    """Counts the end of an epoch, and the beginning of the next."""
    fit, loop, fetcher = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fit.epoch_progress.increment_processed()
    fit.epoch_progress.increment_completed()
    fit.epoch_progress.increment_ready()
    fit.epoch_progress.increment_started()
    loop.batch_progress.reset_on_run()
    loop.scheduler_progress.reset_on_run()
    loop.automatic_optimization.optim_progress.reset_on_run()
    loop.val_loop.batch_progress.total.reset()
    fetcher.reset()
    trainer._logger_connector._first_loop_iter = None


def leave_steps(trainer: Trainer, *, validated: bool) -> None:
    """Returns to Lightning's loop after steps that were counted here; the loop finishes the last of them."""
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1
    trainer.fit_loop.epoch_loop._skip_next_val = validated


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

    def removes(self, previous: Path, current: Path) -> bool:
        raise NotImplementedError

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self.resumable = None  # it may be of the middle of a step

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


class DataParallelMesh(ModelParallelStrategy):
    """A ModelParallelStrategy whose data-parallel group is all processes, whatever their number.

    Lightning's default is one group for each node, in which every process holds the whole model.
    """

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


class Parsers(NamedTuple):
    """What a LightningCLI parses with."""

    whole: LightningArgumentParser
    of_subcommands: dict[str, LightningArgumentParser]
    method_arguments: dict[str, list[str]]


class OpenCLI(LightningCLI):
    """A LightningCLI with hooks where it has none: when a checkpoint is named, and before the trainer is made."""

    def on_checkpoint_path(self) -> None:
        """Called after parsing; Lightning itself would lay the checkpoint's arguments over the configuration."""

    def on_trainer_config(self, config: Any) -> None:
        """Called with the arguments of the trainer, its callbacks made, just before it is made."""

    @property
    def parsers(self) -> Parsers:
        """For another command line of the same subcommands: to make them takes a good part of a start."""
        return Parsers(
            self.parser,
            getattr(self, "_subcommand_parsers", {}),  # without subcommands there are none
            getattr(self, "_subcommand_method_arguments", {}),
        )

    def share_parsers(self, parsers: Parsers) -> None:
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = parsers

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
