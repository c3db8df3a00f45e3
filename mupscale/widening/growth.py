"""How one parameter or buffer grows: its axes, and by what its weight and its gradient are multiplied."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mupscale.errors import UserError
from mupscale.widening import table
from mupscale.widening.table import Scale, Side


class Piece(NamedTuple):
    """A part of an axis: each run of `block` consecutive entries is repeated `factor` times.

    Block 1 is `repeat_interleave`; a block of head_dim repeats whole heads; factor 1 copies. Where an axis grows by a
    factor that is not whole, units have unequal numbers of copies, and each is a piece of its own (`evenly`).
    """

    length: int
    block: int
    factor: int


Layout = tuple[Piece, ...]
"""One axis. An axis that does not grow is a single piece of factor 1."""


class Axis(NamedTuple):
    """One axis of a parameter."""

    pieces: Layout
    side: Side = None
    shares: tuple[float, ...] = ()
    """Where copies of one entry are read in unequal shares: that of each wide entry, in units of 1 / copies."""

    @property
    def reference(self) -> float:
        """The factor that rates and state follow; those of its entries are relative to it.

        The multiplier of a muP readout falls as its width grows, whatever its pieces are.
        """
        by_units = is_mixed(self.pieces) and is_unit_by_unit(self.pieces)  # not pieces that grow apart from each other
        if self.side == "mean" or by_units:
            return whole_factor(self.pieces)
        return max(piece.factor for piece in self.pieces)

    @property
    def relative_side(self) -> Side:
        """The side on which entries differ from the reference.

        A muP readout has one multiplier for all of its inputs, so its gradients all fall by the reference, and the
        weights of an input with more copies than that are smaller.
        """
        return "in" if self.side == "mean" else self.side


Kind = Literal["weight", "bias", "gain"]

LayoutSpec = int | Sequence[Sequence[int]]
"""What a user writes for an axis: a block length, or a list of (length, block, factor)."""


def evenly(narrow: int, wide: int, block: int = 1) -> Layout:
    """The layout of an axis whose units, `block` entries each, grow by wide / narrow, whole or not.

    The extra copies are spread evenly: of n units that become w, unit i (from 0) has ⌊(i + 1) w/n⌋ - ⌊i w/n⌋ copies.
    This depends on the ratio alone, and repeats after as many units as its denominator says. So all axes of the same
    units agree, also where an axis holds them several times over: the three sections of a fused QKV, the gates of an
    LSTM, the groups of a convolution. `evenly(12, 20)` gives copies 1, 2, 2, 1, 2, 2, ...
    """
    units, copies = narrow // block, wide // block
    if copies % units == 0:
        return (Piece(narrow, block, copies // units),)
    ends = [unit * copies // units for unit in range(units + 1)]
    return tuple(Piece(block, block, end - start) for start, end in pairwise(ends))


def parse_layout(spec: LayoutSpec, narrow: int, wide: int) -> Layout:
    """The layout that `spec` gives an axis of `narrow` → `wide` entries; raises a UserError if it does not fit."""
    if isinstance(spec, int) and not isinstance(spec, bool):
        pieces: Layout = _parse_block(spec, narrow, wide)
    else:
        if not isinstance(spec, list | tuple) or not all(_is_piece(row) for row in spec):
            raise UserError(f"give a block length, or a list of (length, block, factor) in whole numbers; got {spec!r}")
        pieces = tuple(Piece(*row) for row in spec)
    for piece in pieces:
        if min(piece) < 1:
            raise UserError(f"length, block and factor must be at least 1, got {tuple(piece)}")
        if piece.length % piece.block:
            raise UserError(f"a block of {piece.block} does not divide {piece.length} entries")
    source, target = narrow_length(pieces), wide_length(pieces)
    if (source, target) != (narrow, wide):
        raise UserError(
            f"the pieces {[tuple(p) for p in pieces]} cover {source} → {target} entries, the axis has {narrow} → {wide}"
        )
    return pieces


def _parse_block(block: int, narrow: int, wide: int) -> Layout:
    if block < 1:
        raise UserError(f"a block must have at least 1 entry, got {block}")
    if wide < narrow:
        raise UserError(f"it is narrower in the wide model ({wide} < {narrow}); swap the models?")
    if narrow == 0:
        raise UserError(
            "it is empty in the narrow model, so it has nothing to copy. Keep it empty, or give both models units"
        )
    for length in (narrow, wide):
        if length % block:
            raise UserError(f"a block of {block} does not divide {length} entries")
    return evenly(narrow, wide, block)


def _is_piece(row: object) -> bool:
    return isinstance(row, list | tuple) and len(row) == 3 and all(isinstance(number, int) for number in row)


def narrow_length(layout: Layout) -> int:
    return sum(piece.length for piece in layout)


def wide_length(layout: Layout) -> int:
    return sum(piece.length * piece.factor for piece in layout)


def whole_factor(layout: Layout) -> float:
    """By how much the axis grows as a whole; an int where that is a whole number."""
    narrow, wide = narrow_length(layout), wide_length(layout)
    if narrow == 0:
        return 1
    return wide // narrow if wide % narrow == 0 else wide / narrow


def is_unit_by_unit(layout: Layout) -> bool:
    """Whether every unit is a piece of its own, all of one size."""
    return len({(piece.length, piece.block) for piece in layout}) == 1 and layout[0].length == layout[0].block


def is_fractional(layout: Layout) -> bool:
    """Whether the axis grows, as a whole, by a factor that is not whole."""
    narrow = narrow_length(layout)
    return narrow > 0 and wide_length(layout) % narrow != 0


def is_mixed(layout: Layout) -> bool:
    return len({piece.factor for piece in layout}) > 1


def duplicate_(
    target: Tensor,
    source: Tensor,
    layouts: Sequence[Layout],
    scales: Sequence[Sequence[float]] | None = None,
    scale: float = 1.0,
    rows: slice | None = None,
    first: int = 0,
) -> None:
    """Writes `source`, duplicated along every axis, into `target`, without a temporary of the target's size.

    `scale` multiplies everything and `scales[axis][piece]` that piece of that axis, on the narrow side, in the wider
    dtype. `target` may be some `rows` of the wide tensor alone, from a start to an end; then `source` may have only the
    narrow rows that they need, from the row `first` on.
    """
    scales = scales or [[1.0] * len(layout) for layout in layouts]
    if rows is not None:
        wanted = source_index(layouts[0])[rows] - first
        if len(wanted) and len(wanted) == 1 + wanted[-1] - wanted[0]:  # consecutive rows, of which no copy is needed
            source = source[wanted[0] : wanted[-1] + 1]
        else:
            source = source.index_select(0, wanted.to(source.device))
        kept, kept_scales = _copied_rows(layouts[0], scales[0], rows)
        layouts, scales = (kept, *layouts[1:]), (kept_scales, *scales[1:])
    dtype = torch.promote_types(source.dtype, target.dtype)
    if math.prod(len(layout) for layout in layouts) > _MANY_CELLS:
        _duplicate_by_index_(target, source, layouts, scales, scale, dtype)
        return
    for source_slices, target_slices, pieces, cell_scale in _cells(layouts, scales):
        # each axis of n entries becomes three, (n / block, factor, block), so that one strided copy does all the
        # repeating
        part = source[source_slices]
        if scale * cell_scale != 1.0:
            part = part.to(dtype) * (scale * cell_scale)
        part = part.reshape([size for p in pieces for size in (p.length // p.block, 1, p.block)])
        copies = target[target_slices].view([size for p in pieces for size in (p.length // p.block, p.factor, p.block)])
        copies.copy_(part.expand(copies.shape))


def _copied_rows(layout: Layout, scales: Sequence[float], rows: slice) -> tuple[Layout, list[float]]:
    """Some rows of the wide axis as pieces of factor 1, each with the scale of the piece that it is of."""
    kept: list[Piece] = []
    kept_scales: list[float] = []
    start = 0
    for piece, scale in zip(layout, scales, strict=True):
        end = start + piece.length * piece.factor
        count = min(end, rows.stop) - max(start, rows.start)
        if count > 0:
            kept.append(Piece(count, count, 1))
            kept_scales.append(scale)
        start = end
    return tuple(kept), kept_scales


def _duplicate_by_index_(
    target: Tensor,
    source: Tensor,
    layouts: Sequence[Layout],
    scales: Sequence[Sequence[float]],
    scale: float,
    dtype: torch.dtype,
) -> None:
    """The same for axes of many pieces, each of which would need a separate copy; uses a temporary."""
    result = source.to(dtype) * scale if scale != 1.0 else source
    for axis, (layout, axis_scales) in enumerate(zip(layouts, scales, strict=True)):
        if len(layout) == 1 and layout[0].factor == 1 and axis_scales[0] == 1.0:
            continue
        if any(number != 1.0 for number in axis_scales):
            shape = [-1 if other == axis else 1 for other in range(len(layouts))]
            result = result.to(dtype) * by_entry(layout, axis_scales).to(result.device, dtype).view(shape)
        result = result.index_select(axis, source_index(layout).to(result.device))
    target.copy_(result)


_MANY_CELLS = 256
"""From here on one gather per axis is faster than a copy per cell."""


@lru_cache(8)  # a tensor that is widened some rows at a time needs it for each of them
@torch.inference_mode(False)
def source_index(layout: Layout) -> Tensor:
    """The narrow entry that each wide entry of an axis is a copy of. Read only."""
    runs = _runs(layout)
    return (runs.source - runs.start).repeat_interleave(runs.length) + torch.arange(wide_length(layout), device="cpu")


def copy_index(layout: Layout) -> Tensor:
    """Which copy of its narrow entry each wide entry of an axis is: 0 for the first."""
    runs = _runs(layout)
    return runs.copy.repeat_interleave(runs.length)


def by_entry(layout: Layout, values: Sequence[float]) -> Tensor:
    """A number for each narrow entry of an axis, from one for each piece."""
    lengths = torch.tensor([piece.length for piece in layout])
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(lengths)


class _Runs(NamedTuple):
    """The copies of all blocks of an axis, in the order of the wide axis; one number for each copy."""

    source: Tensor
    start: Tensor
    length: Tensor
    copy: Tensor


def _runs(layout: Layout) -> _Runs:
    lengths, blocks, factors = (torch.tensor(column, device="cpu") for column in zip(*layout, strict=True))
    count = lengths // blocks
    length, copies = blocks.repeat_interleave(count), factors.repeat_interleave(count)
    source = length.cumsum(0) - length
    first = (copies.cumsum(0) - copies).repeat_interleave(copies)
    source, length = source.repeat_interleave(copies), length.repeat_interleave(copies)
    return _Runs(source, length.cumsum(0) - length, length, torch.arange(len(first), device="cpu") - first)


def duplicate(source: Tensor, layouts: Sequence[Layout]) -> Tensor:
    """A new tensor: `source` duplicated along every axis."""
    target = source.new_empty([wide_length(layout) for layout in layouts])
    duplicate_(target, source, layouts)
    return target


def centre_(tensor: Tensor, layouts: Sequence[Layout], axes: Collection[int]) -> None:
    """Subtracts, in place, the mean over the copies that one narrow entry has along `axes`, and keeps the variance.

    `tensor` has the wide shape and independent entries of one variance. Afterwards the k copies of an entry along
    `axes` sum to zero, so that a layer that sums over these axes maps duplicated inputs to zero. Centring leaves the
    share 1 - 1/k of the variance; the entries are divided by its root. An entry with a single copy becomes zero.
    """
    if math.prod(len(layout) for layout in layouts) > _MANY_CELLS:
        _centre_by_index_(tensor, layouts, axes)
        return
    ones = [[1.0] * len(layout) for layout in layouts]
    for _, wide_slices, pieces, _ in _cells(layouts, ones):
        shape: list[int] = []
        copies_at: list[int] = []
        for axis, piece in enumerate(pieces):
            if axis in axes:
                copies_at.append(len(shape) + 1)
                shape += [piece.length // piece.block, piece.factor, piece.block]
            else:
                shape.append(piece.length * piece.factor)
        copies = tensor[wide_slices].view(shape)
        count = math.prod(shape[axis] for axis in copies_at)
        if count == 1:
            copies.zero_()
        else:
            copies.sub_(copies.mean(copies_at, keepdim=True)).div_(math.sqrt(1 - 1 / count))


def _centre_by_index_(tensor: Tensor, layouts: Sequence[Layout], axes: Collection[int]) -> None:
    """The same for axes of many pieces, with temporaries."""
    mean = tensor
    count = tensor.new_ones([1] * tensor.ndim)
    for axis in axes:
        index = source_index(layouts[axis]).to(tensor.device)
        copies = torch.bincount(index).to(tensor)
        sums_shape = [len(copies) if other == axis else size for other, size in enumerate(mean.shape)]
        shape = [-1 if other == axis else 1 for other in range(tensor.ndim)]
        sums = mean.new_zeros(sums_shape).index_add_(axis, index, mean)
        mean = (sums / copies.view(shape)).index_select(axis, index)
        count = count * copies[index].view(shape)
    tensor.sub_(mean)
    # of an entry with a single copy nothing is left
    tensor.mul_(torch.where(count > 1, (1 - 1 / count).rsqrt(), 0.0))


def _cells(
    layouts: Sequence[Layout], scales: Sequence[Sequence[float]]
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], tuple[Piece, ...], float]]:
    """The grid of pieces: slices of source and target, the piece along each axis, and the product of their scales."""
    axes = []
    for layout, axis_scales in zip(layouts, scales, strict=True):
        rows, at, to = [], 0, 0
        for piece, scale in zip(layout, axis_scales, strict=True):
            end, stop = at + piece.length, to + piece.length * piece.factor
            rows.append((slice(at, end), slice(to, stop), piece, scale))
            at, to = end, stop
        axes.append(rows)
    for cell in product(*axes):
        scale = 1.0
        for row in cell:
            scale *= row[3]
        yield tuple(r[0] for r in cell), tuple(r[1] for r in cell), tuple(r[2] for r in cell), scale


Role = Literal["matrix", "transposed_matrix", "vector", "readout", "mu_readout", "scalar"]
"""`matrix` is (out, in), `transposed_matrix` (in, out); `vector` produces its width, `readout` sums over it,
`mu_readout` averages over it, `scalar` has none.
"""


@dataclass(frozen=True)
class Growth:
    """How one parameter or buffer grows."""

    names: tuple[str, ...]
    """Its name, and the further names of a tied parameter."""
    narrow_shape: tuple[int, ...]
    wide_shape: tuple[int, ...]
    kind: Kind | Literal["buffer"]
    axes: tuple[Axis, ...]
    matrix_axes: tuple[int, int] | None = None
    """The two axes that make a matrix, the others counting kernel positions; None means flatten to width × rest."""
    rescale: float = 1.0
    """What the weight is multiplied by beyond its axes, to compensate for a constant of the model."""
    offset: float = 0.0
    """The parameter w acts as offset + w, and this sum is multiplied, as a gain 1 + w needs it."""
    base: int | None = None
    """`fan_in` at the base width of muP; None without base shapes."""
    quiet: tuple[int, ...] = ()
    """Rows of axis 0 that get no noise, because no gradient would ever remove it: the padding row of an embedding."""
    zero_initialised: bool = False
    summed_axes: tuple[int, ...] = ()
    """The width axes that every use of the parameter sums over. A muP readout's counts; that of an embedding which is
    tied to it does not."""
    normed: bool = False
    """Whether its layer divides it by its norm (`modules.py`)."""
    kept: bool = False
    """The wide model keeps its own values: of a buffer that is not saved, of a random layer."""
    source: str = ""
    """Its name in the narrow model, of what belongs to a list of layers that becomes longer."""
    inserted: Literal["copy", "identity", "random"] | None = None
    """How its layer was made, if it is new."""
    fill: float | None = None
    """The value of all its entries, which makes its layer the identity."""
    branch: float = 1.0
    """What residual branches of its layer are multiplied by, deep over shallow."""
    layers: float = 1.0
    """How many layers of the deep model come from one."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def origin(self) -> str:
        """Its name in the narrow model."""
        return self.source or self.name

    @property
    def is_copied(self) -> bool:
        """Whether its values come from the narrow model."""
        return not self.kept and self.fill is None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(axis.pieces for axis in self.axes)

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(axis.side for axis in self.axes)

    @property
    def role(self) -> Role | Literal["buffer"]:
        """The word for its sides in a printed plan."""
        return "buffer" if self.kind == "buffer" else role_of(self.sides)

    @cached_property
    def scale(self) -> Scale:
        """Of the whole tensor, which rates and state follow; entries of unequal copies differ from it by `entries`."""
        scales = (table.scale_of_axis(axis.side, axis.reference, axis.reference) for axis in self.axes)
        return table.deeper(table.rescaled(table.product(scales), self.rescale), self.branch, self.layers)

    def by_piece(self, column: Literal["weight", "gradient"]) -> list[list[float]]:
        """What the entries of each piece of each axis are multiplied by, without `rescale`; for `axes.duplicate_`."""
        return [
            [getattr(table.scale_of_axis(axis.side, piece.factor, axis.reference), column) for piece in axis.pieces]
            for axis in self.axes
        ]

    @property
    def shift(self) -> float:
        """What the wide weight has beyond its multiple of the narrow one."""
        return table.shift(self.scale, self.offset) if self.offset else 0.0

    @property
    def fan_in(self) -> int:
        """Entries of the summed width axes at the wide width: N_in of the muP initialisation; 1 without one."""
        return math.prod(size for size, side in zip(self.wide_shape, self.sides, strict=True) if side == "in")

    @property
    def copies_summed(self) -> int:
        """The largest number of copies of an input unit that the layer adds up; 1 under a norm, or without any."""
        if self.normed:
            return 1
        return math.prod(max(piece.factor for piece in self.layouts[axis]) for axis in self.summed_axes)

    @property
    def grows(self) -> bool:
        return self.narrow_shape != self.wide_shape

    @property
    def mixed(self) -> bool:
        """Whether pieces of one axis grow by different factors, or copies are consumed in different shares, so that no
        single learning rate is right for all."""
        return any(axis.side and (is_mixed(axis.pieces) or axis.shares) for axis in self.axes)

    @property
    def fractional_axes(self) -> tuple[int, ...]:
        """The axes that grow, as a whole, by a factor that is not whole."""
        return tuple(axis for axis, layout in enumerate(self.layouts) if is_fractional(layout))

    def ratio(self, axis: int) -> Fraction:
        """By how much an axis grows as a whole."""
        return Fraction(self.wide_shape[axis], self.narrow_shape[axis])

    @property
    def in_blocks(self) -> bool:
        """Whether an axis is duplicated in blocks of several entries: whole heads, groups or positions."""
        pieces = [piece for layout in self.layouts for piece in layout]
        return any(piece.block > 1 and piece.factor > 1 for piece in pieces)


def role_of(sides: tuple[Side, ...]) -> Role:
    """The word for the sides of a parameter's axes."""
    if "mean" in sides:
        return "mu_readout"
    if "out" in sides and "in" in sides:
        return "matrix"
    return "vector" if "out" in sides else "readout" if "in" in sides else "scalar"
