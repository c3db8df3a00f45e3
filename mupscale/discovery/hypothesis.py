"""The assumptions about how each tensor grows, and the wide model that follows from them."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mupscale._torch import BatchNormBase, ConvNd
from mupscale.checks.comparison import Planned, planned_layouts
from mupscale.errors import UserError
from mupscale.text_tables import starred
from mupscale.widening import modules
from mupscale.widening.growth import Axis, Growth, Layout, Piece, centre_, parse_layout
from mupscale.widening.hints import Pairing, Use, unsaved_buffers
from mupscale.widening.plan_text import Plan
from mupscale.widening.table import Side
from mupscale.widening.write import widen_

NamedAxis = tuple[str, int]
"""The name of a tensor, and one of its axes."""


@dataclass(frozen=True)
class AxisGroup:
    """Axes of one module, and of the same module in other layers, that hold the same units."""

    key: str
    """The module's name, with a star for every number; of a module of unknown type, its tensor's and the axis."""
    narrow: int
    wide: int
    axes: tuple[NamedAxis, ...]


State = tuple[dict[str, Growth], frozenset[NamedAxis]]
"""What is assumed, and which layouts were chosen."""


class Hypothesis:
    """What is assumed, and the wide model that follows from it. Both models are the caller's copies, in float64."""

    def __init__(self, narrow: nn.Module, wide: nn.Module) -> None:
        self.pairing = Pairing(narrow, wide)
        self.narrow, self.wide = narrow, wide
        self.uses = {use.name: use for use in self.pairing.uses}
        own = unsaved_buffers(wide)
        self.buffers = {name: (a, b) for name, a, b in self.pairing.buffers if name not in own}
        self.assumed: dict[str, Growth] = {}
        self.pinned: frozenset[NamedAxis] = frozenset()
        """Axes whose layout was chosen; those of others follow from what their module reads."""
        for use in self.pairing.uses:
            shapes = use.narrow_shape, use.wide_shape
            axes = tuple(map(Axis, _first_layouts(use.name, *shapes), first_sides(use)))
            self.assumed[use.name] = Growth(use.names, *shapes, "weight", axes)
        for name, (before, after) in self.buffers.items():
            shapes = tuple(before.shape), tuple(after.shape)
            self.assumed[name] = Growth((name,), *shapes, "buffer", tuple(map(Axis, _first_layouts(name, *shapes))))
        self._written: dict[str, Growth] = {}
        self._wide = {**dict(wide.named_parameters()), **dict(wide.named_buffers())}
        self.groups = list(self._groups())

    def state(self) -> State:
        return dict(self.assumed), self.pinned

    def restore(self, state: State) -> None:
        self.assumed, self.pinned = dict(state[0]), state[1]

    def assume(self, plan: Plan) -> None:
        """Everything as a plan has it."""
        for name, entry in {**plan.parameters, **plan.buffers}.items():
            if name in self.assumed:
                self.assumed[name] = entry
                self.pinned |= {(name, axis) for axis in range(len(entry.axes))}

    def choose(self, group: AxisGroup, layout: Layout) -> None:
        for name, axis in group.axes:
            self._lay_out(name, axis, layout)
        self.pinned |= set(group.axes)

    def follow(self, name: str, axis: int, layout: Layout) -> None:
        """An axis gets the layout of what its module reads, unless one was chosen for it."""
        if (name, axis) not in self.pinned and self.assumed[name].layouts[axis] != layout:
            self._lay_out(name, axis, layout)

    def _lay_out(self, name: str, axis: int, layout: Layout) -> None:
        axes = list(self.assumed[name].axes)
        axes[axis] = axes[axis]._replace(pieces=layout)
        self.assumed[name] = replace(self.assumed[name], axes=tuple(axes))

    def turn(self, names: Iterable[str], sides: tuple[Side, ...]) -> None:
        """Gives the axes of parameters other sides."""
        for name in names:
            self.assumed[name] = replace(self.assumed[name], axes=tuple(map(Axis, self.assumed[name].layouts, sides)))

    def scale(self, names: Iterable[str], unit: float, offset: float) -> None:
        """Multiplies tensors, or offset + tensor, by a further number."""
        for name in names:
            old = self.assumed[name]
            self.assumed[name] = replace(old, rescale=old.rescale * unit, offset=offset or old.offset)

    @torch.no_grad()
    def write(self, names: Iterable[str] | None = None) -> None:
        """Writes what has changed into the wide model."""
        for name in self.assumed if names is None else names:
            assumed = self.assumed[name]
            if self._written.get(name) == assumed:
                continue
            source = self.uses[name].narrow if name in self.uses else self.buffers[name][0]
            widen_(self._wide[name], source, assumed)
            self._written[name] = assumed

    def write_again(self, names: Iterable[str]) -> None:
        """Writes tensors of the wide model that something else has changed."""
        known = [name for name in names if name in self.assumed]
        for name in known:
            self._written.pop(name, None)
        self.write(known)

    @torch.no_grad()
    def add_centred_noise(self, names: Iterable[str]) -> None:
        """Adds noise that is zero in sum over copies along summed axes, until the next `write`."""
        generator = torch.Generator().manual_seed(2)
        for name in names:
            assumed, target = self.assumed[name], self._wide[name]
            summed = [axis for axis, side in enumerate(assumed.sides) if side == "in"]
            noise = torch.randn(target.shape, generator=generator, dtype=torch.float64)
            centre_(noise, assumed.layouts, summed)
            target.add_(noise, alpha=0.3 * float(target.abs().square().mean().sqrt()))
            self._written.pop(name, None)

    def planned(self) -> Planned:
        """The layouts of the axes that grow, by their sizes, the first guess before others."""
        found = planned_layouts(self.assumed.values()).items()
        return {sizes: [first_layout(*sizes), *layouts] for sizes, layouts in found if sizes[0] != sizes[1]}

    def own(self, module: str) -> list[str]:
        """The names, as assumed, of the parameters that a module itself holds."""
        first = self.pairing.parameter_names
        held = self.narrow.get_submodule(module).named_parameters(recurse=False, remove_duplicate=False)
        return [first[f"{module}.{attribute}".removeprefix(".")] for attribute, _ in held]

    def _groups(self) -> Iterator[AxisGroup]:
        found: dict[tuple[str, int, int], list[NamedAxis]] = {}
        read: dict[tuple[str, int, int], list[NamedAxis]] = {}
        for name in (*self.uses, *self.buffers):
            use, assumed = self.uses.get(name), self.assumed[name]
            for axis in assumed.growing:
                n, w = assumed.sizes[axis]
                owner = name.rpartition(".")[0]
                known = use is None or is_known(use)
                if known and use and assumed.sides[axis] == "in":
                    followed = {followed_axis(module, attribute, use.narrow) for _, module, _, attribute in use.owners}
                    if followed != {axis}:  # what its modules read does not determine the layout of this axis
                        read.setdefault((f"what {starred(owner)} reads", n, w), []).append((name, axis))
                    continue
                key = starred(owner) if known else f"{starred(name)}, axis {axis}"
                found.setdefault((key, n, w), []).append((name, axis))
        for (key, n, w), axes in {**found, **read}.items():
            yield AxisGroup(key, n, w, tuple(axes))


