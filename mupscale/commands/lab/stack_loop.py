"""One loop for fits that are trained together: each is an ordinary fit, and one stacked program takes their steps.

Every fit has its own trainer, callbacks, loggers and checkpoints. Only the step is shared. The fits that are furthest
behind step first, so that fits that were resumed from different steps catch up. If the next steps of a fit need no
hooks, it is advanced by many steps at once.
"""

import gc
import math
import os
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from mupscale._torch import step_by_hand, step_hooks, tree_map
from mupscale.callbacks import step_blocks
from mupscale.callbacks.fast_loop import LeanEpochLoop, is_resident, why_single
from mupscale.callbacks.step_blocks import OF_EPOCHS, OF_STEPS, HostCopy, has_hooks
from mupscale.callbacks.strides import Strides
from mupscale.callbacks.upscale import size_after_all, swaps_of
from mupscale.commands.process import Terminated
from mupscale.cuda_graph import batch_kind
from mupscale.datamodules.resident import Plans, ResidentLoader, joint_batch
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError
from mupscale.models import _lightning as loops
from mupscale.models._lightning import callbacks_in
from mupscale.models._lightning_stack import (
    data_fetcher,
    fit_in_steps,
    is_followed_by_validation,
    pass_validation,
    validate_outside,
    validation_loader,
)
from mupscale.models.base import Growable, init_contexts
from mupscale.models.checkpoint import Size
from mupscale.stacking.dropout import mixed
from mupscale.stacking.stack import Captured, CapturedStack, Stack, bytes_per_model, captured_scores
from mupscale.widening.stepping import step_records

NEVER = 1_000_000
"""A number of collections of young objects that no fit reaches; after so many, Python looks through the old ones."""

SHARE = 0.9
"""The share of the free memory that a stack may use."""

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

    plans: dict[Any, Plans]
    """Of the data of all fits, by its order: a hundred fits would draw the same one a hundred times."""

    def on_run_start(self, data_fetcher: Any) -> None:
        loader = loops.training_loader(self.trainer)
        if isinstance(loader, ResidentLoader):
            loader.share_plans(self.plans)
        super().on_run_start(data_fetcher)

    def awaits_scores(self, data_fetcher: Any) -> bool:
        """Whether a validation is due that a stack can compute."""
        is_due = not self.trainer.should_stop and self.is_validation_next(data_fetcher)
        return is_due and is_scored_jointly(self.trainer)

    def on_advance_end(self, data_fetcher: Any) -> None:
        if self.awaits_scores(data_fetcher):
            validate_outside(self.trainer, *(self.scores or self.score()))
        self.scores = None
        super().on_advance_end(data_fetcher)


