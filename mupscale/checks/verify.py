"""Trains narrow and wide copies in float64: `verify` compares all that they compute, `check_claim` their losses."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.base_shapes import clip_grad_norm_
from mupscale.checks.comparison import gradient_errors, gradients_of, named_gradients, planned_layouts, relative_error
from mupscale.checks.precision import WithoutDropout
from mupscale.checks.real_step import (
    GradientMasks,
    StepTolerance,
    Values,
    differences,
    updates_since,
    values_of,
)
from mupscale.checks.recording import (
    copied,
    float64_copy,
    generators_kept,
    map_leaves,
    refuse_unless_loss,
    state_kept,
)
from mupscale.checks.trace import Event, Follower, Ratios, float_copies, watched
from mupscale.errors import UserError, refuse_unless_level, refuse_unless_model, refuse_unless_whole
from mupscale.methods.base import Claim, GrowthMethod, Loss
from mupscale.methods.grow import as_list, grow
from mupscale.text_tables import Paint, Watch, folded, table, unpainted, unwatched
from mupscale.widening.hints import Hints, checked_hints, refuse_lazy, refuse_scripted, some_names
from mupscale.widening.layers import Depth
from mupscale.widening.modules import dropout_of
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan_text import Plan
from mupscale.widening.write import is_inexact

TOLERANCE = 1e-8
"""Relative drift of activations in float64."""

TOLERANCE_FLOAT32 = 1e-4
"""The same for optimizers that compute in float32."""

LOSS_DIVISOR = 100
"""The loss is held to this part of the tolerance of activations."""

GRADIENT_MULTIPLE = 10
"""Gradients and weights get this multiple of it."""

WARM_UP = 10
"""Training steps of the narrow copy before it grows, so that the move of optimizer state is tested too."""

VANISHING = 1e-11
"""Gradients below this share of the largest one are rounding, as that of a key's bias or of a bias before BatchNorm."""


_REMEDY = "mupscale.discover looks for a plan with which the models agree, where there is one: give it as hints"


@dataclass
class Verdict:
    """The result of `verify`. Each drift is a relative difference, the largest over all steps.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> class Shrink(nn.Module):
        ...     def forward(self, x):
        ...         return x / x.shape[-1] ** 0.5  # depends on the width
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), Shrink(), nn.Linear(n, 2)) for n in (4, 8))
        >>> verdict = mupscale.verify(
        ...     narrow, wide, optimizer=torch.optim.AdamW, batches=[torch.randn(5, 3)], steps=2,
        ...     loss=lambda model, batch: model(batch).square().mean())
        >>> verdict.passed, verdict.first_divergent
        (False, '1')
    """

    passed: bool
    loss_drift: float = 0.0
    activation_drift: float = 0.0
    gradient_drift: float = 0.0
    weight_drift: float = 0.0
    first_divergent: str | None = None
    """The name of the first module that diverges, or None."""
    reason: str | None = None
    """What diverged there, at which step, and the plan's notes on it; or why nothing was tested."""
    steps: int = 0
    tolerance: float = 0.0
    drift_by_module: dict[str, float] = field(default_factory=dict, repr=False)
    """The largest drift of each module's activations, in the order of the forward pass. An output inside the model may
    be multiplied by a constant: its drift is measured from there."""
    plan: Plan | None = field(default=None, repr=False)
    dropout: tuple[str, ...] = ()
    """Layers that drop units, which dropped none."""

    def __bool__(self) -> bool:
        return self.passed

    def text(self, columns: int | None = None, paint: Paint = unpainted, title: str = "") -> str:
        """The verdict in a line that begins with `title`, and the drifts in a table; for a terminal of `columns`."""
        if self.passed:
            head = "exact apart from dropout" if self.dropout else "exact"
        elif self.first_divergent is None:
            head = "NOTHING TESTED"
        else:
            head = f"NOT exact: {self.first_divergent} diverges first"
        lines = folded([f"{title}{head} (tolerance {self.tolerance:g}, {self.steps} steps after the growth)"], columns)
        lines = [paint(line, "good" if self.passed else "bad") for line in lines]
        drifts = {
            "loss": (self.loss_drift, self.tolerance / LOSS_DIVISOR),
            "activations": (self.activation_drift, self.tolerance),
            "gradients": (self.gradient_drift, self.tolerance * GRADIENT_MULTIPLE),
            "weights": (self.weight_drift, self.tolerance * GRADIENT_MULTIPLE),
        }
        rows = [("", "largest relative drift", "allowed")]
        rows += [(name, f"{drift:.1e}", f"{allowed:.0e}") for name, (drift, allowed) in drifts.items()]
        beyond = [index for index, (drift, allowed) in enumerate(drifts.values(), 1) if not drift <= allowed]
        lines += table(rows, right=(1, 2), styles=dict.fromkeys(beyond, "bad"), columns=columns, paint=paint)
        below = [f"compared without {some_names(self.dropout)}"] if self.dropout and not self.reason else []
        if self.reason:
            below = [self.reason, *[_REMEDY] * (self.first_divergent is not None)]
        return "\n".join([*lines, *folded(below, columns)])

    __str__ = text


