"""A training step by Lightning's own loops beside the run: under a copy of its trainer that counts and logs for itself.

Private names of Lightning, as in `_lightning.py`. The step is that of the run: accumulation, manual optimization, the
hooks of the module, its `optimizer_step`, clipping and schedules are what they are there.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _ResultCollection
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from torch import Tensor
from torch.optim import Optimizer

from mupscale._torch import inner_schedulers
from mupscale.models._lightning import attach_trainer, set_callbacks

MOST_WINDOWS = 8
"""Batches, or windows of accumulation, after which a module that makes no step of an optimizer is given up."""

Clip = Callable[[Optimizer, float], None]


class NoStep(Exception):
    """The module makes no step of an optimizer on the first batches."""


class StepPrecision(Precision):
    """Computes in the dtype that the tensors have. The loss is scaled before the backward pass."""

    def __init__(self, loss_scale: float, clips: Mapping[str, Clip]) -> None:
        """`clips` are functions that clip, in the place of methods of these names."""
        super().__init__()
        self.loss_scale = loss_scale
        vars(self).update(clips)

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        return super().pre_backward(tensor if self.loss_scale == 1 else tensor * self.loss_scale, module)


class Stepping(NamedTuple):
    """What steps a module: its optimizers, and Lightning's settings of their schedules."""

    optimizers: list[Optimizer]
    configs: list[Any]

    @property
    def schedules(self) -> list[Any]:
        """The schedules, and those that they are made of."""
        found = [config.scheduler for config in self.configs]
        for scheduler in found:  # it grows on the way
            found += [inner for inner in inner_schedulers(scheduler) if inner not in found]
        return found


def stepping_of(trainer: Trainer) -> Stepping:
    return Stepping(list(trainer.optimizers), list(trainer.lr_scheduler_configs))


def configure_anew(trainer: Trainer, module: LightningModule) -> Stepping:
    """New optimizers and schedules, as the module's `configure_optimizers` makes them for its present parameters."""
    with attach_trainer(module, shadow_of(trainer, module, stepping_of(trainer))):
        return Stepping(*_init_optimizers_and_lr_schedulers(module))


def shadow_of(
    trainer: Trainer,
    module: LightningModule,
    stepping: Stepping,
    loss_scale: float = 1.0,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """A trainer with the settings, data and counters of another, but loops, results and a strategy of its own.

    It runs on one device, writes nothing, and has no callbacks but the given ones.
    """
    shadow = copy.copy(trainer)
    set_callbacks(shadow, list(callbacks))
    shadow._loggers = [DummyLogger() for _ in trainer.loggers]
    shadow.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
    shadow.state = copy.copy(trainer.state)
    shadow.save_checkpoint = lambda *_, **__: None  # type: ignore[method-assign]
    shadow._logger_connector = _LoggerConnector(shadow)
    for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"):
        setattr(shadow._logger_connector, name, dict(getattr(trainer._logger_connector, name)))
    own = vars(trainer.precision_plugin)
    clips: dict[str, Clip] = {name: own[name] for name in ("clip_grad_by_norm", "clip_grad_by_value") if name in own}
    strategy = SingleDeviceStrategy(
        module.device, trainer.strategy.accelerator, precision_plugin=StepPrecision(loss_scale, clips)
    )
    strategy.connect(module)
    strategy.optimizers = list(stepping.optimizers)
    strategy.lr_scheduler_configs = stepping.configs
    shadow._accelerator_connector = copy.copy(trainer._accelerator_connector)
    shadow._accelerator_connector.strategy = strategy
    fit = shadow.fit_loop = copy.copy(trainer.fit_loop)
    epoch = fit.epoch_loop = copy.copy(trainer.fit_loop.epoch_loop)
    fit.trainer = epoch.trainer = shadow
    epoch._results = _ResultCollection(training=True)
    automatic, manual = _AutomaticOptimization(shadow), _ManualOptimization(shadow)
    automatic.optim_progress = copy.deepcopy(epoch.automatic_optimization.optim_progress)
    manual.optim_step_progress = copy.deepcopy(epoch.manual_optimization.optim_step_progress)
    epoch.automatic_optimization, epoch.manual_optimization = automatic, manual
    for name in ("batch_progress", "scheduler_progress"):
        setattr(epoch, name, copy.deepcopy(getattr(epoch, name)))
    return shadow


def take_training_step(shadow: Trainer, module: LightningModule, batches: Callable[[], Any], batch_idx: int) -> None:
    """Everything from `on_train_batch_start` to `on_train_batch_end`, until each optimizer has made a step.

    A window of accumulation has as many batches as that of the run; `batches` gives each. Raises `NoStep` if a module
    makes no step for several windows, and a TypeError if `training_step` takes the iterator of the batches.
    """
    steps: list[Optimizer] = []
    counting = [o.register_step_post_hook(lambda optimizer, *_: steps.append(optimizer)) for o in shadow.optimizers]
    wanted = {id(optimizer) for optimizer in shadow.optimizers}
    try:
        with attach_trainer(module, shadow):
            for window in range(MOST_WINDOWS):
                first = batch_idx + window * shadow.accumulate_grad_batches
                _take_window(shadow, module, batches, first, is_first=not window)
                if {id(optimizer) for optimizer in steps} >= wanted:
                    return
                if steps and window + 1 == MOST_WINDOWS:
                    return  # one of several optimizers may begin later
    finally:
        for each in counting:
            each.remove()
    raise NoStep(f"{type(module).__name__} makes no step of an optimizer in {MOST_WINDOWS} batches")


def _take_window(
    shadow: Trainer, module: LightningModule, batches: Callable[[], Any], first: int, *, is_first: bool
) -> None:
    epoch = shadow.fit_loop.epoch_loop
    count = shadow.accumulate_grad_batches
    for part in range(count):
        batch, index = batches(), first + part
        if part or not is_first:
            epoch.batch_progress.increment_ready()
        epoch._should_accumulate = lambda part=part: part + 1 < count  # type: ignore[method-assign, misc]
        _call_callback_hooks(shadow, "on_train_batch_start", batch, index)
        if _call_lightning_module_hook(shadow, "on_train_batch_start", batch, index) == -1:
            raise NoStep(f"{type(module).__name__}.on_train_batch_start ends the epoch")
        kwargs = epoch._build_kwargs(OrderedDict(), batch, index)
        if module.automatic_optimization:
            output: Any = epoch.automatic_optimization.run(shadow.optimizers[0], index, kwargs)
        else:
            output = epoch.manual_optimization.run(kwargs)
        epoch.update_lr_schedulers("step", update_plateau_schedulers=False)
        _call_callback_hooks(shadow, "on_train_batch_end", output, batch, index)
        _call_lightning_module_hook(shadow, "on_train_batch_end", output, batch, index)
        epoch.batch_progress.increment_completed()


def takes_the_iterator(trainer: Trainer) -> bool:
    """Whether `training_step` takes the iterator over batches, and not a batch."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)
