"""The plan as a whole, and its text: a table with a row for each parameter and buffer."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from mupscale.text_tables import Paint, braced, folded, notes_by_layer, table, unpainted
from mupscale.widening.growth import Growth, is_fractional, is_mixed, is_unit_by_unit
from mupscale.widening.layers import Layer, Layers


@dataclass(frozen=True)
class Plan:
    """What `upscale` will do to each parameter. `print` it.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> plan = mupscale.plan(narrow, wide)
        >>> {name: entry.role for name, entry in plan.parameters.items()}
        {'0.weight': 'vector', '0.bias': 'vector', '2.weight': 'readout', '2.bias': 'scalar'}
        >>> report = mupscale.upscale(narrow, wide, plan=plan, call=lambda model: model(torch.ones(1, 3)))
    """

    parameters: dict[str, Growth]
    buffers: dict[str, Growth]
    notes: tuple[str, ...]
    layers: Layers = field(default_factory=dict)
    """Which layer comes from where, by the name of each list of layers that becomes longer."""

    @property
    def new_parameters(self) -> tuple[str, ...]:
        """The parameters of new layers."""
        return tuple(name for name, growth in self.parameters.items() if growth.inserted)

    def by_origin(self) -> dict[str, list[Growth]]:
        """The growths of each narrow parameter, by its name: several, if its layer has copies."""
        answer: dict[str, list[Growth]] = {}
        for growth in self.parameters.values():
            answer.setdefault(growth.origin, []).append(growth)
        return answer

    @property
    def keeps_function(self) -> bool:
        """Whether new layers, if there are any, add nothing."""
        return all(row.how in ("kept", "identity") for rows in self.layers.values() for row in rows)

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of parameters before and after."""
        growths = self.parameters.values()
        before = sum(math.prod(g.narrow_shape) for g in growths if not g.inserted)
        return before, sum(math.prod(g.wide_shape) for g in growths)

    def text(self, columns: int | None = None, paint: Paint = unpainted) -> str:
        """A table of parameters and buffers; for a terminal of `columns`, those that grow alike share a row."""
        rows = [_row(entry) for entry in (*self.parameters.values(), *self.buffers.values())]
        if columns is not None:
            rows = _grouped(rows)
        below = ["{:,} → {:,} parameters".format(*self.sizes)]
        below += [_layers_text(name, rows) for name, rows in self.layers.items()]
        below += _fractions(self.parameters)
        if any(_BY in row[-1] for row in rows):
            below.append("by N: blocks of N entries are repeated as wholes")
        below += [f"note: {note}" for note in notes_by_layer(self.notes)]
        lines = table([_HEADING, *rows], right=_NUMBERS, columns=columns, paint=paint)
        return "\n".join([*lines, *folded(below, columns)])

    __str__ = text


_HEADING = ("parameter", "role", "narrow → wide", "k_out", "k_in", "weight", "duplicated")
_NUMBERS = (_HEADING.index("k_out"), _HEADING.index("k_in"))
_BY = " by "


def _grouped(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for all layers of which the same is said, where the first of them is."""
    names_of: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        names_of.setdefault(row[1:], []).append(row[0])
    by_first = {}
    for cells, names in names_of.items():
        for label, members in braced(names).items():
            many = f"  ×{len(members)}" if len(members) > 1 else ""
            by_first[members[0]] = (label + many, *cells)
    return [by_first[name] for name, *_ in rows if name in by_first]


def _row(entry: Growth) -> tuple[str, ...]:
    shapes = f"{_shape(entry.narrow_shape)} → {_shape(entry.wide_shape)}" if entry.grows else _shape(entry.narrow_shape)
    factors = {
        side: math.prod(axis.reference for axis in entry.axes if axis.side == side) for side in ("out", "in", "mean")
    }
    k_out, k_in = (_factor_text(k) for k in (factors["out"] * factors["mean"], factors["in"]))
    by_copies = any(is_mixed(axis.pieces) for axis in entry.axes if axis.relative_side == "in")
    weight = "copy" if not entry.grows else "dup" if factors["in"] == 1 else f"dup / {k_in}"
    if by_copies and entry.fractional_axes:
        weight = f"dup · {k_out} / copies" if entry.role == "mu_readout" else "dup / copies"
    if any(axis.shares and axis.relative_side == "in" for axis in entry.axes):
        weight += ", unequal shares"
    if entry.fill is not None:
        weight = f"{entry.fill:g}"
    if entry.kept:
        weight = "kept"
    if entry.rescale != 1:
        weight += f" · {entry.rescale:.3g}"
    if entry.offset:
        weight += f" on {entry.offset:g} + w"
    return " = ".join(entry.names), entry.role, shapes, k_out, k_in, weight, _layout_text(entry)


_HOW = {"copy": "copy of", "identity": "adds nothing, from", "random": "random, in the place of"}


def _layers_text(name: str, rows: tuple[Layer, ...]) -> str:
    """`layers: 0 = 0, 1 (copy of 0), 2 = 1, ...`: which layer of a deeper model comes from where."""
    texts = [f"{row.key} ({_HOW[row.how]} {row.source})" if row.is_new else f"{row.key} = {row.source}" for row in rows]
    return f"{name}, {sum(not row.is_new for row in rows)} → {len(rows)} layers: {', '.join(texts)}"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "()"


_MANY_PIECES = 6
"""An axis with more pieces shows only their number in the printed plan."""


def _layout_text(entry: Growth) -> str:
    texts = []
    for axis, layout in enumerate(entry.layouts):
        if is_fractional(layout) and is_unit_by_unit(layout):
            texts.append(f"axis {axis} ×{entry.ratio(axis)}" + f"{_BY}{layout[0].block}" * (layout[0].block > 1))
        elif len(layout) > _MANY_PIECES:
            narrow, wide = entry.sizes[axis]
            texts.append(f"axis {axis}: {narrow} → {wide} in {len(layout)} pieces")
        elif len(layout) > 1:
            texts.append(f"axis {axis}: " + " + ".join(f"{p.length}·{p.factor} by {p.block}" for p in layout))
        elif layout[0].factor > 1:
            texts.append(f"axis {axis} ×{layout[0].factor}" + f"{_BY}{layout[0].block}" * (layout[0].block > 1))
    return ", ".join(texts)


def _factor_text(factor: float) -> str:
    """A factor as a user writes it: 2, 5/3."""
    return str(Fraction(factor).limit_denominator(10**6))


def _fractions(growths: Mapping[str, Growth]) -> Iterator[str]:
    """One line for each factor that is not whole: which parameters grow by it, and what is exact."""
    grown: dict[Fraction, list[tuple[Growth, int]]] = {}
    for growth in growths.values():
        for axis in growth.fractional_axes:
            if is_unit_by_unit(growth.layouts[axis]):  # other pieces are named in the table
                grown.setdefault(growth.ratio(axis), []).append((growth, axis))
    for factor, places in sorted(grown.items()):
        copies = {piece.factor for growth, axis in places for piece in growth.layouts[axis]}
        few, many = min(copies), max(copies)
        yield (
            f"fractional: {len({growth.name for growth, _ in places})} parameters grow by {factor}, with {few} to "
            f"{many} copies of a unit. This is exact with a rate for each entry, which the optimizer of the growth "
            "has unless the method leaves rates as they are. With one rate for all, rates would be "
            f"{float(few / factor):.2f} to {float(many / factor):.2f} times the exact ones"
        )
