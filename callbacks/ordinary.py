"""The growth of a LightningModule of any class in a run: what `UpscaleCallback` does for it.

Optimizers and schedules stay the objects that the module's `configure_optimizers` made: their groups are split where
parameters need different rates, and rescaled by Table 1.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import is_compiled_in_place
from mupscale.base_shapes import clip_grad_norm_
from mupscale.callbacks.own_code import RateWatch, WeightsOutside
from mupscale.callbacks.swap import keeps_loss, rate_factors, refuse_shared_rates
from mupscale.checks.recording import attributes_of, generators_kept, leaves_of, state_kept
from mupscale.errors import UserError, prefix_errors
from mupscale.growing.upscale import find_plan
from mupscale.methods import GrowthMethod
from mupscale.methods.grow import UpscaleReport, grow
from mupscale.methods.noise import Noise
from mupscale.models._lightning import (
    averaged_copy,
    averaging_callbacks,
    is_compiled,
    replace_attributes,
    set_average,
)
from mupscale.models.growth_check import depth_between, first_samples
from mupscale.models.ordinary import (
    Attributes,
    Recipe,
    graft_,
    make_shell,
    names_that_grow,
    plain_attributes,
    refuse_same_shapes,
    shapes_of,
    ungraft_,
)
from mupscale.models.quiet_step import ModuleCall, QuietStep
from mupscale.schedules import spread_schedule_
from mupscale.widening.hints import Hints, refuse_lazy
from mupscale.widening.layers import Depth, joined
from mupscale.widening.optimizers import rule_of
from mupscale.widening.state import Continuation, Source
from mupscale.widening.stepping import attach, names_by_id

SAMPLES = 4
"""Of the batch on which the narrow and the wide module are compared, if `training_step` works with so few."""


class OrdinaryGrowth:
    """One growth of a module that is not a Growable. Its saved state: the hints that the check found."""

    def __init__(self, recipe: Recipe, call: ModuleCall | None, depth: Depth) -> None:
        self.recipe = recipe
        self.call = call
        self.depth = depth
        self.is_done = False
        self.hints: Hints | None = None
        self._built: Attributes = {}
        self._watches: list[RateWatch] = []
        """One for each optimizer, if its groups will have different rates; all growths of a run share them."""
        self.weights_outside: WeightsOutside | None = None

    # --- before the first step

    def setup(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuses what cannot work, and remembers the module as it is."""
        name = type(module).__name__
        with prefix_errors(f"UpscaleCallback: {name}"):
            refuse_lazy(module)
        self.recipe.refuse_unknown(module)
        if module.device_mesh is not None or trainer.strategy.restore_checkpoint_after_setup:
            raise UserError(
                f"UpscaleCallback.{self.recipe}: {name} cannot grow under {type(trainer.strategy).__name__}, which "
                "divides its weights among processes. Use DDP or one device, or write it as a mupscale Growable"
            )
        if is_compiled(module):
            raise UserError(
                f"UpscaleCallback.{self.recipe}: torch.compile({name}) compiled the module for its present layers. "
                "Compile the network in its place, in __init__ or configure_model: self.net.compile()"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise UserError(
                'Trainer.gradient_clip_algorithm = "value" clips entries of gradients, which become smaller where the '
                'module grows. Use "norm", whose factors follow the growth'
            )
        self._built = plain_attributes(module)
        self.is_done = False

    def start(self, trainer: Trainer, module: LightningModule, earlier: Sequence["OrdinaryGrowth"]) -> None:
        for optimizer in trainer.optimizers:
            _refuse_strangers(module, optimizer)
            attach(module, optimizer)
        self.clip_by_width_invariant_norm(trainer, module)
        if not self.is_done and not earlier and self.recipe.may_be_there(module):
            self.is_done = shapes_of(self.recipe.build(module, trainer)) == shapes_of(module)
            if self.is_done and not trainer.global_step:
                rank_zero_warn(
                    f"UpscaleCallback.{self.recipe}: {type(module).__name__} has this size and does not grow"
                )
        if not self.is_done:
            for optimizer in trainer.optimizers:
                with prefix_errors(f"UpscaleCallback: {type(module).__name__}.configure_optimizers"):
                    rule_of(optimizer)
            self.recipe.refuse_settings(module, trainer.optimizers)

    def check(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,
        batch_idx: int,
        earlier: Sequence["OrdinaryGrowth"],
        method: GrowthMethod,
        noise: Noise | None,
    ) -> None:
        """Finds the plan by the losses of a batch and their gradients, with shells of the module; else a UserError."""
        narrow = make_shell(module)
        for growth in earlier:
            growth._graft(trainer, narrow)
        wide = make_shell(narrow)
        self._graft(trainer, wide)
        refuse_same_shapes(self.recipe, narrow, wide)
        for shell in (narrow, wide):
            _refuse_compiled_parts(module, shell)
        step = self._step_on_few_samples(trainer, module, batch, batch_idx)
        hints = self.hints or Hints(depth=depth_between(narrow, wide, self.depth))
        try:
            checked = find_plan(narrow, wide.to(module.device), step, hints, "discover")
        except UserError as error:
            reason = str(error).removeprefix("upscale: ").replace("what call(model) returns", "the loss")
            raise UserError(f"UpscaleCallback.{self.recipe}: {reason}. {REMEDY}") from error
        _refuse_kept_tensors(step, narrow, wide)
        self.hints = trainer.strategy.broadcast(_bare(checked.hints))
        rank_zero_info(f"growth by {self.recipe} is {checked.text}")
        growth_plan = method.plan(narrow, wide, self.hints)
        method.choose_noise(noise, growth_plan, narrow)
        if earlier:
            self._watches = earlier[0]._watches
            return
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        refuse_shared_rates(module, module, schedulers, growth_plan, method.rates)
        self.weights_outside = WeightsOutside(module, names_that_grow(narrow, wide))
        self._watches[:] = [
            RateWatch(optimizer, [each for each in schedulers if each.optimizer is optimizer], type(module).__name__)
            for optimizer in trainer.optimizers
            if len(rate_factors(optimizer, module, growth_plan, method.rates)) > 1
        ]

    def quiet_step(self, trainer: Trainer, batch: Any, batch_idx: int = 0) -> QuietStep:
        return QuietStep(trainer, batch, batch_idx, self.call)

    # --- the swap

    def grow(
        self,
        trainer: Trainer,
        module: LightningModule,
        method: GrowthMethod,
        noise: Noise | None,
        seed: int,
        lr: float | None,
        compare: Callable[[], None],
    ) -> UpscaleReport:
        """Grows module, optimizers and schedules, or nothing; `compare` is called before noise, if the loss stays."""
        narrow = self._graft(trainer, module)
        try:
            module.to(narrow.device)
            if trainer.optimizers and module.automatic_optimization:
                narrow.zero_grad()  # gradients are those of the last step; the window of accumulation begins
            plan = method.plan(narrow, module, self.hints)
            is_noisy = noise is not None or method.noise is not None
            report = grow(
                narrow,
                module,
                list(trainer.optimizers),
                hints=plan,
                noise=noise,
                seed=seed,
                method=method,
                before_noise=compare if is_noisy and keeps_loss(method, plan, narrow) else None,
            )
        except BaseException:
            ungraft_(module, narrow)
            raise
        assert isinstance(report.optimizer, list)
        for optimizer, continued in zip(trainer.optimizers, report.optimizer, strict=True):
            sources = Continuation(report.plan, narrow, optimizer, module, method.rates).sources()
            of_groups = [sources[id(group["params"][0])] for group in continued.param_groups]
            groups = continued.param_groups
            if lr is not None:
                of_groups = _rescale_(optimizer, groups, of_groups, lr)
            _regroup_(trainer, optimizer, groups, of_groups)
            for watch in self._watches:
                watch.go_on(optimizer, of_groups)
            optimizer.state.clear()
            optimizer.state.update(continued.state)
        with replace_attributes(trainer.strategy, {"setup_optimizers": lambda trainer: None}):  # it keeps its own
            trainer.strategy.connect(module)
            trainer.strategy.setup(trainer)
        self._built = plain_attributes(module)
        self.is_done = True
        return report

    def clip_by_width_invariant_norm(self, trainer: Trainer, module: LightningModule) -> None:
        """Lets `Trainer(gradient_clip_val=…)` and `self.clip_gradients` clip by a norm that growth does not change."""

        def clip(optimizer: Optimizer, clip_val: float) -> None:
            if clip_val > 0:
                clip_grad_norm_(module, clip_val, getattr(optimizer, "optimizer", optimizer))

        trainer.precision_plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        if self.hints is None:
            return {}
        return {"hints": json.dumps({each.name: getattr(self.hints, each.name) for each in fields(Hints)})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.is_done = "step" in state
        if "hints" in state:
            known = json.loads(state["hints"])
            blocks = {
                name: {int(axis): row for axis, row in axes.items()} for name, axes in known.pop("blocks").items()
            }
            self.hints = Hints(blocks=blocks, **known)

    def rebuild(self, trainer: Trainer, module: LightningModule, recipe: Recipe | None = None) -> None:
        """Gives the module the layers of a checkpoint that was written after this growth, or those of a recipe."""
        recipe = recipe or self.recipe
        graft_(module, recipe.build(module, trainer), recipe.hparams, self._built)
        self._built = plain_attributes(module)
        for callback in averaging_callbacks(module):
            set_average(callback, averaged_copy(callback, module))

    def take_back(self, trainer: Trainer, module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Gives a module that has grown the layers of a checkpoint that was written before."""
        saved = checkpoint.get("hyper_parameters", {})
        before = {name: saved[name] for name in self.recipe.hparams or () if name in saved}
        if before and self.recipe.may_be_there(module):
            self.rebuild(trainer, module, Recipe(before, None))
        elif self.recipe.make is not None and self.is_done:
            raise UserError(
                f"UpscaleCallback.make: the checkpoint was written before the growth, and {type(module).__name__} has "
                "grown since. Load it into a new module"
            )

    @staticmethod
    def load_growths(
        trainer: Trainer, module: LightningModule, grown_in: Callable[[Any], list[tuple["OrdinaryGrowth", bool]]]
    ) -> None:
        """Lets a module take the layers of a checkpoint before its weights load.

        `grown_in` gives all growths in their order, and whether the checkpoint was written after each.
        """
        if "on_load_checkpoint" in vars(module):
            return  # another callback has done it
        original = module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            del vars(module)["on_load_checkpoint"]
            growths = grown_in(checkpoint)
            for growth in (growth for growth, is_in in growths if is_in):
                growth.rebuild(trainer, module)
            for growth in (growth for growth, is_in in growths if not is_in):
                growth.take_back(trainer, module, checkpoint)
            if isinstance(trainer.precision_plugin, DoublePrecision):
                module.double()  # Lightning does so after it has loaded the weights, which were rounded then
            original(checkpoint)

        vars(module)["on_load_checkpoint"] = on_load_checkpoint

    @staticmethod
    def regroup(
        trainer: Trainer, module: LightningModule, names: Sequence[Sequence[str]], states: Sequence[Any]
    ) -> None:
        """Splits the groups of new optimizers as those of a checkpoint are, so that their state can be loaded."""
        named = dict(module.named_parameters())
        for optimizer, listed, state in zip(trainer.optimizers, names, states, strict=True):
            group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
            left, groups, sources = list(listed), [], []
            for saved in state["param_groups"]:
                count = len(saved["params"])
                parameters, left = [named[name] for name in left[:count]], left[count:]
                sources.append(Source(group_of[id(parameters[0])], 1.0))
                groups.append({**optimizer.param_groups[sources[-1].group], "params": parameters})
                groups[-1].pop("param_names", None)
                if "param_names" in saved:
                    groups[-1]["param_names"] = saved["param_names"]
            _regroup_(trainer, optimizer, groups, sources)

    def _graft(self, trainer: Trainer, module: LightningModule) -> LightningModule:
        wide = self.recipe.build(module, trainer)
        return graft_(module, wide, self.recipe.hparams, self._built)

    def _step_on_few_samples(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> QuietStep:
        """With few samples, unless the module needs the whole batch."""
        few = self.quiet_step(trainer, first_samples(batch, SAMPLES), index)
        try:
            with state_kept(module.modules()), generators_kept():
                few(module)
        except UserError:
            raise
        except Exception:  # whatever a module does with too few
            return self.quiet_step(trainer, batch, index)
        return few


REMEDY = (
    "Give hints on how parameters grow where their classes declare them (width_roles, width_blocks), or compare "
    "something else: call=, a function of the module and a batch that returns what the module computes"
)


def _regroup_(trainer: Trainer, optimizer: Optimizer, groups: list[dict[str, Any]], sources: Sequence[Source]) -> None:
    """Gives an optimizer other groups, and its schedules the rates of these."""
    for config in trainer.lr_scheduler_configs:
        if config.scheduler.optimizer is optimizer:
            spread_schedule_(config.scheduler, sources)
    optimizer.param_groups[:] = groups


def _rescale_(optimizer: Optimizer, groups: list[dict[str, Any]], sources: list[Source], lr: float) -> list[Source]:
    ratio = lr / float(optimizer.defaults["lr"])
    optimizer.defaults["lr"] = lr
    for group in groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if key in group:
                group[key] = group[key] * ratio
    return [Source(source.group, source.factor * ratio) for source in sources]


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


def _refuse_kept_tensors(step: QuietStep, narrow: LightningModule, wide: LightningModule) -> None:
    """Raises a UserError for tensors that a step leaves to the next one in attributes, where they do not grow."""
    with state_kept([*narrow.modules(), *wide.modules()]):
        first = _total_loss(step, narrow)
        left = _shapes_in_attributes(narrow)
        if not left:
            return
        _total_loss(step, wide)
        of_wide = _shapes_in_attributes(wide)
        growing = [name for name, shapes in left.items() if of_wide.get(name, shapes) != shapes]
        if growing and not torch.isclose(_total_loss(step, narrow), first, rtol=1e-5):
            name = growing[0]
            raise UserError(
                f"UpscaleCallback: {type(narrow).__name__} keeps tensors in {name!r} from one step to the next, of "
                f"shape {left[name][0]}, or {of_wide[name][0]} in the wide module; attributes do not grow. Keep "
                "them in buffers (self.register_buffer), which do"
            )


def _total_loss(step: QuietStep, module: LightningModule) -> Tensor:
    with generators_kept():
        return step.total(module)


def _shapes_in_attributes(module: nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Of the tensors that a module or a part of it has in an attribute, by its name."""
    answer: dict[str, list[tuple[int, ...]]] = {}
    for prefix, part in module.named_modules():
        for name, value in attributes_of(part).items():
            shapes = [tuple(leaf.shape) for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
            answer |= {joined(prefix, name): shapes} if shapes else {}
    return answer


def _bare(hints: Any) -> Hints | None:
    """Hints without what a search knows beside them."""
    if not isinstance(hints, Hints):
        return None
    return Hints(**{each.name: getattr(hints, each.name) for each in fields(Hints)})
