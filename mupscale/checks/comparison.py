"""Compares tensors of a narrow and a wide model: how one is made of the other, by the layouts of its axes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mupscale.widening.growth import (
    Axis,
    Growth,
    Layout,
    Piece,
    duplicate,
    duplicate_,
    evenly,
    narrow_length,
    wide_length,
)
from mupscale.widening.write import widen_gradient_

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
    """The layouts of these parameters and buffers, and after them those of their blocks: of heads, for one."""
    answer: dict[tuple[int, int], list[Layout]] = {}
    for entry in growths:
        for sizes, layout in zip(entry.sizes, entry.layouts, strict=True):
            if layout not in answer.setdefault(sizes, []):
                answer[sizes].append(layout)
    for (n, w), layouts in list(answer.items()):
        for layout in layouts:
            common = math.gcd(*(piece.block for piece in layout))
            for size in (size for size in range(2, common + 1) if common % size == 0 and n != w):
                blocks = tuple(Piece(piece.length // size, piece.block // size, piece.factor) for piece in layout)
                if blocks not in answer.setdefault((n // size, w // size), []):
                    answer[n // size, w // size].append(blocks)
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


def size_of(tensor: Tensor) -> float:
    """The largest number, apart from fill values of masks."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.detach().abs()
    return float(sizes.masked_fill(~(sizes < MASKED), 0.0).max())


def relative_error(value: Tensor, wanted: Tensor, size: float) -> float:
    """The largest difference, in units of `size`; NaN and infinity agree with themselves."""
    if value.numel() == 0:
        return 0.0
    error = (value - wanted).abs().nan_to_num(nan=math.inf)
    both = (value == wanted) | (value.isnan() & wanted.isnan())  # -inf in a masked score agrees with itself
    return float(error.masked_fill(both, 0.0).max()) / max(size if math.isfinite(size) else 1.0, 1e-30)


def weighted_sum(outputs: Sequence[Tensor], matches: Sequence[Match] | None = None) -> Tensor:
    """A sum of all outputs with fixed random weights. Fill values of masks do not count.

    With `matches`, which say how the outputs of a wide model are made of the narrow one's, the sum is the same: the
    copies of an output share its weight.
    """
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for index, output in enumerate(outputs):
        layouts = None if matches is None else matches[index].layouts
        shape = output.shape if layouts is None else [narrow_length(layout) for layout in layouts]
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        if matches is not None and layouts is not None:
            shares = [Axis(layout, "in").scale.weight for layout in layouts]
            spread = weights.new_empty(output.shape)
            duplicate_(spread, weights, layouts, shares, 1 / matches[index].ratio)
            weights = spread
        total = total + torch.where(output.detach().abs() < MASKED, output * weights.to(output), 0.0).sum()
    return total


def named_gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    """The gradients of a number by the names of parameters; those that it does not depend on are left out."""
    model.zero_grad()
    if total.requires_grad:
        total.backward()
    found = gradients_of(model)
    model.zero_grad()
    return found
