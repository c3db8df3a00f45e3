"""Compares tensors of a narrow and a wide model, and training steps of both: how one is made of the other."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mupscale.checks.recording import Event
from mupscale.text_tables import Paint, folded, table, unpainted
from mupscale.widening.growth import Growth, Layout, Piece, duplicate, evenly, wide_length
from mupscale.widening.hints import some_names
from mupscale.widening.plan_text import Plan
from mupscale.widening.write import is_inexact, widen_, widen_gradient_

_MOST_LAYOUTS = 1024
MASKED = 1e30
"""Larger numbers are fill values of masks: they must be equal, but do not count for the ratio."""


class Match(NamedTuple):
    """The wide tensor is `ratio` times the narrow one, duplicated in `layouts`."""

    layouts: tuple[Layout, ...]
    ratio: float


Planned = Mapping[tuple[int, int], Sequence[Layout]]
"""The layouts that parameters have, by the sizes of the axis. Units that are zero, as after a ReLU, show no layout."""


def match(narrow: Tensor, wide: Tensor, tolerance: float, planned: Planned = MappingProxyType({})) -> Match | None:
    """How `wide` is made of `narrow`; None if it is not a duplicate of it. Of several ways, a planned one."""
    if narrow.ndim != wide.ndim or any(w < n for n, w in zip(narrow.shape, wide.shape, strict=True)):
        return None
    for layouts in candidates(narrow, wide, planned):
        ratio = _ratio(duplicate(narrow, layouts), wide, tolerance)
        if ratio is not None:
            return Match(layouts, ratio)
    return _matched_by_units(narrow, wide, tolerance)


def planned_layouts(growths: Iterable[Growth]) -> Planned:
    """The layouts of these parameters and buffers."""
    answer: dict[tuple[int, int], list[Layout]] = {}
    for entry in growths:
        for sizes, layout in zip(entry.sizes, entry.layouts, strict=True):
            if layout not in answer.setdefault(sizes, []):
                answer[sizes].append(layout)
    return answer


def candidates(narrow: Tensor, wide: Tensor, planned: Planned) -> Iterator[tuple[Layout, ...]]:
    """The layouts to try, of all axes: planned ones first, then those of equal blocks."""
    sizes = zip(narrow.shape, wide.shape, strict=True)
    axes = [dict.fromkeys((*planned.get(each, ()), *_equal_blocks(*each))) for each in sizes]
    return islice(product(*axes), _MOST_LAYOUTS)


def _equal_blocks(n: int, w: int) -> list[Layout]:
    """The largest blocks first; of a factor that is not whole, the smallest, as they are planned."""
    if n == w:
        return [(Piece(n, max(n, 1), 1),)]
    if n == 0:
        return []
    blocks = [block for block in range(n, 0, -1) if n % block == 0 and w % block == 0]
    return [evenly(n, w, block) for block in (blocks if w % n == 0 else reversed(blocks))]


def _ratio(duplicated: Tensor, wide: Tensor, tolerance: float) -> float | None:
    """The number r with wide = r · duplicated; None if there is none."""
    if wide.numel() == 0:
        return 1.0
    masked = ~(duplicated.abs() < MASKED)
    if bool(masked.any()):
        agree = (duplicated == wide) | (duplicated.isnan() & wide.isnan())
        if not bool(agree[masked].all()):
            return None
        duplicated, wide = duplicated.masked_fill(masked, 0.0), wide.masked_fill(masked, 0.0)
    size = float(wide.abs().max())
    square = float(duplicated.square().sum())
    if square == 0 or size == 0:
        return 1.0 if square == size == 0 else None
    ratio = float((duplicated * wide).sum()) / square
    if not ratio > 0 or not float((wide - ratio * duplicated).abs().max()) <= tolerance * size:
        return None
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=tolerance) else ratio


def _matched_by_units(narrow: Tensor, wide: Tensor, tolerance: float) -> Match | None:
    """Finds for each wide unit the narrow one that it is a copy of, by what they hold."""
    growing = [axis for axis, (n, w) in enumerate(zip(narrow.shape, wide.shape, strict=True)) if n != w]
    if len(growing) != 1 or narrow.numel() == 0:
        return None
    axis = growing[0]
    before = narrow.movedim(axis, 0).reshape(narrow.shape[axis], -1).clamp(-MASKED, MASKED)
    after = wide.movedim(axis, 0).reshape(wide.shape[axis], -1).clamp(-MASKED, MASKED)
    likeness = torch.nn.functional.normalize(after, dim=1) @ torch.nn.functional.normalize(before, dim=1).T
    layout = as_layout(likeness.argmax(1).tolist())
    if layout is None or wide_length(layout) != wide.shape[axis]:
        return None
    layouts = tuple(
        layout if other == axis else (Piece(size, max(size, 1), 1),) for other, size in enumerate(narrow.shape)
    )
    if tuple(sum(piece.length for piece in row) for row in layouts) != tuple(narrow.shape):
        return None
    ratio = _ratio(duplicate(narrow, layouts), wide, tolerance)
    return None if ratio is None else Match(layouts, ratio)


def as_layout(index: list[int]) -> Layout | None:
    """The pieces of an axis whose wide entries are copies of these narrow ones; None if pieces cannot say it."""
    pieces: list[Piece] = []
    at = start = 0
    while at < len(index):
        length = 0
        while at + length < len(index) and index[at + length] == start + length:
            length += 1
        if length == 0:
            return None
        after = index[at + length] if at + length < len(index) else start + length
        if start < after < start + length:  # what comes before the repeated block is there once
            length = after - start
        block = list(range(start, start + length))
        factor = 1
        while index[at + factor * length : at + (factor + 1) * length] == block:
            factor += 1
        if pieces and pieces[-1].block == length and pieces[-1].factor == factor:
            pieces[-1] = Piece(pieces[-1].length + length, length, factor)
        else:
            pieces.append(Piece(length, length, factor))
        at, start = at + factor * length, start + length
    return tuple(pieces)


LOSS_DIVISOR = 100
"""The loss is held to this part of the tolerance of activations."""

GRADIENT_MULTIPLE = 10
"""Gradients and weights get this multiple of it."""


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
    """The largest drift of each module's activations, in the order of the forward pass."""
    plan: Plan | None = field(default=None, repr=False)
    scaled: dict[str, float] = field(default_factory=dict, repr=False)
    """The modules inside an exact model whose outputs the wide model multiplies by another factor, and this factor.
    Their drifts are measured from the multiplied outputs."""
    dropout: tuple[str, ...] = ()
    """Layers that draw other masks for the wide model; they were left out."""

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
        lines = folded([f"{title}{head} (tolerance {self.tolerance:g}, {self.steps} steps after the upscale)"], columns)
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
        below = [f"{name}: its output is multiplied by {scale:g}" for name, scale in self.scaled.items()]
        if self.dropout:
            below.append(f"compared without {some_names(self.dropout)}, whose masks are others in the wide model")
        if self.reason:
            below = [self.reason, _REMEDY] if self.first_divergent is not None else [self.reason]
        return "\n".join([*lines, *folded(below, columns)])

    __str__ = text


