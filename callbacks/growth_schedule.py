"""The growths of a run: what is planned, checked and done, and what its checkpoints record of it.

One object holds them, whatever the class of the module. Its optimizers and schedules stay the objects that
`configure_optimizers` made: their groups are split where parameters need different rates, and rescaled by Table 1.
"""

import copy
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import allocate_parameters_, apply_to_values_, is_compiled_in_place
from mupscale.base_shapes import clip_grad_norm_
from mupscale.callbacks.captured_steps import CapturedSteps
from mupscale.callbacks.losses import (
    Measured,
    effects_undone,
    first_samples,
    losses_of_step,
    measure_loss,
    reshard_,
    run_eagerly,
)
from mupscale.callbacks.own_code import HandSetRates, refuse_weights_outside, watch_callbacks
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.step_check import SAMPLES, StepCheck
from mupscale.callbacks.swap import OwnBatches, RefusedSwap, refuse_many_loaders
from mupscale.callbacks.tensorboard import tag_in
from mupscale.checks.check_step import Agreement, check_step
from mupscale.checks.weights import AS_THEY_ARE
from mupscale.device_memory import physical_memory, unreserved_bytes
from mupscale.discovery.found import Found
from mupscale.errors import UserError, prefix_errors
from mupscale.growing.upscale import CheckedPlan, find_plan, weights_read_nonlinearly
from mupscale.methods import GrowthMethod
from mupscale.methods.grow import UpscaleReport, grow
from mupscale.methods.noise import NO_NOISE
from mupscale.models._lightning import (
    average_device,
    average_of,
    averaged_copy,
    averaging_callbacks,
    callbacks_in,
    callbacks_of,
    is_compiled,
    is_trial_run,
    replace_attributes,
    schedulers_of,
    set_average,
    set_callbacks,
)
from mupscale.models.checkpoint import CHECKPOINT_KEY, PRE_UPSCALE, peek
from mupscale.models.checkpoint_files import files_of, write_whole_files
from mupscale.models.optimizers import continue_optimizers_, regroup_
from mupscale.models.twin import (
    TwinSpec,
    depth_between,
    merge_recipes,
    names_that_grow,
    plain_attributes,
    rebuild_,
    refuse_same_shapes,
    replace_submodules_,
    restore_submodules_,
    shallow_twin,
    shapes_of,
)
from mupscale.schedules import follows_rates, refuse_unless_relative, restart_schedule_
from mupscale.text_tables import notes_by_layer
from mupscale.widening.hints import Hints, refuse_lazy
from mupscale.widening.optimizers import rule_of
from mupscale.widening.plan import as_identity
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import attach, check_own_count, names_by_id
from mupscale.widening.state import RatesOf, StateSource

Swap = Any
"""An `UpscaleCallback`, whose file imports this one."""

MOST_PARAMETERS = 20_000_000
"""The largest wide module that is compared at its full size."""

MOST_AGAIN = 2_000_000
"""Parameters of a wide module that is compared once more at its growth, which then takes tenths of a second."""

Losses = Callable[[Any], list[Tensor]]
"""The losses of a step of a module."""

CLIPS_ENTRIES = (
    'clips entries of gradients, which become smaller where the module grows. Use "norm", whose factors follow the '
    "growth"
)


