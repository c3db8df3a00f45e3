"""The steps of fits that go together, as those of one stack."""

import math
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from mupscale._torch import has_step_hooks, tree_map
from mupscale.callbacks.strides import Strides
from mupscale.datamodules.resident import joint_batch
from mupscale.errors import UserError
from mupscale.models._lightning import (
    batches_left,
    callbacks_of,
    datamodule_of,
    detects_anomalies,
    epochs_are_plain,
    is_validation_due,
    pass_epoch,
    pass_steps,
    pass_validation,
    place_in_data,
    profiler_of,
    step_by_hand,
    steps_before_the_end,
    steps_before_validation,
    steps_to_validation,
    training_loader,
    validates,
    validation_loader,
)
from mupscale.models.base import WidthScalable
from mupscale.stacking.captured import CapturedStack, batch_kind
from mupscale.stacking.dropout import mixed
from mupscale.stacking.optimizers import KINDS
from mupscale.stacking.stack import Stack

INSIDE_A_STEP = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "backward", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
"""Hooks of modules and callbacks that a captured step, or one of a stack, cannot call."""

OF_STEPS = ("on_train_batch_start", "on_train_batch_end")

OF_EPOCHS = (
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
)  # fmt: skip

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Apart(UserError):
    """A fit cannot take its steps together with others, or gains nothing by it; the message says why."""


@dataclass
class Awaited:
    """What a fit waits for: a step on its batch, with all hooks; or up to `free` steps, which have no batch yet."""

    trainer: Trainer
    cuda_graph: bool
    batch: Any = None
    free: float = 0
    validated: bool = False
    """Whether the last of the free steps was followed by a validation."""

    def __post_init__(self) -> None:
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))  # in the thread of the fit

    @property
    def module(self) -> WidthScalable:
        module = self.trainer.lightning_module
        assert isinstance(module, WidthScalable)
        return module

    @property
    def step(self) -> int:
        return self.trainer.global_step

    @property
    def place(self) -> tuple[Any, ...]:
        """What fits have in common that take a step together, beside their architecture."""
        return self.step, self.batch is None, place_in_data(self.trainer), str(self.module.width)


