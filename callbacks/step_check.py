"""Whether a module of a run grows exactly: its own training step, narrow and wide, by Lightning's loops.

One object has two bodies. The module takes the narrow step; then wide submodules are put into it, as a growth does it,
and it takes the wide step. Weights, state, attributes, schedules, counters, logs and random numbers are then as before.
"""

import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import gradient_hooks
from mupscale.callbacks.losses import first_samples
from mupscale.callbacks.own_code import INSIDE, attributes_with
from mupscale.checks.check_step import Agreement
from mupscale.checks.precision import Precision
from mupscale.checks.real_step import (
    Compare,
    GradientMasks,
    Steps,
    StepTolerance,
    StepWatch,
    borrowed,
    comparing,
    own_tensors,
    with_exact_rates,
)
from mupscale.checks.recording import (
    attributes_of,
    contents_kept,
    generators_kept,
    map_leaves,
    seed_generators,
)
from mupscale.checks.trace import Difference, Differs
from mupscale.checks.weights import WEIGHTS, Weights, disturb_, enlarge_
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError, one_line
from mupscale.methods.grow import grow
from mupscale.models._lightning import OF_EVERY_MODULE
from mupscale.models._lightning_step import (
    NoStep,
    Stepping,
    configure_anew,
    shadow_of,
    stepping_of,
    take_training_step,
    takes_the_iterator,
)
from mupscale.models.optimizers import continue_optimizers_
from mupscale.models.twin import plain_attributes, replace_submodules_, restore_submodules_
from mupscale.sharding import is_sharded
from mupscale.widening.hints import some_names
from mupscale.widening.modules import dropout_of
from mupscale.widening.optimizers import rule_of
from mupscale.widening.plan_text import Plan

SAMPLES = 4
"""The samples of the batch on which steps are compared, if the module works with so few."""

MOST_FIRST = 6
"""Steps before the one that is compared: RAdam's variance term is off in the first five."""

LOSS_SCALE = 100.0
"""The factor of the loss beside larger weights: clips that are inactive now become active."""


class _Fails(Exception):
    """The narrow module cannot take the step."""


