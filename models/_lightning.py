"""Private names of Lightning's trainers, modules, loggers, weight averaging, command line and training loop.

Every use of a private name of Lightning is in a file `_lightning*.py`, or in exact_resume.py or run_checkpoint.py
of callbacks/; tests/test_seams.py fails if a release changes one. The files are in models/ because models/ is the
lowest package that imports Lightning; callbacks and commands use them too.
"""

import copy
import inspect
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, TQDMProgressBar, WeightAveraging
from lightning.pytorch.cli import instantiate_module
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

C = TypeVar("C")

# --- modules and trainers


def callbacks_of(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]  # public, but set where type checkers do not look


def callbacks_in(trainer: Trainer, kind: type[C]) -> list[C]:
    """The callbacks of a kind."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, kind)]


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    trainer.callbacks = callbacks  # type: ignore[attr-defined]


def datamodule_of(trainer: Trainer) -> LightningDataModule | None:
    return trainer.datamodule  # type: ignore[attr-defined]


def profiler_of(trainer: Trainer) -> Profiler:
    return trainer.profiler  # type: ignore[attr-defined]


def is_trial_run(trainer: Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def run_folder(trainer: Trainer) -> Path | None:
    """The folder of a run and its checkpoints. All ranks must ask for it together."""
    log_dir = trainer.log_dir  # that of all runs for most loggers
    if not trainer.loggers or isinstance(trainer.loggers[0], TensorBoardLogger | CSVLogger):
        return None if log_dir is None else Path(log_dir)
    logger = trainer.loggers[0]
    # as ModelCheckpoint spells it
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


def is_remote(path: Any) -> bool:
    """Whether a path is not one of this machine's file systems."""
    return "://" in str(path)


def log_interval(trainer: Trainer) -> int:
    return trainer.log_every_n_steps  # type: ignore[attr-defined]


def trainer_of(module: LightningModule) -> Trainer | None:
    """The trainer a module is attached to, or None; the public `module.trainer` raises without one."""
    return module._trainer


@contextmanager
def replace_attributes(holder: object, values: Mapping[str, Any]) -> Iterator[None]:
    """An object has these attributes of its own meanwhile, whatever its class has."""
    own = vars(holder)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)


def attach_trainer(module: LightningModule, trainer: Any) -> AbstractContextManager[None]:
    """Lets a module have this trainer meanwhile, as `self.trainer`."""
    return replace_attributes(module, {"_trainer": trainer})


