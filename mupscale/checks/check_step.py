"""Does a plan make the wide model compute and train as the narrow one? A real training step of both shows it."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mupscale._torch import has_tensor_hooks
from mupscale.checks.comparison import (
    MASKED,
    Match,
    gradients_of,
    match,
    planned_layouts,
    relative_error,
    size_of,
    weighted_sum,
)
from mupscale.checks.precision import Precision, WithoutDropout
from mupscale.checks.real_step import (
    GradientMasks,
    Steps,
    StepTolerance,
    StepWatch,
    borrowed,
    comparing,
    own_tensors,
    with_exact_rates,
    without_state,
)
from mupscale.checks.recording import attributes_of, generators_kept
from mupscale.checks.trace import (
    Call,
    Difference,
    Differs,
    Event,
    EventKind,
    Follower,
    float_copies,
    floats_of,
    watched,
)
from mupscale.checks.weights import IN_EVALUATION, SHUFFLED, WEIGHTS, Weights, as_they_are, disturb_, enlarge_
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError, one_line
from mupscale.methods.base import GrowthMethod
from mupscale.methods.grow import grow
from mupscale.methods.noise import Noise
from mupscale.sharding import is_sharded
from mupscale.widening.growth import duplicate, is_mixed
from mupscale.widening.hints import some_names
from mupscale.widening.layers import source_of
from mupscale.widening.modules import caveat, dropout_of
from mupscale.widening.optimizers import groups_by_id
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import attach

THE_MODEL = "(the model)"


@dataclass(frozen=True)
class Agreement:
    """The result of a check. `print` it."""

    exact: bool | None
    """Whether growing and then stepping gives what stepping and then growing gives; None if that could not be checked,
    or not for all growing parameters."""
    outputs: float = 0.0
    """How far what the wide model returns is from what the narrow one returns, relative to its largest number."""
    updates: float = 0.0
    """How far the updates of wide parameters are from those expected, relative to the largest update."""
    precision: str = "float64"
    first_difference: str | None = None
    reason: str = ""
    """What differs there, or why there was no check."""
    untested: tuple[str, ...] = ()
    """Growing parameters without a gradient in the check, or that nothing reads."""
    notes: tuple[str, ...] = ()
    """What else the check found out."""
    dropout: tuple[str, ...] = ()
    """Layers that drop units of an axis that grows; both steps drop the same units."""
    settled: tuple[str, ...] = ()
    """Notes of the plan on layers that drop only units of other axes: they do not apply."""
    is_random: bool = False
    """Whether the wide model draws more random numbers than the narrow one; both steps had copies of the same."""

    def __str__(self) -> str:
        if self.exact is None and not self.untested:
            return f"not checked: {self.reason}"
        if self.exact is False:
            return f"not exact: {self.reason}"
        numbers = f"outputs agree to {self.outputs:.0e}, updates to {self.updates:.0e}"
        apart = " apart from dropout" if self.dropout else " apart from random numbers" if self.is_random else ""
        head = f"exact{apart}: a training step" if self.exact else "not known to be exact. A training step"
        return f"{head} in {self.precision} equals the narrow model's, {numbers}" + f". But {self.reason}" * bool(
            self.untested
        )


def check_step(
    narrow: nn.Module,
    wide: nn.Module,
    optimizers: Sequence[Optimizer],
    call: Call,
    plan: Plan,
    *,
    method: GrowthMethod | None = None,
) -> Agreement:
    """Compares growing by `plan` after a training step with a training step after growing: all weights and state.

    `call(model)` runs one forward pass and returns what it computes; the loss is a weighted sum of it. `optimizers` of
    the narrow model take the step; what they do not hold steps by SGD with rate 1. It is taken with the weights as they
    are, with smaller and with larger ones, because initial zeros and ones, or thresholds that no unit reaches yet,
    would hide differences. Models, optimizers and the generators of random numbers stay as they are.
    """
    plan, reason = with_exact_rates(plan), _why_not_checked(narrow, wide)
    if reason is not None:
        return Agreement(None, reason=reason)
    failure: _Fails | None = None
    with _undisturbed():
        for dtype in _precisions(narrow, wide, optimizers):
            try:
                return _Check(narrow, wide, optimizers, call, plan, dtype).agreement(method)
            except torch.OutOfMemoryError:
                continue
            except _Fails as error:  # an operation may not exist in float64
                failure = failure or error
    if failure is not None:
        raise UserError(f"upscale: call(model) fails on the narrow model: {failure}") from failure.__cause__
    return Agreement(
        None,
        reason="copies of both models do not fit into half of the free memory, or their activations do "
        "not. Let call use fewer samples, or check with smaller models of the same family",
    )


def change_of_outputs(
    narrow: nn.Module,
    wide: nn.Module,
    plan: Plan,
    call: Call,
    precision: str = "float64",
    *,
    noise: Noise | None = None,
    seed: int = 0,
    prepare: Weights = as_they_are,
) -> float:
    """By how much outputs change when a model grows by a plan, and noise is added: relative root mean square.

    `prepare` changes the weights of the narrow model before.
    """
    dtype = getattr(torch, precision)
    with _undisturbed(), borrowed([narrow, wide], (), dtype), _with_eager_experts([narrow, wide]):
        with torch.no_grad():
            prepare(narrow)
        grow(narrow, wide, plan=plan, noise=noise, seed=seed)
        made = []
        for model in (narrow, wide):
            model.eval()
            made.append([x.detach().double() for x in floats_of(watched(model, call, dtype=dtype)[1])])
    pairs = [(a, b.to(a.device)) for a, b in zip(*made, strict=False) if a.shape == b.shape]
    difference = sum(float((b - a).square().sum()) for a, b in pairs)
    return math.sqrt(difference / max(sum(float(a.square().sum()) for a, _ in pairs), 1e-300))


class _Fails(Exception):
    """`call` fails on the narrow model."""


def _why_not_checked(narrow: nn.Module, wide: nn.Module) -> str | None:
    tensors = [tensor for model in (narrow, wide) for tensor in (*model.parameters(), *model.buffers())]
    if any(tensor.is_meta for tensor in tensors):
        return "a model on the meta device cannot run. Check with models on a device, at smaller widths if need be"
    if any(is_sharded(tensor) for tensor in tensors):
        return "parameters are sharded. Check before sharding, at smaller widths if need be"
    for model in (narrow, wide):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise UserError(
                "upscale: the check cannot run a model inside DistributedDataParallel. Give narrow.module and "
                "wide.module, and wrap the wide model afterwards"
            )
    return None


def _precisions(narrow: nn.Module, wide: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[torch.dtype]:
    """The precisions in which copies, their gradients and state fit into half of the free memory."""
    before, after = (sum(parameter.numel() for parameter in model.parameters()) for model in (narrow, wide))
    state = sum(x.numel() for x in own_tensors([], optimizers)) / max(before, 1)
    device = next((parameter.device for parameter in wide.parameters()), torch.device("cpu"))
    free = free_bytes(device) / 2
    entries = (3 + 2 * state) * after + (4 + 2 * state) * before
    if device.type != "mps" and 8 * entries <= free:
        yield torch.float64
    if 4 * (3 * after + 4 * before) + 8 * 3 * before <= free:
        yield torch.float32


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Turns gradients on, TF32 and autocast off, whatever the caller has set, and puts random generators back."""
    before = torch.get_float32_matmul_precision()
    with (
        generators_kept(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.backends.cudnn.flags(allow_tf32=False),
    ):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@contextmanager
def _with_eager_experts(models: Sequence[nn.Module]) -> Iterator[None]:
    """The experts of transformers run one by one: their other implementations have no float64."""
    changed = []
    for model in models:
        choose: Any = getattr(model, "set_experts_implementation", None)
        if callable(choose):
            changed.append((choose, getattr(getattr(model, "config", None), "_experts_implementation", None)))
            choose("eager")
    try:
        yield
    finally:
        for choose, before in changed:
            if before is not None:
                choose(before)


LARGE = 1_000_000
"""Parameters of a wide model, beyond which the optimizers step with the weights as they are. With smaller weights,
gradients are compared, and with larger ones only outputs."""

SMALLER_LOSS = 1e-3
"""What the loss is multiplied by where weights are changed, because gradients of a mean are smaller than of a sum."""


class _CallStep:
    """The step of plain torch, by a weighted sum of what `call` returns; the wide outputs are compared on the way."""

    def __init__(self, check: "_Check", vary: int = 0) -> None:
        self.check, self.vary = check, vary
        self.drops, self.trains = True, True
        self.forward_only = False
        self.scale = 1.0
        """What the loss is multiplied by: hooks may have thresholds for gradients, too."""
        self.reference: list[Tensor] = []
        self.error = 0.0
        """How far the outputs are apart."""
        self.repeats: str | None = None
        """A note on outputs that grow."""
        self.follows = False
        """Whether events are recorded, and those of the wide model compared."""
        self.events: list[Event] = []

    def __call__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        check, is_wide = self.check, model is not self.check.narrow
        self._set_modes(model, is_wide=is_wide)
        outputs = self._outputs(model, is_wide=is_wide)
        matches = None
        if is_wide:
            matches = self._matched(outputs)
        else:
            self.reference = [output.detach() for output in outputs]
            if not outputs:
                raise UserError(
                    "upscale: call(model) returns no tensor of floats. Let it return what the model computes: "
                    "call=lambda model: model(batch)"
                )
        if self.forward_only:
            return
        total = self.scale * weighted_sum(outputs, matches)
        if total.requires_grad:
            try:
                total.backward()
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:
                raise self._failed(error, is_wide=is_wide) from error
        with Precision(dtype=check.dtype):  # Muon rounds to bfloat16
            for optimizer in optimizers:
                optimizer.step()

    def _set_modes(self, model: nn.Module, *, is_wide: bool) -> None:
        layers = self.check.plan.layers if is_wide else {}
        for name, module in model.named_modules():
            trains = self.trains and self.check.modes.get(source_of(layers, name), True)
            module.training = trains and (self.drops or not dropout_of(module))

    def _outputs(self, model: nn.Module, *, is_wide: bool) -> list[Tensor]:
        check = self.check
        follow: Follower | None = None
        if self.follows and is_wide:
            follow = Follower(check.narrow, self.events, check.plan, check.planned, check.tolerance.outputs)
        if self.follows and not is_wide:
            self.events.clear()

        def note(name: str, kind: EventKind, values: Any) -> None:
            if follow is not None:
                follow(name, kind, values)
            elif self.follows:
                self.events.append(Event(name, kind, float_copies(values)))

        try:
            with nullcontext() if self.drops else WithoutDropout():
                _, result = watched(model, check.call, note, dtype=check.dtype, vary=self.vary)
        except (torch.OutOfMemoryError, UserError, Differs):
            raise
        except Exception as error:
            raise self._failed(error, is_wide=is_wide) from error
        if follow is not None:
            words = "what is computed of the outputs of all modules, which agree, differs"
            raise Differs(follow.first or Difference("", words, math.inf))
        return floats_of(result)

    def _failed(self, error: Exception, *, is_wide: bool) -> Exception:
        words = f"{type(error).__name__}: {one_line(error, 300)}"
        return UserError(f"upscale: call(model) fails on the wide model: {words}") if is_wide else _Fails(words)

    def _matched(self, outputs: Sequence[Tensor]) -> list[Match]:
        """How outputs are made of the narrow ones. Raises `Differs` if one is not."""
        narrow = self.reference
        if len(narrow) != len(outputs):
            words = f"call(model) returns {len(narrow)} tensors of the narrow model and {len(outputs)} of the wide"
            raise Differs(Difference("", words, math.inf))
        matches, self.error = [], 0.0
        for before, after in zip(narrow, outputs, strict=True):
            values = after.detach().to(before.device)
            found = match(before.double(), values.double(), self.check.tolerance.outputs, self.check.planned)
            if found is None or found.ratio != 1:
                error = _error(values, before) if before.shape == values.shape else math.inf
                times = "" if found is None else f", which is multiplied by {found.ratio:.4g}"
                by = f" by {100 * error:.3g} %" if math.isfinite(error) else ""
                ratio = 1.0 if found is None else found.ratio
                raise Differs(Difference("", f"what call(model) returns differs{by}{times}", error, ratio))
            matches.append(found)
            self.error = max(self.error, _error(values, duplicate(before, found.layouts)))
            if before.shape != after.shape:
                uneven = any(map(is_mixed, found.layouts))
                self.repeats = (
                    f"what call(model) returns grows {tuple(before.shape)} → {tuple(after.shape)}, by copies of its "
                    + "entries" + ", of some more than of others, so a mean over them is another one" * uneven
                    + ". If these are classes or targets, give the wide model as many as the narrow one has"
                )  # fmt: skip
        return matches


class _Check:
    """One comparison in one precision."""

    def __init__(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        optimizers: Sequence[Optimizer],
        call: Call,
        plan: Plan,
        dtype: torch.dtype,
    ) -> None:
        self.narrow, self.wide, self.call, self.plan, self.dtype = narrow, wide, call, plan, dtype
        entries = (entry for entry in (*plan.parameters.values(), *plan.buffers.values()) if not entry.kept)
        self.planned = planned_layouts(entries)
        self.modes = {name: module.training or not narrow.training for name, module in narrow.named_modules()}
        # in float32 the update of an optimizer that normalises would be rounding
        self.optimizers = list(optimizers) if dtype is torch.float64 else []
        held = {key for optimizer in self.optimizers for key in groups_by_id(optimizer)}
        trained = [p for p in narrow.parameters() if p.requires_grad]
        rest = [p for p in trained if id(p) not in held]
        self.all_optimizers = [*self.optimizers, *self._plain(rest)]
        self.plain = self._plain(trained)
        """Optimizers whose updates are the gradients."""
        self.is_large = sum(parameter.numel() for parameter in wide.parameters()) > LARGE
        self.tolerance = StepTolerance()
        self.masks = GradientMasks(plan, self.tolerance)
        self.read: set[str] = set()
        """Growing parameters that an operation reads."""

    def _plain(self, parameters: list[nn.Parameter]) -> list[Optimizer]:
        """An optimizer whose updates are the gradients, at the rates that entries of earlier growths need."""
        return [attach(self.narrow, SGD(parameters, lr=1.0))] if parameters else []

    def agreement(self, method: GrowthMethod | None) -> Agreement:
        models, optimizers = (self.narrow, self.wide), self.all_optimizers
        with _with_eager_experts(models):
            if self.dtype is torch.float32:
                self._allow_rounding()
            fresh = without_state(optimizers)

            def first(model: nn.Module, _: Sequence[Optimizer]) -> None:
                with suppress(_Fails):  # a model may need more to train, such as labels
                    _CallStep(self)(model, fresh)

            settings: dict[str, Any] = {"method": method, "dtype": self.dtype}
            with comparing(
                *models, optimizers, self.plan, self.masks, first if fresh else None, **settings
            ) as self.compare:
                return self._agreement()

    def _agreement(self) -> Agreement:
        precision = str(self.dtype).removeprefix("torch.")
        notes: list[str] = []
        outputs = updates = 0.0
        is_random, step = False, _CallStep(self)
        for words, change in (WEIGHTS | IN_EVALUATION | SHUFFLED).items():
            if words in SHUFFLED and not self._without_gradient():
                break
            found = self._compared(words, change, notes)
            if found is None:
                continue
            compared, steps = found
            step = compared if words not in IN_EVALUATION else step
            if steps.differences:
                first = self._explained(compared, steps, change)
                reason = f"{first} ({words})" if words else str(first)
                is_random = steps.wide.is_not_replayed
                if is_random:
                    reason += ". The model draws random numbers, as many as its width needs"
                place = first.place or THE_MODEL
                outputs = steps.differences[0].error if steps.updates == math.inf else compared.error
                return Agreement(False, outputs, steps.updates, precision, place, reason, is_random=is_random)
            outputs, updates = max(outputs, compared.error), max(updates, steps.updates)
            is_random |= steps.wide.grows
        dropping = {name: module for name, module in self.narrow.named_modules() if dropout_of(module)}
        does_not_grow = step.drops and not is_random
        settled = tuple(f"{name or THE_MODEL}: {caveat(each, each)}" for name, each in dropping.items())
        untested = self._untested()
        reason = f"without a gradient in the check, so untested: {some_names(untested)}" if untested else ""
        if step.repeats is not None:
            notes.append(step.repeats)
        return Agreement(
            None if untested else True,
            outputs,
            updates,
            precision,
            reason=reason,
            untested=untested,
            notes=tuple(dict.fromkeys(notes)),
            dropout=() if does_not_grow else tuple(dropping),
            settled=settled if does_not_grow else (),
            is_random=is_random,
        )

    def _compared(self, words: str, change: Weights, notes: list[str]) -> tuple[_CallStep, Steps] | None:
        """Compares both steps with changed weights; None if the narrow model cannot run with them, or shows nothing."""
        failure: _Fails | None = None
        evaluates = words in IN_EVALUATION
        for vary in (0,) if change is as_they_are or evaluates else (1, -1, 0):
            step = _CallStep(self, vary)
            step.trains, step.scale = not evaluates, 1.0 if change is as_they_are else SMALLER_LOSS
            step.forward_only = evaluates or (change is enlarge_ and self.is_large)
            try:
                steps = self._steps(step, change)
            except _Fails as error:
                failure = failure or error
                continue
            if change is not as_they_are and not _are_finite(step.reference):
                continue
            if steps.differences and steps.wide.is_not_replayed:  # a fused dropout
                step = self._alike(step)
                step.drops = False
                steps = self._steps(step, change)
            if steps.differences and change is not as_they_are and self._is_chaotic(step, change):
                continue
            return step, steps
        if change is not as_they_are:
            return None
        assert failure is not None
        step = _CallStep(self)
        step.trains = False
        steps = self._steps(step, change)  # a model may need more to train, such as labels
        notes.append(f"not compared in training mode: call(model) fails there: {failure}")
        return step, steps

    def _steps(self, step: _CallStep, change: Weights, optimizers: Sequence[Optimizer] | None = None) -> Steps:
        if step.forward_only:
            optimizers = ()
        elif optimizers is None:
            optimizers = self.plain if self.is_large and change is not as_they_are else self.all_optimizers
        steps: Steps = self.compare(step, change, optimizers)
        self.read |= steps.read
        return steps

    def _explained(self, step: _CallStep, steps: Steps, change: Weights) -> Difference:
        """The difference, with the first module that differs, or what else of the step does."""
        first = steps.differences[0]
        if steps.updates < math.inf:
            return replace(first, what=f"{first}{self._cause(step, first, change)}")
        again = self._alike(step)
        again.follows = True
        found = self._steps(again, change).differences
        if not _are_equal(again.reference, step.reference):
            raise UserError(
                "upscale: call(model) returns other numbers when it runs again, so nothing can be compared. Let it use "
                "one fixed batch, and no state that it changes"
            )
        where = found[0] if found else first
        known = [f". {note}" for note in self.plan.notes if note.startswith(f"{where.place or THE_MODEL}: ")]
        what = f"{first}. First, {where}{self._unlike_attributes()}{''.join(known)}"
        return Difference(where.place, what, first.error, first.ratio)

    def _alike(self, step: _CallStep) -> _CallStep:
        again = copy.copy(step)
        again.follows, again.events = False, []
        return again

    def _cause(self, step: _CallStep, first: Difference, change: Weights) -> str:
        """What may be the cause of a difference that outputs do not show."""
        if first.kind == "buffer":
            return (
                ", though what call(model) returns agrees: the step changes it otherwise at another width. Let the "
                "statistic average over units (a mean, not a norm or a sum)"
            )
        hooks = self._hooks()
        if not self.optimizers:
            return f" from that of Table 1, though what call(model) returns agrees{hooks or self._unlike_attributes()}"
        if self._steps(self._alike(step), change, self.plain).differences:
            return f" from that of Table 1, though what call(model) returns agrees: its gradient differs{hooks}"
        kinds = " and ".join(sorted({type(optimizer).__name__ for optimizer in self.optimizers}))
        return (
            f", though its gradient agrees: the step of {kinds}, with its hooks, does not scale as its rule says. "
            "Remove hooks that change weights or gradients by absolute numbers, and register an optimizer of your own "
            "as it scales: mupscale.register_optimizer(..., trust_ratio=True) if updates follow the norm of weights"
        )

    def _hooks(self) -> str:
        """What to do about hooks of parameters that only one of the models has, or that both have."""
        hooked = [
            [name for name, parameter in model.named_parameters() if has_tensor_hooks(parameter)]
            for model in (self.narrow, self.wide)
        ]
        alone = [name for name in hooked[0] if name not in hooked[1]]
        if alone:
            return (
                f". The gradient of {some_names(alone)} has a hook (register_hook) in the narrow model alone: register "
                "it on the wide model, too"
            )
        if hooked[0]:
            return f". Hooks change the gradient of {some_names(hooked[0])}: let them not depend on its size"
        return ""

    def _unlike_attributes(self) -> str:
        """What differs in the wide model: numbers in attributes that are no sizes of an axis, and kept buffers."""
        after, found = dict(self.wide.named_modules()), []
        for name in (name for name, entry in self.plan.buffers.items() if entry.kept):
            both = self.narrow.get_buffer(self.plan.buffers[name].origin), self.wide.get_buffer(name)
            before, own = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.double() for x in both)
            matched = match(before, own.to(before.device), 1e-9, self.planned)
            if matched is None or matched.ratio != 1:
                numbers = f"{before.item():g} → {own.item():g}, " if before.numel() == own.numel() == 1 else ""
                found.append(f"{name!r} ({numbers}a buffer that is not saved, so it keeps the wide model's value)")
        for name, module in self.narrow.named_modules():
            other = vars(after[name]) if name in after else {}
            for key, value in attributes_of(module).items():
                known = type(value) in (int, float) and type(other.get(key)) in (int, float)
                if known and other[key] != value and (value, other[key]) not in self.planned:
                    found.append(f"{f'{name}.{key}'.removeprefix('.')!r} ({value:g} → {other[key]:g})")
        if not found:
            return ""
        return f". Attributes that may be the reason: {', '.join(found[:4])}; a counter has to be set by hand"

    def _without_gradient(self) -> list[str]:
        """Growing parameters without a gradient, or that nothing reads where they are frozen."""
        entries = self.plan.parameters
        growing = [name for name, entry in entries.items() if entry.grows and not entry.inserted]
        read = self._read_frozen()
        return [name for name in growing if not self.masks.has_tested(name) and entries[name].origin not in read]

    def _read_frozen(self) -> set[str]:
        return self.read & {name for name, parameter in self.narrow.named_parameters() if not parameter.requires_grad}

    def _untested(self) -> tuple[str, ...]:
        """Growing parameters that the check says nothing about: outputs ignore them, and no similar one was tested."""
        entries, without = self.plan.parameters, self._without_gradient()
        growing = [name for name, entry in entries.items() if entry.grows and not entry.inserted]
        tested = [name for name in growing if name not in without]
        if growing and not tested and not any(entries[name].origin in self.masks.any_seen() for name in growing):
            raise UserError(
                "upscale: what call(model) returns has no gradient with respect to a parameter that grows, so nothing "
                "can be compared. Let it run the model that it is given, and return what that computes, with its graph"
            )
        return tuple(
            name
            for name in self.masks.untested(self._read_frozen())
            if entries[name].origin in self.masks.any_seen() or not self._has_effect(entries[name].origin)
        )

    def _has_effect(self, name: str) -> bool:
        """Whether what the narrow model returns depends on a parameter, which has no gradient: it is tested by that."""

        def shrink_one(model: nn.Module) -> None:
            parameter = model.get_parameter(name)
            generator = torch.Generator().manual_seed(5)
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_((1 - 0.5 * drawn).to(parameter.device))

        outputs = [self._pass_of_narrow(_CallStep(self), each, self.dtype)[0] for each in (as_they_are, shrink_one)]
        return not _are_equal(*outputs)

    def _is_chaotic(self, step: _CallStep, change: Weights) -> bool:
        """Whether rounding errors change a step of the narrow model as much as a difference would."""
        outputs, gradients = self._pass_of_narrow(step, change, self.dtype)

        def disturbed(model: nn.Module) -> None:
            change(model)
            disturb_(model)

        errors = self._errors(self._pass_of_narrow(step, disturbed, self.dtype), (outputs, gradients))
        return errors[0] > self.tolerance.outputs / 10 or errors[1] > self.tolerance.update / 10

    def _pass_of_narrow(
        self, step: _CallStep, change: Weights, dtype: torch.dtype
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        again = self._alike(step)
        with borrowed([self.narrow], (), dtype):
            with torch.no_grad():
                change(self.narrow)
            watch = StepWatch(own_tensors([self.narrow]), self.planned)
            try:
                with watch:
                    again(self.narrow, ())
            finally:
                watch.undo()
            return again.reference, gradients_of(self.narrow)

    @staticmethod
    def _errors(
        found: tuple[list[Tensor], dict[str, Tensor]], wanted: tuple[list[Tensor], dict[str, Tensor]]
    ) -> tuple[float, float]:
        """The relative errors of the outputs, each by its size, and of the gradients, by the size of the largest."""
        pairs = zip(found[0], wanted[0], strict=True)
        outputs = max((_error(a.to(b.dtype), b) for a, b in pairs), default=0.0)
        largest = max((size_of(gradient) for gradient in wanted[1].values()), default=0.0)
        of_gradients = (
            relative_error(found[1][name].to(b.dtype), b, max(size_of(b), 1e-2 * largest))
            for name, b in wanted[1].items()
            if name in found[1]
        )
        return outputs, max(of_gradients, default=0.0)

    def _allow_rounding(self) -> None:
        """Sets the tolerance in float32: ten times the distance of a narrow step from the same step in float64."""
        step = _CallStep(self)
        low = self._pass_of_narrow(step, as_they_are, torch.float32)
        largest = max((size_of(gradient) for gradient in low[1].values()), default=0.0)
        for optimizer in (*self.all_optimizers, *self.plain):
            for group in optimizer.param_groups:
                group["lr"] = 1 / max(largest, 1e-30)  # an update that is not lost in the rounding of weights
        self.dtype = torch.float64
        try:
            high = self._pass_of_narrow(step, as_they_are, torch.float64)
        except _Fails:  # an operation may not exist in float64
            outputs, update = 1e-5, 1e-4
        else:
            double = [x.double() for x in low[0]], {name: x.double() for name, x in low[1].items()}
            outputs, update = (10 * max(1e-7, error) for error in self._errors(double, high))
        finally:
            self.dtype = torch.float32
        self.tolerance = StepTolerance(update=update, rounding=1e-6, outputs=outputs, vanishing=1e-6)
        self.masks = GradientMasks(self.plan, self.tolerance)


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool((tensor.isfinite() | (tensor.abs() >= MASKED)).all()) for tensor in tensors)


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    same = len(one) == len(other) and all(a.shape == b.shape for a, b in zip(one, other, strict=True))
    return same and all(bool(torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in zip(one, other, strict=True))


def _error(value: Tensor, wanted: Tensor) -> float:
    return relative_error(value, wanted.to(value), max(size_of(wanted), 1e-30))