class StepCheck:
    """The comparison of growing after a training step with a training step after growing, for the module of a run.

    On a wide module that agrees, this says so:

        StepCheck(trainer, module, batch, 0, plain_attributes(module)).agreement(narrow, wide, plan).exact
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,
        batch_idx: int,
        built: Mapping[str, Any],
        has_schedules: bool = True,
    ) -> None:
        """
        Args:
            built: The plain attributes that the module had when it was new.
            has_schedules: Whether the schedules of the run are a part of the step.
        """
        self.trainer, self.module, self.batch_idx = trainer, module, batch_idx
        self._batch, self._whole_batch = first_samples(batch, SAMPLES), batch
        self._built = dict(built)
        self._has_schedules = has_schedules
        self._stepping = self._with_schedules(stepping_of(trainer))
        self._is_wide = self._drops_nothing = False
        self._numbers: dict[bool, tuple[dict[str, float], dict[str, float]]] = {}
        """The numbers in attributes of the narrow and the wide module, before a step and after it."""
        self._growing: set[int] = set()
        """The lengths of axes that grow."""
        self._attached: list[str] = []
        """Attributes that have tensors of such a length when the wide step begins."""
        self._adds_layers = False
        self._read: frozenset[str] = frozenset()
        """The parameters that steps of the narrow module have read."""
        self._updates = 0.0

    def agreement(
        self, before: LightningModule, after: LightningModule, plan: Plan, weights: Mapping[str, Weights] = WEIGHTS
    ) -> Agreement:
        """Compares steps of the module as `before` and as `after`, modules of its class. All is then as it was.

        If `before` has other parameters than the module, optimizers and schedules are configured anew for it. A step
        comes first, by which optimizers have state, and attributes what a step leaves in them.
        """
        reason = self._why_not(before, after)
        if reason is not None:
            return Agreement(None, reason=reason)
        plan, draws = with_exact_rates(plan), False
        masks = GradientMasks(plan, StepTolerance())
        self._adds_layers = bool(plan.layers)
        sizes = (size for entry in plan.parameters.values() for size in entry.sizes)
        self._growing = {n for n, w in sizes if n != w}
        try:
            with generators_kept(), self._as(before), self._comparing(after, plan, masks) as compare:
                for words, change in weights.items():
                    scale = LOSS_SCALE if change is enlarge_ else 1.0
                    try:
                        steps = self._steps(compare, change, scale)
                        if steps.differences and self._is_unsteady(masks, change, scale, disturbed=bool(words)):
                            raise _Fails("a step gives other numbers when it is taken again")
                    except _Fails:
                        if words:
                            continue  # with such weights the module cannot run, or shows nothing
                        raise
                    draws |= steps.wide.grows
                    self._read |= steps.read
                    self._updates = max(self._updates, steps.updates)
                    if steps.differences:
                        first = steps.differences[0]
                        what = f"{words}, {first}" if words else str(first)
                        return Agreement(
                            False,
                            updates=first.error,
                            first_difference=first.place,
                            reason=f"{what}{self._cause(after, plan, steps)}",
                            is_random=steps.wide.is_not_replayed,
                        )
            return self._exact(masks, draws)
        except _Fails as error:
            if self._batch is self._whole_batch:
                return Agreement(None, reason=str(error))
        self._batch = self._whole_batch  # the module needs all of it
        return self.agreement(before, after, plan, weights)

    def _exact(self, masks: GradientMasks, draws: bool) -> Agreement:
        frozen = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
        untested = tuple(masks.untested(frozen & self._read))
        notes = ("it draws random numbers for each unit; both sizes drew the same ones",) if draws else ()
        if self._drops_nothing:
            notes = (*notes, "layers that drop units dropped none: the device draws their masks in a way of its own")
        reason = f"without a gradient in the check, so untested: {some_names(untested)}" if untested else ""
        exact = None if untested else True
        return Agreement(exact, updates=self._updates, reason=reason, untested=untested, notes=notes, is_random=draws)

    def _why_not(self, before: nn.Module, after: nn.Module) -> str | None:
        """Why steps cannot be compared; None if they can."""
        tensors = [tensor for each in (before, after) for tensor in (*each.parameters(), *each.buffers())]
        if any(map(is_sharded, tensors)):
            return "its weights are sharded"
        if getattr(self.module, "is_in_stack", False):
            return "it trains in a stack"
        if takes_the_iterator(self.trainer):
            return "its training_step takes the iterator over batches"
        if memory_needed(before, after, self._stepping.optimizers) > free_bytes(self.module.device) / 2:
            return "float64 copies of both sizes do not fit into half of the free memory"
        return None

    def _with_schedules(self, stepping: Stepping) -> Stepping:
        return stepping if self._has_schedules else stepping._replace(configs=[])

    # --- bodies

    @contextmanager
    def _as(self, before: LightningModule) -> Iterator[None]:
        """The module is this one, with optimizers of its own, until the end."""
        module, outer = self.module, (self._stepping, self._built)
        if {id(p) for p in before.parameters()} == {id(p) for p in module.parameters()}:
            yield
            return
        with contents_kept([*module.modules(), *before.modules()]):
            shell = replace_submodules_(module, before.to(module.device), None, self._built)
            try:
                self._stepping = self._with_schedules(configure_anew(self.trainer, module))
                self._built = plain_attributes(before)
                yield
            finally:
                self._stepping, self._built = outer
                restore_submodules_(module, shell)

    @contextmanager
    def _wide(
        self, after: LightningModule, plan: Plan, narrow: nn.Module, wide: nn.Module, optimizers: list[Optimizer]
    ) -> Iterator[tuple[nn.Module, list[Optimizer]]]:
        """The module has grown, and so have its optimizers and schedules, until the end."""
        module, schedules = self.module, self._stepping.schedules
        with contents_kept(schedules):
            shell = replace_submodules_(module, after, None, self._built)
            new: list[nn.Parameter] = []
            try:
                report = grow(shell, module, optimizers, plan=plan)
                # new layers learn too, and a clip counts their gradients; no narrow run has these
                new = [p for name, p in module.named_parameters() if plan.parameters[name].inserted and p.requires_grad]
                for parameter in new:
                    parameter.requires_grad_(False)
                outer = [config.scheduler for config in self._stepping.configs]
                continue_optimizers_(optimizers, outer, shell, module, report)
                self._is_wide = True
                yield module, optimizers
            finally:
                self._is_wide = False
                for parameter in new:
                    parameter.requires_grad_(True)
                restore_submodules_(module, shell)

    # --- steps

    def _comparing(self, after: LightningModule, plan: Plan, masks: GradientMasks) -> AbstractContextManager[Compare]:
        wide, stepping = after.to(self.module.device), self._stepping
        settings: dict[str, Any] = {"become_wide": partial(self._wide, after, plan), "keep": stepping.schedules}
        return comparing(self.module, wide, stepping.optimizers, plan, masks, self._take_first, **settings)

    def _steps(self, compare: Compare, change: Weights, loss_scale: float) -> Steps:
        """Takes both steps, without layers that drop units if the device draws their masks in a way of its own."""
        take = partial(self._take, loss_scale)
        try:
            steps: Steps = compare(take, change)
            if steps.differences and (steps.wide.is_not_replayed or steps.wide.grows) and not self._drops_nothing:
                self._drops_nothing = True
                steps = compare(take, change)
        except (UserError, _Fails):
            raise
        except Exception as error:  # a buffer may have another shape after a step, for one
            raise _Fails(_words(error)) from error
        if not steps.differences:
            steps.differences.extend(self._unlike_numbers())
        return steps

    def _take_first(self, *__: Any) -> None:
        """Steps of the narrow module, as many as its optimizers take before they step as they will go on."""
        for _ in range(MOST_FIRST):
            self._take(1.0)
            if all(map(is_ready, self._stepping.optimizers)):
                return

    def _take(self, loss_scale: float, *_: Any) -> None:
        """A training step of the module, whichever body it has."""
        module = self.module
        shadow = shadow_of(self.trainer, module, self._stepping, loss_scale)
        if self._adds_layers:  # the norm is that of the deep model, in which new layers count
            shadow.gradient_clip_val = None
        before = _numbers_in_attributes(module)
        if self._is_wide:
            self._attached = attributes_with(module, self._growing)
        for part in module.modules() if self._drops_nothing else ():
            part.training = part.training and not dropout_of(part)
        is_compiled = "torch._dynamo" in sys.modules  # it takes long to import
        eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        kept = contents_kept(self._stepping.schedules)
        with kept, redirect_stdout(io.StringIO()), eager, Precision():
            seed_generators(0)
            try:
                take_training_step(shadow, module, self._copied_batch, self.batch_idx)
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever a module does
                if self._is_wide:
                    what = f"the step of the wide module fails: {_words(error)}"
                    raise Differs(Difference("", what, math.inf)) from error
                words = str(error) if isinstance(error, NoStep) else f"its step fails: {_words(error)}"
                raise _Fails(words) from error
        refuse_replaced(module, self._stepping.optimizers, shadow.optimizers)
        if not self._is_wide and not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
            raise _Fails("its step gives weights that are not finite")
        self._numbers[self._is_wide] = before, _numbers_in_attributes(module)

    def _copied_batch(self) -> Any:
        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(torch.float64, copy=True) if leaf.is_floating_point() else leaf.clone()

        return map_leaves(copied, self._batch)

    # --- what a difference means

    def _is_unsteady(self, masks: GradientMasks, change: Weights, loss_scale: float, *, disturbed: bool) -> bool:
        """Whether the narrow step differs as much when it is taken again, or after rounding errors of the weights."""
        module, optimizers = self.module, self._stepping.optimizers
        runs = []
        for again in (False, True):
            with contents_kept(self._stepping.schedules), borrowed([module], optimizers):
                with torch.no_grad():
                    change(module)
                    if again and disturbed:
                        disturb_(module)
                before = [p.detach().clone() for p in module.parameters()]
                watch = StepWatch(own_tensors([module], optimizers), {})
                with masks.flushed(module, optimizers, is_wide=False):
                    try:
                        with torch.enable_grad(), watch:
                            self._take(loss_scale)
                    finally:
                        watch.undo()
                runs.append([p.detach() - old for p, old in zip(module.parameters(), before, strict=True)])
        largest = max((float(update.abs().max()) for update in runs[0] if update.numel()), default=0.0)
        for first, second in zip(*runs, strict=True):
            size, error = (float(x.abs().max()) if x.numel() else 0.0 for x in (first, first - second))
            if not error <= masks.tolerance.update / 10 * (size + largest / 10):
                return True
        return False

    def _unlike_numbers(self) -> Iterator[Difference]:
        """Numbers in attributes that were equal before the steps, and are not after them."""
        (before, after), (wide_before, wide_after) = self._numbers[False], self._numbers[True]
        for name, value in after.items():
            other = wide_after.get(name, value)
            if before.get(name) != wide_before.get(name) or math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-12):
                continue
            what = f"the attribute {name!r} becomes {other:.6g}, in the narrow module {value:.6g}"
            yield Difference(name.rpartition(".")[0], what, math.inf)

    def _cause(self, after: LightningModule, plan: Plan, steps: Steps) -> str:
        """What else is known of a difference, with the remedy."""
        twins = dict(after.named_parameters())
        for name, parameter in self.module.named_parameters():
            if name in twins and gradient_hooks(twins[name]) < gradient_hooks(parameter):
                return (
                    f". The wide module does not have the hook on the gradient of {name!r}: call register_hook where "
                    "the parameter is made, in __init__ or configure_model"
                )
        if steps.updates < math.inf:
            return ""
        if self._attached:
            return f". {type(self.module).__name__} keeps tensors in {self._attached[0]!r}, which do not grow. {INSIDE}"
        growing = {entry.narrow_shape for entry in plan.parameters.values() if entry.grows}
        if any(shape in growing for shape in steps.narrow.written):
            return f". A step writes into tensors outside of the module, of shapes that grow. {INSIDE}"
        return ""

    def blame(self, found: Agreement) -> str:
        """The reason of a difference that losses and gradients alone do not show, with the remedy."""
        return found.reason if found.updates == math.inf else f"{found.reason}. {blame_own_code(self.module)}"


REPLACED = "A growth continues those of configure_optimizers: change these in their place"


OWN_CODE = "The layers grow exactly, but not what "
OWN_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "backward", "on_after_backward",
    "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "on_train_batch_end",
)  # fmt: skip
"""The hooks of a module that are a part of a training step, apart from `training_step`."""


def blame_own_code(module: LightningModule) -> str:
    """What may be the cause of a step that differs though its losses and gradients agree, with the remedy."""
    own = [hook for hook in OWN_HOOKS if is_overridden(hook, module)]
    own += [] if module.automatic_optimization else ["training_step"]
    whose = (
        " and ".join(f"{type(module).__name__}.{hook}" for hook in own) or f"the optimizer of {type(module).__name__}"
    )
    return (
        f"{OWN_CODE}{whose} does with weights, gradients or settings of the optimizer. Weights and gradients become "
        "smaller where a layer grows, and so do rates: leave clamps, norms of weights, decay and rates to the "
        "optimizer (weight_decay, a group for each rate), and clip by self.clip_gradients or mupscale.clip_grad_norm_"
    )


def refuse_replaced(module: LightningModule, known: Sequence[Optimizer], present: Sequence[Optimizer]) -> None:
    """Raises a UserError if the optimizers of a trainer are others than before."""
    if list(map(id, known)) != list(map(id, present)):
        raise UserError(f"UpscaleCallback: {type(module).__name__} replaces optimizers of its trainer. {REPLACED}")


def is_ready(optimizer: Optimizer) -> bool:
    """Whether the state of an optimizer can grow: whether its next steps follow the rule of its kind."""
    ready = rule_of(optimizer).ready
    if ready is None:
        return True
    state = optimizer.state
    return not any(ready(group, state[p]) for group in optimizer.param_groups for p in group["params"] if p in state)


def memory_needed(narrow: nn.Module, wide: nn.Module, optimizers: Sequence[Optimizer]) -> float:
    """The bytes that a comparison takes: what both steps leave, what is expected, and gradients, in float64."""
    state = max((len(rule_of(optimizer).state) for optimizer in optimizers), default=0)
    return 8.0 * (4 + 2 * state) * (_count(wide) + _count(narrow))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 300)}"


def _count(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


def _numbers_in_attributes(module: nn.Module) -> dict[str, float]:
    return {
        f"{name}.{key}".removeprefix("."): float(value)
        for name, part in module.named_modules()
        for key, value in attributes_of(part).items()
        if type(value) in (int, float) and key not in OF_EVERY_MODULE
    }
