"""Upscaling in the middle of a run."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, WeightAveraging
from lightning.pytorch.utilities import rank_zero_info
from mupscale.models.base import Width, WidthScalable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from mupscale.algorithm import upscale
from mupscale.noise import Noise
from mupscale.optim import check_transfer, continued_groups, transfer_state
from mupscale.widths import Plan, plan


class UpscaleCallback(Callback):
    """Swaps in a widened network, with its optimizer state, at a step. Several in one run make a growth schedule.

    The swap happens when the first batch after `at_step` optimizer steps comes in, so checkpoints of that step are still narrow, and
    a run resumed from one replays it. A network that has the target width already is left alone. Before anything is
    consumed the plan and the noise are validated and `pre-upscale-<step>.ckpt` is written beside the run's checkpoints.

    Saved: what it did, for the summary; width and state are the module's and the optimizer's.
    """

    def __init__(
        self,
        at_step: int,
        width: Width,
        noise: Noise | None = None,
        lr: float | None = None,
        transfer_state: bool = True,
        restart_schedule: bool = False,
    ) -> None:
        """
        Args:
            at_step: Optimizer steps before the swap; 0 upscales before the first.
            width: The target width, a multiple of the width before.
            noise: Symmetry-breaking noise; none leaves the loss curve as it was.
            lr: The base learning rate from there on; by default the one so far.
            transfer_state: Carry the optimizer state over; otherwise it starts anew.
            restart_schedule: Start the learning-rate schedule at zero again.
        """
        if at_step < 0:
            raise ValueError(f"UpscaleCallback.at_step must be at least 0, got {at_step}")
        if lr is not None and lr <= 0:
            raise ValueError(f"UpscaleCallback.lr must be positive, got {lr}")
        self.at_step = at_step
        self.width = width
        self.noise = noise
        self.lr = lr
        self.transfer_state = transfer_state
        self.restart_schedule = restart_schedule
        self.checkpoint: Path | None = None
        self.summary: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.summary)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.summary = dict(state_dict)

    @property
    def state_key(self) -> str:
        return f"UpscaleCallback[at_step={self.at_step},width={self.width}]"

    # --- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses, before training, what cannot work."""
        if stage != "fit":
            return
        if not isinstance(pl_module, WidthScalable):
            raise ValueError(f"UpscaleCallback needs a WidthScalable module, model is a {type(pl_module).__name__}")
        if 0 < trainer.max_steps <= self.at_step:
            raise ValueError(f"UpscaleCallback.at_step = {self.at_step} is never reached: trainer.max_steps = {trainer.max_steps}")
        before = self._width_before(trainer, pl_module)
        with _quietly_built(pl_module):
            try:
                growth = plan(pl_module.network(before, meta=True), pl_module.network(self.width, meta=True))
            except ValueError as error:
                raise ValueError(f"UpscaleCallback.width = {self.width} does not fit the width before it, {before}: {error}") from error
        if self.noise is not None:
            self.noise.check(growth)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.max_steps <= self.at_step and trainer.estimated_stepping_batches <= self.at_step:
            raise ValueError(
                f"UpscaleCallback.at_step = {self.at_step} is never reached: the run has {trainer.estimated_stepping_batches} steps"
            )
        if self.is_due(trainer, pl_module):
            self._save(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_due(trainer, pl_module) and self.checkpoint is None:
            self._save(trainer)  # here loops and data stand between two steps, as after a swap they would not

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_due(trainer, pl_module):
            assert isinstance(pl_module, WidthScalable)
            try:
                self._swap(trainer, pl_module, batch)
            except Exception as error:
                raise RuntimeError(
                    f"upscaling to width {self.width} at step {trainer.global_step} failed ({type(error).__name__}: {error}). "
                    f"Nothing is lost: the run before it is saved in {self.checkpoint}"
                ) from error

    def is_due(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        assert isinstance(pl_module, WidthScalable)
        return trainer.global_step >= self.at_step and _narrower(pl_module.width, self.width)

    # --- the swap

    def _swap(self, trainer: Trainer, module: WidthScalable, batch: Any) -> None:
        start = time.perf_counter()
        loss_before = _loss(trainer, module, batch)
        narrow, narrow_width = module.net, module.width
        assert narrow is not None
        narrow_opts = list(trainer.optimizers)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        seed = _seed(trainer.global_step)

        averaged = self._widened_average(trainer, module, seed)
        if module.hparams["compile"]:
            torch.compiler.reset()
        with _init_contexts(trainer):
            module.net = wide = module.network(self.width, meta=True)
            module.prepare_network()
        if module.device_mesh is not None:
            wide.to_empty(device=module.device)
        growth = plan(narrow, wide)
        for optimizer in narrow_opts if self.transfer_state else ():
            check_transfer(growth, narrow, optimizer, wide, None)
        report = upscale(narrow, wide, noise=self.noise, seed=seed, consume=True)
        module.hparams["width"] = self.width
        trainer.strategy.connect(module)
        trainer.strategy.setup(trainer)
        for before, after in zip(narrow_opts, trainer.optimizers, strict=True):
            if any(p is q for g in after.param_groups for p in g["params"] for q in narrow.parameters()):
                raise ValueError(
                    f"{type(module).__name__}.configure_optimizers returned an optimizer over the old parameters; make a new one"
                )
            self._continue(growth, narrow, before, wide, after)
        for config, old in zip(trainer.lr_scheduler_configs, schedulers, strict=True):
            if not self.restart_schedule:
                continue_schedule(old, config.scheduler)
        for callback, model in averaged:
            callback._average_model = AveragedModel(module, device=callback._device, use_buffers=callback._use_buffers, **callback._kwargs)
            callback._average_model.n_averaged.copy_(model.n_averaged)
            callback._average_model.module.net = model.module
        for monitor in (c for c in trainer.callbacks if isinstance(c, LearningRateMonitor)):
            monitor.on_train_start(trainer)  # the number of parameter groups may have changed
        del narrow, narrow_opts, schedulers
        seconds = time.perf_counter() - start
        self._log(trainer, module, narrow_width, growth, loss_before, _loss(trainer, module, batch), seconds)
        if report.notes:
            rank_zero_info("\n".join(report.notes))

    def _continue(self, growth: Plan, narrow: nn.Module, before: Optimizer, wide: nn.Module, after: Optimizer) -> None:
        """State by name, and each group's rate: the narrow one's by the rule, or the schedule's start at a new base constant."""
        ratio = 1.0 if self.lr is None else self.lr / float(before.defaults["lr"])
        rates = {id(p): group for group in continued_groups(growth, narrow, before, wide) for p in group["params"]}
        for group in after.param_groups:
            source = rates[id(group["params"][0])]
            for key in ("lr", "initial_lr"):
                if key in group:
                    value = source.get("initial_lr", source["lr"]) if self.restart_schedule else source.get(key, source["lr"])
                    group[key] = value * ratio
        after.defaults["lr"] = before.defaults["lr"] * ratio
        if self.transfer_state:
            transfer_state(growth, narrow, before, wide, after, consume=True)

    def _widened_average(self, trainer: Trainer, module: WidthScalable, seed: int) -> list[tuple[WeightAveraging, Any]]:
        """For each EMA callback its widened average, with the noise that the model gets."""
        answer = []
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging) and callback._average_model is not None:
                average = callback._average_model
                with _init_contexts(trainer):
                    wide = module.network(self.width, meta=True)
                upscale(average.module.net, wide, noise=self.noise, seed=seed)
                average.module = wide
                answer.append((callback, average))
        return answer

    def _save(self, trainer: Trainer) -> None:
        checkpointing = trainer.checkpoint_callback
        folder = getattr(checkpointing, "dirpath", None) or trainer.log_dir or trainer.default_root_dir
        self.checkpoint = Path(trainer.strategy.broadcast(str(folder))) / f"pre-upscale-{trainer.global_step}.ckpt"
        trainer.save_checkpoint(self.checkpoint)

    def _log(
        self, trainer: Trainer, module: WidthScalable, before: Width, growth: Plan, loss_before: Tensor, loss_after: Tensor, seconds: float
    ) -> None:
        parameters = sum(p.numel() for p in module.parameters())
        self.summary = {
            "step": trainer.global_step, "before": before, "after": self.width, "parameters": parameters, "seconds": seconds,
            "loss_before": float(loss_before), "loss_after": float(loss_after),
        }  # fmt: skip
        values = {
            "upscale/loss_before": float(loss_before),
            "upscale/loss_after": float(loss_after),
            "upscale/pause_seconds": seconds,
            "upscale/parameters": parameters,
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
            writer = getattr(logger.experiment, "add_text", None)
            if writer is not None:
                logger.experiment.add_text("upscale/plan", f"```\n{growth}\n```", trainer.global_step)
        rank_zero_info(
            f"step {trainer.global_step}: upscaled width {before} → {self.width}, {parameters:,} parameters, "
            f"loss {float(loss_before):.6f} → {float(loss_after):.6f}, {seconds:.2f} s"
        )

    def _width_before(self, trainer: Trainer, module: WidthScalable) -> Width:
        """The width this swap will start from: the model's, or that of the swap before it."""
        earlier = [c for c in trainer.callbacks if isinstance(c, UpscaleCallback) and c.at_step < self.at_step]
        return max(earlier, key=lambda c: c.at_step).width if earlier else module.width


def continue_schedule(old: Any, new: Any) -> None:
    """Loads the old schedule's position into the new one, whose groups, and so rates, are its own."""
    state = old.state_dict()
    _replace_rates(state, new)
    new.load_state_dict(state)


def _replace_rates(state: dict[str, Any], new: Any) -> None:
    for key in ("base_lrs", "min_lrs"):
        if key in state:
            state[key] = list(getattr(new, key))
    if "_last_lr" in state:
        state["_last_lr"] = [group["lr"] for group in new.optimizer.param_groups]
    if "lr_lambdas" in state:
        state["lr_lambdas"] = [None] * len(new.lr_lambdas)
    for part, scheduler in zip(state.get("_schedulers", ()), getattr(new, "_schedulers", ()), strict=True):
        _replace_rates(part, scheduler)


@torch.no_grad()
def _loss(trainer: Trainer, module: WidthScalable, batch: Any) -> Tensor:
    """The loss of a batch, leaving buffers (running statistics) and the random state as they were."""
    assert module.net is not None
    buffers = {name: buffer.clone() for name, buffer in module.net.named_buffers()}
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.random.fork_rng(devices), trainer.precision_plugin.forward_context():
        loss = module.loss(batch).detach()
    for name, buffer in module.net.named_buffers():
        buffer.copy_(buffers[name])
    for part in module.net.modules():
        if hasattr(part, "reshard"):  # FSDP2 keeps the outermost parameters whole for a backward pass that does not come
            part.reshard()
    return loss


@contextmanager
def _init_contexts(trainer: Trainer) -> Iterator[None]:
    """The contexts in which Lightning itself calls `configure_model`."""
    with ExitStack() as stack:
        stack.enter_context(trainer.strategy.tensor_init_context())
        stack.enter_context(trainer.strategy.model_sharded_context())
        stack.enter_context(trainer.precision_plugin.module_init_context())
        yield


@contextmanager
def _quietly_built(module: WidthScalable) -> Iterator[None]:
    """Building on the meta device must not move the run's random numbers."""
    with torch.random.fork_rng(devices=[]):
        yield


def _narrower(width: Width, target: Width) -> bool:
    widths, targets = ([w] if isinstance(w, int) else w for w in (width, target))
    if len(widths) != len(targets):
        return True
    return any(a < b for a, b in zip(widths, targets, strict=True))


def _seed(step: int) -> int:
    """The noise of a run depends on its seed and the step, not on how often it was interrupted."""
    import os

    return int(os.environ.get("PL_GLOBAL_SEED", "0")) * 1_000_003 + step