class StackedFits:
    """Fits whose networks are one stack."""

    def __init__(self, awaited: list[Awaited]) -> None:
        self.awaited = awaited
        trainer, module = awaited[0].trainer, awaited[0].module
        optimizers = [each.trainer.optimizers[0] for each in awaited]
        if any(has_step_hooks(optimizer) for optimizer in optimizers):
            raise UserError("the optimizer has hooks of its steps, which a stack cannot call")
        self._networks = [each.module.net for each in awaited]
        self._stack = Stack(
            [each.module for each in awaited],
            optimizers,
            lambda model, batch: model.mappable_loss(batch),
            module.stacked_losses(),
            compiled=module.device.type == "cuda" and (module.hparams["compile"] or awaited[0].cuda_graph),
        )
        for optimizer in optimizers:
            step_by_hand(optimizer)
        self._max_norm = trainer.gradient_clip_val
        self._draws = module.stacked_losses() is None  # in it, dropout may be
        self._seeds = torch.tensor([each.seed for each in awaited], device=module.device)
        self._captured: CapturedStack | None = None
        self._kind: Any = None

    def is_of(self, awaited: list[Awaited]) -> bool:
        """Whether these fits, with the networks that they have now, are those of the stack."""
        if len(awaited) != len(self.awaited):
            return False
        same = zip(awaited, self.awaited, self._networks, strict=True)
        return all(new.trainer is old.trainer and new.module.net is net for new, old, net in same)

    # --- a step with all hooks

    def take_one(self) -> list[Tensor]:
        """A step of each fit on its batch; returns the losses."""
        loaders = [training_loader(each.trainer) for each in self.awaited]
        batches = [each.batch for each in self.awaited]
        shared = loaders[0] is not None and all(loader and loader.order == loaders[0].order for loader in loaders)
        self._stack.optimizer.read_numbers()
        batch = batches[0] if shared else tree_map(lambda *parts: torch.stack(parts), *batches)
        return list(self._step(batch, shared, self.awaited[0].step).double().cpu())

    # --- free steps

    def take_free(self, limit: float) -> None:
        """Free steps of all fits, up to the next after which one of them has something to do; at most `limit`."""
        trainers = [each.trainer for each in self.awaited]
        least = min(limit, *(min(each.free, stride(each.trainer)) for each in self.awaited))
        count = int(min(least, steps_to_validation(trainers[0])))
        loaders = [training_loader(trainer) for trainer in trainers]
        shared = all(loader.order == loaders[0].order for loader in loaders)
        (epoch, position), start = place_in_data(trainers[0]), trainers[0].global_step
        scheduled = bool(trainers[0].lr_scheduler_configs)
        self._stack.optimizer.read_numbers()
        losses, batch = [], None
        for index in range(count):
            place = epoch, position + index
            batch = self._prepared(loaders[0].batch_at(*place) if shared else joint_batch(loaders, *place))
            losses.append(self._step(batch, shared, start + index))
            if scheduled:
                for trainer in trainers:
                    pass_steps(trainer, 1)
                self._stack.optimizer.read_rates()
        table = torch.stack(losses).double().cpu().T.contiguous()
        like_theirs = batch if shared else tree_map(lambda part: part[0], batch)
        for each, loader, row in zip(self.awaited, loaders, table, strict=True):
            if not scheduled:
                pass_steps(each.trainer, count)
            loader.go_to(epoch, position + count)
            each.free -= count
            each.validated = False
            each.module.train_loss = row[-1]
            for callback in strides_of(each.trainer):
                callback.on_steps(each.trainer, each.module, like_theirs, row.tolist())
        self._validate()
        for each in self.awaited:
            if batches_left(each.trainer) == 0 and each.free >= 1 and not each.trainer.should_stop:
                pass_epoch(each.trainer)

    def _validate(self) -> None:
        """Validates the fits for which it is time, but not those that end here: Lightning does that."""
        due = [each for each in self.awaited if not each.trainer.should_stop and is_validation_due(each.trainer)]
        if not due:
            return
        scores = self._scores()
        for each in due:
            pass_validation(each.trainer, *scores[each.trainer])
            each.validated = True
            for callback in strides_of(each.trainer):
                callback.on_scores(each.trainer, each.module)

    def _scores(self) -> dict[Trainer, tuple[int, dict[str, float]]]:
        """How many batches the validation has, and its results, for each fit."""
        trainer, module = self.awaited[0].trainer, self.awaited[0].module
        found, scoring = validation_loader(trainer), module.joint_scores()
        assert found is not None
        assert scoring is not None
        loader, batches = found
        sums: dict[str, Tensor] = {}
        samples = 0
        for position in range(batches):
            batch = self._prepared(loader.batch_at(0, position))
            size = module.batch_size(batch)
            samples += size
            with trainer.precision_plugin.val_step_context():
                means = self._stack.evaluate(scoring.of_batch, batch)
            for name, mean in means.items():
                total = mean.double() * size
                sums[name] = sums[name] + total if name in sums else total
        table = {name: (total / samples).tolist() for name, total in sums.items()}
        return {
            each.trainer: (batches, scoring.finished({name: values[index] for name, values in table.items()}))
            for index, each in enumerate(self.awaited)
        }

    # --- the step

    def _step(self, batch: Any, shared: bool, number: int) -> Tensor:
        """Takes a step of all fits; returns the losses, on their device."""
        if self._draws:
            self._stack.seeds.copy_(mixed(self._seeds, number))
        options: dict[str, Any] = {"shared": shared, "max_norm": self._max_norm, "context": self._context}
        if not self.awaited[0].cuda_graph:
            return self._stack.advance(batch, **options)
        kind, before = (shared, batch_kind(batch)), self._kind
        self._kind = kind
        if kind != before:  # a graph is made for the second step in a row of a kind
            self._captured = None
            return self._stack.advance(batch, **options)
        if self._captured is None:
            self._captured = CapturedStack(self._stack, batch, **options)
        return self._captured(batch)

    def _context(self) -> AbstractContextManager[Any]:
        return self.awaited[0].trainer.precision_plugin.train_step_context()

    def _prepared(self, batch: Any) -> Any:
        trainer = self.awaited[0].trainer
        return trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def strides_of(trainer: Trainer) -> list[Strides]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, Strides)]