@dataclass
class Comparison:
    """Fills in the verdict of one `verify`, and remembers what exceeded the tolerance first."""

    plan: Plan
    verdict: Verdict
    tested: dict[str, Tensor]
    """The parameters whose training tests the widening before the first step: those that grow, else all."""
    step: int = 0
    matches: dict[Any, Match] = field(default_factory=dict)
    """How single tensors are made of the narrow ones."""
    is_inexact: bool = False
    """Whether anything differed by more than the scale of an activation inside the model."""
    unscaled_drift: dict[str, float] = field(default_factory=dict)
    """The largest drift of each module's activations, apart from such a scale."""
    tracked: list[str] = field(default_factory=list)
    """The buffers that agreed before the first step."""
    has_gradient: bool = False
    """Whether one of the tested parameters had a gradient other than zero, at any step."""
    has_moved: bool = False
    """Whether one of them moved, at any step."""

    def __post_init__(self) -> None:
        self.tolerance = self.verdict.tolerance
        growths = self.plan.parameters.values()
        self.planned = planned_layouts((*growths, *self.plan.buffers.values()))
        self.fractions = {growth.ratio(axis) for growth in growths for axis in growth.fractional_axes}
        # the output of a norm or a matrix in role `readout` carries the 1/k of the readout behind it, and any output
        # the unit of what produced it
        self.known_scales = {1.0} | {growth.rescale for growth in growths}
        for growth in growths:
            summed = [axis for axis, side in enumerate(growth.sides) if side == "in"]
            if growth.role == "readout" and (growth.kind == "gain" or len(summed) > 1):
                self.known_scales |= {growth.rescale / growth.axes[axis].reference for axis in summed}

    def finished(self) -> Verdict:
        """The verdict, once all steps are compared."""
        verdict = self.verdict
        if verdict.reason is not None and not self.is_inexact:  # only scales inside the model differ
            verdict.first_divergent = verdict.reason = None
            verdict.drift_by_module = self.unscaled_drift
            verdict.activation_drift = worst_of(0.0, *verdict.drift_by_module.values())
        else:
            verdict.scaled = {}
        if verdict.reason is None:
            verdict.reason = self._why_untested()
        else:
            hints = [note for note in self.plan.notes if _concerns(note.partition(":")[0], verdict.first_divergent)]
            verdict.reason = "\n  ".join([verdict.reason.rstrip(","), *(f"note: {hint}" for hint in hints)])
        verdict.passed = verdict.reason is None
        return verdict

    def blame(self, module: str, what: str) -> None:
        if self.verdict.reason is None:
            self.verdict.first_divergent = module or "(the model)"
            self.verdict.reason = f"{what} at step {self.step} after the upscale"

    def loss(self, narrow: Tensor, wide: Tensor) -> None:
        drift = relative_error(wide, narrow, float(narrow.abs()))
        self.verdict.loss_drift = worst_of(self.verdict.loss_drift, drift)
        if not drift <= self.tolerance / LOSS_DIVISOR:
            self.is_inexact = True
            self.blame("(the loss)", f"the loss drifts by {drift:.1e} while every module's output agrees,")

    def activations(self, narrow: list[Event], wide: list[Event]) -> None:
        verdict = self.verdict
        if [(event.name, event.ends) for event in narrow] != [(event.name, event.ends) for event in wide]:
            self.is_inexact = True
            self.blame("(the model)", "the two models call different modules")
            verdict.activation_drift = math.inf
            return
        for index, (before, after) in enumerate(zip(narrow, wide, strict=True)):
            if not before.ends:
                continue
            drift, unscaled, scale = self._drifts(index, before, after)
            verdict.activation_drift = worst_of(verdict.activation_drift, drift)
            for drifts, value in ((verdict.drift_by_module, drift), (self.unscaled_drift, unscaled)):
                drifts[before.name] = worst_of(drifts.get(before.name, 0.0), value)
            if drift <= self.tolerance:
                continue
            if unscaled <= self.tolerance:
                verdict.scaled.setdefault(before.name, scale)
            else:
                self.is_inexact = True
            if verdict.reason is None:
                self._blame_first(index, drift, narrow, wide)

    def _blame_first(self, index: int, drift: float, narrow: list[Event], wide: list[Event]) -> None:
        """Blames the module whose output drifts or, if an input drifted before it, the module that computed that."""
        called = {event.name for event in narrow}  # a list of modules is never called
        under_way: list[int] = []  # an input of a call that has ended, with an output that agrees, does no harm
        for place, event in enumerate(narrow[:index]):
            if event.ends:
                under_way.pop()
            else:
                under_way.append(place)
        for place in under_way:
            before = narrow[place]
            given = self._drifts(place, before, wide[place])[0]
            if not given <= self.tolerance:
                parent = before.name.rpartition(".")[0]
                while parent and parent not in called:
                    parent = parent.rpartition(".")[0]
                self.blame(parent, f"what it computes before {before.name!r} drifts by {given:.1e}")
                return
        self.blame(narrow[index].name, f"its output drifts by {drift:.1e} although its input agrees,")

    def gradients(self, narrow: nn.Module, wide: nn.Module, order: dict[str, int]) -> None:
        before = gradients_of(narrow)
        self.has_gradient |= any(bool(before[name].any()) for name in self.tested.keys() & before.keys())
        drifts = gradient_errors(self.plan.parameters, before, gradients_of(wide), least=1e-4)
        bad = [name for name, drift in drifts.items() if not drift <= self.tolerance * GRADIENT_MULTIPLE]
        self.verdict.gradient_drift = worst_of(self.verdict.gradient_drift, *drifts.values())
        if bad:  # the fault is nearest to the loss: everything before it inherits a wrong gradient
            self.is_inexact = True
            name = max(bad, key=lambda n: order.get(n.rpartition(".")[0], -1))
            self.blame(name.rpartition(".")[0], f"the gradient of {name!r} drifts by {drifts[name]:.1e}")

    def weights(self, narrow: nn.Module, wide: nn.Module) -> None:
        targets = dict(wide.named_parameters())
        for name, source in narrow.named_parameters():
            wanted = torch.empty_like(targets[name])
            widen_(wanted, source.detach(), self.plan.parameters[name])
            drift = relative_error(targets[name].detach(), wanted, _largest(wanted))
            self.has_moved |= name in self.tested and not torch.equal(source, self.tested[name])
            self.verdict.weight_drift = worst_of(self.verdict.weight_drift, drift)
            if not drift <= self.tolerance * GRADIENT_MULTIPLE:
                self.is_inexact = True
                what = f"the update of {name!r} drifts by {drift:.1e} although its gradient agrees,"
                self.blame(name.rpartition(".")[0], what)

    def buffers(self, narrow: nn.Module, wide: nn.Module) -> None:
        """Statistics of activations with another scale would show only in evaluation."""
        drifts = self.buffer_drifts(narrow, wide)
        allowed = self.tolerance * GRADIENT_MULTIPLE
        if self.verdict.scaled and not all(drifts.get(name, math.inf) <= allowed for name in self.tracked):
            self.is_inexact = True

    def buffer_drifts(self, narrow: nn.Module, wide: nn.Module) -> dict[str, float]:
        """Of the buffers that both models have, in the shapes of the plan."""
        targets = dict(wide.named_buffers())
        drifts = {}
        for name, source in narrow.named_buffers():
            entry, target = self.plan.buffers.get(name), targets.get(name)
            if entry is None or target is None or source.shape != entry.narrow_shape:
                continue
            before, after = duplicate(source.detach(), entry.layouts), target.detach()
            if before.shape != after.shape:
                continue
            if is_inexact(before):
                drifts[name] = relative_error(after, before, _largest(before))
            else:
                drifts[name] = 0.0 if torch.equal(before, after) else math.inf
        return drifts

    def _why_untested(self) -> str | None:
        """Why agreement proves nothing; None if it does."""
        steps = self.verdict.steps
        if not self.has_gradient:
            return (
                f"nothing was tested: no parameter that grows has a gradient in any of {steps} steps. The loss does "
                "not depend on them, the network is dead (a ReLU that is always 0), or they are frozen"
            )
        if not self.has_moved:
            return (
                f"nothing was tested: no parameter that grows moves in any of {steps} steps. Is the learning rate 0, "
                "or the clip?"
            )
        return None

    def _drifts(self, index: int, narrow: Event, wide: Event) -> tuple[float, float, float]:
        """The largest drift of some tensors; apart from one scale of each, the same at all steps; and such a scale.

        If a scale is wrong for what follows, that differs too. Nothing follows the output of the model.
        """
        if len(narrow.tensors) != len(wide.tensors):
            return math.inf, math.inf, 1.0
        drift, unscaled, scale = 0.0, 0.0, 1.0
        for number, (a, b) in enumerate(zip(narrow.tensors, wide.tensors, strict=True)):
            error, ratio = self._compared((index, number, a.shape, b.shape), a, b)
            by_scale = worst_of(error, abs(ratio - 1))
            if narrow.ends and narrow.is_outermost and (not narrow.name or a.shape == b.shape):
                error = by_scale
            drift, unscaled = worst_of(drift, by_scale), worst_of(unscaled, error)
            scale = scale if ratio == 1 else ratio
        return drift, unscaled, scale

    def _compared(self, key: Any, narrow: Tensor, wide: Tensor) -> tuple[float, float]:
        """How far a tensor is from the narrow one, in the layout that fits best and times a ratio; and the ratio.

        The layout of an activation is not known: heads may be a separate axis, or be flattened with positions. So every
        block length is tried. If a layout is wrong for the next module, the output of that module differs.
        """
        if narrow.ndim != wide.ndim:
            return math.inf, 1.0
        size = _largest(narrow)

        def error_of(found: Match) -> float:
            return relative_error(wide, duplicate(narrow, found.layouts) * found.ratio, size * found.ratio)

        found = self.matches.get(key)
        is_settled = found is not None and (self.is_inexact or found.ratio != 1)  # once diverged, no other will fit
        if found is None or not (is_settled or error_of(found) <= self.tolerance):
            found = match(narrow, wide, self.tolerance, self.planned)
            if found is None:
                sizes = zip(narrow.shape, wide.shape, strict=True)
                if not all(self._is_described(*each) for each in sizes):
                    return 0.0, 1.0  # a concatenation that no parameter describes: what follows will show
                found = min((Match(each, 1.0) for each in candidates(narrow, wide, self.planned)), key=error_of)
            self.matches[key] = found
        normalised = math.sqrt(narrow.numel() / wide.numel()) if _is_normalised(narrow, wide) else 1.0
        known = any(math.isclose(found.ratio, scale, rel_tol=1e-6) for scale in (*self.known_scales, normalised))
        return error_of(found), 1.0 if known else found.ratio

    def _is_described(self, n: int, w: int) -> bool:
        """Whether the growth of an axis is a whole factor, or one that parameters have."""
        return n == w or (n, w) in self.planned or (n > 0 and (w % n == 0 or Fraction(w, n) in self.fractions))


