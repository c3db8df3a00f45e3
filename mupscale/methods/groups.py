"""Groups of axes that hold the same units: some layers produce them, others read them. Methods treat them alike."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from mupscale.errors import UserError
from mupscale.widening.axes import Layout, is_unit_by_unit, narrow_length, whole_factor
from mupscale.widening.hints import matches
from mupscale.widening.modules import normalises_width
from mupscale.widening.pairing import some_names
from mupscale.widening.plan_text import Plan

AxisGroups = Mapping[str, Mapping[str, int]]
"""For each group of units, the axis of every parameter (by name pattern) that produces or reads them."""


class UnitGroup(NamedTuple):
    """Units that some parameters produce or read. A unit may be a block of entries, as a head is."""

    name: str
    copies: tuple[int, ...]
    """Of each unit; equal ones where the units grow by a whole factor."""
    axes: dict[str, tuple[int, int]]
    """The axis of each parameter, and the length of a unit on it. An axis may hold the units several times over, as the
    three sections of a fused QKV do."""

    @property
    def units(self) -> int:
        """In the narrow model."""
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


def norms_over_width(plan: Plan, narrow: nn.Module) -> Iterator[str]:
    """The growing parameters of modules that average over their units."""
    for prefix, module in narrow.named_modules():
        if not normalises_width(module):
            continue
        for attribute, _ in module.named_parameters():
            name = f"{prefix}.{attribute}".removeprefix(".")
            if name in plan.parameters and plan.parameters[name].grows:
                yield name


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
        found = [name for name in plan.parameters if matches(name, pattern)]
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
    counted = {member: narrow_length(layout) // blocks[member] for member, layout in layouts.items()}
    copies = {member: copies_of_units(layout) for member, layout in layouts.items()}
    fewest = min(copies.values(), key=len)
    if any(theirs != fewest * (len(theirs) // max(len(fewest), 1)) for theirs in copies.values()):
        factors = sorted({whole_factor(layout) for layout in layouts.values()})
        raise UserError(
            f"{method}: the axes of the group {name!r} do not hold the same units: {some_names(list(members))} have "
            f"{counted} units, and grow by {factors}. Give axes of the same units"
        )
    axes = {member: (axis, blocks[member]) for member, axis in members.items()}
    return UnitGroup(name, fewest, axes)
