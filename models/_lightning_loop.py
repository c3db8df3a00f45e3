"""Lightning's training loop: its data, where a run is in it, and steps that are taken outside of it.

Private names of Lightning, as in `_lightning.py`.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.call import (
    _call_and_handle_interrupt,
    _call_callback_hooks,
    _call_lightning_module_hook,
    _call_teardown_hook,
)
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.combined_loader import CombinedLoader

# --- the loop itself


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


# --- a fit in parts


class FitParts:
    """`Trainer.fit` in parts: one loop can take the steps of many fits, and call these parts around each.

    The steps themselves are taken by others: after `begin`, and after each `end_step`, one is due as long as these
    return True. In the end comes `finish`, or after an error `interrupt`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._pause: BaseException | None = None

    def begin(self, **arguments: Any) -> bool:
        """Does all that `fit` does before its first step; whether there is one."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        trainer.strategy._launcher = self  # type: ignore[assignment]
        vars(fit)["run"] = _pause
        trainer.fit(**arguments)
        trainer.strategy._launcher = None
        del vars(fit)["run"]
        if isinstance(self._pause, KeyboardInterrupt):
            raise self._pause
        trainer._signal_connector.teardown()  # signals are the caller's
        fit.setup_data()
        if fit.skip:
            return False
        fit.reset()
        fit.on_run_start()
        return self._goes_on(in_epoch=False)

    def launch(self, function: Callable[..., Any], *arguments: Any, trainer: Trainer) -> None:
        """Called by Lightning, to make the fit in this process or another."""
        try:
            function(*arguments)
        except (_Paused, KeyboardInterrupt) as pause:  # for the latter, Lightning would end the whole process
            self._pause = pause

    def kill(self, number: int) -> None:
        """Called by Lightning when SIGTERM comes meanwhile: there is no other process."""

    def end_step(self) -> bool:
        """Does what follows a step: validates, ends the epoch, begins the next, ends the run; whether it goes on."""
        self._end_batch()
        return self._goes_on(in_epoch=True)

    def finish(self) -> None:
        trainer = self._trainer
        trainer._teardown()
        _call_callback_hooks(trainer, "on_fit_end")
        _call_lightning_module_hook(trainer, "on_fit_end")
        _call_teardown_hook(trainer)
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None

    def interrupt(self, error: BaseException) -> NoReturn:
        """Ends the fit, as an error does, and raises the error."""

        def fail() -> NoReturn:
            raise error

        if self._pause is not None:  # otherwise Lightning has done so
            _call_and_handle_interrupt(self._trainer, fail)
        fail()

    @property
    def data(self) -> Any:
        return self._trainer.fit_loop._data_fetcher

    def _goes_on(self, *, in_epoch: bool) -> bool:
        """Goes to the next step, maybe of another epoch; without one, ends the run. Whether there is one."""
        fit, epoch = self._trainer.fit_loop, cast(EpochLoop, self._trainer.fit_loop.epoch_loop)
        while in_epoch or not fit.done:
            if not in_epoch:
                fit.on_advance_start()
                epoch.reset()
                epoch.on_run_start(self.data)
            while not epoch.done:
                if not epoch.finish_validation(self.data):
                    return True
                self._end_batch()
            fit.on_advance_end()
            fit.on_iteration_done()
            in_epoch = False
        fit._restarting = False
        fit.on_run_end()
        return False

    def _end_batch(self) -> None:
        self._trainer.fit_loop.epoch_loop.on_advance_end(self.data)
        self._trainer.fit_loop.epoch_loop.on_iteration_done()


class _Paused(Exception):
    """Ends Lightning's set-up of a fit."""


def _pause() -> NoReturn:
    raise _Paused


# --- its data


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


# --- where a run is


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


# --- steps and validations outside of the loop


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