@generators_kept()
def verify(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]],
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    steps: int,
    clip: float | None = None,
    hints: Hints | None = None,
    tolerance: float | None = None,
    watch: Watch = unwatched,
) -> Verdict:
    """Checks whether the growth of `narrow` to `wide` is exact: same function, same training.

    A float64 copy of `narrow` trains for a few steps and grows without noise. Then both copies train for `steps`
    steps with `optimizer(parameters)` and `loss(model, batch)`, cycling through `batches`; with `clip`, gradients are
    clipped by the width-invariant norm. The output of every module and every gradient of the wide copy is compared with
    its duplicated narrow counterpart; after the first and the last step also weights, buffers and optimizer state. The
    arguments are not changed.

    All is computed in float64, or complex128, what a model casts to float32 inside as well. Layers that drop units drop
    none, because their masks are others in the wide model: the verdict is then exact apart from dropout.

    Inside the model, the output of a module may be multiplied by a constant (a softmax over the width makes it smaller)
    if the output of the model, the loss, all gradients, weights and buffers agree.

    The default tolerance is 1e-8 for activations and 1e-10 for the loss. If the optimizer computes in float32
    internally, it is 1e-4 and 1e-6.

    `watch(words, done, total)` is called after every step.

    The verdict is not `passed` if no growing parameter has a gradient, or if none of them moves: nothing was tested.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> def loss(model, batch):
        ...     return model(batch).square().mean()
        >>> batches = [torch.randn(5, 3) for _ in range(4)]
        >>> verdict = mupscale.verify(narrow, wide, optimizer=torch.optim.AdamW, batches=batches, loss=loss, steps=10)
        >>> print(verdict)  # doctest: +ELLIPSIS
        exact (tolerance 1e-08, 10 steps after the growth)
        ...
    """
    for name, model in (("narrow", narrow), ("wide", wide)):
        refuse_unless_model(f"verify: {name}", model)
        refuse_scripted(f"verify: {name}", model)
        refuse_lazy(model)
    if any(tensor.is_meta for tensor in (*narrow.parameters(), *narrow.buffers())):
        raise UserError("verify: narrow is on the meta device and has no values; build it on the CPU")
    refuse_unless_whole("verify: steps", steps)
    for name, value in (("clip", clip), ("tolerance", tolerance)):
        if value is not None:
            refuse_unless_level(f"verify: {name}", value)
    batches = list(islice(batches, WARM_UP + steps))
    if not batches:
        raise UserError("verify: batches is empty")
    narrow, wide = copied("verify: narrow", narrow), copied("verify: wide", wide)
    dropout = tuple(name for name, module in narrow.named_modules() if module.training and dropout_of(module))
    for module, twin in zip(narrow.modules(), wide.modules(), strict=False):
        module.training = twin.training = module.training and not dropout_of(module)
    optimizers = as_list(optimizer(list(narrow.parameters())))
    allowed = tolerance
    if allowed is None:
        allowed = TOLERANCE_FLOAT32 if any(map(_steps_in_float32, optimizers)) else TOLERANCE
    plan = make_plan(narrow, wide, hints=hints)
    comparison = _Comparison(plan, allowed)

    def backward(model: nn.Module, step: int, note: Any = lambda name, kind, values: None) -> Tensor:
        model.zero_grad()
        batch = batches[step % len(batches)]
        with WithoutDropout():
            _, value = watched(model, lambda model: loss(model, batch), note, seed=step)
        refuse_unless_loss(value)
        if value.requires_grad:  # a constant has no gradients, which the verdict says
            value.backward()
        return value.detach()

    def update(model: nn.Module, optimizers: list[Optimizer]) -> None:
        with comparison.masks.flushed(model, optimizers, is_wide=model is wide):
            if clip is not None:
                clip_grad_norm_(model, clip)
            for each in optimizers:
                each.step()

    for step in range(WARM_UP):
        backward(narrow, step)
        update(narrow, optimizers)
    continued = as_list(grow(narrow, wide, optimizers, plan=plan).optimizer)
    comparison.begin(narrow)
    for step in range(steps):
        events: list[Event] = []

        def record(name: str, kind: Any, values: Any, events: list[Event] = events) -> None:
            events.append(Event(name, kind, float_copies(values)))

        before = backward(narrow, WARM_UP + step, record)
        follower = Follower(narrow, events, plan, comparison.layouts, allowed, comparison.ratios)
        after = backward(wide, WARM_UP + step, follower)
        comparison.step = step
        comparison.passes(follower, before, after)
        comparison.gradients(narrow, wide, {event.name: place for place, event in enumerate(events)})
        update(narrow, optimizers)
        update(wide, continued)
        if step in (0, steps - 1) and not comparison.is_inexact:
            expected = copied("verify: wide", wide)
            wanted = values_of(expected, as_list(grow(narrow, expected, optimizers, plan=plan).optimizer))
            comparison.values(narrow, values_of(wide, continued), wanted)
        watch("comparing training steps", step + 1, steps)
    return comparison.verdict(narrow, steps, dropout)