class StackedFit:
    """A fit with its own trainer, callbacks, loggers and checkpoints, whose steps are taken by others.

    Each fit has its own random numbers, standard output, and seed in the environment, in which its hooks are called.
    """

    def __init__(self, opening: Opening, plans: dict[Any, Plans]) -> None:
        """`opening` has a trainer with a FastLoop. `plans` are those of the data of all fits."""
        self._opening, self._plans = opening, plans
        self._steps = self._leave_steps_out()
        self._own = ProcessState()
        self.is_over = False
        self.batch: Any = None
        """That of the next step, if the step is one with hooks."""
        self._batch_idx = 0
        self.free = 0.0
        """How many of the next steps need no hooks."""
        self.validated = False
        """Whether the last of the free steps was followed by a validation."""
        self.loss = float("nan")
        """Of the last of the free steps."""

    def _leave_steps_out(self) -> Generator[None]:
        """Makes the fit, but for its steps: where this yields, one is due."""
        try:
            with self._opening as (self.trainer, arguments):
                self.module: Growable = arguments["model"]
                self.module.is_in_stack = True
                self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
                self.loop = StackedEpochLoop(self.trainer.fit_loop.epoch_loop)
                self.loop.plans = self._plans
                self.loop.score = lambda: StackedSteps([self]).scores()[0]
                self.trainer.fit_loop.epoch_loop = self.loop
                yield from fit_in_steps(self.trainer, **arguments)
        finally:
            self.is_over = True

    def begin(self) -> None:
        """Does all that comes before the first step."""
        with self._active():
            self._go_on()

    def leave_free_steps(self) -> None:
        """Ends the free steps that were taken and counted."""
        self.module.train_loss = torch.tensor(self.loss, dtype=torch.float64)
        with self._active():
            loops.leave_steps(self.trainer, validated=self.validated)
            self._go_on()

    def leave_step(self, loss: torch.Tensor) -> None:
        """Counts a step with hooks that was taken, and calls the hooks after it."""
        with self._active():
            self.loop.after_step(self.loop.count_step(self.module, loss), self.batch, self._batch_idx)
            self.batch = None

    def end_step(self, scores: Scores | None) -> None:
        """Ends a step with hooks; `scores` are the results of the validation that follows it, if it was made."""
        with self._active():
            self.loop.scores = scores
            self._go_on()

    def stop(self) -> None:
        """Ends the fit as SIGTERM does."""
        with self._entered(), suppress(Exception, SIGTERMException, Terminated):
            self._steps.throw(SIGTERMException())

    def _go_on(self) -> None:
        """Goes to the next step, or to the end of the fit."""
        next(self._steps, None)
        if self.is_over:
            return
        self.free = free_steps(self.trainer)
        if self.free < 1:
            self.batch, self._batch_idx = self.loop.before_step(data_fetcher(self.trainer))

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
                self._steps.throw(error)  # which raises it again, if it is over by this error

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
        and validation_loader(trainer) is not None
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


# --- the loop


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
        self._plans: dict[Any, Plans] = {}
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
            fit = StackedFit(opening, self._plans)
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
        end = least + int(loops.steps_before_the_end(first.trainer)) + 1
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
        scored = [fit for fit in group if fit.loop.awaits_scores(data_fetcher(fit.trainer))]
        scores = dict(zip(scored, self._steps_of(scored).scores(), strict=True)) if scored else {}
        for fit in group:
            fit.end_step(scores.get(fit))

    def _steps_of(self, fits: list[StackedFit]) -> "StackedSteps":
        """Those of these fits: the last ones, unless the fits or their networks are others."""
        if self._steps is None or not self._steps.is_of(fits):
            self._steps = None  # its memory, before the next takes as much
            try:
                self._steps = StackedSteps(fits)
            except UserError as error:
                raise Apart(str(error)) from error
        self._steps.is_unread = True  # hooks may have changed them since the last step
        return self._steps

    def _end(self) -> None:
        self._steps = None
        for fit in self._fits:
            if not fit.is_over:
                fit.stop()


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


# --- their steps


