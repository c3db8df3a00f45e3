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

from mupscale.checks.recording import Call
from mupscale.widening.growth import Growth, Layout, Piece, duplicate, evenly, wide_length
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
        for sizes, layout in zip(zip(entry.narrow_shape, entry.wide_shape, strict=True), entry.layouts, strict=True):
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


@dataclass
class Comparison:
    """Collects the drifts of one `verify` and remembers what exceeded the tolerance first."""

    plan: Plan
    tolerance: float
    step: int = 0
    loss_drift: float = 0.0
    activation_drift: float = 0.0
    gradient_drift: float = 0.0
    weight_drift: float = 0.0
    first: tuple[str, str] | None = None
    by_module: dict[str, float] = field(default_factory=dict)
    matches: dict[Any, Match] = field(default_factory=dict)
    """How single tensors are made of the narrow ones."""
    is_inexact: bool = False
    """Whether anything differed by more than the scale of an activation inside the model."""
    scaled: dict[str, float] = field(default_factory=dict)
    """The scale of the outputs of modules that differ by no more than that."""
    unscaled_drift: dict[str, float] = field(default_factory=dict)
    """The largest drift of each module's activations, apart from such a scale."""
    tracked: list[str] = field(default_factory=list)
    """The buffers that agreed before the first step."""
    tested: dict[str, Tensor] = field(default_factory=dict)
    """The parameters whose training tests the widening before the first step: those that grow, else all."""
    has_gradient: bool = False
    """Whether one of them had a gradient other than zero, at any step."""
    has_moved: bool = False
    """Whether one of them moved, at any step."""

    def __post_init__(self) -> None:
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

    def blame(self, module: str, what: str, *, is_inexact: bool = True) -> None:
        self.is_inexact = self.is_inexact or is_inexact
        if self.first is None:
            self.first = module or "(the model)", f"{what} at step {self.step} after the upscale"

    def loss(self, narrow: Tensor, wide: Tensor) -> None:
        drift = relative_error(wide, narrow, float(narrow.abs()))
        self.loss_drift = worst_of(self.loss_drift, drift)
        if not drift <= self.tolerance / LOSS_DIVISOR:
            self.blame("(the loss)", f"the loss drifts by {drift:.1e} while every module's output agrees,")

    def activations(self, narrow: list[Call], wide: list[Call]) -> None:
        if [call.name for call in narrow] != [call.name for call in wide]:
            self.blame("(the model)", "the two models call different modules")
            self.activation_drift = math.inf
            return
        for index, (before, after) in enumerate(zip(narrow, wide, strict=True)):
            drift, unscaled, scale = self._drifts((index, "out"), before.outputs, after.outputs, before)
            self.activation_drift = worst_of(self.activation_drift, drift)
            self.by_module[before.name] = worst_of(self.by_module.get(before.name, 0.0), drift)
            self.unscaled_drift[before.name] = worst_of(self.unscaled_drift.get(before.name, 0.0), unscaled)
            if drift <= self.tolerance:
                continue
            is_inexact = not unscaled <= self.tolerance
            if not is_inexact:
                self.scaled.setdefault(before.name, scale)
            given, _, _ = self._drifts((index, "in"), before.inputs, after.inputs)
            if given <= self.tolerance:
                what = f"its output drifts by {drift:.1e} although its input agrees,"
                self.blame(before.name, what, is_inexact=is_inexact)
            elif self.first is None:
                self._blame_container(index, given, narrow, wide, is_inexact=is_inexact)
            self.is_inexact = self.is_inexact or is_inexact

    def _blame_container(
        self, index: int, given: float, narrow: list[Call], wide: list[Call], *, is_inexact: bool
    ) -> None:
        """Blames the innermost module around this call whose own input agrees.

        A computation between two modules happens in the forward pass of a module that contains both. Calls are in the
        order in which they end, so the call of a container comes after those of its parts.
        """
        inner = narrow[index].name
        parent = inner
        while parent:
            parent = parent.rpartition(".")[0]
            around = next((i for i in range(index + 1, len(narrow)) if narrow[i].name == parent), None)
            if around is None:  # a list of modules is never called
                continue
            drift, _, _ = self._drifts((around, "in"), narrow[around].inputs, wide[around].inputs)
            if drift <= self.tolerance:
                break
            inner, given = parent, drift
        self.blame(parent, f"what it computes before {inner!r} drifts by {given:.1e}", is_inexact=is_inexact)

    def gradients(self, narrow: nn.Module, wide: nn.Module, order: dict[str, int]) -> None:
        before = gradients_of(narrow)
        self.has_gradient |= any(bool(before[name].any()) for name in self.tested.keys() & before.keys())
        drifts = gradient_errors(self.plan.parameters, before, gradients_of(wide), least=1e-4)
        bad = [name for name, drift in drifts.items() if not drift <= self.tolerance * GRADIENT_MULTIPLE]
        self.gradient_drift = worst_of(self.gradient_drift, *drifts.values())
        if bad:  # the fault is nearest to the loss: everything before it inherits a wrong gradient
            name = max(bad, key=lambda n: order.get(n.rpartition(".")[0], -1))
            self.blame(name.rpartition(".")[0], f"the gradient of {name!r} drifts by {drifts[name]:.1e}")

    def weights(self, narrow: nn.Module, wide: nn.Module) -> None:
        targets = dict(wide.named_parameters())
        for name, source in narrow.named_parameters():
            wanted = torch.empty_like(targets[name])
            widen_(wanted, source.detach(), self.plan.parameters[name])
            drift = relative_error(targets[name].detach(), wanted, _largest(wanted))
            self.has_moved |= name in self.tested and not torch.equal(source, self.tested[name])
            self.weight_drift = worst_of(self.weight_drift, drift)
            if not drift <= self.tolerance * GRADIENT_MULTIPLE:
                what = f"the update of {name!r} drifts by {drift:.1e} although its gradient agrees,"
                self.blame(name.rpartition(".")[0], what)

    def buffers(self, narrow: nn.Module, wide: nn.Module) -> None:
        """Statistics of activations with another scale would show only in evaluation."""
        drifts = self.buffer_drifts(narrow, wide)
        allowed = self.tolerance * GRADIENT_MULTIPLE
        if self.scaled and not all(drifts.get(name, math.inf) <= allowed for name in self.tracked):
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

    def untested(self, steps: int) -> str | None:
        """Why agreement proves nothing; None if it does."""
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

    def _drifts(
        self, key: Any, narrow: list[Tensor], wide: list[Tensor], made_by: Call | None = None
    ) -> tuple[float, float, float]:
        """The largest drift of some tensors; apart from one scale of each, the same at all steps; and such a scale.

        If a scale is wrong for what follows, that differs too. Nothing follows the output of the model.
        """
        if len(narrow) != len(wide):
            return math.inf, math.inf, 1.0
        drift, unscaled, scale = 0.0, 0.0, 1.0
        for number, (a, b) in enumerate(zip(narrow, wide, strict=True)):
            error, ratio = self._compared((key, number, a.shape, b.shape), a, b)
            by_scale = worst_of(error, abs(ratio - 1))
            if made_by is not None and made_by.is_outermost and (not made_by.name or a.shape == b.shape):
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