def make_alike(module: LightningModule, changes: Mapping[str, Any]) -> LightningModule:
    """A new module of the same class by its saved hyperparameters, some changed, as `load_from_checkpoint` does it."""
    kind = type(module)
    arguments: dict[str, Any] = {**copy.deepcopy(dict(module.hparams)), **changes}
    of_class = inspect.signature(kind).parameters.values()
    names = [each.name for each in of_class if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    of_all = vars(module).get("_hparams_name")
    if of_all in names:
        return kind(**{of_all: AttributeDict(arguments)})
    is_of_cli = arguments.pop("_instantiator", None) is not None
    if not any(each.kind is each.VAR_KEYWORD for each in of_class):
        arguments = {name: value for name, value in arguments.items() if name in names or name == "_class_path"}
    return instantiate_module(kind, arguments) if is_of_cli else kind(**arguments)


def set_hyperparameters(module: LightningModule, values: Mapping[str, Any]) -> None:
    """Gives a module its own copy of these hyperparameters, which its checkpoints hold."""
    module._hparams = AttributeDict(values)


OF_EVERY_MODULE = frozenset(
    {*vars(LightningModule()), "_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"}
)
"""Attributes in which Lightning and torch keep their own things."""


def is_compiled(module: LightningModule) -> bool:
    return module._compiler_ctx is not None


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
    _, schedulers, _ = _configure_optimizers(configured)
    return [given["scheduler"] if isinstance(given, dict) else given for given in schedulers]


def hands_weights_back(trainer: Trainer) -> bool:
    """Whether the processes of a run are forked or spawned: the module of their parent gets the weights at the end."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def detects_anomalies(trainer: Trainer) -> bool:
    return bool(trainer._detect_anomaly)


# --- logging


def update_callback_metrics(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    trainer._logger_connector._callback_metrics.update(metrics)


def is_logged_in_training(trainer: Trainer, name: str) -> bool:
    """Whether the module, or a callback, logs a metric by `self.log` during the steps of this epoch."""
    results = trainer.fit_loop.epoch_loop._results
    return any(metric.meta.name == name for metric in results.values())


def rates_of(monitor: LearningRateMonitor, trainer: Trainer) -> dict[str, float]:
    """The current learning rates, by Lightning's names; this is slow."""
    return monitor._extract_stats(trainer, "step")


def name_arguments_apart(module: LightningModule, data: LightningDataModule | None) -> None:
    """Lets loggers have an argument of the data as `data.NAME` if the module has another value of that name."""
    if data is None or not hasattr(data, "_hparams_initial"):
        return
    theirs = {name for name in module.hparams_initial if not name.startswith("_")}
    saved = data.hparams_initial
    data._hparams_initial = type(saved)({f"data.{name}" if name in theirs else name: saved[name] for name in saved})


def open_writer(logger: TensorBoardLogger) -> None:
    """Opens the event file of a logger by its absolute path, on the first rank.

    TensorBoard opens the file again for every write. The working directory may be another one then: jsonargparse
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
    callbacks = [] if trainer is None else callbacks_in(trainer, WeightAveraging)
    return [callback for callback in callbacks if callback._average_model is not None]


def average_of(callback: WeightAveraging) -> AveragedModel:
    assert callback._average_model is not None
    return callback._average_model


def set_average(callback: WeightAveraging, average: AveragedModel) -> None:
    callback._average_model = average


def average_device(callback: WeightAveraging, module: LightningModule) -> torch.device:
    return torch.device(callback._device or module.device)


def averaged_copy(callback: WeightAveraging, module: LightningModule) -> AveragedModel:
    device = average_device(callback, module)
    return AveragedModel(module, device=device, use_buffers=callback._use_buffers, **callback._kwargs)


# --- base classes whose private methods are overridden


class ClockedBar(TQDMProgressBar):
    """A progress bar that is drawn when `is_due` says so."""

    def is_due(self, current: int, total: int | float) -> bool:
        raise NotImplementedError

    def _should_update(self, current: int, total: int | float) -> bool:
        return self.is_enabled and self.is_due(current, total)


class DataParallelMesh(ModelParallelStrategy):
    """A ModelParallelStrategy with one data-parallel group of all processes; Lightning's default has one per node."""

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


# --- the training loop


def numbers_of(progress: _BaseProgress) -> dict[str, Any]:
    """What a checkpoint holds of a counter of Lightning's loops, by its parts."""
    parts = vars(progress).items()
    return {name: numbers_of(part) if isinstance(part, _BaseProgress) else part for name, part in parts}


# Lightning copies every number by `deepcopy`, which is a quarter of the calls of a checkpoint; training waits for them
_BaseProgress.state_dict = numbers_of  # type: ignore[assignment, method-assign]


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
        return self._results

    @property
    def is_at_last_batch(self) -> bool:
        return bool(self._num_ready_batches_reached())

    def is_validation_next(self, data_fetcher: Any) -> bool:
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


def accumulates(trainer: Trainer) -> bool:
    """Whether the batch at hand is not the last of its accumulation window."""
    return bool(trainer.fit_loop._should_accumulate())


def hands_over_the_iterator(data_fetcher: Any) -> bool:
    """Whether `training_step` takes the iterator over batches, and not a batch."""
    return isinstance(data_fetcher, _DataLoaderIterDataFetcher)


# --- where a run is in its data


def resident_loader(loader: CombinedLoader | None) -> Any | None:
    """The loader of a run that has one, if its batches can be had by their position."""
    only = None if loader is None else loader.iterables
    return only if hasattr(only, "batch_at") else None


def training_loader(trainer: Trainer) -> Any | None:
    """The loader of the training batches, if they can be had by their position."""
    return resident_loader(trainer.fit_loop._combined_loader)


def batches_left(trainer: Trainer) -> int:
    return int(trainer.num_training_batches) - trainer.fit_loop.epoch_loop.batch_progress.current.ready


def validates(trainer: Trainer) -> bool:
    """Whether a run validates at all; Lightning may load the data for it as late as at the first validation."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return bool(trainer.enable_validation and (loop._combined_loader is None or loop._max_batches))


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


# --- steps that are taken outside of the loop


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
