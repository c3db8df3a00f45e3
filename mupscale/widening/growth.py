"""How one parameter or buffer grows: its axes, and by what its weight and its gradient are multiplied."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mupscale.errors import UserError
from mupscale.text_tables import unwrapped
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

    @property
    def scale(self) -> Scale:
        """What its wide entries are multiplied by: one number for all, or a tensor with a number for each."""
        copies: Any = copies_of_entries(self.pieces) if is_mixed(self.pieces) else self.reference
        share: Any = torch.tensor(self.shares, dtype=torch.float64, device="cpu") if self.shares else 1.0
        return table.scale_of_axis(self.side, copies, self.reference, share)


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
        return _parse_block(spec, narrow, wide)
    if not isinstance(spec, list | tuple) or not all(_is_piece(row) for row in spec):
        raise UserError(f"give a block length, or a list of (length, block, factor) in whole numbers; got {spec!r}")
    pieces = tuple(Piece(*row) for row in spec)
    for piece in pieces:
        if min(piece) < 1:
            raise UserError(f"length, block and factor must be at least 1, got {tuple(piece)}")
        if piece.length % piece.block:
            raise UserError(f"a block of {piece.block} does not divide {piece.length} entries")
    source, target = sizes_of(pieces)
    if (source, target) != (narrow, wide):
        raise UserError(
            f"the pieces {[tuple(p) for p in pieces]} cover {source} → {target} entries, the axis has {narrow} → {wide}"
        )
    return pieces


def _parse_block(block: int, narrow: int, wide: int) -> Layout:
    if wide < narrow:
        raise UserError(f"it is narrower in the wide model ({wide} < {narrow}). Give the smaller model first")
    if narrow == 0:
        raise UserError(
            "it is empty in the narrow model, so it has nothing to copy. Keep it empty, or give both models units"
        )
    for length in (narrow, wide):
        if block < 1 or length % block:
            raise UserError(f"a block of {block} does not divide {length} entries")
    return evenly(narrow, wide, block)


def _is_piece(row: object) -> bool:
    return isinstance(row, list | tuple) and len(row) == 3 and all(isinstance(number, int) for number in row)


def narrow_length(layout: Layout) -> int:
    return sum(piece.length for piece in layout)


def wide_length(layout: Layout) -> int:
    return sum(piece.length * piece.factor for piece in layout)


def sizes_of(layout: Layout) -> tuple[int, int]:
    """The sizes of the axis in the narrow and in the wide model."""
    return narrow_length(layout), wide_length(layout)


def whole_factor(layout: Layout) -> float:
    """By how much the axis grows as a whole; an int where that is a whole number."""
    narrow, wide = sizes_of(layout)
    if narrow == 0:
        return 1
    return wide // narrow if wide % narrow == 0 else wide / narrow


def is_unit_by_unit(layout: Layout) -> bool:
    """Whether every unit is a piece of its own, all of one size."""
    return len({(piece.length, piece.block) for piece in layout}) == 1 and layout[0].length == layout[0].block


def is_fractional(layout: Layout) -> bool:
    """Whether the axis grows, as a whole, by a factor that is not whole."""
    narrow, wide = sizes_of(layout)
    return narrow > 0 and wide % narrow != 0


def is_mixed(layout: Layout) -> bool:
    return len({piece.factor for piece in layout}) > 1


AT_ONCE = 2**22
"""Wide entries of several pieces that are written at a time: temporaries have as many."""


def duplicate_(
    target: Tensor,
    source: Tensor,
    layouts: Sequence[Layout],
    factors: Sequence[Any] | None = None,
    scale: float = 1.0,
    rows: slice | None = None,
    first: int = 0,
) -> None:
    """Writes `source`, duplicated along every axis, into `target`, with small temporaries.

    `scale` multiplies everything, in the wider dtype, and so do the `factors` of each axis: a number, or a tensor with
    one for each wide entry (`Axis.scale`). `target` may be some `rows` of the wide tensor alone, from a start to an
    end; then `source` may have only the narrow rows that they need, from the row `first` on.
    """
    factors = [1.0] * len(layouts) if factors is None else factors
    is_indexed = any(len(layout) > 1 or isinstance(f, Tensor) for layout, f in zip(layouts, factors, strict=True))
    if rows is None and is_indexed and target.numel() > AT_ONCE:
        height = max(1, AT_ONCE // target[0].numel())
        for part in (slice(start, min(start + height, len(target))) for start in range(0, len(target), height)):
            duplicate_(target[part], source, layouts, factors, scale, part)
        return
    scale *= math.prod(factor for factor in factors if not isinstance(factor, Tensor))
    dtype = torch.promote_types(source.dtype, target.dtype)
    sizes: list[tuple[int, int, int]] = []
    for axis, (layout, factor) in enumerate(zip(layouts, factors, strict=True)):
        of_rows = axis == 0 and rows is not None
        if len(layout) == 1 and not of_rows and not isinstance(factor, Tensor):
            sizes.append((layout[0].length // layout[0].block, layout[0].factor, layout[0].block))
            continue
        index = source_index(layout)[rows] - first if of_rows else source_index(layout)
        source = source.index_select(axis, index.to(source.device))
        sizes.append((1, 1, len(index)))
        if isinstance(factor, Tensor):
            row, scale = scale * (factor[rows] if of_rows else factor), 1.0
            wider = torch.promote_types(dtype, torch.float32)  # in half precision the factor would be rounded
            source = source.to(wider) * along(row.to(source.device, wider), axis, len(layouts))
    if scale != 1.0:
        source = source.to(dtype) * scale
    # each axis of n entries is three, (n / block, factor, block), so that one strided copy does all the repeating
    copies = target.view([size for each in sizes for size in each])
    copies.copy_(source.reshape([size for n, _, block in sizes for size in (n, 1, block)]).expand(copies.shape))


def duplicate(source: Tensor, layouts: Sequence[Layout]) -> Tensor:
    """A new tensor: `source` duplicated along every axis."""
    target = source.new_empty([wide_length(layout) for layout in layouts])
    duplicate_(target, source, layouts)
    return target


def along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """A value for each entry of an axis, in a shape that multiplies a tensor of so many axes."""
    return values.view([-1 if other == axis else 1 for other in range(ndim)])


def source_index(layout: Layout) -> Tensor:
    """The narrow entry that each wide entry of an axis is a copy of. Read only."""
    return _indices(layout)[0]


def copy_index(layout: Layout) -> Tensor:
    """Which copy of its narrow entry each wide entry of an axis is: 0 for the first. Read only."""
    return _indices(layout)[1]


def copies_of_entries(layout: Layout) -> Tensor:
    """The number of copies that the narrow entry of each wide entry of an axis has."""
    index = source_index(layout)
    return torch.bincount(index)[index].double()


@lru_cache(8)  # a tensor that is widened some rows at a time needs it for each of them
@torch.inference_mode(False)
def _indices(layout: Layout) -> tuple[Tensor, Tensor]:
    lengths, blocks, factors = (torch.tensor(column, device="cpu") for column in zip(*layout, strict=True))
    block, factor = (column.repeat_interleave(lengths // blocks) for column in (blocks, factors))
    # of every copy of a block, in the order of the wide axis
    source, length = ((block.cumsum(0) - block).repeat_interleave(factor), block.repeat_interleave(factor))
    copy = torch.arange(len(length), device="cpu") - (factor.cumsum(0) - factor).repeat_interleave(factor)
    start = length.cumsum(0) - length
    entries = torch.arange(wide_length(layout), device="cpu")
    return (source - start).repeat_interleave(length) + entries, copy.repeat_interleave(length)


def centre_(tensor: Tensor, layouts: Sequence[Layout], axes: Collection[int]) -> None:
    """Subtracts, in place, the mean over the copies that one narrow entry has along `axes`, and keeps the variance.

    `tensor` has the wide shape and independent entries of one variance. Afterwards the k copies of an entry along
    `axes` sum to zero, so that a layer that sums over these axes maps duplicated inputs to zero. Centring leaves the
    share 1 - 1/k of the variance; the entries are divided by its root. An entry with a single copy becomes zero.
    """
    if any(len(layouts[axis]) > 1 for axis in axes):
        _centre_by_index_(tensor, layouts, axes)
        return
    sizes = [(size, 1, 1) for size in tensor.shape]
    for axis in axes:
        length, block, factor = layouts[axis][0]
        sizes[axis] = (length // block, factor, block)
    copies = tensor.view([size for each in sizes for size in each])
    count = math.prod(factor for _, factor, _ in sizes)
    if count == 1:
        copies.zero_()
    else:
        copies.sub_(copies.mean([3 * axis + 1 for axis in axes], keepdim=True)).div_(math.sqrt(1 - 1 / count))


def _centre_by_index_(tensor: Tensor, layouts: Sequence[Layout], axes: Collection[int]) -> None:
    """The same for axes of several pieces, with temporaries."""
    mean, count = tensor, tensor.real.new_ones([1] * tensor.ndim)
    for axis in axes:
        layout = layouts[axis]
        index, copy = source_index(layout).to(tensor.device), copy_index(layout).to(tensor.device)
        copies = along(copies_of_entries(layout).to(count), axis, tensor.ndim)
        sums = mean.new_zeros([narrow_length(layout) if i == axis else n for i, n in enumerate(mean.shape)])
        for number in range(int(copy.max()) + 1):  # one copy after another, so that the order of the sum is the same
            places = (copy == number).nonzero().flatten()
            sums.index_add_(axis, index[places], mean.index_select(axis, places))
        mean, count = sums.index_select(axis, index) / copies, count * copies
    tensor.sub_(mean)
    # of an entry with a single copy nothing is left
    tensor.mul_(torch.where(count > 1, (1 - 1 / count).rsqrt(), 0.0))


Role = Literal["matrix", "transposed_matrix", "vector", "readout", "mu_readout", "scalar"]
"""`matrix` is (out, in), `transposed_matrix` (in, out); `vector` produces its width, `readout` sums over it,
`mu_readout` averages over it, `scalar` has none.
"""


@dataclass(frozen=True)
class Resized:
    """A tensor of both models."""

    names: tuple[str, ...]
    """The name of the tensor, and the further names of a tied parameter."""
    narrow_shape: tuple[int, ...]
    wide_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The sizes of every axis, in the narrow and in the wide model."""
        return list(zip(self.narrow_shape, self.wide_shape, strict=True))

    @property
    def growing(self) -> tuple[int, ...]:
        """The axes that grow."""
        return tuple(axis for axis, (n, w) in enumerate(self.sizes) if n != w)

    @property
    def grows(self) -> bool:
        return self.narrow_shape != self.wide_shape


