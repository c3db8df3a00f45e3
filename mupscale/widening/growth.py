"""How one parameter or buffer grows: its axes, and by what its weight and its gradient are multiplied."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from mupscale.widening import table
from mupscale.widening.axes import Axis, Layout, is_fractional, is_mixed
from mupscale.widening.modules import Kind
from mupscale.widening.table import Scale, Side

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