class _Comparison:
    """The drifts of a wide model from a narrow one, and what differed first."""

    def __init__(self, plan: Plan, tolerance: float) -> None:
        self.plan, self.tolerance, self.step = plan, tolerance, 0
        self.layouts = planned_layouts((*plan.parameters.values(), *plan.buffers.values()))
        self.masks = GradientMasks(plan, StepTolerance(vanishing=VANISHING))
        self.ratios: Ratios = {}
        self._drifts = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
        self._by_module: dict[str, float] = {}
        self._first: tuple[str, str] | None = None
        self.is_inexact = False
        self._start: dict[str, Tensor] = {}

    def begin(self, narrow: nn.Module) -> None:
        self._start = {name: parameter.detach().clone() for name, parameter in narrow.named_parameters()}
        self.masks.seen.clear()

    def passes(self, follower: Follower, narrow_loss: Tensor, wide_loss: Tensor) -> None:
        for name, drift in follower.drifts.items():
            self._by_module[name] = _worst(self._by_module.get(name, 0.0), drift)
        self.is_inexact |= follower.differs
        if follower.first is not None:  # or only by a number that what follows makes up for
            self._blame(follower.first.place, str(follower.first))
        drift = relative_error(wide_loss, narrow_loss, float(narrow_loss.abs()))
        if self._exceeds("loss", drift, self.tolerance / LOSS_DIVISOR):
            self._blame("(the loss)", f"the loss drifts by {drift:.1e} while every module's output agrees")

    def gradients(self, narrow: nn.Module, wide: nn.Module, order: dict[str, int]) -> None:
        drifts = gradient_errors(self.plan.parameters, gradients_of(narrow), gradients_of(wide), least=1e-4)
        if self._exceeds("gradient", _worst(*drifts.values()), self.tolerance * GRADIENT_MULTIPLE):
            # the fault is nearest to the loss: everything before it inherits a wrong gradient
            bad = [name for name, drift in drifts.items() if not drift <= self.tolerance * GRADIENT_MULTIPLE]
            name = max(bad, key=lambda name: order.get(name.rpartition(".")[0], -1))
            self._blame(name.rpartition(".")[0], f"the gradient of {name!r} drifts by {drifts[name]:.1e}")

    def values(self, narrow: nn.Module, got: Values, wanted: Values) -> None:
        allowed = self.tolerance * GRADIENT_MULTIPLE
        updates = updates_since(self.plan, narrow, self._start)
        found, worst = differences(got, wanted, updates, self.plan, StepTolerance(update=allowed, rounding=allowed))
        self._drifts["weight"] = _worst(self._drifts["weight"], worst)
        self.is_inexact |= bool(found)
        for first in found[:1]:
            self._blame(first.place, f"{first}, though gradients agree,")

    def verdict(self, narrow: nn.Module, steps: int, dropout: tuple[str, ...]) -> Verdict:
        divergent, reason = None, self._why_untested(narrow, steps)
        if self.is_inexact and self._first is not None:
            divergent, reason = self._first
            notes = [note for note in self.plan.notes if _concerns(note.partition(":")[0], divergent)]
            reason = "\n  ".join([reason, *(f"note: {note}" for note in notes)])
        return Verdict(
            reason is None,
            self._drifts["loss"],
            _worst(*self._by_module.values()),
            self._drifts["gradient"],
            self._drifts["weight"],
            divergent,
            reason,
            steps,
            self.tolerance,
            self._by_module,
            self.plan,
            dropout,
        )

    def _exceeds(self, kind: str, drift: float, allowed: float) -> bool:
        self._drifts[kind] = _worst(self._drifts[kind], drift)
        self.is_inexact |= not drift <= allowed
        return not drift <= allowed

    def _blame(self, module: str, what: str) -> None:
        if self._first is None:
            self._first = module or "(the model)", f"{what} at step {self.step} after the growth"

    def _why_untested(self, narrow: nn.Module, steps: int) -> str | None:
        """Why agreement proves nothing; None if it does."""
        entries = self.plan.parameters.values()
        tested = {entry.origin for entry in entries if entry.grows} or {entry.origin for entry in entries}
        if not tested & self.masks.any_seen():
            return (
                f"nothing was tested: no parameter that grows has a gradient in any of {steps} steps. The loss does "
                "not depend on them, the network is dead (a ReLU that is always 0), or they are frozen"
            )
        if all(torch.equal(narrow.get_parameter(name), self._start[name]) for name in tested):
            return (
                f"nothing was tested: no parameter that grows moves in any of {steps} steps. Is the learning rate 0, "
                "or the clip?"
            )
        return None