@dataclass(frozen=True)
class Growth(Resized):
    """How one parameter or buffer grows."""

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
    """The name in the narrow model of a tensor in a list of layers that becomes longer; else empty."""
    inserted: Literal["copy", "identity", "random"] | None = None
    """How its layer was made, if it is new."""
    fill: float | None = None
    """The value of all its entries, which makes its layer the identity."""
    branch: float = 1.0
    """What residual branches of its layer are multiplied by, deep over shallow."""
    layers: float = 1.0
    """How many layers of the deep model come from one."""
    rates_as: tuple[float, float] | None = None
    """`rescale` and `branch` that hyperparameters follow, where the weights follow others: in a kept layer beside new
    ones that add nothing. New layers learn too, so its rates are those of the deep model."""
    wrapper: str = ""
    """What a wrapper adds in front of all names of its model, such as "net."; noise does not depend on it."""

    @property
    def origin(self) -> str:
        """The name of the tensor in the narrow model."""
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
        """The scale of the whole tensor, which rates and state follow; unequal copies differ from it by `entries`."""
        scales = (table.scale_of_axis(axis.side, axis.reference, axis.reference) for axis in self.axes)
        return table.deeper(table.rescaled(table.product(scales), self.rescale), self.branch, self.layers)

    @cached_property
    def for_rates(self) -> "Growth":
        """The same growth, as learning rates, eps and weight decay follow it."""
        if self.rates_as is None:
            return self
        rescale, branch = self.rates_as
        return replace(self, rescale=rescale, branch=branch, layers=1 / branch, rates_as=None)

    def inside(self, name: str) -> str:
        """A name in this model without what wrappers add to it: by it noise is drawn and recorded."""
        return unwrapped(name).removeprefix(self.wrapper)

    def matches(self, pattern: str) -> bool:
        """Whether a name pattern means this parameter, by its full name or that inside the network."""
        return any(matches(name, pattern) or matches(self.inside(name), pattern) for name in self.names)

    def factors(self, column: Literal["weight", "gradient"]) -> list[Any]:
        """What wide entries are multiplied by along each axis, without `rescale`; for `duplicate_`."""
        return [getattr(axis.scale, column) for axis in self.axes]

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


def matches(name: str, pattern: str) -> bool:
    """Whether a name pattern means this parameter or buffer."""
    # with the dot, "*.q_proj.weight" matches a top-level q_proj too
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


def role_of(sides: tuple[Side, ...]) -> Role:
    """The word for the sides of a parameter's axes."""
    if "mean" in sides:
        return "mu_readout"
    if "out" in sides and "in" in sides:
        return "matrix"
    return "vector" if "out" in sides else "readout" if "in" in sides else "scalar"
