"""Fits that are trained together: each is an ordinary fit in its own thread, and one stacked program takes their steps.

Every fit has its own trainer, callbacks, loggers and checkpoints. Only the step is shared: the loops of all fits wait
for it. The fits that are furthest behind step first, so that fits that were resumed from different steps catch up. If
the next steps of a fit need no hooks, it is advanced by many steps at once (`strides.py`).
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mupscale.callbacks.fit_threads import FitThread
from mupscale.callbacks.stack_rules import why_apart
from mupscale.callbacks.stacked_fits import Apart, Awaited, StackedFits, loss_of
from mupscale.callbacks.upscale import size_after_all, swaps_of
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError
from mupscale.models._lightning_loop import steps_before_the_end, training_loader
from mupscale.models.base import Growable, init_contexts
from mupscale.models.checkpoint import Size
from mupscale.stacking.memory import bytes_per_model
from mupscale.widening.stepping import step_records

NEVER = 1_000_000
"""A number of collections of young objects that no fit reaches; after so many, Python looks through the old ones."""

SHARE = 0.9
"""The share of the free memory that a stack may use."""


class JointSteps:
    """Runs fits to their ends, with joint steps.

    joint = JointSteps([first_fit, second_fit], tell=print)
    joint.run()
    joint.results
    """

    def __init__(
        self,
        jobs: Iterable[Callable[[], Any]],
        tell: Callable[[str], None],
        most: Callable[[Awaited], int] = lambda first: sys.maxsize,
        progress: Callable[[int, int, int], None] = lambda step, steps, count: None,
    ) -> None:
        """
        Args:
            jobs: Functions that each run a fit with a FastLoop in this process. They are requested one by one.
            most: Returns how many of them to run, given the first one before its first step.
            tell: Called with a line about fits that are trained separately.
            progress: Called now and then with the lowest step of all fits, the total number of steps, and how many fits
                are still running.
        """
        self.threads: list[FitThread] = []
        self._jobs, self._most, self._tell, self._progress = iter(jobs), most, tell, progress
        self._fits: StackedFits | None = None

    def run(self) -> None:
        """Raises the first error of a fit, once all others have ended too; Apart, if they cannot be stacked at all."""
        try:
            with long_lived_objects():
                self._set_up()
                while waiting := [thread for thread in self.threads if not thread.is_over]:
                    self._advance(waiting)
        except BaseException:
            self._end()
            raise

    def _set_up(self) -> None:
        """Starts the fits, up to their first steps."""
        most = sys.maxsize
        while len(self.threads) < most and (job := next(self._jobs, None)) is not None:
            thread = FitThread(job)
            self.threads.append(thread)
            self._turn(thread)
            if not thread.is_over:
                self._refuse(thread)
                most = min(most, self._most(thread.request)) if len(self.threads) == 1 else most

    @property
    def results(self) -> list[Any]:
        """What the jobs returned."""
        return [thread.result for thread in self.threads]

    def _refuse(self, thread: FitThread) -> None:
        """Checks a fit before the next one starts, so that little time is lost."""
        reason = why_apart(thread.request.trainer)
        if reason is not None:
            raise Apart(reason)

    def _advance(self, waiting: list[FitThread]) -> None:
        """Takes steps of those that are furthest behind."""
        first = min(waiting, key=lambda thread: thread.request.step)
        group = [thread for thread in waiting if thread.request.place == first.request.place]
        awaited: list[Awaited] = [thread.request for thread in group]
        least = first.request.step
        end = least + int(steps_before_the_end(first.request.trainer)) + 1
        try:
            fits = self._together(awaited)
        except UserError as error:
            self._tell(f"{error}; from step {least} on, {len(group)} trials are trained separately")
            for thread in group:
                self._turn(thread, alone=True)
            return
        if first.request.kind != "free":
            self._progress(least, end, len(waiting))
            answers = fits.take_one() if first.request.kind == "step" else fits.scores()
            for thread, answer in zip(group, answers, strict=True):
                self._turn(thread, answer)
            return
        ahead = [thread.request.step - least for thread in waiting if thread.request.step > least]
        fits.take_free(min(ahead, default=math.inf), lambda step: self._progress(step, end, len(waiting)))
        for thread, each in zip(group, awaited, strict=True):
            if each.free < 1 or each.trainer.should_stop:
                self._turn(thread, each)

    def _together(self, awaited: list[Awaited]) -> StackedFits:
        """The stack of these fits: the last one, unless the fits or their networks are others."""
        if self._fits is None or not self._fits.is_of(awaited):
            self._fits = None  # its memory, before the next takes as much
            self._fits = StackedFits(awaited)
        self._fits.go_on(awaited)
        return self._fits

    def _turn(self, thread: FitThread, answer: Any = None, *, alone: bool = False) -> None:
        thread.turn((alone, answer))
        if thread.is_over and thread.error is not None:
            raise thread.error

    def _end(self) -> None:
        """Ends all fits, as SIGTERM does."""
        self._fits = None
        for thread in self.threads:
            while not thread.is_over and thread.request is not None:
                thread.turn(error=SIGTERMException())


@contextmanager
def long_lived_objects() -> Iterator[None]:
    """Keeps Python from looking through the existing objects, a hundred thousand for each fit, again and again.

    By its threshold, because `gc.unfreeze` would also release what others have frozen.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