class GrowthSchedule:
    """All growths of a run, in the order of their steps."""

    def __init__(self, trainer: Trainer, module: LightningModule, swaps: Sequence[Swap]) -> None:
        self.trainer, self.module, self.swaps = trainer, module, swaps
        self.checkpoint: Path | None = None
        """The checkpoint of the run before the growth that is due."""
        self.ahead: subprocess.Popen[bytes] | None = None
        """Compiles the wide network until the growth."""
        self._built = plain_attributes(module)
        self._factor = math.inf
        """How many times as many parameters there are after the next growth, where it is known before."""
        self._watches: list[HandSetRates] = []
        """One for each optimizer whose groups will have different rates."""
        self._groups_in_checkpoint: tuple[Any, Any] | None = None
        self._growing: set[str] = set()
        """The names of parameters that will be larger."""
        self._needs_check = self._is_before_first_step = False
        self._found: list[Swap] = []
        """The growths of which this process, and neither a checkpoint nor another trial, found how they are exact."""

    @property
    def coming(self) -> list[Swap]:
        return [swap for swap in self.swaps if not swap.is_done]

    @property
    def due(self) -> list[Swap]:
        return [swap for swap in self.coming if swap.is_due(self.trainer)]

    @property
    def schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    # --- before the first step

    def prepare(self, stage: str) -> None:
        """Lets the module take the layers of a checkpoint. Refuses, before a fit, what cannot work."""
        module, trainer, name = self.module, self.trainer, type(self.module).__name__
        for swap in self.swaps if stage == "fit" else ():
            swap.is_done, swap.hints = False, None
        self._load_growths()
        if stage != "fit":
            return
        write_whole_files(trainer)
        # what is saved before a growth must hold what the other callbacks (EMA, curves) did after the step
        set_callbacks(
            trainer, sorted(callbacks_of(trainer), key=lambda c: (isinstance(c, Checkpoint), c in self.swaps))
        )
        with prefix_errors(f"UpscaleCallback: {name}"):
            refuse_lazy(module)
        for swap in self.swaps:
            swap.recipe.refuse_unknown(module)
        if is_compiled(module):
            raise UserError(
                f"UpscaleCallback.{self.swaps[0].recipe}: torch.compile({name}) compiled the module for its present "
                "layers. Compile the network in its place, in __init__ or configure_model: self.net.compile()"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise UserError(f'Trainer.gradient_clip_algorithm = "value" {CLIPS_ENTRIES}')
        self._needs_check = True

    def start(self) -> None:
        """Refuses, before the first batch, optimizers that cannot go on, and leaves growths out that are there."""
        module, trainer = self.module, self.trainer
        self._is_before_first_step = True
        self._forget_hook()
        steps = trainer.estimated_stepping_batches
        for swap in self.swaps:
            if 0 < steps <= swap.at_step and not is_trial_run(trainer):
                raise UserError(f"UpscaleCallback.at_step = {swap.at_step} is never reached: the run has {steps} steps")
            if swap.method.needs_batches:
                refuse_many_loaders(f"UpscaleCallback.method = {type(swap.method).__name__}", trainer)
        reshard_(module)
        for optimizer in trainer.optimizers:
            _refuse_strangers(module, optimizer)
            attach(module, optimizer)
        self._clip_by_width_invariant_norm()
        for swap in self.coming[:1]:
            if swap.recipe.may_be_there(module):
                there = shapes_of(swap.recipe.build_for_growth(module, trainer)) == shapes_of(module)
                swap.is_done = there
                if there and not trainer.global_step:
                    text = f"{type(module).__name__} has this size and does not grow"
                    rank_zero_warn(f"UpscaleCallback.{swap.recipe}: {text}")
        for swap in self.coming:
            for optimizer in trainer.optimizers:
                with prefix_errors(f"UpscaleCallback: {type(module).__name__}.configure_optimizers"):
                    rule_of(optimizer)
                if swap.state_rule == "reset_new_copies":
                    check_own_count(optimizer)
            swap.recipe.refuse_settings(module, trainer.optimizers)
            if swap.lr is not None and len(trainer.optimizers) > 1:
                raise UserError(
                    f"UpscaleCallback.lr = {swap.lr}: {type(module).__name__} has {len(trainer.optimizers)} "
                    "optimizers, which would all get this rate. Leave it out, and change their rates by schedules, "
                    "such as LambdaLR"
                )
        if self.due:
            self.checkpoint = Path(trainer.ckpt_path) if trainer.ckpt_path else self._saved()

    def _clip_by_width_invariant_norm(self) -> None:
        """Lets `Trainer(gradient_clip_val=…)` and `self.clip_gradients` clip by a norm that growth does not change."""
        module, plugin = self.module, self.trainer.precision_plugin

        def clip(optimizer: Optimizer, clip_val: float) -> None:
            if clip_val > 0:
                clip_grad_norm_(module, clip_val, getattr(optimizer, "optimizer", optimizer))

        def refuse(optimizer: Optimizer, clip_val: float) -> None:
            raise UserError(f'{type(module).__name__}.clip_gradients(…, "value") {CLIPS_ENTRIES}')

        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = clip, refuse  # type: ignore[method-assign]

    def before_batch(self, batch: Any, batch_idx: int) -> None:
        """Checks all growths at the first batch, and makes those that are due."""
        found_before = list(self._found)
        if self._needs_check:
            self._needs_check = False
            with run_eagerly(self.module):
                for swap in self.coming:
                    self.check(swap, batch, batch_idx)
        for swap in self.due:
            self.end_ahead()
            try:
                self._refuse_weights_outside()
                if swap in found_before:
                    self._check_again(swap, batch, batch_idx)
                self._grow(swap, batch)
            except Exception as error:
                is_users = isinstance(error, UserError)
                problem = str(error).rstrip(".") if is_users else f"{type(error).__name__}: {error}"
                files_of(self.trainer).wait()
                is_saved = self.checkpoint is not None and self.checkpoint.exists()
                raise (RefusedSwap if is_users else RuntimeError)(
                    f"the growth to {swap.recipe.target} at step {self.trainer.global_step} failed: {problem}. "
                    f"The run before the growth {f'is saved in {self.checkpoint}' if is_saved else 'was not saved'}"
                ) from error
            self.checkpoint, self._is_before_first_step = None, True

    def after_batch(self, batch: Any) -> None:
        if self._is_before_first_step:  # until now: the run has taken the memory that it needs
            self._is_before_first_step = False
            if self.coming:
                self._refuse_weights_outside()  # which the step may have made
            files_of(self.trainer).go_on()
            self._begin_ahead(batch)
        if self.due and self.checkpoint is None:
            # here loops and data can be resumed exactly; in the middle of a step they cannot
            self.checkpoint = self._saved()

    def end(self) -> None:
        """Warns at the end of a fit that counted no steps, so that none was that of a growth."""
        coming = [] if self.trainer.global_step or is_trial_run(self.trainer) else self.coming
        for swap in coming:
            if not swap.is_due(self.trainer):
                rank_zero_warn(
                    f"UpscaleCallback.at_step = {swap.at_step}: {type(self.module).__name__} did not grow. Lightning "
                    "counts steps of the optimizers in self.optimizers() only, and the run ended at step 0"
                )

    # --- the check

    def check(self, swap: Swap, batch: Any, batch_idx: int) -> None:
        """Finds how a growth is exact, by steps of training on a batch, unless a checkpoint says it; else a UserError.

        Modules on the meta device show what else must be refused before the first step.
        """
        module, recipe = self.module, swap.recipe
        narrow, wide = self._shells(swap, on_meta=True)
        refuse_same_shapes(recipe, narrow, wide)
        _refuse_compiled_parts(module, wide)
        factor = _refuse_too_large(recipe, narrow, wide, module.device)
        is_next = swap is self.coming[0]
        self._growing |= names_that_grow(narrow, wide)
        if is_next:
            self._factor = factor
            self._refuse_weights_outside()
            watch_callbacks(callbacks_of(self.trainer), module, self.trainer.global_step)
        said: list[str] = []
        if swap.hints is None:
            swap.hints, said = self._find_hints(swap, narrow, wide, batch, batch_idx)
            self._found.append(swap)
        plan = swap.method.plan(narrow, wide, swap.hints)
        swap.chosen_noise, notes = swap.method.choose_noise(swap.noise, plan, narrow, swap.nonlinear)
        if swap.chosen_noise is None and not notes and swap.method.leaves_copies_equal(plan):
            notes = [NO_NOISE]
        if is_next:
            self._watch_rates(plan, swap.method.rates)
        for line in (*said, *notes):
            rank_zero_info(line)

    def _refuse_weights_outside(self) -> None:
        refuse_weights_outside(self.module, self._growing, callbacks_of(self.trainer))

    def _watch_rates(self, plan: Plan, rates_of: RatesOf) -> None:
        """Looks after the optimizers whose groups will have different rates. Refuses schedules that set the same."""
        module = self.module
        for optimizer in self.trainer.optimizers:
            if len(rate_factors(optimizer, module, plan, rates_of)) < 2:
                continue
            schedulers = [each for each in self.schedulers if each.optimizer is optimizer]
            refuse_shared_rates(module, module, schedulers, plan, rates_of)
            self._watches.append(HandSetRates(optimizer, schedulers, type(module).__name__))

    def _find_hints(
        self,
        swap: Swap,
        narrow: LightningModule,
        wide: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> tuple[Hints, list[str]]:
        """How parameters grow, and what to say of it."""
        module, trainer = self.module, self.trainer
        with prefix_errors("UpscaleCallback"):
            call = self._call_on_few_samples(swap, batch, batch_idx)
        # the check grows by duplication, whose rates may be others
        has_schedules = all(map(follows_rates, self.schedulers))
        refusal: UserError | None = None
        checked: CheckedPlan | None = None
        for before, after in self._pairs(swap, narrow, wide):
            steps = StepCheck(trainer, module, batch, batch_idx, self._built, has_schedules=has_schedules)
            compare = _compare_by(steps, before, after, call)
            try:
                checked = find_plan(
                    before, after, call, _hints_between(swap, before, after), "discover", compare=compare
                )
                break
            except UserError as error:  # a module may treat few units in another way than many
                reason = str(error).removeprefix("upscale: ").replace("what call(model) returns", "the loss")
                remedy = f". {REMEDY}" if error.__cause__ is not None or "upscale: " in str(error) else ""
                refusal = UserError(f"UpscaleCallback.{swap.recipe}: {reason}{remedy}")
                refusal.__cause__ = error
        if trainer.strategy.model is not module:
            self._set_up()  # DDP listens to gradients of the tensors that were exchanged
        if checked is None and refusal is not None:
            raise refusal
        found: Any = _hints_between(swap, narrow, wide) if checked is None else checked.hints
        if isinstance(found, Found) and shapes_of(after) != shapes_of(wide):
            found = found.resolved(narrow, wide)
        if swap.noise == "auto" and checked is not None:
            nonlinear = weights_read_nonlinearly(before, after, call, checked, swap.method)
            swap.nonlinear = trainer.strategy.broadcast(nonlinear)
        text = "not checked: it is sharded, and has no smaller size" if checked is None else checked.text
        notes = [] if checked is None else [f"note: {note}" for note in notes_by_layer(checked.notes)]
        said = [f"growth by {swap.recipe}: {text}", *notes]
        bare = Hints(**{each.name: getattr(found, each.name) for each in fields(Hints)})
        return trainer.strategy.broadcast(bare), said

    def _check_again(self, swap: Swap, batch: Any, batch_idx: int) -> None:
        """Compares a step as weights and state are now, where that is quick: a threshold may be reached since."""
        module = self.module
        if module.device_mesh is not None or _count(self._shells(swap, on_meta=True)[1]) > MOST_AGAIN:
            rank_zero_info(f"growth by {swap.recipe}: too large to compare a step again; its losses are compared")
            return
        before, after = self._shells(swap)
        hints = _hints_between(swap, before, after)
        try:
            plan = as_identity(make_plan(before, after, hints=hints), before, after, hints.residual)
        except UserError:  # copied layers, of which nobody knows what makes them add nothing
            return
        has_schedules = all(map(follows_rates, self.schedulers))
        steps = StepCheck(self.trainer, module, batch, batch_idx, self._built, has_schedules=has_schedules)
        with ExitStack() as stack:
            stack.enter_context(run_eagerly(module))
            for watch in self._watches:
                stack.enter_context(watch.pause())
            found = self.trainer.strategy.broadcast(steps.agreement(before, after, plan, AS_THEY_ARE))
        if found.exact is False:
            raise RefusedSwap(f"with the weights and state of this step, {found.reason}")

    def _shells(self, last: Swap, *, on_meta: bool = False) -> tuple[LightningModule, LightningModule]:
        """Returns objects like the module as it is before, and after, a growth that is to come."""
        after, built = shallow_twin(self.module), self._built
        for swap in self.coming:
            before = after
            after = shallow_twin(before)
            build = swap.recipe.build_for_growth if on_meta else swap.recipe.build
            wide = build(before, self.trainer)
            of_wide = plain_attributes(wide)
            replace_submodules_(after, wide, swap.recipe.changes(before), built)
            built = of_wide
            if swap is last:
                break
        return before, after

    def _pairs(
        self, swap: Swap, narrow: LightningModule, wide: LightningModule
    ) -> Iterator[tuple[LightningModule, LightningModule]]:
        """The module before and after; of a large or sharded one, small modules of the same factors."""
        module, is_small = self.module, True
        is_sharded = module.device_mesh is not None
        for recipes in swap.recipe.small_pairs(narrow) if is_sharded or _count(wide) > MOST_PARAMETERS else ():
            try:
                small = [recipe.build(module, self.trainer, sharded=False).to(module.device) for recipe in recipes]
            except UserError:  # so few units may be no whole head
                continue
            pair = shallow_twin(module), shallow_twin(module)
            for shell, recipe, built in zip(pair, recipes, small, strict=True):
                replace_submodules_(shell, built, recipe.changes(module), self._built)
            if is_small or _count(pair[1]) <= MOST_PARAMETERS:
                is_small = False
                yield pair
        if is_small and not is_sharded:
            before, after = self._shells(swap)
            yield before, after.to(module.device)

    def _call_on_few_samples(self, swap: Swap, batch: Any, batch_idx: int) -> Losses:
        """The losses of a step on a few samples, unless the module needs the whole batch."""

        def on(samples: Any) -> Losses:
            return lambda module: losses_of_step(self.trainer, module, samples, batch_idx, swap.call)

        few = on(first_samples(batch, SAMPLES))
        try:
            with effects_undone(self.module):
                few(self.module)
        except UserError:
            raise
        except Exception:  # whatever a module does with too few
            return on(batch)
        return few

    # --- a growth

    def _grow(self, swap: Swap, batch: Any) -> None:
        trainer, module, start = self.trainer, self.module, time.perf_counter()
        context: Callable[[], AbstractContextManager[Any]] = torch.no_grad
        size = swap.recipe.size_of(module)

        def measure() -> Measured:
            with context():
                return measure_loss(trainer, module, batch, swap.call)

        try:
            before = measure()
        except RuntimeError:  # a training_step that takes gradients itself
            context = torch.enable_grad
            before = measure()
        report, keeps_loss = self.perform(swap, lambda: _refuse_jump(before, measure(), trainer, "before its noise"))
        after = measure()
        losses = float(before.loss), float(after.loss)  # waits for the device
        if keeps_loss:
            _refuse_jump(before, after, trainer, "with centred noise" if swap.chosen_noise else "without noise")
        swap.constants = report.noise
        swap.summary = {
            "step": trainer.global_step,
            "before": size,
            "after": swap.recipe.size_of(module),
            "parameters": _count(module),
            "seconds": time.perf_counter() - start,
            "loss_before": losses[0],
            "loss_after": losses[1],
        }
        self._log(swap, report.plan)
        notes = list(report.notes)
        if not torch.equal(before.random_state, after.random_state):
            notes.append(
                "the loss draws other random numbers at the new width, such as noise for each unit: training does not "
                "continue exactly"
            )
        if notes:
            rank_zero_info("\n".join(notes_by_layer(notes)))

    def perform(self, swap: Swap, compare: Callable[[], None]) -> tuple[UpscaleReport, bool]:
        """Grows the module, tensor by tensor, with its optimizers, schedules and averages, and frees the narrow one.

        Returns what was done, and whether the loss should be the same just after it. `compare` is called before noise
        is added, if the loss stays and the module is not sharded. If a check fails before anything is written, the
        module stays as it was.
        """
        trainer, module, recipe, device = self.trainer, self.module, swap.recipe, self.module.device
        for steps in callbacks_in(trainer, CapturedSteps):
            steps.release()  # a captured step would keep the narrow network's memory
        seed = trainer.strategy.broadcast(_seed(trainer.global_step))
        method = copy.copy(swap.method)
        method.state, method.rewarm_steps = swap.state_rule, swap.rewarm_steps
        noise = swap.chosen_noise
        if any(map(is_compiled_in_place, module.modules())):
            torch.compiler.reset()
        # new layers with random values depend on nothing but the seed
        wide = recipe.build_for_growth(module, trainer, seed if swap.depth == "random" else None)
        built = plain_attributes(wide)
        narrow = replace_submodules_(module, wide, recipe.changes(module), self._built)
        del wide
        try:
            if trainer.optimizers and module.automatic_optimization:
                narrow.zero_grad()  # gradients are those of the last step; the window of accumulation begins
            _place_on_device(module, device)
            plan = method.plan(narrow, module, _hints_between(swap, narrow, module))
            keeps_loss = method.claim(plan, narrow, ()).function and plan.keeps_function
            if method.needs_batches:
                self._fit_method(swap, narrow, method)
            report = grow(
                narrow,
                module,
                list(trainer.optimizers),
                plan=plan,
                noise=None if noise is method.noise else noise,
                seed=seed,
                method=method,
                # a gradient that waits for its step would be lost with its parameter
                consume=all(parameter.grad is None for parameter in narrow.parameters()),
                before_noise=compare if noise is not None and module.device_mesh is None and keeps_loss else None,
            )
        except BaseException:
            restore_submodules_(module, narrow)
            raise
        splits = continue_optimizers_(trainer.optimizers, self.schedulers, narrow, module, report, swap.lr)
        for optimizer, (sources, text) in zip(trainer.optimizers, splits, strict=True):
            rank_zero_info(text)
            for watch in self._watches:
                watch.go_on(optimizer, sources)
        if swap.restart_schedule:
            fresh = schedulers_of(module.configure_optimizers())
            for scheduler, new in zip(self.schedulers, fresh, strict=True):
                restart_schedule_(scheduler, new)
        self._set_up()
        self._built = built
        swap.is_done = True
        widen_averages(module, report, method, seed)
        for monitor in callbacks_in(trainer, LearningRateMonitor):
            monitor.on_train_start(trainer)  # the number of parameter groups may have changed
        return report, keeps_loss and (noise is None or noise.centred)

    def _set_up(self) -> None:
        """Lets the strategy wrap the module again, with the optimizers that there are."""
        strategy = self.trainer.strategy
        with replace_attributes(strategy, {"setup_optimizers": lambda trainer: None}):
            strategy.connect(self.module)
            strategy.setup(self.trainer)

    def _fit_method(self, swap: Swap, narrow: LightningModule, method: GrowthMethod) -> None:
        """Lets the method learn from training batches, leaving the run's data and random numbers as they were."""
        trainer, module, average = self.trainer, self.module, None
        if trainer.world_size > 1:
            average = lambda gradient: trainer.strategy.reduce(gradient, reduce_op="mean")  # noqa: E731
        with isolate_rng(), trainer.precision_plugin.forward_context(), run_eagerly(module):
            batches = OwnBatches(trainer, module)

            def loss(wide: nn.Module, batch: Any) -> Tensor:
                return torch.stack([each.sum() for each in losses_of_step(trainer, wide, batch, call=swap.call)]).sum()

            with batches.generators_kept():
                hints = _hints_between(swap, narrow, module)
                method.fit(narrow, module, batches, loss, hints=hints, average=average)

    def _log(self, swap: Swap, plan: Plan) -> None:
        done, trainer = swap.summary, self.trainer
        values = {f"growth/{key}": done[key] for key in ("loss_before", "loss_after", "parameters")}
        values["growth/pause_seconds"] = done["seconds"]
        if swap.width is not None:
            values["growth/width"] = max(swap.width) if isinstance(swap.width, list) else swap.width
        if swap.layers is not None:
            values["growth/layers"] = sum(swap.layers) if isinstance(swap.layers, list) else swap.layers
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is not None:
                add_text(tag_in(logger, "growth/plan"), f"```\n{plan}\n```", trainer.global_step)
        sizes = growth_text(done)
        counted = "" if "parameters" in sizes else f", {done['parameters']:,} parameters"
        rank_zero_info(
            f"step {done['step']}: grew {sizes}{counted}; loss without dropout {done['loss_before']:.6f} → "
            f"{done['loss_after']:.6f}; {done['seconds']:.2f} s"
        )

    # --- the network that is compiled before it is needed

    def _begin_ahead(self, batch: Any) -> None:
        coming = self.coming
        if coming and not self.due and should_precompile(self.trainer, self.module):
            from mupscale.callbacks.compile_ahead import start_compiling  # most runs do not

            alike = coming[0].recipe.make_unbuilt(self.module)
            self.ahead = start_compiling(self.trainer, self.module, alike, batch)

    def end_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.kill()
            self.ahead.wait()
            self.ahead = None

    # --- checkpoints

    def _saved(self) -> Path | None:
        """Saves the run before a growth, unless the user keeps nothing and has named no folder."""
        trainer = self.trainer
        policy = next(iter(callbacks_in(trainer, RunCheckpoint)), None)
        keeper = policy or trainer.checkpoint_callback
        keeps_nothing = keeper is None and not trainer.loggers and trainer.default_root_dir == str(Path.cwd())
        if keeps_nothing or is_trial_run(trainer):
            return None
        folder = getattr(keeper, "dirpath", None) or trainer.log_dir or trainer.default_root_dir
        path = Path(trainer.strategy.broadcast(str(folder))) / f"{PRE_UPSCALE}{trainer.global_step}.ckpt"
        if policy is not None:
            path = policy.free_path(path, trainer)
        files, device = files_of(trainer), trainer.strategy.root_device
        # a copy that is written later stays on a GPU, if all that is there now could grow beside it
        if device.type != "cuda" or self._factor * torch.cuda.memory_reserved(device) <= unreserved_bytes(device):
            files.hold()  # until the first wide step is launched: writing would make the pause longer
        with files.deferring():
            trainer.save_checkpoint(path, weights_only=False)
        return path

    def read(self, checkpoint: Mapping[str, Any]) -> None:
        ours = checkpoint.get(CHECKPOINT_KEY)
        if ours is not None:
            self._groups_in_checkpoint = ours["optimizer_names"], ours["group_sizes"]

    def _load_growths(self) -> None:
        """Lets the module take the layers of a checkpoint before its weights load: this is the last hook before."""
        trainer, module = self.trainer, self.module
        is_loaded_late = trainer.strategy.restore_checkpoint_after_setup
        if is_loaded_late and trainer.ckpt_path is not None:
            self._prepare_for_sharded(peek(Path(str(trainer.ckpt_path))) or {})
        self._forget_hook()
        original = module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            self._forget_hook()
            done = self._done_in(checkpoint)
            # one that is loaded late was made with these layers
            for recipe in [] if is_loaded_late else merge_recipes([swap.recipe for swap in done]):
                if recipe.make is not None or not recipe.may_be_there(module):
                    self._rebuild(recipe)
            for swap in self.swaps:
                if swap not in done:
                    self._take_back(swap, checkpoint.get("hyper_parameters", {}))
            if isinstance(trainer.precision_plugin, DoublePrecision):
                module.double()  # Lightning does so after it has loaded the weights, which were rounded then
            original(checkpoint)

        vars(module)["on_load_checkpoint"] = on_load_checkpoint

    def _forget_hook(self) -> None:
        vars(self.module).pop("on_load_checkpoint", None)

    def _done_in(self, checkpoint: Mapping[str, Any]) -> list[Swap]:
        """The growths after which a checkpoint was written."""
        states = checkpoint.get("callbacks", {})
        return [swap for swap in self.swaps if "step" in states.get(swap.state_key, {})]

    def _prepare_for_sharded(self, checkpoint: dict[str, Any]) -> None:
        """A sharded checkpoint loads into optimizers, and layers, that must be those of it before."""
        if CHECKPOINT_KEY not in checkpoint:
            return  # which is refused later
        module = self.module
        for recipe in merge_recipes([swap.recipe for swap in self._done_in(checkpoint)]):
            if recipe.make is not None or not recipe.may_be_there(module):
                replace_submodules_(
                    module, recipe.make_unbuilt(module), recipe.changes(module), plain_attributes(module)
                )
        for swap in self.swaps:
            if swap.state_key in checkpoint.get("callbacks", {}):
                swap.load_state_dict(dict(checkpoint["callbacks"][swap.state_key]))
        self.read(checkpoint)

    def _rebuild(self, recipe: TwinSpec) -> None:
        wide = recipe.build(self.module, self.trainer)
        built = plain_attributes(wide)
        rebuild_(self.module, wide, recipe.changes(self.module), self._built)
        self._built = built

    def _take_back(self, swap: Swap, saved: Mapping[str, Any]) -> None:
        """Gives a module that has grown the layers of a checkpoint that was written before."""
        module, recipe = self.module, swap.recipe
        before = TwinSpec({name: saved[name] for name in recipe.changes(module) or () if name in saved}, None)
        if before.hparams and recipe.may_be_there(module):
            if not before.may_be_there(module):
                self._rebuild(before)
        elif recipe.make is not None and swap.is_done:
            raise UserError(
                f"UpscaleCallback.make: the checkpoint was written before the growth, and {type(module).__name__} has "
                "grown since. Load it into a new module"
            )

    def regroup(self) -> None:
        """Splits the groups of new optimizers as those of a checkpoint are, so that their state can be loaded."""
        done = [swap for swap in self.swaps if swap.is_done]
        if not done or self._groups_in_checkpoint is None:
            return
        named, optimizers = dict(self.module.named_parameters()), self.trainer.optimizers
        for optimizer, listed, counts in zip(optimizers, *self._groups_in_checkpoint, strict=True):
            group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
            own_names = {
                id(p): name
                for group in optimizer.param_groups
                for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
            }
            groups, sources, rest = [], [], iter(listed)
            for count in counts:
                parameters = [named[name] for name in islice(rest, count)]
                sources.append(StateSource(group_of[id(parameters[0])], 1.0))
                groups.append({**optimizer.param_groups[sources[-1].group], "params": parameters})
                if "param_names" in groups[-1]:
                    groups[-1]["param_names"] = [own_names[id(parameter)] for parameter in parameters]
            regroup_(optimizer, self.schedulers, groups, sources)
            for swap in done:
                if swap.lr is not None:
                    optimizer.defaults["lr"] = swap.lr  # to which the rate of a later growth is relative


REMEDY = (
    "Give hints on how parameters grow where their classes declare them (width_roles, width_blocks), or compare "
    "something else: call=, a function of the module and a batch that returns what the module computes"
)


def _compare_by(
    steps: StepCheck, before: LightningModule, after: LightningModule, call: Losses
) -> Callable[[Plan], Agreement]:
    """What compares a plan by steps of training; where these cannot be compared, by the losses of `call`."""
    broadcast, name = steps.trainer.strategy.broadcast, type(before).__name__

    def compare(plan: Plan) -> Agreement:
        found = broadcast(steps.agreement(before, after, plan))
        if found.exact or found.untested:
            return found
        try:
            by_loss = broadcast(check_step(before, after, (), call, plan))
        except UserError:
            if found.exact is None:
                raise
            raise UserError(steps.blame(found)) from None  # the losses alone cannot be had
        if found.exact is None:
            rank_zero_info(f"steps of {name} are not compared, its losses are: {found.reason}")
            return by_loss
        if by_loss.exact:  # its layers grow exactly
            raise UserError(steps.blame(found))
        return found

    return compare


def _hints_between(swap: Swap, narrow: nn.Module, wide: nn.Module) -> Hints:
    """What the check found; before it, how new layers are made."""
    return swap.hints or Hints(depth=depth_between(narrow, wide, swap.depth))


def rate_factors(optimizer: Optimizer, narrow: nn.Module, plan: Plan, rates_of: RatesOf) -> set[float]:
    """What a growth multiplies the rates of an optimizer's parameters by."""
    names, rule = names_by_id(narrow), rule_of(optimizer)
    group_of = {names.get(id(parameter)): group for group in optimizer.param_groups for parameter in group["params"]}
    entries = [entry for entry in plan.parameters.values() if entry.origin in group_of]
    return {rule.scale(group_of[entry.origin], rates_of(entry)).lr for entry in entries}


def refuse_shared_rates(
    module: nn.Module, narrow: nn.Module, schedulers: Sequence[Any], plan: Plan, rates_of: RatesOf
) -> None:
    """Raises a UserError for a schedule that sets one absolute rate for all groups, if they will need several."""
    for scheduler in schedulers:
        if len(rate_factors(scheduler.optimizer, narrow, plan, rates_of)) > 1:
            name = f"{type(module).__name__}.configure_optimizers: {type(scheduler).__name__}"
            refuse_unless_relative(scheduler, name, "and after the growth the groups have different ones")


def growth_text(summary: dict[str, Any]) -> str:
    noun = "" if isinstance(summary["before"], str) else "width "
    return f"{noun}{summary['before']} → {summary['after']}"


def should_precompile(trainer: Trainer, module: LightningModule) -> bool:
    """Whether to compile ahead: a run that is compiled on one GPU, beside which the host has time."""
    is_alone = trainer.world_size == 1 and module.device.type == "cuda"
    return is_alone and any(map(is_compiled_in_place, module.modules()))


def widen_averages(module: LightningModule, report: UpscaleReport, method: GrowthMethod, seed: int) -> None:
    """Each EMA callback gets its average widened, with the very noise that the module got."""
    for callback in averaging_callbacks(module):
        old, new = average_of(callback), averaged_copy(callback, module)
        # the draw depends on the device, in which the average may differ
        narrow, wide = old.module.to(module.device), new.module
        wide.to(module.device, next(narrow.parameters()).dtype)
        grow(narrow, wide, noise=report.same_noise(), seed=seed, plan=report.plan, method=method)
        wide.to(average_device(callback, module))
        new.n_averaged.copy_(old.n_averaged)
        set_average(callback, new)


def _seed(step: int) -> int:
    """The noise of a run depends on its seed and the step, not on how often it was interrupted."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) * 1_000_003 + step


def _refuse_jump(before: Measured, after: Measured, trainer: Trainer, when: str) -> None:
    """Raises a RefusedSwap if a growth has changed the loss; not if the losses draw unlike random numbers.

    With TF32, on by default in convolutions on a GPU, and strong centred noise, losses differ by up to 0.2 %; in half
    precision by more.
    """
    if not torch.equal(before.random_state, after.random_state):
        return
    on_gpu = trainer.strategy.root_device.type == "cuda"
    is_fine = trainer.precision.startswith("64") or (trainer.precision.startswith("32") and not on_gpu)
    then, now = float(before.loss), float(after.loss)
    if abs(now - then) > (1e-3 if is_fine else 5e-2) * max(abs(then), abs(now), 1e-3):
        raise RefusedSwap(
            f"the loss of a batch changed from {then:.6g} to {now:.6g}, but a growth {when} keeps it: the model does "
            f"not grow exactly. {REMEDY}"
        )


def _place_on_device(module: LightningModule, device: torch.device) -> None:
    """Moves what a wide module has to a device; sharded weights get memory there, others when they are written."""
    if module.device_mesh is not None:
        allocate_parameters_(module, device)
    tensors = (*module.parameters(), *module.buffers())
    if any(not tensor.is_meta and tensor.device != device for tensor in tensors):
        apply_to_values_(module, lambda tensor: tensor.to(device))


def _refuse_strangers(module: LightningModule, optimizer: Optimizer) -> None:
    names = names_by_id(module)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in names:
            raise UserError(
                f"{type(module).__name__}.configure_optimizers trains a parameter of shape {tuple(parameter.shape)} "
                "that is not registered in the module, so it cannot grow with it. Assign it, or the layer that has "
                "it, to an attribute of the module"
            )


def _refuse_compiled_parts(module: nn.Module, other: nn.Module) -> None:
    compiled = {name for name, part in other.named_modules() if is_compiled_in_place(part)}
    for name, part in module.named_modules():
        if is_compiled_in_place(part) and name not in compiled:
            raise UserError(
                f"UpscaleCallback: {name!r} of {type(module).__name__} was compiled from outside, so the wide one "
                "would not be. Call its compile() in __init__ or configure_model of the module"
            )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _refuse_too_large(recipe: TwinSpec, narrow: LightningModule, wide: LightningModule, device: torch.device) -> float:
    """How many times as many parameters the wide module has. Raises a UserError if they do not fit into memory."""
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else physical_memory()
    if wide.device_mesh is None and 2 * _count(wide) > memory:  # sharded, it may fit
        raise UserError(
            f"UpscaleCallback.{recipe} gives {_count(wide):,} parameters, which do not fit into the "
            f"{memory / 2**30:.0f} GiB of memory of {device}; choose a smaller one"
        )
    return _count(wide) / max(1, _count(narrow))