def _worst(*drifts: float) -> float:
    return max((math.inf if math.isnan(drift) else drift for drift in drifts), default=0.0)


def _concerns(noted: str, module: str) -> bool:
    """Whether a note on one module may explain a divergence that shows in another: one contains the other."""
    within = f"{noted}.".startswith(f"{module}.") or f"{module}.".startswith(f"{noted}.")
    return within or "(the model)" in (noted, module)


def _steps_in_float32(optimizer: Optimizer) -> bool:
    """Whether an optimizer rounds to float32: capturable ones do, and float32 learning rates when rescaled."""
    return any(
        group.get("capturable")
        or any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in group.values())
        for group in optimizer.param_groups
    )


PRESERVED = 1e-12
"""The largest relative deviation of a loss, in float64, that is rounding."""


@dataclass(frozen=True)
class ClaimCheck:
    """The result of `check_claim`. Each deviation is relative, the largest over batches or steps."""

    method: str
    claim: Claim
    static: float
    """The deviation of the losses just after growing."""
    dynamic: float
    """The deviation of the losses of the steps after it."""

    @property
    def holds(self) -> bool:
        """Whether the method preserves exactly what it claims, no less and no more."""
        return self.claim == Claim(self.static <= PRESERVED, self.dynamic <= PRESERVED)

    def text(self, columns: int | None = None, paint: Paint = unpainted, title: str = "") -> str:
        """The check in a line that begins with `title`; for a terminal of `columns`."""
        rows = zip(("function", "training"), self.claim, (self.static, self.dynamic), strict=True)
        parts = [f"{name} {'not ' * (not kept)}preserved (deviation {found:.1e})" for name, kept, found in rows]
        line = f"{title}{self.method}: {', '.join(parts)}: {'confirmed' if self.holds else 'REFUTED'}"
        return "\n".join(paint(part, "good" if self.holds else "bad") for part in folded([line], columns))

    __str__ = text


