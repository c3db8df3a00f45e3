"""A fit of Lightning in parts, for the stacks of `lab`: one loop takes the steps of many fits.

Private names of Lightning, as in `_lightning.py`.
"""

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.call import (
    _call_and_handle_interrupt,
    _call_callback_hooks,
    _call_lightning_module_hook,
    _call_teardown_hook,
)
from lightning.pytorch.trainer.states import TrainerStatus

from mupscale.models._lightning import EpochLoop, Place, resident_loader, validates


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


def validation_loader(trainer: Trainer) -> tuple[Any, int] | None:
    """The loader of the validation batches and how many of them count, if they can be had by their position."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loader = resident_loader(loop._combined_loader)
    return None if loader is None else (loader, int(loop.max_batches[0]))


def is_followed_by_validation(trainer: Trainer, place: Place) -> bool:
    """Whether the step that leads to this place is followed by a validation, as Lightning decides it."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not isinstance(every, int) or not validates(trainer):
        return False
    done = place.total if epochs is None else place.position
    return done % every == 0 and (epochs is None or (place.epoch + 1) % epochs == 0)


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
