"""Groups of axes that hold the same units, and methods that treat those alike: Net2Net, FPI, AKI and LEMON."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mupscale.errors import UserError, is_finite_number
from mupscale.methods.base import GrowthMethod, norms_over_width
from mupscale.sharding import gathered, whole
from mupscale.widening.growth import Growth, Layout, along, copy_index, is_unit_by_unit, source_index, whole_factor
from mupscale.widening.hints import Hints, some_names
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan import refuse_uneven_shift
from mupscale.widening.plan_text import Plan

AxisGroups = Mapping[str, Mapping[str, int]]
"""The axis of every parameter (by name pattern) that produces or reads the units of a group."""


class UnitGroup(NamedTuple):
    """Units that some parameters produce or read. A unit may be a block of entries, as a head is."""

    name: str
    copies: tuple[int, ...]
    """The number of copies of each unit; equal ones where the units grow by a whole factor."""
    axes: dict[str, tuple[int, int]]
    """The axis of each parameter, and the length of a unit on it. An axis may hold the units several times over, as the
    three sections of a fused QKV do."""

    @property
    def units(self) -> int:
        """The number of units in the narrow model."""
        return len(self.copies)

    @property
    def wide_units(self) -> int:
        return sum(self.copies)


def copies_of_units(layout: Layout) -> tuple[int, ...]:
    """The number of copies of each block of an axis."""
    copies: list[int] = []
    for piece in layout:
        copies += [piece.factor] * (piece.length // piece.block)
    return tuple(copies)


def unit_groups(
    method: str, narrow: nn.Module, plan: Plan, given: AxisGroups | None, *, with_mup_readouts: bool = False
) -> list[UnitGroup]:
    """The growing groups that `method` may treat unit by unit, by default the declared ones; else a UserError."""
    groups = _declared(narrow) if given is None else given
    if not groups:
        raise UserError(
            f"{method}: {type(narrow).__name__} does not declare which axes hold the same units. Give them as "
            'groups={"hidden": {"0.weight": 0, "1.weight": 1}}, or as the attribute width_groups of the model'
        )
    answer, averaged = [], []
    for name, axes in groups.items():
        members = _members(method, plan, name, axes)
        is_averaged = any("mean" in plan.parameters[member].sides for member in members)
        if is_averaged and not with_mup_readouts:
            averaged.append(name)
            continue
        group = _group(method, plan, name, members)
        if group.wide_units > group.units:
            answer.append(group)
    if not answer:
        reason = f"muP readouts read {some_names(averaged)}" if averaged else "they do not grow"
        remedy = "Give other groups, or use a plain readout" if averaged else "Give other groups, or use Duplication"
        raise UserError(
            f"{method}: none of the groups {some_names(list(groups))} can be mapped unit by unit, because {reason}. "
            f"{remedy}"
        )
    return answer


def with_biases(plan: Plan, axes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The axes of a group, with those of the biases beside weights that produce its units."""
    answer = dict(axes)
    for name, (axis, block) in axes.items():
        bias = bias_of(plan, name)
        if bias is not None and plan.parameters[name].sides[axis] == "out":
            answer[bias] = (0, block)
    return answer


def bias_of(plan: Plan, weight: str) -> str | None:
    """The name of the bias beside a weight, if there is one with as many entries as the weight produces."""
    owner, dot, attribute = weight.rpartition(".")
    name = owner + dot + attribute.replace("weight", "bias")
    if name == weight or name not in plan.parameters:
        return None
    entry, produced = plan.parameters[name], plan.parameters[weight]
    rows = [size for size, side in zip(produced.wide_shape, produced.sides, strict=True) if side == "out"]
    return name if list(entry.wide_shape) == rows[:1] else None


def _declared(model: nn.Module) -> dict[str, dict[str, int]]:
    answer: dict[str, dict[str, int]] = {}
    for prefix, module in model.named_modules():
        for group, axes in (getattr(module, "width_groups", None) or {}).items():
            answer[f"{prefix}.{group}".removeprefix(".")] = {
                f"{prefix}.{pattern}".removeprefix("."): axis for pattern, axis in axes.items()
            }
    return answer


def _members(method: str, plan: Plan, group: str, axes: Mapping[str, int]) -> dict[str, int]:
    members: dict[str, int] = {}
    for pattern, axis in axes.items():
        found = [name for name, entry in plan.parameters.items() if entry.matches(pattern)]
        if not found:
            raise UserError(
                f"{method}: {pattern!r} of the group {group!r} matches no parameter; there are "
                f"{some_names(plan.parameters)}"
            )
        for name in found:
            if not -len(plan.parameters[name].layouts) <= axis < len(plan.parameters[name].layouts):
                raise UserError(f"{method}: {name!r} of the group {group!r} has no axis {axis}. Give one that it has")
            members[name] = axis % len(plan.parameters[name].layouts)
    return members