def stride(trainer: Trainer) -> float:
    """After how many steps a callback must be called at the latest."""
    module = trainer.lightning_module
    return min((callback.stride(trainer, module) for callback in strides_of(trainer)), default=math.inf)


def free_steps(trainer: Trainer) -> float:
    """How many of the next steps of a fit need no hooks, validations and ends of epochs among them."""
    module = trainer.lightning_module
    if training_loader(trainer) is None or any(is_overridden(hook, module) for hook in OF_STEPS):
        return 0
    others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, Strides)]
    if any(is_overridden(hook, callback) for hook in OF_STEPS for callback in others):
        return 0
    steps = steps_before_the_end(trainer)
    has_hooks = any(is_overridden(hook, owner) for hook in OF_EPOCHS for owner in (module, *others))
    is_alone = validates(trainer) and not is_scored_jointly(trainer)
    if has_hooks or is_alone or not epochs_are_plain(trainer):
        steps = min(steps, steps_before_validation(trainer))
    return max(0, min([steps, *(callback.free_steps(trainer, module) for callback in strides_of(trainer))]))


def is_scored_jointly(trainer: Trainer) -> bool:
    """Whether the validation of a fit can be made for many of them at once."""
    module = trainer.lightning_module
    return (
        isinstance(module, WidthScalable)
        and module.joint_scores() is not None
        and validation_loader(trainer) is not None
    )


def why_apart(trainer: Trainer) -> str | None:
    """Why a fit cannot take its steps together with others; None if it can."""
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    if not isinstance(module, WidthScalable):
        return f"the model is a {type(module).__name__}, and not a WidthScalable"
    name = type(module).__name__
    if type(trainer.strategy) is not SingleDeviceStrategy:
        return "a trial runs on several devices"
    if trainer.accumulate_grad_batches != 1:
        return f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}"
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        return "trainer.gradient_clip_algorithm is value"
    if not isinstance(profiler_of(trainer), PassThroughProfiler):
        return "trainer.profiler watches single steps"
    if detects_anomalies(trainer):
        return "trainer.detect_anomaly watches single steps"
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        return "trainer.precision is 16-mixed, which scales each loss; use bf16-mixed"
    if type(module).training_step is not WidthScalable.training_step:
        return f"{name} has a training_step of its own"
    for method in ("configure_gradient_clipping", "on_train_batch_start", *TRANSFER):
        if getattr(type(module), method) is not getattr(WidthScalable, method):
            return f"{name} has a {method} of its own"
    owners = [(callback, Callback) for callback in callbacks_of(trainer)] + [(module, LightningModule)]
    for owner, kind in owners:
        for hook in INSIDE_A_STEP:
            if hasattr(kind, hook) and is_overridden(hook, owner, kind):
                return f"{type(owner).__name__} has a hook inside of steps, {hook}"
    if any(is_overridden(hook, datamodule_of(trainer)) for hook in TRANSFER):
        return f"{type(datamodule_of(trainer)).__name__} has a hook that transfers batches"
    if len(trainer.optimizers) != 1 or type(trainer.optimizers[0]) not in KINDS:
        names = ", ".join(kind.__name__ for kind in KINDS)
        return f"{type(trainer.optimizers[0]).__name__} has no step for many models at once; {names} have"
    return None
