"""A fit of Lightning without its steps, for the stacks of `lab`: one loop takes those of many fits.

Private names of Lightning, as in `_lightning.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
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
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mupscale.models._lightning import EpochLoop, Place, resident_loader, validates


def fit_in_steps(trainer: Trainer, **arguments: Any) -> Iterator[None]:
    """`Trainer.fit`, but for its steps: where this yields, others take one. An error thrown into it ends the fit."""
    launcher = trainer.strategy._launcher = _Launcher()  # type: ignore[assignment]
    vars(trainer.fit_loop)["run"] = _pause
    trainer.fit(**arguments)
    trainer.strategy._launcher = None
    del vars(trainer.fit_loop)["run"]
    try:
        if launcher.interrupt is not None:
            raise launcher.interrupt
        trainer._signal_connector.teardown()  # signals are the caller's
        yield from _run_loops(trainer)
        trainer._teardown()
        _call_callback_hooks(trainer, "on_fit_end")
        _call_lightning_module_hook(trainer, "on_fit_end")
        _call_teardown_hook(trainer)
    except BaseException as error:
        # by Ctrl-C, Lightning would end the whole process
        reason = error if isinstance(error, Exception) else SIGTERMException()

        def fail() -> NoReturn:
            raise reason

        with suppress(SIGTERMException):
            _call_and_handle_interrupt(trainer, fail)
        raise
    trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None


def _run_loops(trainer: Trainer) -> Iterator[None]:
    """As Lightning's loops over epochs and batches run, but for the steps."""
    fit, epoch = trainer.fit_loop, cast(EpochLoop, trainer.fit_loop.epoch_loop)
    fit.setup_data()
    if fit.skip:
        return
    fit.reset()
    fit.on_run_start()
    while not fit.done:
        fit.on_advance_start()
        data = data_fetcher(trainer)
        epoch.reset()
        epoch.on_run_start(data)
        while not epoch.done:
            if not epoch.finish_validation(data):
                yield
            epoch.on_advance_end(data)
            epoch.on_iteration_done()
        fit.on_advance_end()
        fit.on_iteration_done()
    fit._restarting = False
    fit.on_run_end()


class _Launcher:
    """What Lightning hands a fit over to, to make it in this process or another: makes it up to its first step."""

    interrupt: KeyboardInterrupt | None = None

    def launch(self, function: Callable[..., Any], *arguments: Any, trainer: Trainer) -> None:
        try:
            function(*arguments)
        except _Paused:
            pass
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt

    def kill(self, number: int) -> None:
        """Called by Lightning when SIGTERM comes meanwhile: there is no other process."""


class _Paused(Exception):
    """Ends Lightning's set-up of a fit."""


def _pause() -> NoReturn:
    raise _Paused


def data_fetcher(trainer: Trainer) -> Any:
    return trainer.fit_loop._data_fetcher


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
