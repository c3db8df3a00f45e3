"""One of the fits that take their steps together: an ordinary fit, in parts between which the others run.

And which fits can be stacked, and which of their steps need no hooks.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from mupscale.callbacks import step_blocks
from mupscale.callbacks.fast_loop import LeanEpochLoop, why_single
from mupscale.callbacks.step_blocks import OF_EPOCHS, OF_STEPS, has_hooks
from mupscale.callbacks.strides import Strides
from mupscale.errors import UserError
from mupscale.models import _lightning_loop as loops
from mupscale.models._lightning import callbacks_in
from mupscale.models.base import Growable

_ENVIRONMENT = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")

Opening = AbstractContextManager[tuple[Trainer, dict[str, Any]]]
"""A trainer, and the arguments of its `fit`. It is left when the fit is over, or with the error that ended it."""


Scores = tuple[int, dict[str, float]]
"""How many batches a validation had, and what is logged of it."""


class Apart(UserError):
    """A fit cannot be stacked with others; the message is the reason."""


class StackedEpochLoop(LeanEpochLoop):
    """The loop over batches of a stacked fit: where a stack can compute a validation, Lightning does not."""

    scores: Scores | None = None
    """Of the validation that is due, if it was made together with others."""

    score: Callable[[], Scores]
    """Validates this fit alone."""

    def awaits_scores(self, data_fetcher: Any) -> bool:
        """Whether a validation is due that a stack can compute."""
        is_due = not self.trainer.should_stop and self.is_validation_next(data_fetcher)
        return is_due and is_scored_jointly(self.trainer)

    def on_advance_end(self, data_fetcher: Any) -> None:
        if self.awaits_scores(data_fetcher):
            loops.validate_outside(self.trainer, *(self.scores or self.score()))
        self.scores = None
        super().on_advance_end(data_fetcher)


class StackedFit:
    """A fit with its own trainer, callbacks, loggers and checkpoints, whose steps are taken by others.

    Each fit has its own random numbers, standard output, and seed in the environment, in which its hooks are called.
    """

    def __init__(self, opening: Opening, score: Callable[["StackedFit"], Scores]) -> None:
        """`opening` has a trainer with a FastLoop; `score` validates this fit alone."""
        self._opening, self._score = opening, score
        self._contexts = ExitStack()
        self._own = ProcessState()
        self._is_open = self.is_over = False
        self.batch: Any = None
        """That of the next step, if the step is one with hooks."""
        self._batch_idx = 0
        self.free = 0.0
        """How many of the next steps need no hooks."""
        self.validated = False
        """Whether the last of the free steps was followed by a validation."""
        self.loss = float("nan")
        """Of the last of the free steps."""

    def begin(self) -> None:
        """Does all that comes before the first step."""
        with self._active():
            self.trainer, arguments = self._contexts.enter_context(self._opening)
            self.module: Growable = arguments["model"]
            self.module.is_in_stack = True
            self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
            self.loop = StackedEpochLoop(self.trainer.fit_loop.epoch_loop)
            self.loop.score = partial(self._score, self)
            self.trainer.fit_loop.epoch_loop = self.loop
            self.parts = loops.FitParts(self.trainer)
            self._is_open = True
            self._go_on(self.parts.begin(**arguments))

    def leave_free_steps(self) -> None:
        """Ends the free steps that were taken and counted."""
        self.module.train_loss = torch.tensor(self.loss, dtype=torch.float64)
        with self._active():
            loops.leave_steps(self.trainer, validated=self.validated)
            self._go_on(self.parts.end_step())

    def leave_step(self, loss: torch.Tensor) -> None:
        """Counts a step with hooks that was taken, and calls the hooks after it."""
        with self._active():
            self.loop.after_step(self.loop.count_step(self.module, loss), self.batch, self._batch_idx)
            self.batch = None

    def end_step(self, scores: Scores | None) -> None:
        """Ends a step with hooks; `scores` are the results of the validation that follows it, if it was made."""
        with self._active():
            self.loop.scores = scores
            self._go_on(self.parts.end_step())

    def end_by(self, error: BaseException) -> None:
        """Ends the fit as an error does; raises what its opening makes of the error."""
        with self._entered():
            self._end_by(error)

    def _end_by(self, error: BaseException) -> None:
        self.is_over = True
        with self._contexts:
            if self._is_open:
                self.parts.interrupt(error)
            raise error

    def _go_on(self, goes_on: bool) -> None:
        """Looks at the next step; if there is none, ends the fit."""
        if not goes_on:
            self.is_over = True
            self.parts.finish()
            self._contexts.close()
            return
        self.free = free_steps(self.trainer)
        if self.free < 1:
            self.batch, self._batch_idx = self.loop.before_step(self.parts.data)

    # --- what it is, and where

    @property
    def loader(self) -> Any:
        return loops.training_loader(self.trainer)

    @cached_property
    def strides(self) -> list[Strides]:
        return callbacks_in(self.trainer, Strides)

    @property
    def step(self) -> int:
        return self.trainer.global_step

    @property
    def place(self) -> tuple[Any, ...]:
        """What fits have in common that take their next step together, besides their architecture."""
        return self.step, self.free >= 1, loops.place_in_data(self.trainer), str(self.module.size)

    # --- its own state of the process

    @contextmanager
    def _active(self) -> Iterator[None]:
        """The state of this fit; an error ends it."""
        with self._entered():
            try:
                yield
            except Exception as error:
                self._end_by(error)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        others = ProcessState()
        self._own.enter()
        try:
            yield
        finally:
            self._own = ProcessState()
            others.enter()


class ProcessState:
    """The process-wide state that each fit has for itself, as it is when this object is made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state() if is_used else None
        self._environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
        self._streams = sys.stdout, sys.stderr

    def enter(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.stdout, sys.stderr = self._streams


# --- rules


def free_steps(trainer: Trainer) -> float:
    """How many of the next steps of a fit need no hooks, validations and ends of epochs among them."""
    if loops.training_loader(trainer) is None or has_hooks(trainer, OF_STEPS):
        return 0
    is_scored = not loops.validates(trainer) or is_scored_jointly(trainer)
    passes_epochs = is_scored and not has_hooks(trainer, OF_EPOCHS) and loops.epochs_are_plain(trainer)
    return step_blocks.free_steps(trainer, callbacks_in(trainer, Strides), passes_epochs)


def is_scored_jointly(trainer: Trainer) -> bool:
    """Whether validations of many fits can be computed at once: no hook needs their single batches."""
    module = trainer.lightning_module
    hooks = ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end")
    return (
        isinstance(module, Growable)
        and module.joint_scores() is not None
        and loops.validation_loader(trainer) is not None
        and not any(is_overridden(hook, module) for hook in ("on_validation_epoch_end", "on_validation_end"))
        and not has_hooks(trainer, hooks)
    )


def why_apart(trainer: Trainer) -> str | None:
    module = trainer.lightning_module
    reason = why_single(trainer)
    if reason is not None:
        return reason
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        return "trainer.gradient_clip_algorithm is value"
    if type(module).configure_gradient_clipping is not Growable.configure_gradient_clipping:
        return f"{type(module).__name__} overrides configure_gradient_clipping"
    return None
