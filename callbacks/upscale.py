"""The callback that upscales in the middle of a run: when it does, and what it refuses, saves and logs.

The swap itself is in `swap.py`.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from mupscale.callbacks.incompatible import refuse_callbacks
from mupscale.callbacks.own_batches import refuse_many_loaders
from mupscale.callbacks.run_checkpoint import RunCheckpoint, write_whole_files
from mupscale.callbacks.strides import Strides
from mupscale.callbacks.swap import Grown, Measured, RefusedSwap, Swap, keep_units_of_own_optimizers, loss_of
from mupscale.callbacks.tensorboard import tag_in
from mupscale.checks.random_numbers import generators_kept
from mupscale.device_memory import physical_memory
from mupscale.errors import UserError
from mupscale.layer_names import notes_by_layer
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.noise import Noise
from mupscale.models._lightning import callbacks_of, is_trial_run, set_callbacks
from mupscale.models.arguments import refuse_bad_width
from mupscale.models.base import Growable, has_own_optimizers, hint_of_parameters_outside, parameters_outside
from mupscale.models.checkpoint import PRE_UPSCALE, Width, load_checkpoint, non_finite_in
from mupscale.models.growth_check import REMEDY, check_growth, refuse_inexact
from mupscale.schedule_state import refuse_one_rate_for_all
from mupscale.widening.optimizers import rule_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.stepping import StateRule, check_own_count, check_state_rule, names_by_id


class UpscaleCallback(Strides):
    """Widens the network and its optimizer state at a given step of a run. Use several for several growths.

    The swap happens just before the first batch after `at_step` optimizer steps. So a checkpoint of that step is still
    narrow, and a run that resumes from it repeats the swap. A network that already has the target width stays as it is.
    Before the swap, the plan and the noise are validated, and `pre-upscale-<step>.ckpt` is written next to the run's
    checkpoints, unless the run was resumed from a checkpoint of the same step.

    Whether the growth is exact is checked twice: at the first batch of the run, with small networks of the same factor
    in float64, so that a wrong model fails at once; and at the swap, by the loss of a batch before noise is added.

    Its saved state is a record of the swap, for the summary.
    """

    def __init__(
        self,
        at_step: int,
        width: Width,
        noise: Noise | None = None,
        lr: float | None = None,
        transfer_state: StateRule | None = None,
        restart_schedule: bool = False,
        rewarm_steps: int = 0,
        method: GrowthMethod | None = None,
    ) -> None:
        """
        Args:
            at_step: The number of optimizer steps before the swap; with 0 the network grows before the first step.
            width: The target width, larger than the current one. If a norm averages over the width, it must be a
                multiple of the current width.
            noise: Noise that breaks the symmetry of copies. Without it, training continues exactly as before.
            lr: The base learning rate after the swap, of a module with one optimizer; by default unchanged.
            transfer_state: What happens to the optimizer state. `carry` moves it; `reset` drops it;
                `reset_new_copies` moves it for the first copy of each unit only. The default depends on `method`; the
                paper's duplication moves it.
            restart_schedule: Restart the learning-rate schedule from its beginning.
            rewarm_steps: With `reset_new_copies`, the steps over which the learning rate of new copies rises.
            method: The growth method; by default the paper's duplication.
        """
        if at_step < 0:
            raise UserError(f"UpscaleCallback.at_step must be at least 0, got {at_step}")
        refuse_bad_width("UpscaleCallback.width", width)
        if lr is not None and not (math.isfinite(lr) and lr > 0):
            raise UserError(f"UpscaleCallback.lr must be positive and finite, got {lr}")
        if noise is not None and not isinstance(noise, Noise):
            raise UserError(
                "UpscaleCallback.noise must be AdditiveNoise(std), SignalNoise(t) or RecordedNoise(path), got "
                f"{noise!r}"
            )
        self.method = Duplication() if method is None else method
        if not isinstance(self.method, GrowthMethod):
            raise UserError(
                f"UpscaleCallback.method must be a growth method, such as mupscale.methods.Net2Net; got {method!r}"
            )
        if noise is not None and self.method.noise is not None:
            raise UserError(
                f"UpscaleCallback.noise: {type(self.method).__name__} has noise of its own. Give none, or use another "
                "method"
            )
        state_rule = self.method.state if transfer_state is None else transfer_state
        try:
            check_state_rule(state_rule, rewarm_steps)
        except UserError as error:
            raise UserError(f"UpscaleCallback.transfer_state: {error}") from error
        self.at_step = at_step
        self.width = width
        self.noise = noise
        self.lr = lr
        self.state_rule = state_rule
        self.rewarm_steps = rewarm_steps
        self.restart_schedule = restart_schedule
        self.checkpoint: Path | None = None
        self.summary: dict[str, Any] = {}
        self._needs_check = False

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
        if not isinstance(pl_module, Growable):
            raise UserError(f"UpscaleCallback needs a Growable module, model is a {type(pl_module).__name__}")
        self.refuse_step(trainer)
        refuse_schedule([c for c in callbacks_of(trainer) if isinstance(c, UpscaleCallback)])
        write_whole_files(trainer)
        refuse_callbacks(callbacks_of(trainer))
        self.checkpoint = None
        self._needs_check = False
        # what it saves before a swap must hold what the other callbacks (EMA, curves) did after the step
        order = lambda c: (isinstance(c, Checkpoint), isinstance(c, UpscaleCallback))  # noqa: E731
        set_callbacks(trainer, sorted(callbacks_of(trainer), key=order))
        before = self._width_before(trainer, pl_module)
        if not is_narrower(before, self.width):
            return  # right for a run that is resumed after the swap; whether it is one is not known yet
        growth = self.planned(pl_module, before)
        with generators_kept([]):
            narrow = pl_module.network(before, meta=True)
        self._needs_check = self.method.claim(growth, narrow, ()).function  # others change the function anyway
        if self.method.needs_batches and pl_module.device_mesh is not None:
            raise UserError(
                f"UpscaleCallback.method: {type(self.method).__name__} cannot learn on sharded weights. Use another "
                "method, or train with DDP or on one device"
            )
        if pl_module.device_mesh is None:  # sharded, it may fit
            self._refuse_too_wide(growth, trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        if 0 < steps <= self.at_step and not is_trial_run(trainer):
            raise UserError(f"UpscaleCallback.at_step = {self.at_step} is never reached: the run has {steps} steps")
        before = self._width_before(trainer, pl_module)
        if trainer.ckpt_path is None:
            self.refuse_narrower(before)
        if self.method.needs_batches:
            refuse_many_loaders(f"UpscaleCallback.method = {type(self.method).__name__}", trainer)
        keep_units_of_own_optimizers(trainer, pl_module)
        for optimizer in trainer.optimizers:
            if self.state_rule == "reset_new_copies":
                check_own_count(optimizer)
        if is_narrower(before, self.width):
            self.refuse_one_rate(trainer, pl_module)
            _refuse_parameters_outside(trainer, pl_module)
        self._refuse_schedules(trainer, pl_module, before)
        if self.is_due(trainer, pl_module):
            self.checkpoint = Path(trainer.ckpt_path) if trainer.ckpt_path else self._saved(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_due(trainer, pl_module) and self.checkpoint is None:
            # here loops and data can be resumed exactly; in the middle of a step they cannot
            self.checkpoint = self._saved(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._needs_check:
            self._needs_check = False
            self._check_growth(trainer, pl_module, batch)
        if self.is_due(trainer, pl_module):
            assert isinstance(pl_module, Growable)
            try:
                self._swap(trainer, pl_module, batch)
            except Exception as error:
                is_of_shapes = type(error) is RuntimeError and pl_module.width == self.width
                hint = hint_of_parameters_outside(pl_module) if is_of_shapes else None
                # it may be neither narrow nor wide: Lightning would fail on it before it reports this error
                pl_module.net = None
                kind = RefusedSwap if isinstance(error, RefusedSwap) else RuntimeError
                raise kind(
                    f"upscaling to width {self.width} at step {trainer.global_step} failed "
                    f"({type(error).__name__}: {error}). {f'{hint}. ' if hint else ''}{_what_is_saved(self.checkpoint)}"
                ) from error

    def free_steps(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """All steps before the one that ends with a checkpoint; after the swap, all steps."""
        assert isinstance(pl_module, Growable)
        is_to_come = is_narrower(pl_module.width, self.width)
        if is_to_come and self._needs_check:
            return 0
        return max(0, self.at_step - 1 - trainer.global_step) if is_to_come else math.inf

    def is_due(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        assert isinstance(pl_module, Growable)
        return trainer.global_step >= self.at_step and is_narrower(pl_module.width, self.width)

    # --- what can be refused without a run

    def refuse_step(self, trainer: Trainer) -> None:
        """Raises a UserError if the run ends before the swap."""
        if 0 < trainer.max_steps <= self.at_step and not is_trial_run(trainer):
            raise UserError(
                f"UpscaleCallback.at_step = {self.at_step} is never reached: trainer.max_steps = {trainer.max_steps}"
            )

    def refuse_narrower(self, before: Width) -> None:
        """Raises a UserError if the target is narrower than the width before it."""
        if not is_narrower(before, self.width) and before != self.width:
            raise UserError(f"UpscaleCallback.width = {self.width} is not wider than the width before it, {before}")

    def refuse_one_rate(self, trainer: Trainer, module: LightningModule) -> None:
        """Raises a UserError if `lr` would be the rate of several optimizers."""
        if self.lr is not None and len(trainer.optimizers) > 1:
            raise UserError(
                f"UpscaleCallback.lr = {self.lr}: {type(module).__name__} has {len(trainer.optimizers)} optimizers, "
                "which would all get this rate. Leave it out, and change their rates by schedules, such as LambdaLR"
            )

    def planned(self, module: Growable, before: Width) -> Plan:
        """The plan of the swap. Raises a UserError if the width before it, or the noise, does not fit."""
        with generators_kept([]):  # building a network must not move the run's random numbers
            try:
                narrow, wide = (module.network(width, meta=True) for width in (before, self.width))
                growth = self.method.plan(narrow, wide)
            except ValueError as error:
                raise UserError(
                    f"UpscaleCallback.width = {self.width} does not fit the width before it, {before}: {error}"
                ) from error
        try:
            self.method.choose_noise(self.noise, growth, narrow)
        except ValueError as error:
            raise UserError(f"UpscaleCallback.noise: {error}") from error
        return growth

    # --- what is refused in a run

    def _refuse_too_wide(self, growth: Plan, device: torch.device) -> None:
        """Raises a UserError if the wide weights alone, at two bytes each, do not fit into the memory of a device."""
        weights = sum(math.prod(entry.wide_shape) for entry in growth.parameters.values())
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        elif device.type == "cpu":
            memory = physical_memory()
        else:
            return
        if 2 * weights > memory:
            raise UserError(
                f"UpscaleCallback.width = {self.width} gives {weights:,} parameters, which do not fit into the "
                f"{memory / 2**30:.0f} GiB of memory of {device}; choose a smaller width"
            )

    def _refuse_schedules(self, trainer: Trainer, module: LightningModule, before: Width) -> None:
        """Raises a UserError for a schedule that cannot continue after the swap."""
        assert isinstance(module, Growable)
        is_checked = has_own_optimizers(module) and is_narrower(before, self.width)
        if not is_checked or not trainer.lr_scheduler_configs:
            return
        assert module.net is not None
        growth = self.planned(module, before)
        for config in trainer.lr_scheduler_configs:
            factors = rate_factors(growth, module.net, config.scheduler.optimizer, self.method)
            try:
                refuse_one_rate_for_all(config.scheduler, factors)
            except UserError as error:
                raise UserError(f"{type(module).__name__}.{error}") from error

    def _width_before(self, trainer: Trainer, module: LightningModule) -> Width:
        """The width this swap will start from: the model's, or that of the swap before it."""
        assert isinstance(module, Growable)
        earlier = [c for c in callbacks_of(trainer) if isinstance(c, UpscaleCallback) and c.at_step < self.at_step]
        return max(earlier, key=lambda c: c.at_step).width if earlier else module.width

    def _check_growth(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Raises a UserError if small networks of the same factor show that the growth is not exact."""
        assert isinstance(module, Growable)
        before = self._width_before(trainer, module)
        if not is_narrower(module.width, self.width):
            return  # the run was resumed after the swap
        found = check_growth(module, before, self.width, batch)
        refuse_inexact(f"UpscaleCallback.width = {self.width}", before, found)
        if found.exact is None:
            rank_zero_info(f"whether growth from width {before} to {self.width} is exact was {found}")

    # --- the swap

    def _saved(self, trainer: Trainer) -> Path | None:
        """Writes the run before the swap beside its checkpoints."""
        if is_trial_run(trainer):
            return None
        policy = next((c for c in callbacks_of(trainer) if isinstance(c, RunCheckpoint)), None)
        keeper = policy or trainer.checkpoint_callback
        folder = getattr(keeper, "dirpath", None) or trainer.log_dir or trainer.default_root_dir
        path = Path(trainer.strategy.broadcast(str(folder))) / f"{PRE_UPSCALE}{trainer.global_step}.ckpt"
        if policy is not None:
            path = policy.free_path(path, trainer)
        trainer.save_checkpoint(path)
        return path

    def _swap(self, trainer: Trainer, module: Growable, batch: Any) -> None:
        start = time.perf_counter()
        before, narrow_width = loss_of(trainer, module, batch), module.width

        def compare() -> None:
            _refuse_jump(before, loss_of(trainer, module, batch), trainer, "an upscale before its noise")

        grown = self._grow(trainer, module, compare)
        after = loss_of(trainer, module, batch)
        losses = float(before.loss), float(after.loss)  # waits for the device
        if grown.keeps_function:
            _refuse_jump(before, after, trainer, "centred noise" if self.noise else "an upscale without noise")
        self._log(trainer, module, narrow_width, grown.plan, *losses, time.perf_counter() - start)
        notes = list(grown.notes)
        if not torch.equal(before.random_state, after.random_state):
            notes.append(
                "the loss draws other random numbers at the new width (dropout, or noise for each unit): training does "
                "not continue exactly"
            )
        if notes:
            rank_zero_info("\n".join(notes_by_layer(notes)))

    def _grow(self, trainer: Trainer, module: Growable, compare: Callable[[], None]) -> Grown:
        swap = Swap(
            width=self.width,
            method=self.method,
            noise=self.noise,
            lr=self.lr,
            state_rule=self.state_rule,
            rewarm_steps=self.rewarm_steps,
            restart_schedule=self.restart_schedule,
        )
        return swap.perform(trainer, module, compare)

    def _log(
        self,
        trainer: Trainer,
        module: Growable,
        before: Width,
        growth: Plan,
        loss_before: float,
        loss_after: float,
        seconds: float,
    ) -> None:
        parameters = sum(p.numel() for p in module.parameters())
        self.summary = {
            "step": trainer.global_step,
            "before": before,
            "after": self.width,
            "parameters": parameters,
            "seconds": seconds,
            "loss_before": loss_before,
            "loss_after": loss_after,
        }
        values = {
            "upscale/loss_before": loss_before,
            "upscale/loss_after": loss_after,
            "upscale/pause_seconds": seconds,
            "upscale/parameters": parameters,
            "upscale/width": max(self.width) if isinstance(self.width, list) else self.width,
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is not None:
                add_text(tag_in(logger, "upscale/plan"), f"```\n{growth}\n```", trainer.global_step)
        rank_zero_info(
            f"step {trainer.global_step}: upscaled width {before} → {self.width}, {parameters:,} parameters, "
            f"loss {loss_before:.6f} → {loss_after:.6f}, {seconds:.2f} s"
        )


def refuse_schedule(swaps: Sequence[UpscaleCallback]) -> None:
    """Raises a UserError for two upscales at one step, or for an invalid level of noise."""
    widths: dict[int, Width] = {}
    for swap in swaps:
        if swap.at_step in widths:
            first = widths[swap.at_step]
            what = f"to width {first}, twice" if first == swap.width else f"to widths {first} and {swap.width}"
            raise UserError(f"UpscaleCallback.at_step = {swap.at_step}: two upscales {what}. Keep one of them")
        widths[swap.at_step] = swap.width
        if swap.noise is not None:
            try:
                swap.noise.check_level()
            except ValueError as error:
                raise UserError(f"UpscaleCallback.noise: {error}") from error


def rate_factors(growth: Plan, narrow: nn.Module, optimizer: Optimizer, method: GrowthMethod) -> set[float]:
    """The factors by which the rates of an optimizer's parameters change when the network grows."""
    rule = rule_of(optimizer)
    names = names_by_id(narrow)
    factors = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                entry = growth.parameters[names[id(parameter)]]
                factors.add(rule.scale(group, method.mup_rates(entry)).lr)
    return factors


def _refuse_parameters_outside(trainer: Trainer, module: LightningModule) -> None:
    """Raises a UserError if an optimizer trains a parameter that is not in the network, and so cannot be carried."""
    assert isinstance(module, Growable)
    outside = {id(parameter): name for name, parameter in parameters_outside(module)}
    for optimizer in trainer.optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in outside:
                raise UserError(
                    f"{type(module).__name__}.configure_optimizers trains {outside[id(parameter)]!r}, which is not in "
                    "the network, so a growth cannot continue its optimizer. Make it in `build`, as a part of `net`"
                )


def _has_jumped(before: float, after: float, trainer: Trainer) -> bool:
    """Whether two losses differ by more than rounding.

    With TF32, on by default in convolutions on a GPU, and strong centred noise, they differ by up to 0.2 %; in half
    precision by more.
    """
    on_gpu = trainer.strategy.root_device.type == "cuda"
    is_fine = trainer.precision.startswith("64") or (trainer.precision.startswith("32") and not on_gpu)
    allowed = 1e-3 if is_fine else 5e-2
    return abs(after - before) > allowed * max(abs(before), abs(after), 1e-3)


def _refuse_jump(before: Measured, after: Measured, trainer: Trainer, growth: str) -> None:
    """Raises a RefusedSwap if a growth has changed the loss; not if the losses draw unlike random numbers."""
    if not torch.equal(before.random_state, after.random_state):
        return
    losses = float(before.loss), float(after.loss)
    if _has_jumped(*losses, trainer):
        raise RefusedSwap(
            f"the loss of a batch changed from {losses[0]:.6g} to {losses[1]:.6g}, but {growth} keeps it: the model is "
            f"not widened exactly. {REMEDY}"
        )


def _what_is_saved(checkpoint: Path | None) -> str:
    """Whether the run before a failed swap is saved, in words."""
    if checkpoint is None or not checkpoint.exists():
        return "The run before the upscale was not saved"
    if checkpoint.is_dir():
        return f"The run before the upscale is saved in {checkpoint}"
    try:
        saved = load_checkpoint(checkpoint)
    except UserError as error:
        return f"The checkpoint before the upscale cannot be read: {error}"
    bad = non_finite_in(saved)
    if bad is not None:
        return (
            f"The checkpoint before the upscale, {checkpoint}, has NaN or infinite entries in {bad}: use an earlier one"
        )
    return f"Nothing is lost: the run before the upscale is saved in {checkpoint}"


def is_narrower(width: Width, target: Width) -> bool:
    """Whether a width is smaller than the target, in at least one layer."""
    layers = max(len(w) if isinstance(w, list) else 1 for w in (width, target))
    widths, targets = (w if isinstance(w, list) else [w] * layers for w in (width, target))
    return any(a < b for a, b in zip(widths, targets, strict=False))  # of lists of unequal length `plan` tells
