"""A training loop with little overhead between steps, and steps as CUDA graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from mupscale.callbacks.step_blocks import OF_STEPS, StepBlocks, takes_blocks
from mupscale.cuda_graph import CapturedStep, step_kind
from mupscale.errors import UserError
from mupscale.models._lightning import (
    EpochLoop,
    callbacks_of,
    datamodule_of,
    detects_anomalies,
    enter_hook,
    hands_over_the_iterator,
    profiler_of,
)
from mupscale.models.base import Growable

INSIDE_A_STEP = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "backward", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip
"""Hooks of modules and callbacks that a captured step, or one of a stack, cannot call."""

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

WARM_UP = 3
"""Steps before a capture: the first ones make optimizer state, compile, and choose kernels."""


class FastLoop(Callback):
    """A training loop with little overhead between steps, for fits on one device.

    Counters, hooks, logs and checkpoints are the same as in Lightning's loop.

    Lightning prepares and profiles every hook of every callback around every step, which takes half a millisecond or
    more. This loop calls only the hooks that are overridden. Cases that it does not support (several devices, gradient
    accumulation, a profiler, manual optimization) use Lightning's own loop.
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

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.tf32:
            torch.set_float32_matmul_precision("high")
        if stage != "fit":
            return
        loop = trainer.fit_loop.epoch_loop
        if not isinstance(loop, LeanEpochLoop):
            loop = trainer.fit_loop.epoch_loop = LeanEpochLoop(loop)
        loop.cuda_graph = self.cuda_graph and trainer.strategy.root_device.type == "cuda"
        if loop.cuda_graph:
            refuse_capture(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.fit_loop.epoch_loop, LeanEpochLoop):
            trainer.fit_loop.epoch_loop.release()


class LeanEpochLoop(EpochLoop):
    """Lightning's loop over batches, with the plain case written out."""

    cuda_graph = False

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._blocks: StepBlocks | None = None
        self.release()

    def release(self) -> None:
        """Drops the captured step, and with it the memory it holds."""
        self._captured: CapturedStep | None = None
        self._network: torch.nn.Module | None = None
        self._kind: tuple[Any, ...] | None = None
        self._since_swap = 0

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        trainer, module = self.trainer, self.trainer.lightning_module
        self._module = module
        self._plain = plain(trainer) and not hands_over_the_iterator(data_fetcher)
        for hook in OF_STEPS:
            self._hooks[hook] = [
                partial(getattr(c, hook), trainer, module) for c in callbacks_of(trainer) if is_overridden(hook, c)
            ]
        if is_overridden("on_train_batch_end", module):
            self._hooks["on_train_batch_end"].append(module.on_train_batch_end)
        self._blocks = StepBlocks(trainer) if self._plain and self.cuda_graph and takes_blocks(trainer) else None

    def advance(self, data_fetcher: Any) -> None:
        if self.restarting or not self._plain:
            super().advance(data_fetcher)
            return
        if self._captured is not None and self._blocks is not None and self._blocks.take(self._captured):
            return
        batch, batch_idx = self.before_step(data_fetcher)
        outputs = None if batch is None else self._step(self.trainer, self._module, batch, batch_idx)
        self.after_step(outputs, batch, batch_idx)

    def before_step(self, data_fetcher: Any) -> tuple[Any, int]:
        """The next batch, on its device, and its number; the hooks before a step are called."""
        trainer, progress = self.trainer, self.batch_progress
        self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        if not self._plain:
            batch = trainer.precision_plugin.convert_input(batch)
        if not is_resident(batch, trainer.strategy.root_device):
            batch = trainer.strategy.batch_to_device(batch)
        progress.increment_ready()
        self.log_connector.on_batch_start(batch)
        if batch is None:
            self.warn_once("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            self._call(self._module, "on_train_batch_start", batch, batch_idx)
            progress.increment_started()
        return batch, batch_idx

    def after_step(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Advances schedules and counters after a step, and calls the hooks after it."""
        progress = self.batch_progress
        progress.increment_processed()
        if self.trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self.is_at_last_batch:
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call(self._module, "on_train_batch_end", outputs, batch, batch_idx)
        logged = bool(self.logged)  # most runs log by callbacks, and `self.log` nothing but validations
        if logged:
            self.log_connector.on_batch_end()
        self.logged.batch = None
        progress.increment_completed()
        if logged:
            self.log_connector.update_train_step_metrics()

    def _call(self, module: LightningModule, hook: str, *arguments: Any) -> None:
        outer = enter_hook(module, hook)
        for function in self._hooks[hook]:
            function(*arguments)
        enter_hook(module, outer)

    def _step(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Any:
        captured = self._captured_for(trainer, module, batch) if self.cuda_graph else None
        if captured is None:
            arguments = self.step_arguments(batch, batch_idx)
            return self.automatic_optimization.run(trainer.optimizers[0], batch_idx, arguments)
        return self.count_step(module, captured(batch))

    def count_step(self, module: LightningModule, loss: Tensor) -> dict[str, Tensor]:
        optimizer = self.automatic_optimization.optim_progress.optimizer
        optimizer.step.increment_by(1)
        optimizer.zero_grad.increment_by(1)
        module.__dict__["train_loss"] = loss
        return {"loss": loss}

    def _captured_for(self, trainer: Trainer, module: LightningModule, batch: Any) -> CapturedStep | None:
        """The graph of a step on this batch; None where Lightning must take the step.

        A graph is made for the second step in a row of a kind: not for the ragged batch at the end of an epoch, nor for
        every value of a weight decay that changes all the time.
        """
        assert isinstance(module, Growable)
        if module.net is not self._network:
            self.release()  # a swap has put in another network
            self._network = module.net
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


def gradients(trainer: Trainer, module: Growable, batch: Any) -> Tensor:
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


def plain(trainer: Trainer) -> bool:
    """Whether a step is one unmodified batch on one device, without a profiler or other observers."""
    module = trainer.lightning_module
    return (
        type(trainer.strategy) is SingleDeviceStrategy
        and module.automatic_optimization
        and trainer.accumulate_grad_batches == 1
        and isinstance(profiler_of(trainer), PassThroughProfiler)
        and type(trainer.precision_plugin).convert_input is Precision.convert_input
        and not is_overridden("on_train_batch_start", module)  # which may end the epoch
        and not any(is_overridden(hook, owner) for hook in TRANSFER for owner in (module, datamodule_of(trainer)))
    )


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
    if not isinstance(module, Growable):
        return f"the model is a {name}, not a Growable"
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
    for method in ("training_step", "on_train_batch_start", *TRANSFER):
        if getattr(type(module), method) is not getattr(Growable, method):
            return f"{name} overrides {method}"
    if any(is_overridden(hook, data) for hook in TRANSFER):
        return f"{type(data).__name__} has a hook that transfers batches"
    inside = hook_inside_a_step(trainer)
    return None if inside is None else f"{inside[0]} has a hook inside the step, {inside[1]}"


def refuse_capture(trainer: Trainer) -> None:
    reason = why_single(trainer)
    if reason is None and not plain(trainer):
        reason = f"trainer.precision = {trainer.precision} converts inputs; use 32-true or bf16-mixed"
    if reason is not None:
        raise UserError(f"FastLoop.cuda_graph: {reason}")


def is_resident(batch: Any, device: torch.device) -> bool:
    """Whether a batch lies on the device already."""
    parts = batch if type(batch) in (tuple, list) else (batch,)
    return all(isinstance(part, Tensor) and part.device == device for part in parts)