class StackedSteps:
    """The steps and validations of fits whose networks are one stack."""

    def __init__(self, fits: list[StackedFit]) -> None:
        self.fits = fits
        trainer, module = fits[0].trainer, fits[0].module
        optimizers = [each.trainer.optimizers[0] for each in fits]
        self._networks = [each.module.net for each in fits]
        self._modes = modes_of(fits)
        self._stack = Stack(
            [each.module for each in fits],
            optimizers,
            loss_of,
            module.stacked_losses(),
            compiled=module.hparams["compile"],
            fused=module.device.type == "cuda",
        )
        for optimizer in optimizers:
            step_by_hand(optimizer)
        self._max_norm = trainer.gradient_clip_val
        self._draws = module.stacked_losses() is None  # in it, dropout may be
        self._seeds = torch.tensor([each.seed for each in fits], device=module.device)
        self._device = trainer.strategy.root_device
        self._context = trainer.precision_plugin.train_step_context
        self.is_unread = True
        """Whether the numbers of the optimizers are to be read before the next step."""
        self._captured: CapturedStack | None = None
        self._evaluations: dict[str, Captured] = {}
        self._kind: Any = None

    def is_of(self, fits: list[StackedFit]) -> bool:
        """Whether these fits, with the networks that they have now, and what these train, are those of the stack."""
        if fits != self.fits or any(each.module.net is not net for each, net in zip(fits, self._networks, strict=True)):
            return False
        return modes_of(fits) == self._modes

    # --- a step with all hooks

    def take_one(self) -> list[Tensor]:
        """A step of each fit on its batch; returns the losses."""
        loaders, batches = [each.loader for each in self.fits], [each.batch for each in self.fits]
        shared = loaders[0] is not None and all(loader.order == loaders[0].order for loader in loaders)
        self._stack.optimizer.read_numbers()
        batch = batches[0] if shared else tree_map(lambda *parts: torch.stack(parts), *batches)
        return list(self._step(batch, shared, self.fits[0].step).double().cpu())

    # --- free steps

    def take_free(self, limit: float, progress: Callable[[int], None]) -> None:
        """Takes free steps of all fits until one of them has none left, or stops; at most `limit`.

        On a GPU, the next steps run while the fits process the last ones. So a fit that stops because it diverged may
        have taken a few more steps.
        """
        first = self.fits[0].trainer
        waits = self._device.type != "cuda" or bool(first.lr_scheduler_configs)
        left = int(min(limit, *(each.free for each in self.fits)))
        place, step = loops.place_in_data(first), first.global_step
        under_way: Block | None = None
        while left:
            block = self._launched(place, step, left)
            place, step, left = block.end, step + block.steps, left - block.steps
            if int(first.num_training_batches) == place.position:
                place = place.next_epoch()
            if under_way is not None:
                self._account_for(under_way)
            under_way = block
            progress(step)
            if waits or not left:
                self._account_for(under_way)
                under_way = None
            if any(each.trainer.should_stop for each in self.fits):
                break
        if under_way is not None:
            self._account_for(under_way)

    def _launched(self, place: loops.Place, step: int, most: int) -> "Block":
        """Launches steps, up to the next after which a fit has something to do."""
        trainers = [each.trainer for each in self.fits]
        strides = [callback.stride(each.trainer, step) for each in self.fits for callback in each.strides]
        count = int(min([most, loops.steps_to_validation(trainers[0], place), *strides]))
        loaders = [each.loader for each in self.fits]
        shared = all(loader.order == loaders[0].order for loader in loaders)
        scheduled = bool(trainers[0].lr_scheduler_configs)
        if self.is_unread:
            self._stack.optimizer.read_numbers()
            self.is_unread = False
        losses, batch = [], None
        for index in range(count):
            where = place.epoch, place.position + index
            batch = self._prepared(loaders[0].batch_at(*where) if shared else joint_batch(loaders, *where))
            losses.append(self._step(batch, shared, step + index))
            if scheduled:
                for trainer in trainers:
                    loops.pass_steps(trainer, 1)
                self._stack.optimizer.read_rates()
        like_theirs = batch if shared else tree_map(lambda part: part[0], batch)
        end = place.after(count)
        scores = self._scores() if is_followed_by_validation(trainers[0], end) else None
        return Block(count, end, like_theirs, HostCopy({"loss": torch.stack(losses, dim=1)}), scores)

    def _account_for(self, block: "Block") -> None:
        """Counts the steps of a block in all fits that are still running, and calls their callbacks."""
        losses = block.losses.arrived()["loss"]
        scores = [] if block.scores is None else self._scores_by_fit(block.scores)
        for index, each in enumerate(self.fits):
            trainer, module = each.trainer, each.module
            if trainer.should_stop:
                continue
            if not trainer.lr_scheduler_configs:
                loops.pass_steps(trainer, block.steps)
            each.loader.go_to(block.end.epoch, block.end.position)
            each.free -= block.steps
            each.validated = False
            each.loss = losses[index][-1]
            for callback in each.strides:
                callback.on_steps(trainer, module, block.batch, losses[index])
            if scores and not trainer.should_stop:  # otherwise Lightning validates it, at its end
                pass_validation(trainer, *scores[index], each.step - 1)
                each.validated = True
                for callback in each.strides:
                    callback.on_scores(trainer, module)
            if loops.batches_left(trainer) == 0 and each.free >= 1 and not trainer.should_stop:
                loops.pass_epoch(trainer)

    def scores(self) -> list[Scores]:
        return self._scores_by_fit(self._scores())

    def _scores_by_fit(self, scores: HostCopy) -> list[Scores]:
        scoring = self.fits[0].module.joint_scores()
        assert scoring is not None
        means = scores.arrived()
        rows = [{name: values[index] for name, values in means.items()} for index in range(len(self.fits))]
        return [(self._validation[1], scoring.finished(row)) for row in rows]

    def _scores(self) -> HostCopy:
        """Launches a validation of all fits."""
        module = self.fits[0].module
        scoring = module.joint_scores()
        assert scoring is not None
        loaders, batches = self._validation
        shared = all(loader.order == loaders[0].order for loader in loaders)
        sums: dict[str, Tensor] = {}
        samples = 0
        for position in range(batches):
            batch = self._prepared(loaders[0].batch_at(0, position) if shared else joint_batch(loaders, 0, position))
            size = module.batch_size(batch if shared else tree_map(lambda part: part[0], batch))
            samples += size
            for name, mean in self._evaluated(scoring.of_batch, batch, shared).items():
                total = mean.double() * size
                sums[name] = sums[name] + total if name in sums else total
        return HostCopy({name: total / samples for name, total in sums.items()})

    @cached_property
    def _validation(self) -> tuple[list[Any], int]:
        """The loaders of the validation batches of each fit, and how many batches count."""
        found = [validation_loader(each.trainer) for each in self.fits]
        loaders = [loader for loader, _ in filter(None, found)]
        assert len(loaders) == len(found)
        assert found[0] is not None
        return loaders, found[0][1]

    def _evaluated(self, function: Any, batch: Any, shared: bool) -> dict[str, Tensor]:
        context = self.fits[0].trainer.precision_plugin.val_step_context
        if not self.fits[0].loop.cuda_graph:
            with context():
                return self._stack.evaluate(function, batch, shared=shared)
        kind = str((shared, batch_kind(batch)))
        if kind not in self._evaluations:
            self._evaluations[kind] = captured_scores(self._stack, function, batch, shared=shared, context=context)
        return self._evaluations[kind](batch)

    # --- the step

    def _step(self, batch: Any, shared: bool, number: int) -> Tensor:
        """Takes a step of all fits; returns the losses, on their device."""
        if self._draws:
            self._stack.seeds.copy_(mixed(self._seeds, number))
        options: dict[str, Any] = {"shared": shared, "max_norm": self._max_norm, "context": self._context}
        if not self.fits[0].loop.cuda_graph:
            return self._stack.advance(batch, **options)
        kind, before = (shared, batch_kind(batch)), self._kind
        self._kind = kind
        if kind != before:  # a graph is made for the second step in a row of a kind
            self._captured = None
            return self._stack.advance(batch, **options)
        if self._captured is None:
            self._captured = CapturedStack(self._stack, batch, **options)
        return self._captured(batch)

    def _prepared(self, batch: Any) -> Any:
        """A batch on the device, in the precision of the fits."""
        trainer = self.fits[0].trainer
        batch = trainer.precision_plugin.convert_input(batch)
        return batch if is_resident(batch, self._device) else trainer.strategy.batch_to_device(batch)


def modes_of(fits: list[StackedFit]) -> list[bool]:
    """Which weights are trained, which modules are in training mode, and which optimizers have hooks of others.

    Callbacks may change all of them.
    """
    trained = [weight.requires_grad for each in fits for weight in each.module.parameters()]
    hooked = [step_hooks(optimizer) > 0 for each in fits for optimizer in each.trainer.optimizers]
    return [*trained, *hooked, *(part.training for each in fits for part in each.module.modules())]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, Growable)
    try:
        return model.mappable_loss(batch)
    except MisconfigurationException as error:  # by self.log
        raise UserError(f"`loss` of many models at once cannot call Lightning: {error}") from error


class Block(NamedTuple):
    """Launched steps: how many, where in the data they end, and their pending results."""

    steps: int
    end: loops.Place
    batch: Any
    losses: HostCopy
    scores: HostCopy | None


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
    module, loader = first.module, loops.training_loader(first.trainer)
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