def check_claim(
    narrow: nn.Module,
    wide: nn.Module,
    method: GrowthMethod,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    batches: Sequence[Any],
    loss: Loss,
    steps: int = 20,
    hints: Hints | None = None,
    depth: Depth | None = None,
) -> ClaimCheck:
    """Checks what a growth method claims to preserve, on float64 copies of the models.

    A copy of `narrow` trains for a few steps and grows. Then both train for `steps` steps; their losses are compared.
    With `depth` it becomes deeper, too.

    `print(check_claim(narrow, wide, Net2Net(), optimizer=torch.optim.AdamW, batches=batches, loss=loss))`

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> groups = {"hidden": {"0.weight": 0, "2.weight": 1}}  # the axes that hold the hidden units
        >>> def loss(model, batch):
        ...     return model(batch).square().mean()
        >>> batches = [torch.randn(5, 3) for _ in range(4)]
        >>> method = mupscale.methods.Net2Net(groups=groups)
        >>> check = mupscale.check_claim(
        ...     narrow, wide, method, optimizer=torch.optim.AdamW, batches=batches, loss=loss)
        >>> check.claim, check.holds
        (Claim(function=True, dynamics=True), True)
    """
    if steps < 1 or not batches:
        raise UserError(f"check_claim: give at least one step and one batch, got {steps} and {len(batches)}")
    if depth is not None:
        hints = replace(checked_hints(hints), depth=depth)
    narrow, wide = float64_copy(narrow), float64_copy(wide)
    batches = [map_leaves(_to_float64, batch) for batch in batches]
    before = optimizer(list(narrow.parameters()))
    for step in range(WARM_UP):
        _train_step(narrow, before, batches[step % len(batches)], loss)
    method = copy.deepcopy(method)
    method.fit(narrow, wide, batches, loss, hints=hints)
    report = grow(narrow, wide, before, method=method, hints=hints)
    after = report.optimizer
    assert isinstance(after, Optimizer)
    static = dynamic = 0.0
    for batch in batches:
        with torch.no_grad(), state_kept([*narrow.modules(), *wide.modules()]):
            static = max(static, _deviation(float(loss(wide, batch)), float(loss(narrow, batch))))
    gradients = {}
    if method.measures_claim:
        with state_kept(wide.modules()):
            gradients["gradients"] = named_gradients(wide, loss(wide, batches[0]))
    claim = method.claim(report.plan, narrow, [before], **gradients)
    if report.plan.layers:  # new layers learn, which no narrow run does
        claim = Claim(claim.function and report.plan.keeps_function, False)
    for step in range(steps):
        batch = batches[(WARM_UP + step) % len(batches)]
        dynamic = max(
            dynamic, _deviation(_train_step(wide, after, batch, loss), _train_step(narrow, before, batch, loss))
        )
    return ClaimCheck(type(method).__name__, claim, static, dynamic)


def _to_float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not is_inexact(value):
        return value
    return value.to(torch.complex128) if value.is_complex() else value.double()


def _train_step(model: nn.Module, optimizer: Optimizer, batch: Any, loss: Loss) -> float:
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return float(value.detach())


def _deviation(wide: float, narrow: float) -> float:
    return abs(wide - narrow) / abs(narrow) if math.isfinite(wide - narrow) else math.inf
