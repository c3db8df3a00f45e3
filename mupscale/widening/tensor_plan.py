"""How one parameter or buffer grows: its axes, their factors, and what its weight and its gradient are scaled by."""

import math
from dataclasses import dataclass
from typing import Literal

from mupscale.widening.layout import Layout, is_fractional, is_mixed, reference_factor, whole_factor
from mupscale.widening.modules import Kind, Side
from mupscale.widening.roles import Role
from mupscale.widening.rules import Factors
from mupscale.widening.units import NO_UNIT, Unit


@dataclass(frozen=True)
class TensorPlan:
    """How one parameter or buffer grows. `k_out`, `k_in` are the factors of the axes it produces and sums over."""

    names: tuple[str, ...]
    """Its name, and the further names of a tied parameter."""
    narrow_shape: tuple[int, ...]
    wide_shape: tuple[int, ...]
    role: Role | Literal["buffer"]
    kind: Kind | Literal["buffer"]
    sides: tuple[Side, ...]
    layouts: tuple[Layout, ...]
    fan_in: int
    """Entries of the summed width axes at the wide width: N_in of the muP initialisation; 1 without one."""
    matrix_axes: tuple[int, int] | None
    """The two axes that make a matrix, the others counting kernel positions; None means flatten to width × rest."""
    zero_initialised: bool = False
    base: int | None = None
    """`fan_in` at the base width of muP; None without base shapes."""
    quiet: tuple[int, ...] = ()
    """Rows of axis 0 that get no noise, because no gradient would ever remove it: the padding row of an embedding."""
    summed_axes: tuple[int, ...] = ()
    """The width axes that every use of the parameter sums over. A muP readout's counts; that of an embedding which is
    tied to it does not."""
    shares: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """Axes on which copies of one entry are consumed unequally: (axis, the share of each wide entry in units of the
    equal one, 1 / copies)."""
    unit: Unit = NO_UNIT
    """What the weight is multiplied by beyond its role."""
    normed: bool = False
    """Whether its layer divides it by its norm (`weight_norm.py`)."""
    kept: bool = False
    """Of a buffer that is not saved: the wide model keeps its own."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def k_out(self) -> float:
        return math.prod(self.reference(axis) for axis, side in enumerate(self.sides) if side == "out")

    @property
    def k_in(self) -> float:
        return math.prod(self.reference(axis) for axis, side in enumerate(self.sides) if side == "in")

    def reference(self, axis: int) -> float:
        """The factor of an axis that rates and state follow; those of its entries are relative to it.

        The multiplier of a muP readout falls as its width grows, whatever its pieces are.
        """
        layout = self.layouts[axis]
        return whole_factor(layout) if self.role == "mu_readout" else reference_factor(layout)

    def relative_side(self, axis: int) -> Side:
        """The side on which entries of an axis differ from its reference.

        A muP readout has one multiplier for all of its inputs, so its gradients all fall by the reference, and the
        weights of an input with more copies than that are smaller.
        """
        return "in" if self.role == "mu_readout" and self.sides[axis] else self.sides[axis]

    @property
    def factors(self) -> Factors:
        """What Table 1 is a function of; a unit s is the pair of factors (k_out · s, k_in / s)."""
        k_out, k_in = self.k_out, self.k_in
        if self.unit.scale != 1:
            k_out, k_in = k_out * self.unit.scale, k_in / self.unit.scale
        return Factors(k_out, k_in, self.narrow_shape, self.wide_shape)

    @property
    def shift(self) -> float:
        """What the wide weight has beyond its multiple of the narrow one.

        A parameter w that acts as c + w becomes w', with c + w' = a (c + w) and a = s / k_in.
        """
        if not self.unit.offset:
            return 0.0
        return (1 / self.factors.k_in - 1) * self.unit.offset

    def unit_scale(self, out_power: int, in_power: int) -> float:
        """What a unit adds to `scales` of these powers."""
        return self.unit.scale ** (out_power - in_power)

    @property
    def copies_summed(self) -> int:
        """The largest number of copies of one input unit that the layer adds up; 1 where it adds up none.

        1, too, under a norm, which noise changes even where it cancels out in the sum.
        """
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
        pieces = any(is_mixed(layout) for layout, side in zip(self.layouts, self.sides, strict=True) if side)
        return pieces or bool(self.shares)

    @property
    def relative_shares(self) -> dict[int, tuple[float, ...]]:
        """`shares` by axis."""
        return dict(self.shares)

    @property
    def fractional_axes(self) -> tuple[int, ...]:
        """The axes that grow, as a whole, by a factor that is not whole."""
        return tuple(axis for axis, layout in enumerate(self.layouts) if is_fractional(layout))

    @property
    def in_blocks(self) -> bool:
        """Whether an axis is duplicated in blocks of several entries: whole heads, groups or positions."""
        pieces = [piece for layout in self.layouts for piece in layout]
        return any(piece.block > 1 and piece.factor > 1 for piece in pieces)

    def scales(self, out_power: int, in_power: int) -> list[list[float]]:
        """k_out^out_power · k_in^in_power of the role, per axis and piece, as `layout.duplicate_` takes it."""
        power = {"out": out_power, "in": in_power, None: 0}
        answer = []
        for axis, (layout, side) in enumerate(zip(self.layouts, self.sides, strict=True)):
            if self.role == "mu_readout" and side:
                k = self.reference(axis)
                answer.append([k**out_power * (piece.factor / k) ** in_power for piece in layout])
            else:
                answer.append([float(piece.factor) ** power[side] for piece in layout])
        return answer