def _concerns(noted: str, module: str | None) -> bool:
    """Whether a note on one module may explain a divergence that shows in another: one contains the other."""
    within = f"{noted}.".startswith(f"{module}.") or f"{module}.".startswith(f"{noted}.")
    return within or "(the model)" in (noted, module)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the parameters that have one, by name."""
    found = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in found.items()}


def gradient_errors(
    growths: Mapping[str, Growth],
    narrow: Mapping[str, Tensor],
    wide: Mapping[str, Tensor],
    least: float,
    *,
    nan_agrees: bool = False,
) -> dict[str, float]:
    """How far each wide gradient is from that of Table 1, in units of its largest entry; those of new layers left out.

    One that vanishes by symmetry (of a bias before BatchNorm, of a key) is rounding, and is measured by the share
    `least` of the largest gradient. NaN and infinity prove nothing, unless `nan_agrees`.
    """
    largest = max((size_of(gradient) for gradient in narrow.values()), default=0.0)
    errors = {}
    for name, growth in growths.items():
        if growth.inserted or (growth.origin not in narrow and name not in wide):
            continue
        before = narrow[growth.origin] if growth.origin in narrow else wide[name].new_zeros(growth.narrow_shape)
        wanted = before.new_empty(growth.wide_shape)
        widen_gradient_(wanted, before, growth)
        after = wide[name].to(wanted.device) if name in wide else torch.zeros_like(wanted)
        size = max(size_of(wanted), least * largest * growth.scale.gradient, 1e-300)
        is_known = nan_agrees or bool(after.isfinite().all())
        errors[name] = relative_error(after, wanted, size) if is_known else math.inf
    return errors


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def size_of(tensor: Tensor) -> float:
    """The largest number, apart from fill values of masks."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.detach().abs()
    return float(sizes.masked_fill(~(sizes < MASKED), 0.0).max())


def _is_normalised(narrow: Tensor, wide: Tensor) -> bool:
    """Whether the narrow tensor holds vectors of length 1 along the axes that grow, so that its copies are smaller."""
    axes = [axis for axis, (n, w) in enumerate(zip(narrow.shape, wide.shape, strict=True)) if n != w]
    if not axes or not narrow.numel() or not wide.numel():
        return False
    return bool((torch.linalg.vector_norm(narrow, dim=axes) - 1).abs().max() < 1e-5)


def relative_error(value: Tensor, wanted: Tensor, size: float) -> float:
    """The largest difference, in units of `size`; NaN and infinity agree with themselves."""
    if value.numel() == 0:
        return 0.0
    error = (value - wanted).abs().nan_to_num(nan=math.inf)
    both = (value == wanted) | (value.isnan() & wanted.isnan())  # -inf in a masked score agrees with itself
    return float(error.masked_fill(both, 0.0).max()) / max(size if math.isfinite(size) else 1.0, 1e-30)


def worst_of(*drifts: float) -> float:
    return max((math.inf if math.isnan(drift) else drift for drift in drifts), default=0.0)
