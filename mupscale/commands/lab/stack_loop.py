"""One loop for fits that are trained together: each is an ordinary fit, and one stacked program takes their steps.

Every fit has its own trainer, callbacks, loggers and checkpoints (`stacked_fit.py`). Only the step is shared. The fits
that are furthest behind step first, so that fits that were resumed from different steps catch up. If the next steps of
a fit need no hooks, it is advanced by many steps at once (`stacked_steps.py`).
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mupscale.callbacks.upscale import size_after_all, swaps_of
from mupscale.commands.lab.stacked_fit import Apart, Opening, StackedFit, why_apart
from mupscale.commands.lab.stacked_steps import StackedSteps, loss_of
from mupscale.commands.process import Terminated
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError
from mupscale.models._lightning_loop import steps_before_the_end, training_loader
from mupscale.models.base import init_contexts
from mupscale.models.checkpoint import Size
from mupscale.stacking.memory import bytes_per_model
from mupscale.widening.stepping import step_records

NEVER = 1_000_000
"""A number of collections of young objects that no fit reaches; after so many, Python looks through the old ones."""

SHARE = 0.9
"""The share of the free memory that a stack may use."""


class StackLoop:
    """Runs fits to their ends, with joint steps.

    StackLoop([opening_of_the_first, opening_of_the_second]).run()
    """

    def __init__(
        self,
        openings: Iterable[Opening],
        most: Callable[[StackedFit], int] = lambda first: sys.maxsize,
        progress: Callable[[int, int, int], None] = lambda step, steps, count: None,
    ) -> None:
        """`openings` are requested one by one; `most` is asked before the first step of the first fit how many to run.

        `progress` is called now and then with the lowest step of all fits, the number of steps, and that of the fits
        that are still running.
        """
        self._openings, self._most, self._progress = iter(openings), most, progress
        self._fits: list[StackedFit] = []
        self._steps: StackedSteps | None = None

    def run(self) -> None:
        """Raises the first error of a fit, once all others have ended too; Apart, if they cannot be stacked."""
        try:
            with long_lived_objects():
                self._begin()
                while running := [fit for fit in self._fits if not fit.is_over]:
                    self._fits = running  # the others free their memory
                    self._advance(running)
        except BaseException:
            self._end()
            raise

    def _begin(self) -> None:
        """Starts the fits, up to their first steps."""
        most = sys.maxsize
        while len(self._fits) < most and (opening := next(self._openings, None)) is not None:
            fit = StackedFit(opening, score=lambda fit: StackedSteps([fit]).scores()[0])
            self._fits.append(fit)
            fit.begin()
            if fit.is_over:
                continue
            reason = why_apart(fit.trainer)  # before the next one begins, so that little time is lost
            if reason is not None:
                raise Apart(reason)
            if len(self._fits) == 1:
                most = self._most(fit)

    def _advance(self, running: list[StackedFit]) -> None:
        """Takes steps of those that are furthest behind."""
        first = min(running, key=lambda fit: fit.step)
        group = [fit for fit in running if fit.place == first.place]
        least = first.step
        end = least + int(steps_before_the_end(first.trainer)) + 1
        steps = self._steps_of(group)
        if first.free >= 1:
            ahead = [fit.step - least for fit in running if fit.step > least]
            steps.take_free(min(ahead, default=math.inf), lambda step: self._progress(step, end, len(running)))
            for fit in group:
                if fit.free < 1 or fit.trainer.should_stop:
                    fit.leave_free_steps()
            return
        self._progress(least, end, len(running))
        for fit, loss in zip(group, steps.take_one(), strict=True):
            fit.leave_step(loss)
        scored = [fit for fit in group if fit.loop.awaits_scores(fit.parts.data)]
        scores = dict(zip(scored, self._steps_of(scored).scores(), strict=True)) if scored else {}
        for fit in group:
            fit.end_step(scores.get(fit))

    def _steps_of(self, fits: list[StackedFit]) -> StackedSteps:
        """Those of these fits: the last ones, unless the fits or their networks are others."""
        if self._steps is None or not self._steps.is_of(fits):
            self._steps = None  # its memory, before the next takes as much
            try:
                self._steps = StackedSteps(fits)
            except UserError as error:
                raise Apart(str(error)) from error
        self._steps.read_again()
        return self._steps

    def _end(self) -> None:
        self._steps = None
        for fit in self._fits:
            if not fit.is_over:
                with suppress(Exception, SIGTERMException, Terminated):
                    fit.end_by(SIGTERMException())


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


def room_in_stack(first: StackedFit, size: int | str) -> int:
    """How many fits like this one to stack: `size`, or for `auto` as many as fit into memory.

    Raises a UserError if `size` of them do not fit. Raises Apart if two do not fit, if a stack cannot compute their
    loss or, for `auto`, if a stack would be slower than one fit after another.
    """
    module, device = first.module, first.trainer.strategy.root_device
    if size == "auto" and device.type == "cuda" and module.stacked_losses() is None:
        raise Apart(f"torch.vmap of {type(module).__name__} is slower on a GPU; to use it anyway, give --stack N")
    free = SHARE * free_bytes(device)
    final = size_after_all(module.size, swaps_of(first.trainer))
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


def bytes_of(first: StackedFit, size: Size) -> int:
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
                losses=module.stacked_losses(),
                amsgrad=any(group.get("amsgrad", False) for group in optimizer.param_groups),
                grown=any(record.changes_steps for record in step_records(optimizer).values())
                or bool(swaps_of(first.trainer)),
            )
        finally:
            module.net = net
