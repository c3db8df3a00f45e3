"""Private names of Lightning's trainers, modules, loggers, weight averaging, command line and training loop.

Every use of a private name of Lightning is here, or in exact_resume.py or run_checkpoint.py
of callbacks/; tests/test_seams.py fails if a release changes one. The files are in models/ because models/ is the
lowest package that imports Lightning; callbacks and commands use them too.
"""

import copy
import inspect
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar, WeightAveraging
from lightning.pytorch.cli import instantiate_module
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from mupscale._torch import forward_pre_hooks
from mupscale.errors import refuse_unless_level

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


def recorders_in(module: nn.Module) -> dict[int, RegisterRecordFunction]:
    """Returns what a PyTorchProfiler has put into the hooks of modules, which cannot be copied, by its `id`."""
    hooks = (hook for part in module.modules() for hook in forward_pre_hooks(part))
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks)
    return {id(owner): owner for owner in owners if isinstance(owner, RegisterRecordFunction)}


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


def set_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Gives a module the mesh of devices over which its `configure_model` may shard it."""
    module._device_mesh = mesh


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

        refuse_unless_level("trainer.logger: flush_secs", logger._kwargs.get("flush_secs", 120))
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


def logs_this_step(trainer: Trainer) -> bool:
    """Whether the step that begins, or that has just ended, is one whose values are logged."""
    return bool(trainer._logger_connector.should_update_logs)


def steps_logged(trainer: Trainer) -> int:
    """Returns the step that Lightning writes for a value that is logged before its step."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


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


class StepTaker(_AutomaticOptimization):
    """Lightning's part that takes a step, put in its place; `take` may take more steps than the one on its batch."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        loop = trainer.fit_loop.epoch_loop
        self.__dict__.update(loop.automatic_optimization.__dict__)  # it may have counters already
        loop.automatic_optimization = self

    @property
    def epoch_loop(self) -> _TrainingEpochLoop:
        return self.trainer.fit_loop.epoch_loop

    def take(self, batch: Any) -> dict[str, Any]:
        """Takes the step on this batch, and further ones; what callbacks get as `outputs`."""
        raise NotImplementedError

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        return self.take(next(iter(kwargs.values())))

    def take_single(self, batch: Any) -> dict[str, Any]:
        """Lightning's own step."""
        loop = self.epoch_loop
        arguments = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)
        return super().run(self.trainer.optimizers[0], loop.batch_idx, arguments)

    def count_step(self) -> None:
        """Counts a step that was taken otherwise."""
        self.optim_progress.optimizer.step.increment_by(1)
        self.optim_progress.optimizer.zero_grad.increment_by(1)

    def begin_next(self) -> bool:
        """Ends the step of a batch as the loop does, but for hooks, and gets the next `batch`; False at the end."""
        loop, fetcher = self.epoch_loop, self.trainer.fit_loop._data_fetcher
        progress = loop.batch_progress
        if loop._num_ready_batches_reached():
            return False
        assert fetcher is not None
        progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        progress.increment_completed()
        loop._batches_that_stepped += 1
        batch, _, _ = next(fetcher)
        progress.is_last_batch = fetcher.done
        self.batch = self.trainer.strategy.batch_to_device(batch)
        progress.increment_ready()
        self.trainer._logger_connector.on_batch_start(self.batch)
        progress.increment_started()
        return True


def saves_every(callback: ModelCheckpoint) -> int:
    """The number of steps after which a ModelCheckpoint saves; 0 if it does not save by steps."""
    return callback._every_n_train_steps


def steps_to_validation_or_end(trainer: Trainer) -> float:
    """How many steps it is to the end of the next that may be followed by a validation, or is the last of an epoch or
    of the run, counting from within a step."""
    progress, every = trainer.fit_loop.epoch_loop.batch_progress, trainer.val_check_batch
    left: float = trainer.num_training_batches - progress.current.ready + 1
    if isinstance(every, int) and validates(trainer):
        done = (progress.total if trainer.check_val_every_n_epoch is None else progress.current).ready - 1
        left = min(left, every - done % every)
    return left if trainer.max_steps == -1 else min(left, trainer.max_steps - trainer.global_step)


def accumulates(trainer: Trainer) -> bool:
    """Whether the batch at hand is not the last of its accumulation window."""
    return bool(trainer.fit_loop._should_accumulate())


# --- where a run is in its data


def validates(trainer: Trainer) -> bool:
    """Whether a run validates at all; Lightning may load the data for it as late as at the first validation."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return bool(trainer.enable_validation and (loop._combined_loader is None or loop._max_batches))


class Place(NamedTuple):
    """The place of a run in its data: the epoch, and how many of its batches were taken."""

    epoch: int
    position: int


def place_in_data(trainer: Trainer) -> Place:
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return Place(epochs.processed, trainer.fit_loop.epoch_loop.batch_progress.current.ready)
