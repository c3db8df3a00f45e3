"""Steps of a captured fit that need no hooks, taken at once: between two of them there is a replay, and no more.

On a GPU, the hooks of every step would take longer than a step of a small network. So the steps between two events (a
log, a checkpoint, a validation, a swap) are launched as a block, and callbacks get the losses of a block
(`strides.py`). While they process it, the device is busy with the next one. An epoch that ends without a validation is
no event, unless something has a hook there.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from mupscale.callbacks.strides import Strides
from mupscale.cuda_graph import CapturedStep, step_kind
from mupscale.models import _lightning as loops
from mupscale.models._lightning import callbacks_in, callbacks_of
from mupscale.models.base import Growable

OF_STEPS = ("on_train_batch_start", "on_train_batch_end")

OF_EPOCHS = (
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
)  # fmt: skip

SECONDS = 0.1
"""How long a block takes at most: a run that is asked to end, or whose progress is shown, does not wait longer."""

FIRST = 4
"""Steps of the first block, by which the length of a step is measured."""


class StepBlocks:
    """Takes the steps of a fit that need no hooks."""

    def __init__(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        assert isinstance(module, Growable)
        self._trainer, self._module = trainer, module
        self._loader: Any = loops.training_loader(trainer)
        self._strides = callbacks_in(trainer, Strides)
        self._is_scheduled = bool(trainer.lr_scheduler_configs)
        self._passes_epochs = not loops.validates(trainer) and not has_hooks(trainer, OF_EPOCHS)
        self._most = FIRST

    def take(self, captured: CapturedStep) -> bool:
        """Takes all steps up to the next that needs hooks; False if that is the next one."""
        trainer = self._trainer
        left, place, step = self._free_steps(), loops.place_in_data(trainer), trainer.global_step
        first_step = step
        is_there = (self._loader.epoch, self._loader.position) == (place.epoch, place.position)
        if left < 1 or not is_there:
            return False
        under_way: Block | None = None
        while left >= 1:
            if place.position == int(trainer.num_training_batches):
                place = place.next_epoch()
            block = self._launch(captured, place, step, left)
            if block is None:
                break
            place, step, left = block.end, step + block.steps, left - block.steps
            if under_way is not None:
                self._account_for(under_way)
            under_way = block
            if self._is_scheduled:  # its steps are counted already
                self._account_for(under_way)
                under_way = None
            if self._free_steps() < 1:  # a callback has something to do
                break
        if under_way is not None:
            self._account_for(under_way)
        if trainer.global_step == first_step:
            return False
        loops.leave_steps(trainer, validated=False)
        return True

    def _free_steps(self) -> float:
        return free_steps(self._trainer, self._strides, self._passes_epochs)

    def _launch(self, captured: CapturedStep, place: loops.Place, step: int, most: float) -> "Block | None":
        """Launches steps, up to the next after which a callback has something to do; None if the graph does not fit."""
        trainer, optimizer = self._trainer, self._trainer.optimizers[0]
        started = time.perf_counter()
        strides = [callback.stride(trainer, step) for callback in self._strides]
        count = int(min([most, self._most, loops.steps_to_validation(trainer, place), *strides]))
        losses: list[Tensor] = []
        taken: Any = None
        for position in range(place.position, place.position + count):
            batch = self._loader.batch_at(place.epoch, position)
            # a schedule may change more than rates, and the last batch of an epoch may be smaller
            may_differ = self._is_scheduled or not losses or position + 1 == int(trainer.num_training_batches)
            if may_differ and step_kind(batch, optimizer) != captured.kind:
                break
            losses.append(captured(batch))
            taken = batch
            if self._is_scheduled:
                self._count(place.position, 1)
        if not losses:
            return None
        return Block(len(losses), place.after(len(losses)), taken, HostCopy({"loss": torch.stack(losses)}), started)

    def _account_for(self, block: "Block") -> None:
        """Counts the steps of a block, and calls the callbacks."""
        trainer, module = self._trainer, self._module
        losses = block.losses.arrived()["loss"]
        self._most = max(1, int(SECONDS * block.steps / (time.perf_counter() - block.started)))
        if not self._is_scheduled:
            self._count(block.end.position - block.steps, block.steps)
        self._loader.go_to(block.end.epoch, block.end.position)
        module.__dict__["train_loss"] = torch.tensor(losses[-1], dtype=torch.float64)
        for callback in self._strides:
            callback.on_steps(trainer, module, block.batch, losses)

    def _count(self, position: int, steps: int) -> None:
        """Counts steps from this position of an epoch on; from the beginning, the epoch before has ended."""
        if position == 0 and loops.batches_left(self._trainer) == 0:
            loops.pass_epoch(self._trainer)
        loops.pass_steps(self._trainer, steps)


class Block(NamedTuple):
    """Launched steps: how many, where in the data they end, a batch like theirs, their losses, and when they began."""

    steps: int
    end: loops.Place
    batch: Any
    losses: "HostCopy"
    started: float


class HostCopy:
    """Tensors that are copied to the CPU, in float64, while the device continues."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._tensors = {name: _pinned_copy(tensor) for name, tensor in self._tensors.items()}
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> dict[str, list[Any]]:
        """The tensors as lists; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return {name: tensor.tolist() for name, tensor in self._tensors.items()}


def _pinned_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def takes_blocks(trainer: Trainer) -> bool:
    """Whether a captured fit has steps that need no hooks."""
    if not isinstance(trainer.lightning_module, Growable) or has_hooks(trainer, OF_STEPS):
        return False
    return loops.training_loader(trainer) is not None and loops.epochs_are_plain(trainer)


def free_steps(trainer: Trainer, strides: Sequence[Strides], passes_epochs: bool) -> float:
    """How many of the next steps need no hooks; ends of epochs and validations among them, if it `passes_epochs`."""
    if trainer.should_stop or trainer.received_sigterm:
        return 0  # it continues until min_epochs or min_steps
    steps = loops.steps_before_the_end(trainer)
    if not passes_epochs:
        steps = min(steps, loops.steps_before_validation(trainer))
    return max(0, min([steps, *(callback.free_steps(trainer, trainer.lightning_module) for callback in strides)]))


def has_hooks(trainer: Trainer, hooks: Sequence[str]) -> bool:
    """Whether the module, or a callback that does not know blocks, has one of these hooks."""
    others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, Strides)]
    return any(is_overridden(hook, owner) for hook in hooks for owner in (trainer.lightning_module, *others))