def entries_grow_by(growth: Growth) -> float:
    """By how much the number of entries grows."""
    return math.prod(growth.wide_shape) / max(math.prod(growth.narrow_shape), 1)


def is_known(use: Use) -> bool:
    """Whether the type of the module says which axes are summed over."""
    _, before, _, attribute = use.owners[0]
    return modules.axis_sides(before, attribute, use.narrow) is not None


def first_sides(use: Use) -> tuple[Side, ...]:
    """The side of every axis as module types tell it, else the last of two is summed over; tied ones are embeddings."""
    found = []
    for _, before, after, attribute in use.owners:
        known = modules.axis_sides(before, attribute, use.narrow)
        if known is not None and modules.group_count(before) != modules.group_count(after):
            known = ("out", *known[1:])
        if known is None:
            known = tuple("out" for _ in use.narrow_shape)
            if len(use.growing) > 1:
                known = tuple("in" if axis == use.growing[-1] else "out" for axis in range(len(known)))
        found.append(tuple(side if axis in use.growing else None for axis, side in enumerate(known)))
    return min(found, key=lambda sides: sides.count("in"))


def _first_layouts(name: str, narrow: tuple[int, ...], wide: tuple[int, ...]) -> Iterator[Layout]:
    for axis, sizes in enumerate(zip(narrow, wide, strict=True)):
        try:
            yield first_layout(*sizes)
        except UserError as error:
            raise UserError(f"axis {axis} of {name!r} {narrow} → {wide}: {error}") from None


def first_layout(narrow: int, wide: int) -> Layout:
    """The whole axis repeated; units spread evenly where the factor is not whole."""
    if narrow == wide or narrow == 0:
        return (Piece(narrow, max(narrow, 1), 1),)
    return parse_layout(narrow if wide % narrow == 0 else 1, narrow, wide)


def followed_axis(module: nn.Module, attribute: str, parameter: Tensor) -> int | None:
    """The axis that is duplicated as what its module reads: the summed one, or the only one of a unitwise tensor."""
    sides = modules.axis_sides(module, attribute, parameter)
    by_unit = isinstance(module, (BatchNormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU))
    by_unit = by_unit or (isinstance(module, ConvNd) and module.groups > 1 and module.weight.shape[1] == 1)
    if by_unit or sides is None:
        axes = [axis for axis, size in enumerate(parameter.shape) if size > 1]
        return axes[0] if len(axes) == 1 or (axes and isinstance(module, ConvNd)) else None
    reads = isinstance(module, nn.Linear | ConvNd) or modules.is_conv1d(module)
    return sides.index("in") if reads and "in" in sides else None
