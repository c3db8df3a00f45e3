"""A training loop with little overhead between steps, and steps as CUDA graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from mupscale.callbacks.fit_threads import FitThread, current_fit_thread
from mupscale.callbacks.stack_rules import OF_STEPS, TRANSFER, free_steps, is_scored_jointly, why_single
from mupscale.callbacks.stacked_fits import Awaited, is_resident
from mupscale.callbacks.step_blocks import StepBlocks, takes_blocks
from mupscale.cuda_graph import CapturedStep, step_kind
from mupscale.errors import UserError
from mupscale.models._lightning import callbacks_of, datamodule_of, enter_hook, profiler_of
from mupscale.models._lightning_loop import EpochLoop, hands_over_the_iterator, leave_steps, validate_outside
from mupscale.models.base import Growable

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
        loop.thread = current_fit_thread()
        if isinstance(pl_module, Growable):
            pl_module.is_in_stack = loop.thread is not None
        if loop.cuda_graph:
            refuse_capture(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.fit_loop.epoch_loop, LeanEpochLoop):
            trainer.fit_loop.epoch_loop.release()


class LeanEpochLoop(EpochLoop):
    """Lightning's loop over batches, with the plain case written out."""

    cuda_graph = False
    thread: FitThread | None = None
    """Of the fits that take their steps together, if this is one of them."""

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
        self._plain = plain(trainer) and not hands_over_the_iterator(data_fetcher)
        for hook in OF_STEPS:
            self._hooks[hook] = [
                partial(getattr(c, hook), trainer, module) for c in callbacks_of(trainer) if is_overridden(hook, c)
            ]
        if is_overridden("on_train_batch_end", module):
            self._hooks["on_train_batch_end"].append(module.on_train_batch_end)
        self._blocks = StepBlocks(trainer) if self._plain and self.cuda_graph and takes_blocks(trainer) else None

    def advance(self, data_fetcher: Any) -> None:
        if self.thread is not None:
            if self.finish_validation(data_fetcher) or self._took_free_steps(self.thread):
                return
        elif self.restarting or not self._plain:
            super().advance(data_fetcher)
            return
        elif self._captured is not None and self._blocks is not None and self._blocks.take(self._captured):
            return
        trainer, progress = self.trainer, self.batch_progress
        module, connector = trainer.lightning_module, self.log_connector
        self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        if self.thread is not None:
            batch = trainer.precision_plugin.convert_input(batch)
        if not is_resident(batch, trainer.strategy.root_device):
            batch = trainer.strategy.batch_to_device(batch)
        progress.increment_ready()
        connector.on_batch_start(batch)
        outputs = None
        if batch is None:
            self.warn_once("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            self._call(module, "on_train_batch_start", batch, batch_idx)
            progress.increment_started()
            outputs = self._step(trainer, module, batch, batch_idx)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self.is_at_last_batch:
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call(module, "on_train_batch_end", outputs, batch, batch_idx)
        logged = bool(self.logged)  # most runs log by callbacks, and `self.log` nothing but validations
        if logged:
            connector.on_batch_end()
        self.logged.batch = None
        progress.increment_completed()
        if logged:
            connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: Any) -> None:
        trainer = self.trainer
        is_due = self.thread is not None and not trainer.should_stop and self.is_validation_next(data_fetcher)
        if is_due and is_scored_jointly(trainer):
            assert self.thread is not None
            alone, scores = self.thread.wait(Awaited(trainer, self.cuda_graph, "scores"))
            if alone:
                self._leave_the_others()
            else:
                validate_outside(trainer, *scores)
        super().on_advance_end(data_fetcher)

    def _took_free_steps(self, thread: FitThread) -> bool:
        """Takes steps that need no hooks, with the others; False where the next one needs them."""
        free = free_steps(self.trainer)
        if free < 1:
            return False
        alone, taken = thread.wait(Awaited(self.trainer, self.cuda_graph, "free", free=free))
        if alone:
            self._leave_the_others()
            return False
        self.trainer.lightning_module.train_loss = torch.tensor(taken.loss, dtype=torch.float64)
        leave_steps(self.trainer, validated=taken.validated)
        return True

    def _leave_the_others(self) -> None:
        self.thread = None
        module = self.trainer.lightning_module
        assert isinstance(module, Growable)
        module.is_in_stack = False
        if module.hparams["compile"] and module.net is not None:
            module.compile_network(module.net)

    def _call(self, module: LightningModule, hook: str, *arguments: Any) -> None:
        outer = enter_hook(module, hook)
        for function in self._hooks[hook]:
            function(*arguments)
        enter_hook(module, outer)

    def _step(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Any:
        if self.thread is not None:
            alone, loss = self.thread.wait(Awaited(trainer, self.cuda_graph, "step", batch))
            if not alone:
                return self._counted(module, loss)
            self._leave_the_others()
        captured = self._captured_for(trainer, module, batch) if self.cuda_graph else None
        if captured is None:
            arguments = self.step_arguments(batch, batch_idx)
            return self.automatic_optimization.run(trainer.optimizers[0], batch_idx, arguments)
        return self._counted(module, captured(batch))

    def _counted(self, module: LightningModule, loss: Tensor) -> dict[str, Tensor]:
        """Counts a step that Lightning did not take."""
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


def refuse_capture(trainer: Trainer) -> None:
    """Raises a UserError, with the reason, if a step cannot be one graph."""
    reason = why_single(trainer)
    if reason is None and not plain(trainer):
        reason = f"trainer.precision = {trainer.precision} converts inputs; use 32-true or bf16-mixed"
    if reason is not None:
        raise UserError(f"FastLoop.cuda_graph: {reason}")
