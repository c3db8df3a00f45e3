"""What was found: hints by parameter name, as `plan`, `upscale` and `verify` take them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import combinations_with_replacement, product
from typing import NamedTuple

from torch import nn

from mupscale.discovery.passes import PairedCut, layouts_of
from mupscale.errors import UserError
from mupscale.text_tables import by_layer, starred
from mupscale.widening.growth import Layout, LayoutSpec, Piece, Role, evenly, parse_layout, sizes_of
from mupscale.widening.hints import Blocks, Hints, Rescale
from mupscale.widening.modules import named_weights

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Found(Hints):
    """The result of `discover`: how a model grows. `print` it.

    `upscale(narrow, wide, optimizer, hints=found)`

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> found = mupscale.discover(narrow, wide, lambda model: model(torch.ones(1, 3)))
        >>> found.blocks
        {'0.weight': {0: 4}, '0.bias': {0: 4}, '2.weight': {1: 4}}
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (100, 200))
        >>> report = mupscale.upscale(
        ...     narrow, wide, hints=found.resolved(narrow, wide), call=lambda model: model(torch.ones(1, 3))
        ... )
    """

    roles: dict[str, Role] = field(default_factory=dict)
    blocks: dict[str, Blocks] = field(default_factory=dict)
    rescale: dict[str, Rescale] = field(default_factory=dict)
    passes: int = 0
    """The number of forward passes of the wide model that the search took."""
    shapes: dict[str, tuple[Shape, Shape]] = field(default_factory=dict, repr=False)
    """The shapes of every parameter and buffer in the narrow and in the wide model."""
    cuts: tuple[PairedCut, ...] = field(default=(), repr=False)
    """Where the models cut their axes into sections."""
    untested: tuple[str, ...] = ()
    """Growing parameters that do not affect what the model returns, so that they could not be tested."""
    undecided: tuple[str, ...] = ()
    """Parameters of which it is not known which axis is summed over: centred noise on them may change the function."""
    without_gradient: tuple[str, ...] = ()
    """Growing parameters that affect what the model returns, but have no gradient: how they train is not tested."""

    def resolved(self, narrow: nn.Module, wide: nn.Module, cuts: Callable[[], Sequence[PairedCut]] = tuple) -> "Found":
        """The same for two models of the same family with other sizes and another depth.

        They may be on the meta device. Blocks are carried over as shares of their axis. Where an axis has sections of
        unequal lengths, `cuts` is called; it returns where these models cut their axes (`cuts_between`). Raises a
        UserError if this does not determine how a parameter grows.
        """
        return _Resolution(self, narrow, wide, cuts).found()

    def __str__(self) -> str:
        lines = [f"found in {self.passes} forward pass{'es' * (self.passes != 1)} of the wide model"]
        for title, values in (("roles", self.roles), ("rescale", self.rescale), ("blocks", self.blocks)):
            if values:
                lines += [
                    f"{title}:",
                    *(f"  {line}" for line in by_layer((name, _text(value)) for name, value in values.items())),
                ]
        notes = {
            "not tested, because what the model returns does not depend on them": self.untested,
            "tested without gradients, because they have none": self.without_gradient,
            "not decided which axis is summed over, so centred noise may change the function": self.undecided,
        }
        for text, names in notes.items():
            if names:
                lines.append(f"{text}: {', '.join(dict.fromkeys(map(starred, names)))}")
        return "\n".join(lines)


class _Width(NamedTuple):
    """The sizes of an axis in the models in which growth was found, and in those to which the finding is carried."""

    small_narrow: int
    small_wide: int
    narrow: int
    wide: int


def nearest_power(ratio: float, factor: float) -> float:
    """The power of a growth factor, in quarters, that is nearest to a ratio."""
    return float(factor ** (round(4 * math.log(ratio, factor)) / 4))


def growth_factors(shapes: Mapping[str, tuple[Shape, Shape]], name: str) -> set[float]:
    """The factors by which the axes of a tensor grow; if none of them does, those of all tensors."""

    def of(narrow: Shape, wide: Shape) -> set[float]:
        return {w / n for n, w in zip(narrow, wide, strict=True) if 0 < n < w}

    narrow, wide = shapes[name]
    return of(narrow, wide) if narrow != wide else set().union(*(of(*pair) for pair in shapes.values()))


def without_rounding(rescale: Rescale, factors: Collection[float], tolerance: float) -> Rescale:
    """A factor as a power of the growth factor, where it is one but for rounding (of a float32 constant, 1e-6)."""
    scale = rescale[0] if isinstance(rescale, tuple) else rescale
    for factor in sorted(factors):
        power = nearest_power(scale, factor)
        if math.isclose(scale, power, rel_tol=tolerance):
            scale = power
    return (scale, rescale[1]) if isinstance(rescale, tuple) else scale


class _Resolution:
    """A finding carried over to two models of the same family with other sizes."""

    def __init__(
        self, given: Found, narrow: nn.Module, wide: nn.Module, cuts: Callable[[], Sequence[PairedCut]]
    ) -> None:
        self.given, self.cuts = given, cache(cuts)
        self.sources = {**named_weights(narrow), **dict(narrow.named_buffers())}
        self.targets = {**named_weights(wide), **dict(wide.named_buffers())}
        self.alike: dict[str, list[str]] = {}
        for name in given.shapes:
            self.alike.setdefault(starred(name), []).append(name)
        self.models = dict(self._models())
        """The parameter of the smaller model that each parameter grows like."""
        self.widths = self._widths()

    def found(self) -> Found:
        given = self.given
        notes = given.untested, given.undecided, given.without_gradient
        answer = Found({}, {}, {}, given.passes, {}, (), *notes)
        for name, model in self.models.items():
            answer.shapes[name] = shapes = tuple(self.sources[name].shape), tuple(self.targets[name].shape)
            if model in given.roles:
                answer.roles[name] = given.roles[model]
            if model in given.rescale:
                answer.rescale[name] = without_rounding(given.rescale[model], growth_factors(given.shapes, model), 1e-6)
            for axis, (n, w) in enumerate(zip(*shapes, strict=True)):
                before, after = given.shapes[model]
                if (n == w) != (before[axis] == after[axis]):
                    raise UserError(
                        f"axis {axis} of {name!r} {shapes[0]} → {shapes[1]} grows in one size of the family only. Were "
                        "both configurations grown by the same factor?"
                    )
                if axis in given.blocks.get(model, {}):
                    layout = parse_layout(given.blocks[model][axis], before[axis], after[axis])
                    answer.blocks.setdefault(name, {})[axis] = self._layout(name, layout, (n, w))
        return answer

    def _models(self) -> Iterator[tuple[str, str]]:
        """Each parameter with one of the same name, but for the numbers of layers: the last like the last."""
        places: dict[str, list[str]] = {}
        for name in self.sources:
            places.setdefault(starred(name), []).append(name)
        for key, names in places.items():
            if key not in self.alike:
                raise UserError(f"{names[0]!r} has no counterpart in the model in which growth was found")
            found = self.alike[key]
            if len(found) != len(names):
                tables = self.given.roles, self.given.blocks, self.given.rescale
                said = [str([table.get(name) for table in tables]) for name in found]
                if any(each != said[0] for each in said[:-1]):
                    raise UserError(
                        f"{found[0]!r} and the same parameters of other layers grow differently, so the finding cannot "
                        "be carried over to another depth"
                    )
                found = [found[0]] * (len(names) - 1) + [found[-1]]
            yield from zip(names, found, strict=True)

    def _widths(self) -> list[_Width]:
        """The axes that grow, each once, with their sizes here and in the model in which growth was found."""
        found: dict[_Width, None] = {}
        for name in self.models:
            small = self.given.shapes[self.alike[starred(name)][0]]
            shapes = *small, tuple(self.sources[name].shape), tuple(self.targets[name].shape)
            for sizes in zip(*shapes, strict=False):
                if 0 < sizes[0] < sizes[1] and 0 < sizes[2] < sizes[3]:
                    found.setdefault(_Width(*sizes))
        return list(found)

    def _layout(self, name: str, layout: Layout, sizes: tuple[int, int]) -> LayoutSpec:
        """The layout of an axis of one length for an axis of another. Of several ways to cut it, the same one."""
        n, w = sizes
        (small_n, small_w), block = sizes_of(layout), layout[0].block
        if len(layout) != 2 and layout == evenly(small_n, small_w, block):  # two may be width beside what is fixed
            count = small_n // block
            if block == 1:
                return self._blocks_of_units(name, small_n, n)
            inner = self._factors_of(_Width(small_n, small_w, n, w)) if count > 1 else []
            if inner:
                blocks = {width.narrow for width in inner if width.small_narrow == block}
                if len(blocks) != 1:
                    raise _does_not_fit(name, sizes)
                return blocks.pop()
            if n % count == 0:
                return n // count
            raise _does_not_fit(name, sizes)
        if len(layout) == 2 and 1 in (factors := [piece.factor for piece in layout]) and max(factors) > 1:
            # width beside what is fixed: the sizes say how much is which
            grown = Fraction(w - n, max(factors) - 1)
            lengths = [n - grown if factor == 1 else grown for factor in factors]
            if grown.denominator == 1 and 0 < grown < n and all(piece.block == piece.length for piece in layout):
                return [(int(length), int(length), factor) for length, factor in zip(lengths, factors, strict=True)]
        for depth in range(3):
            before = _cut_like(layout, self.given.cuts, small_n, small_w, depth)
            if layout in before:
                after = _cut_like(layout, self.cuts(), n, w, depth)
                if len(before) == len(after):
                    return [tuple(piece) for piece in after[before.index(layout)]]
        joined = self._joined(layout, sizes)
        if joined is None:
            raise _does_not_fit(name, sizes)
        return [tuple(piece) for piece in joined]

    def _blocks_of_units(self, name: str, small: int, length: int) -> int:
        """The blocks of an axis of this length whose units were repeated one by one where growth was found.

        One unit may also be the whole axis there, or the whole of a section, if a width is 1. Then it is as of the
        other axes; raises a UserError if some of these are repeated as wholes, and others unit by unit.
        """
        shapes = self.given.shapes
        has_single = any(n == 1 < w for pair in shapes.values() for n, w in zip(*pair, strict=True))
        if small == length or not has_single:
            return 1
        by_unit = {
            spec == 1
            for other, axes in self.given.blocks.items()
            for axis, spec in axes.items()
            if shapes[other][0][axis] > 1 and isinstance(spec, int)
        }
        if len(by_unit) > 1:
            raise UserError(
                f"an axis of {name!r} has {small} unit{'s' * (small > 1)} in the model in which growth was found, "
                f"where a width is 1: this does not show how {length} of them grow. Compare models of larger widths"
            )
        return 1 if by_unit == {True} else length

    def _factors_of(self, axis: _Width) -> list[_Width]:
        """The widths of which an axis holds a product of two, as the weight that a hypernetwork makes; none for others.

        Only where the sizes of the models differ: a block is then no fixed share of the axis.
        """
        if axis.small_narrow == axis.narrow:
            return []
        answer: dict[_Width, None] = {}
        for one, other in combinations_with_replacement(self.widths, 2):
            product = _Width(*(a * b for a, b in zip(one, other, strict=True)))
            multiple = Fraction(axis.small_narrow, product.small_narrow)
            if multiple.denominator == 1 and axis == tuple(int(multiple) * size for size in product):
                answer |= {one: None, other: None}
        return list(answer)

    def _joined(self, layout: Layout, sizes: tuple[int, int]) -> Layout | None:
        """The layout of an axis that is joined of known widths and fixed parts; None if these do not determine it."""
        choices: list[list[int]] = []
        for piece in layout:
            small = piece.length, piece.length * piece.factor
            grown = {x.narrow for x in self.widths if x[:2] == small and x.wide == x.narrow * piece.factor}
            choices.append([piece.length] if piece.factor == 1 else sorted(grown))
        fitting = []
        for lengths in product(*choices):
            wide = sum(length * piece.factor for length, piece in zip(lengths, layout, strict=True))
            if (sum(lengths), wide) == sizes:
                fitting.append(lengths)
        if len(fitting) != 1:
            return None
        answer = []
        for length, piece in zip(fitting[0], layout, strict=True):
            block = piece.block if piece.block == 1 < piece.length else Fraction(piece.block * length, piece.length)
            if Fraction(block).denominator != 1:
                return None
            answer.append(Piece(length, int(block), piece.factor))
        return tuple(answer)


def _cut_like(layout: Layout, cuts: Sequence[PairedCut], narrow: int, wide: int, depth: int) -> list[Layout]:
    """The layouts of an axis by these cuts with as many sections as a given one, which grow as they do."""
    factors = [piece.factor for piece in layout]
    return [option for option in layouts_of(cuts, narrow, wide, depth) if [piece.factor for piece in option] == factors]


def _does_not_fit(name: str, sizes: tuple[int, int]) -> UserError:
    return UserError(
        f"an axis of {name!r} ({sizes[0]} → {sizes[1]}) cannot be cut as it was in the model in which growth was "
        "found. Call discover with these models, or with others whose sizes are in the same proportions"
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return f"{value[0]:.6g}, of {value[1]:g} + the weight"
    return str(value)