def _group(method: str, plan: Plan, name: str, members: Mapping[str, int]) -> UnitGroup:
    layouts = {member: plan.parameters[member].layouts[axis] for member, axis in members.items()}
    in_pieces = [member for member, layout in layouts.items() if len(layout) > 1 and not is_unit_by_unit(layout)]
    if in_pieces:
        raise UserError(
            f"{method}: {in_pieces[0]!r} of the group {name!r} already consists of several pieces. Give other groups"
        )
    blocks = {member: layout[0].block for member, layout in layouts.items()}
    copies = {member: copies_of_units(layout) for member, layout in layouts.items()}
    fewest = min(copies.values(), key=len)
    if any(theirs != fewest * (len(theirs) // max(len(fewest), 1)) for theirs in copies.values()):
        counted = {member: len(theirs) for member, theirs in copies.items()}
        factors = sorted({whole_factor(layout) for layout in layouts.values()})
        raise UserError(
            f"{method}: the axes of the group {name!r} do not hold the same units: {some_names(list(members))} have "
            f"{counted} units, and grow by {factors}. Give axes of the same units"
        )
    axes = {member: (axis, blocks[member]) for member, axis in members.items()}
    return UnitGroup(name, fewest, axes)


class Net2Net(GrowthMethod):
    """Net2Net's random map (Chen et al. 2016): new units are copies of randomly chosen units.

    Each of the c copies of a unit is read with 1/c of its weight, and every entry gets a matching learning rate, so
    that function and training are preserved. Only the axes in `groups`, or in the model's `width_groups`, are mapped at
    random; all others are duplicated. An axis under a norm cannot be mapped at random, because the norm would weight
    units by their number of copies.
    """

    keeps_function = True

    def __init__(self, seed: int = 0, groups: AxisGroups | None = None, **options: Any) -> None:
        """
        Args:
            seed: The seed of the random map.
            groups: Axes that hold the same units, by any name: `{"hidden": {"0.weight": 0, "1.weight": 1}}`. By default
                the model's `width_groups`.
            options: `state`, `hyperparameters` and `rewarm_steps` of every method.
        """
        super().__init__(**options)
        self.seed = seed
        self.groups = groups

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plain = make_plan(narrow, wide, hints=hints)
        generator = torch.Generator().manual_seed(self.seed)
        mapped: dict[str, dict[int, list[tuple[int, int, int]]]] = {}
        for group in unit_groups(type(self).__name__, narrow, plain, self.groups, with_mup_readouts=True):
            extra = torch.randint(group.units, (group.wide_units - group.units,), generator=generator)
            copies = (1 + torch.bincount(extra, minlength=group.units)).tolist()  # each unit has at least one
            for name, (axis, block) in group.axes.items():
                times = plain.parameters[name].narrow_shape[axis] // (group.units * block)
                mapped.setdefault(name, {})[axis] = [(block, block, count) for count in copies] * times
        return make_plan(narrow, wide, hints=replace(hints or Hints(), blocks={**(hints or Hints()).blocks, **mapped}))


class FPI(Net2Net):
    """bert2BERT's function-preserving initialisation (Chen et al. 2022): Net2Net's map in a transformer.

    As published, hyperparameters are unchanged and the optimizer state is reset.
    """

    published_state = "reset"
    published_hyperparameters = "same"


class AKI(FPI):
    """bert2BERT's advanced knowledge initialisation (Chen et al. 2022): new units come from the next layer.

    Units are copied as in FPI. Then the weights and the bias that produce a new copy are replaced by those of the same
    unit in the next layer. So copies differ from the start, and the function changes. The next layer is the one with
    the next larger number in its name and the same shape. Weights without a next layer, such as those of the last one,
    and the gains and shifts of norms stay as in FPI.
    """

    equal_copies = False
    keeps_function = False

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plan = super().plan(narrow, wide, hints)
        if not any(_next_layers(plan)):
            raise UserError(
                f"AKI: no layer of {type(narrow).__name__} has a next one of the same shape to take new units from. "
                "Use FPI"
            )
        return plan

    def edit_(self, plan: Plan, wide: nn.Module) -> None:
        parameters = dict(wide.named_parameters())
        for name, following in _next_layers(plan):
            entry, next_entry = plan.parameters[name], plan.parameters[following]
            units = _in_place_of(entry, gathered(parameters[following]), next_entry)
            produced = entry.sides.index("out")
            new = along(copy_index(entry.layouts[produced]) > 0, produced, units.ndim)
            with whole(parameters[name]) as weight:
                own = gathered(parameters[name])
                weight.copy_(torch.where(new.to(own.device), units.to(own), own))


def _next_layers(plan: Plan) -> Iterator[tuple[str, str]]:
    """Each weight that produces width and has a next layer, with the weight there; then their biases."""
    for name, entry in plan.parameters.items():
        produces = entry.kind == "weight" and any(entry.sides[axis] == "out" for axis in entry.growing)
        following = _next_name(plan, name) if produces else None
        if following is None:
            continue
        yield name, following
        biases = bias_of(plan, name), bias_of(plan, following)
        if biases[0] is not None and biases[1] is not None:
            yield biases[0], biases[1]


_OF_LIKE_LAYERS = ("narrow_shape", "wide_shape", "sides", "kind", "rescale", "offset")


def _next_name(plan: Plan, name: str) -> str | None:
    """The parameter whose name has the next larger number in one place, the first if possible, and the same shape."""
    for number in re.finditer(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name):
        before, after = re.escape(name[: number.start()]), re.escape(name[number.end() :])
        later: dict[int, str] = {}
        for other, entry in plan.parameters.items():
            found = re.fullmatch(f"{before}(\\d+){after}", other)
            alike = all(getattr(entry, key) == getattr(plan.parameters[name], key) for key in _OF_LIKE_LAYERS)
            if found and alike and int(found[1]) > int(number[0]):
                later[int(found[1])] = other
        if later:
            return later[min(later)]
    return None


def _in_place_of(entry: Growth, weight: Tensor, weight_entry: Growth) -> Tensor:
    """What the wide `weight` would be in the place of `entry`, where other units may have several copies.

    Every copy of a unit gets the first one's row, and reads its inputs in equal shares.
    """
    answer = weight
    for axis, (layout, theirs, side) in enumerate(zip(entry.layouts, weight_entry.layouts, entry.sides, strict=True)):
        index = source_index(layout).to(weight.device)
        if side == "out":
            places = torch.nonzero(copy_index(theirs) == 0).flatten()
            first_copies = places[torch.argsort(source_index(theirs)[places])]
            answer = answer.index_select(axis, first_copies.to(weight.device)[index])
        elif side == "in" and layout != theirs:
            shape = [size if other != axis else entry.narrow_shape[axis] for other, size in enumerate(answer.shape)]
            narrow = answer.new_zeros(shape).index_add_(axis, source_index(theirs).to(weight.device), answer)
            copies = torch.bincount(index)[index].to(answer)
            answer = narrow.index_select(axis, index) / along(copies, axis, weight.ndim)
    return answer


class Lemon(GrowthMethod):
    """LEMON's unequal split (Wang et al. 2024): the copies of a unit are read with unequal shares that sum to 1.

    Every entry gets a matching learning rate, so that function and training are preserved. With
    `hyperparameters="same"` all entries have one rate, and copies become different without noise. Only the axes in
    `groups`, or in the model's `width_groups`, are split unequally. Axes under a norm are split equally, as LEMON does
    if the width is a multiple: the gradient of a norm mixes the shares of all units, so unequal shares are not exact.
    """

    keeps_function = True

    def __init__(self, seed: int = 0, spread: float = 0.5, groups: AxisGroups | None = None, **options: Any) -> None:
        """
        Args:
            seed: The seed of the random shares.
            spread: Shares are drawn evenly between 1 - spread and 1 + spread, and divided by their sum.
            groups: Axes that hold the same units, by any name: `{"hidden": {"0.weight": 0, "1.weight": 1}}`. By default
                the model's `width_groups`.
            options: `state`, `hyperparameters` and `rewarm_steps` of every method.
        """
        super().__init__(**options)
        if not is_finite_number(spread) or not 0 < spread < 1:
            raise UserError(f"Lemon: spread must be a number between 0 and 1, got {spread!r}")
        self.seed = seed
        self.spread = spread
        self.groups = groups

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plan = make_plan(narrow, wide, hints=hints)
        normalised = set(norms_over_width(plan, narrow))
        generator = torch.Generator().manual_seed(self.seed)
        parameters = dict(plan.parameters)
        for group in unit_groups("Lemon", narrow, plan, self.groups):
            for name in normalised & group.axes.keys():
                raise UserError(
                    f"Lemon: the group {group.name!r} has {name!r}, whose norm averages over the units: with unequal "
                    "shares its gradient would not be exact. Give groups without it: what is in none is duplicated"
                )
            shares = self._shares(group, generator)
            for name, (axis, block) in with_biases(plan, group.axes).items():
                entry = parameters[name]
                times = entry.narrow_shape[axis] // (group.units * block)
                row = shares.repeat_interleave(block).repeat(times)
                axes = list(entry.axes)
                axes[axis] = axes[axis]._replace(shares=tuple(row.tolist()))
                parameters[name] = replace(entry, axes=tuple(axes))
                refuse_uneven_shift(parameters[name])
        return replace(plan, parameters=parameters)

    def _shares(self, group: UnitGroup, generator: torch.Generator) -> Tensor:
        """How much of its unit each copy stands for, in units of the equal share; unit by unit. A single one has 1."""
        drawn = torch.rand(group.wide_units, generator=generator, dtype=torch.float64)
        shares = 1 + self.spread * (2 * drawn - 1)
        copies = torch.tensor(group.copies)
        unit = torch.arange(group.units).repeat_interleave(copies)
        mean = torch.bincount(unit, weights=shares) / copies
        return shares / mean[unit]