# --- how many fits one stack has room for


def room_in_stack(first: Awaited, size: int | str) -> int:
    """How many fits like this one to stack: `size`, or for `auto` as many as fit into memory.

    Raises a UserError if `size` of them do not fit. Raises Apart if two do not fit, if a stack cannot compute their
    loss or, for `auto`, if a stack would be slower than one fit after another.
    """
    slow = why_slow(first.module, first.trainer.strategy.root_device) if isinstance(size, str) else None
    if slow is not None:
        raise Apart(slow)
    free = SHARE * free_bytes(first.trainer.strategy.root_device)
    final = size_after_all(first.module.size, swaps_of(first.trainer))
    try:
        each = bytes_of(first, final)
    except UserError as error:
        raise Apart(str(error)) from error
    most = int(free // each)
    if isinstance(size, str) and most < 2:
        raise Apart(
            f"{free / 1e9:.1f} GB of free memory do not hold two networks of {final} ({each / 1e9:.1f} GB each)"
        )
    if isinstance(size, str):
        return most
    if size > most:
        raise UserError(
            f"--stack {size}: networks of {final} take about {each / 1e9:.2g} GB each, and {free / 1e9:.2g} GB "
            f"are free. Give at most {most}"
        )
    return size


def why_slow(module: Growable, device: torch.device) -> str | None:
    """Why a stack of such models is not faster than training them one after another; None if it is faster."""
    if device.type != "cuda" or module.stacked_losses() is not None:
        return None
    return f"torch.vmap of {type(module).__name__} is slower on a GPU; to use it anyway, give --stack N"


def bytes_of(first: Awaited, size: Size) -> int:
    """The memory that a fit takes in a stack, at this size."""
    module, loader = first.module, training_loader(first.trainer)
    batch = first.batch if loader is None else loader.batch_at(0, 0)
    net = module.net
    with torch.random.fork_rng(devices=[]), init_contexts(first.trainer):  # in the precision of the fit
        module.net = module.network(*size, meta=True)
        try:
            optimizer = first.trainer.optimizers[0]
            return bytes_per_model(
                module,
                type(optimizer),
                loss_of,
                first.trainer.precision_plugin.convert_input(batch),
                shared=False,
                losses=module.stacked_losses(),
                amsgrad=any(group.get("amsgrad", False) for group in optimizer.param_groups),
                grown=any(record.changes_steps for record in step_records(optimizer).values())
                or bool(swaps_of(first.trainer)),
            )
        finally:
            module.net = net
