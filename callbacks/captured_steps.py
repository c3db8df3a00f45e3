"""Training steps as CUDA graphs: one step is captured, and many replays of it are one batch of Lightning's loop."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.cuda_graph import CapturedStep, step_kind
from mupscale.errors import UserError
from mupscale.models._lightning import (
    StepTaker,
    callbacks_in,
    callbacks_of,
    datamodule_of,
    detects_anomalies,
    enter_hook,
    log_interval,
    profiler_of,
    saves_every,
    steps_to_validation_or_end,
)
from mupscale.models.base import Growable

INSIDE_A_STEP = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "backward", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
"""Hooks of modules and callbacks that a captured step, or one of a stack, cannot call."""

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

OF_STEPS = ("on_train_batch_start", "on_train_batch_end")

WARM_UP = 3
"""Steps before a capture: the first ones make optimizer state, compile, and choose kernels."""

LONGEST = 64
"""Steps of a block, at most."""

SECONDS = 0.1
"""How long a block takes, about: a run that is asked to end, or whose progress is shown, does not wait longer."""


class CapturedSteps(Callback):
    """Speed options of a run on a GPU: its step as a CUDA graph, and TF32.

    With `cuda_graph`, Lightning's loop runs as it is, but one of its batches is a block of steps: all up to the next
    one after which a callback has something to do. Hooks of a batch are called once for a block, with the losses of
    its steps in `outputs["losses"]`. `global_step`, `batch_idx`, the counters in checkpoints, intervals and horizontal
    axes count steps. A module with a hook of every batch gets blocks of one, and so does a callback of your own, unless
    it has an attribute `needs_every_step = False`.
    """

    def __init__(self, cuda_graph: bool = False, tf32: bool = False) -> None:
        """
        Args:
            cuda_graph: On one GPU, replay the whole step, from the loss to the optimizer, as one CUDA graph. This is
                faster if a step takes less than about ten milliseconds. `loss` must do the same work for every batch,
                and hooks inside a step, such as on_after_backward, are not supported. A smaller last batch of an epoch
                is allowed.
            tf32: On a GPU, use TF32 for float32 matmuls: their inputs are rounded to 10 instead of 23 bits, and they
                run several times as fast. It has no effect on bf16-mixed.
        """
        self.cuda_graph = cuda_graph
        self.tf32 = tf32
        self._steps: Blocks | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        if stage == "fit" and self.cuda_graph and trainer.strategy.root_device.type == "cuda":
            refuse_capture(trainer)
            self._steps = Blocks(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.release()

    def release(self) -> None:
        """Drops the captured step, and with it the memory it holds."""
        if self._steps is not None:
            self._steps.release()


class Blocks(StepTaker):
    """Takes a captured step on the batch of the loop, and on those after it up to the next event."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.release()

    def release(self) -> None:
        """Drops the captured step, and with it the memory it holds."""
        self._captured: CapturedStep | None = None
        self._first: Tensor | None = None
        self._kind: tuple[Any, ...] | None = None
        self._since_swap = 0
        self._begun: tuple[float, int] | None = None
        """Time and step at which the last block began."""

    def take(self, batch: Any) -> dict[str, Any]:
        trainer = self.trainer
        captured = self._captured_for(batch)
        if captured is None:
            return self.take_single(batch)
        module, optimizer = trainer.lightning_module, trainer.optimizers[0]
        left, is_scheduled = self._length() - 1, bool(trainer.lr_scheduler_configs)
        losses = [captured(batch)]
        self.count_step()
        while left > 0 and not is_to_end(trainer) and self.begin_next():
            batch = self.batch
            left -= 1
            # a schedule may change more than rates
            is_alike = step_kind(batch, optimizer) == captured.kind if is_scheduled else captured.takes(batch)
            if not is_alike:
                losses.append(self.take_single(batch)["loss"])
                break
            losses.append(captured(batch))
            self.count_step()
        module.__dict__["train_loss"] = losses[-1]  # past nn.Module's own __setattr__, which takes long
        return {"loss": losses[-1]} | ({"losses": torch.stack(losses)} if len(losses) > 1 else {})

    def _length(self) -> int:
        """How many steps there are to the next after which Lightning, or a callback, has something to do."""
        trainer, now = self.trainer, time.perf_counter()
        step = trainer.global_step
        most: float = LONGEST
        if self._begun is not None and step > self._begun[1]:
            most = min(most, SECONDS * (step - self._begun[1]) / (now - self._begun[0]))
        self._begun = now, step
        return max(1, int(min(most, steps_to_event(trainer))))

    def _captured_for(self, batch: Any) -> CapturedStep | None:
        """The graph of a step on this batch; None where Lightning must take the step.

        A graph is made for the second step in a row of a kind: not for the ragged batch at the end of an epoch, nor for
        every value of a weight decay that changes all the time.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        first = next(module.parameters(), None)
        if first is not self._first:
            self.release()  # the network is another one
            self._first = first
        kind, before = step_kind(batch, trainer.optimizers[0]), self._kind
        self._kind = kind
        self._since_swap += 1
        if self._captured is not None and self._captured.kind == kind:
            return self._captured
        if self._since_swap <= WARM_UP or kind != before:
            return None
        self._captured = None  # its memory, before the next takes as much
        self._captured = CapturedStep(lambda inputs: gradients(trainer, module, inputs), trainer.optimizers[0], batch)
        return self._captured


def steps_to_event(trainer: Trainer) -> float:
    """How many steps there are to the end of the next after which hooks have something to do, counting that step.

    The one place that knows which steps Lightning and the callbacks look for.
    """
    if has_foreign_hooks(trainer):
        return 1
    step, every = trainer.global_step, log_interval(trainer)
    found = [steps_to_validation_or_end(trainer)]
    if every:
        found.append(steps_to(every, step))
    for callback in callbacks_of(trainer):
        if isinstance(callback, LearningRateMonitor):  # it logs before the step whose end is logged
            found.append(steps_to(every, step + 1) if every and (step + 1) % every else 1)
        elif isinstance(callback, ModelCheckpoint):
            if saves_every(callback):
                found.append(steps_to(saves_every(callback), step))
        else:
            # of an UpscaleCallback and a TrialMetric, which import this file
            at_step, every_check = getattr(callback, "at_step", None), getattr(callback, "checks_every", None)
            if isinstance(at_step, int) and step < at_step:
                found.append(at_step - step)
            if isinstance(every_check, int):
                found.append(steps_to(every_check, step))
    return min(found)


def is_to_end(trainer: Trainer) -> bool:
    """Whether a signal asks the run to end."""
    asked = (callback.stop for callback in callbacks_in(trainer, RunCheckpoint))
    return trainer.received_sigterm or any(stop is not None and stop.number is not None for stop in asked)


def has_foreign_hooks(trainer: Trainer) -> bool:
    """Whether the module, or a callback that is neither ours nor known, has a hook of every step."""
    module = trainer.lightning_module
    if any(is_overridden(hook, module) for hook in OF_STEPS):
        return True
    return any(
        is_overridden(hook, callback) and is_foreign(callback, hook)
        for callback in callbacks_of(trainer)
        for hook in OF_STEPS
    )


def is_foreign(callback: Callback, hook: str) -> bool:
    """Whether a hook of a callback is neither ours nor one of which it is known which steps it needs."""
    says = getattr(callback, "needs_every_step", None)
    if says is not None:
        return bool(says)
    if isinstance(callback, ProgressBar | LearningRateMonitor | ModelCheckpoint):
        return False
    home = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), type(callback))
    return hook in vars(callback) or not home.__module__.startswith("mupscale.")


def steps_to(multiple: int, step: int) -> int:
    """How many steps it is to the next step that is a multiple."""
    return multiple - step % multiple


def gradients(trainer: Trainer, module: Any, batch: Any) -> Tensor:
    """The loss of a batch; its gradients, clipped, are left in the parameters."""
    outer = enter_hook(module, None)  # `self.log` in a captured step is an error
    try:
        with trainer.precision_plugin.train_step_context(), torch.enable_grad():
            loss = module.loss(batch)
        loss.backward()
        module.configure_gradient_clipping(
            trainer.optimizers[0], trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        )
    finally:
        enter_hook(module, outer)
    return loss


def hook_inside_a_step(trainer: Trainer) -> tuple[str, str] | None:
    """The class and the name of a hook that neither a captured step nor one of a stack calls; None if there is none."""
    owners = [(callback, Callback) for callback in callbacks_of(trainer)]
    for owner, kind in (*owners, (trainer.lightning_module, LightningModule)):
        for hook in INSIDE_A_STEP:
            if hasattr(kind, hook) and is_overridden(hook, owner, kind):
                return type(owner).__name__, hook
    return None


def why_single(trainer: Trainer) -> str | None:
    """Why Lightning must take each step of a fit, so that it is neither captured nor stacked; None if it need not."""
    module, plugin, data = trainer.lightning_module, trainer.precision_plugin, datamodule_of(trainer)
    name = type(module).__name__
    if type(module).training_step is not Growable.training_step:
        return f"{name} has a training_step of its own, not the `loss(batch)` of a Growable"
    if type(trainer.strategy) is not SingleDeviceStrategy:
        return "the run has several devices"
    if not module.automatic_optimization:
        return f"{name} has manual optimization"
    if trainer.accumulate_grad_batches != 1:
        return f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, not 1"
    if not isinstance(profiler_of(trainer), PassThroughProfiler):
        return "trainer.profiler needs single steps"
    if detects_anomalies(trainer):
        return "trainer.detect_anomaly needs single steps; set it to false"
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        return "trainer.precision is 16-mixed, which scales each loss; use bf16-mixed"
    for method in ("on_train_batch_start", *TRANSFER):
        if is_overridden(method, module):
            return f"{name} overrides {method}"
    if any(is_overridden(hook, data) for hook in TRANSFER):
        return f"{type(data).__name__} has a hook that transfers batches"
    inside = hook_inside_a_step(trainer)
    return None if inside is None else f"{inside[0]} has a hook inside the step, {inside[1]}"


def refuse_capture(trainer: Trainer) -> None:
    reason = why_single(trainer)
    if reason is None and type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        reason = f"trainer.precision = {trainer.precision} converts inputs; use 32-true or bf16-mixed"
    if reason is not None:
        raise UserError(f"loop.cuda_graph: {reason}")
