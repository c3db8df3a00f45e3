"""The plan: which axes of each parameter and buffer are width, how they grow, in which blocks, in what role.

Factors follow from the shapes of the two models, and roles from their module types (`modules.py`), so a plain PyTorch
model needs no preparation. Where that is not enough, the caller gives `roles`, `blocks` and `units` by name pattern. A
model class can declare them itself, in attributes `width_roles`, `width_blocks` and `width_units`, with patterns
relative to the module. Each of these is a mapping, or a method that takes the same module of the wide model and returns
the mapping.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mupscale.errors import UserError
from mupscale.text_tables import Paint, folded, table, unpainted
from mupscale.widening import fractional_growth, modules
from mupscale.widening.layers import braced, notes_by_layer
from mupscale.widening.layout import (
    Layout,
    LayoutSpec,
    Piece,
    evenly,
    is_fractional,
    is_mixed,
    is_unit_by_unit,
    narrow_length,
    parse_layout,
    whole_factor,
    wide_length,
)
from mupscale.widening.modules import Side
from mupscale.widening.roles import Role, Roles, all_sides, declared, given_pairs, match_roles, matches
from mupscale.widening.summed_axes import may_be_summed
from mupscale.widening.survey import Survey, Use, refuse_scripted, some_names, unsaved_buffers
from mupscale.widening.tensor_plan import TensorPlan
from mupscale.widening.units import NO_UNIT, Unit, Units, match_units
from mupscale.widening.weight_norm import unit_of_gain
from mupscale.widening.width_table import merged_table

Blocks = Mapping[str, Mapping[int, LayoutSpec]]


@dataclass(frozen=True)
class Plan:
    """What `upscale` will do to each parameter. `print` it.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> plan = mupscale.plan(narrow, wide)
        >>> {name: entry.role for name, entry in plan.parameters.items()}
        {'0.weight': 'vector', '0.bias': 'vector', '2.weight': 'readout', '2.bias': 'scalar'}
        >>> report = mupscale.upscale(narrow, wide, plan=plan)  # the plan is not made again
    """

    parameters: dict[str, TensorPlan]
    buffers: dict[str, TensorPlan]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return self.text()

    def text(self, columns: int | None = None, paint: Paint = unpainted) -> str:
        """A table with a row for each parameter and buffer.

        With `columns`, for a terminal that is so wide: parameters that differ only in the number of their layer, and
        grow alike, share a row.
        """
        rows = [_row(entry) for entry in (*self.parameters.values(), *self.buffers.values())]
        if columns is not None:
            rows = _grouped(rows)
        before = sum(math.prod(e.narrow_shape) for e in self.parameters.values())
        after = sum(math.prod(e.wide_shape) for e in self.parameters.values())
        below = [f"{before:,} → {after:,} parameters"]
        below += fractional_growth.described(self.parameters)
        if any(_BY in row[-1] for row in rows):
            below.append("by N: blocks of N entries are repeated as wholes")
        below += [f"note: {note}" for note in notes_by_layer(self.notes)]
        lines = table([_HEADING, *rows], right=_NUMBERS, columns=columns, paint=paint)
        return "\n".join([*lines, *folded(below, columns)])


def plan(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    roles: Roles | None = None,
    blocks: Blocks | None = None,
    units: Units | None = None,
) -> Plan:
    """The dry run of `upscale`: changes nothing, and raises a UserError if the widening would not be exact.

    Args:
        narrow: The trained model.
        wide: The same architecture at a larger width. Both may be on the meta device.
        roles: What a parameter does with its width axes, by name pattern: `{"head.weight": "readout"}`.
        blocks: How axes are duplicated, by name pattern and axis: `{"*.q.weight": {0: 64}}` repeats blocks of 64.
        units: Extra factors of weights, by name pattern: `{"embed.weight": 0.5}`.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> print(mupscale.plan(narrow, wide))
        parameter  role     narrow → wide  k_out  k_in  weight   duplicated
        -------------------------------------------------------------------
        0.weight   vector   4×3 → 8×3          2     1  dup      axis 0 ×2
        0.bias     vector   4 → 8              2     1  dup      axis 0 ×2
        2.weight   readout  2×4 → 2×8          1     2  dup / 2  axis 1 ×2
        2.bias     scalar   2                  1     1  copy
        26 → 50 parameters
    """
    survey = Survey(narrow, wide)
    refuse_scripted("narrow", narrow)
    refuse_scripted("wide", wide)
    survey.refuse_inexact_modules()
    if not survey.uses:
        raise UserError(
            f"the model ({type(narrow).__name__}) has no parameters: there is nothing to widen. Pass the network itself"
        )
    role_of = match_roles(survey, roles)
    implied = _implied_blocks(survey)
    block_of = _given_blocks(survey, blocks)
    given_units = match_units(survey, units)
    sides = all_sides(survey, role_of)
    unit_of = given_units | _units_of_gains(survey, sides, given_units)
    directions = {survey.parameter_names()[norm.direction] for norm in survey.weight_norms}
    entries: dict[str, TensorPlan] = {}
    layouts: dict[str, tuple[Layout, ...]] = {}
    in_pieces: dict[str, set[int]] = {}
    weights_first = sorted(survey.uses, key=lambda use: _follows_a_weight(use.owners[0][3]))
    for use in weights_first:  # a bias follows the layout of its weight
        given = _merge(block_of, use.names)
        spec = {**_merge(implied, use.names), **_inherited(survey, layouts, sides, use), **given}
        layouts[use.name] = _layouts(use.name, use.narrow_shape, use.wide_shape, spec, given)
        in_pieces[use.name] = {axis for axis, row in spec.items() if not isinstance(row, int)}
    widths = merged_table(narrow, mup_only=True) | merged_table(wide, mup_only=True)
    for use in survey.uses:
        unit = unit_of.get(use.name, NO_UNIT)
        base = widths[use.name].base if use.name in widths else ()
        entries[use.name] = _entry(use, *sides[use.name], layouts[use.name], unit, use.name in directions, base)
    fractional_growth.refuse_averages(survey, entries, in_pieces)
    for use in survey.uses:
        _refuse_tied(use, entries[use.name])
        _refuse_entry(use, entries[use.name])
    fractional_growth.refuse_one_sided(entries, in_pieces)

    buffers: dict[str, TensorPlan] = {}
    unsaved = unsaved_buffers(wide)
    for name, source, target in survey.buffers:
        shapes = tuple(source.shape), tuple(target.shape)
        if name in unsaved:
            buffers[name] = _kept_buffer(name, *shapes)
            continue
        if shapes[0] != shapes[1] and source.dtype in (torch.int8, torch.uint8):
            raise UserError(
                f"buffer {name!r} {shapes[0]} → {shapes[1]} is quantised ({source.dtype}): its scales lie elsewhere, "
                "and cannot be widened with it. Take the model as it was before, in floating point"
            )
        owner = name.rpartition(".")[0]
        weight = f"{owner}.weight" if owner else "weight"
        given = block_of.get(name, {})
        spec = {} if weight not in layouts else _like(layouts[weight], sides[weight][1], *shapes)
        own = _layouts(name, *shapes, {**implied.get(name, {}), **spec, **given}, given)
        buffers[name] = TensorPlan((name,), *shapes, "buffer", "buffer", (None,) * source.ndim, own, 1, None)
        fractional_growth.refuse_buffer(buffers[name], entries, given)
    in_blocks = [name for name, entry in entries.items() if entry.in_blocks]
    in_units = [name for use in survey.uses if given_units.get(use.name, NO_UNIT) != NO_UNIT for name in use.names]
    return Plan(entries, buffers, (*survey.caveats(in_blocks, in_units), *_guesses(survey, role_of)))


def _kept_buffer(name: str, narrow: tuple[int, ...], wide: tuple[int, ...]) -> TensorPlan:
    layouts = tuple((Piece(n, max(n, 1), 1),) for n in narrow)
    return TensorPlan((name,), narrow, wide, "buffer", "buffer", (None,) * len(narrow), layouts, 1, None, kept=True)


def _guesses(survey: Survey, role_of: Mapping[str, Role]) -> Iterator[str]:
    for use in survey.uses:
        _, owner, _, attribute = use.owners[0]
        guessed = use.name not in role_of and modules.axis_sides(owner, attribute, use.narrow) is None
        if not guessed or not use.growing:
            continue
        remedy = f'if its width is summed over, give roles={{"{use.name}": "readout"}}'
        if len(use.narrow_shape) == 2:
            yield f"{use.name}: treated as a vector, whose width is its output; {remedy}"
        elif _may_be_summed(survey, use):
            yield f"{use.name}: treated as a vector, but a forward pass may sum over its width; {remedy}"


def _may_be_summed(survey: Survey, use: Use) -> bool:
    """Whether the code of a module around the parameter looks as if it sums over its width."""
    ndim = len(use.narrow_shape)
    for name in use.names:
        path = [(prefix, module) for prefix, module, _ in survey.modules if not prefix or name.startswith(f"{prefix}.")]
        if any(may_be_summed(path, name, ndim, axis) for axis in use.growing):
            return True
    return False


def _units_of_gains(
    survey: Survey, sides: Mapping[str, tuple[Role, tuple[Side, ...]]], given: Mapping[str, Unit]
) -> dict[str, Unit]:
    """The units of the gains of normalised weights, times those given."""
    names, uses = survey.parameter_names(), {use.name: use for use in survey.uses}
    answer = {}
    for norm in survey.weight_norms:
        direction, unit = uses[names[norm.direction]], given.get(names[norm.gain], NO_UNIT)
        shapes = zip(direction.narrow_shape, direction.wide_shape, strict=True)
        own = unit_of_gain(norm, sides[direction.name][1], [wide / max(narrow, 1) for narrow, wide in shapes])
        answer[names[norm.gain]] = unit._replace(scale=unit.scale * own)
    return answer


def _follows_a_weight(attribute: str) -> bool:
    """Whether a parameter has the layout of another of its layer: a bias, or the gain of a normalised weight."""
    return "bias" in attribute or attribute.endswith("_g")


def _entry(
    use: Use,
    role: Role,
    sides: tuple[Side, ...],
    layouts: tuple[Layout, ...],
    unit: Unit,
    normed: bool,
    base: tuple[int | None, ...],
) -> TensorPlan:
    _, before, _, attribute = use.owners[0]
    known = modules.axis_sides(before, attribute, use.narrow)
    axes = next(
        ((s.index("out"), s.index("in")) for s in (known, sides) if s and s.count("in") == 1 and "out" in s), None
    )
    summed = [axis for axis, side in enumerate(sides) if side == "in"]
    fan_in = math.prod(use.wide_shape[axis] for axis in summed)
    return TensorPlan(
        names=use.names,
        narrow_shape=use.narrow_shape,
        wide_shape=use.wide_shape,
        role=role,
        kind=modules.kind_of(before, attribute, use.narrow),
        sides=sides,
        layouts=layouts,
        fan_in=fan_in,
        base=math.prod(base[axis] or use.wide_shape[axis] for axis in summed) if base else None,
        matrix_axes=axes,
        zero_initialised=any(getattr(owner, "readout_zero_init", False) for _, owner, _, _ in use.owners),
        quiet=tuple(set.intersection(*(modules.untrained_rows(wide, key) for _, _, wide, key in use.owners))),
        summed_axes=_summed_axes(use, role, sides),
        unit=unit,
        normed=normed,
    )


def _summed_axes(use: Use, role: Role, sides: tuple[Side, ...]) -> tuple[int, ...]:
    if role != "mu_readout":
        return tuple(axis for axis, side in enumerate(sides) if side == "in")
    width = {axis for axis, side in enumerate(sides) if side}
    summed = set(width)
    for _, module, _, attribute in use.owners:
        known = modules.axis_sides(module, attribute, use.narrow)
        if known is not None:
            summed &= {axis for axis, side in enumerate(known) if side == "in"}
        elif len(width) > 1:  # which of them is summed over is not known
            return ()
    return tuple(sorted(summed))


def _refuse_tied(use: Use, entry: TensorPlan) -> None:
    """Raises a UserError for an embedding tied to a muP readout whose units have unequal numbers of copies."""
    mixed = {axis for axis, layout in enumerate(entry.layouts) if is_mixed(layout)}
    is_read = any(modules.is_readout(module) and attribute == "weight" for _, module, _, attribute in use.owners)
    if is_read and not mixed <= set(entry.summed_axes):
        raise UserError(
            f"readout {use.name!r} {use.narrow_shape} → {use.wide_shape} is tied to an embedding, and the units that "
            "it reads grow by different factors: an embedding repeats its entries, a readout divides them by their "
            "number of copies. Untie the two, or grow this width by a whole factor"
        )


def _refuse_entry(use: Use, entry: TensorPlan) -> None:
    _, owner, _, _ = use.owners[0]
    if entry.k_in > 1 and not (use.narrow.is_floating_point() or use.narrow.is_complex()):
        raise UserError(
            f"{use.name!r} {use.narrow_shape} → {use.wide_shape} holds whole numbers ({use.narrow.dtype}), which "
            "cannot be divided by "
            f"{entry.k_in}. Give both models floating-point weights"
        )
    if entry.unit.scale != 1 and not (use.narrow.is_floating_point() or use.narrow.is_complex()):
        raise UserError(
            f"units: {use.name!r} holds whole numbers ({use.narrow.dtype}), which cannot be multiplied by "
            f"{entry.unit.scale:g}. Give both models floating-point weights"
        )
    refuse_uneven_shift(entry)
    if entry.normed and entry.mixed:
        raise UserError(
            f"{use.name!r} {use.narrow_shape} → {use.wide_shape} is divided by its norm (weight_norm), and its units "
            "grow by different factors, which changes the norm. Grow this width by a whole factor, or remove the norm"
        )
    if entry.grows and (use.narrow.is_quantized or use.narrow.dtype in (torch.int8, torch.uint8)):
        raise UserError(
            f"{use.name!r} {use.narrow_shape} → {use.wide_shape} is quantised ({use.narrow.dtype}): its scales lie "
            "elsewhere, and cannot be widened with it. Take the model as it was before, in floating point, and "
            "quantise the wide one"
        )
    whole_groups = isinstance(owner, nn.GroupNorm) and fractional_growth.in_whole_groups(owner, entry)
    if entry.mixed and isinstance(owner, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) and not whole_groups:
        raise UserError(
            f"{use.name!r} belongs to a {type(owner).__name__} over pieces that grow by different factors, which "
            "changes the average. Normalise the pieces separately"
        )


def refuse_uneven_shift(entry: TensorPlan) -> None:
    """Raises a UserError for an affine unit of a parameter whose entries are divided by different numbers."""
    layouts = [layout for axis, layout in enumerate(entry.layouts) if entry.relative_side(axis) == "in"]
    shared = any(entry.relative_side(axis) == "in" for axis, _ in entry.shares)
    if entry.unit.offset and (shared or any(is_mixed(layout) for layout in layouts)):
        raise UserError(
            f"units: {entry.name!r} {entry.narrow_shape} → {entry.wide_shape} has an affine unit {tuple(entry.unit)}, "
            "and its entries are divided by different numbers of copies. Grow this width by a whole factor"
        )


def _layouts(
    name: str,
    narrow: tuple[int, ...],
    wide: tuple[int, ...],
    spec: Mapping[int, LayoutSpec],
    given: Mapping[int, LayoutSpec],
) -> tuple[Layout, ...]:
    """The layout of each axis. `given` is what of `spec` the user, or the model class, has said."""
    answer: list[Layout] = []
    for axis, (n, w) in enumerate(zip(narrow, wide, strict=True)):
        if axis in spec:
            try:
                answer.append(parse_layout(spec[axis], n, w))
            except ValueError as error:
                where = f"axis {axis} of {name!r} {narrow} → {wide}: {error}"
                if axis in given:
                    raise UserError(f"blocks: {where}") from None
                raise UserError(
                    f"{where}. The module implies this layout; give another: "
                    f'blocks={{"{name}": {{{axis}: [(length, block, factor), ...]}}}}'
                ) from None
        elif n == w:
            answer.append((Piece(n, max(n, 1), 1),))
        elif w < n:
            raise UserError(
                f"{name!r} {narrow} → {wide}: axis {axis} is narrower in the wide model ({w} < {n}); swap the models?"
            )
        elif n == 0:
            raise UserError(
                f"{name!r} {narrow} → {wide}: axis {axis} is empty in the narrow model, so it has nothing to copy. "
                "Keep it empty, or give both models units there"
            )
        else:
            answer.append(evenly(n, w))
    return tuple(answer)


def _inherited(
    survey: Survey,
    layouts: Mapping[str, tuple[Layout, ...]],
    sides: Mapping[str, tuple[Role, tuple[Side, ...]]],
    use: Use,
) -> dict[int, LayoutSpec]:
    """A bias, or a norm's shift, is duplicated as the rows of the weight beside it; a weight norm's gain, as its v."""
    module_name, _, _, attribute = use.owners[0]
    for norm in survey.weight_norms:
        if use.growing and use.name == survey.parameter_names()[norm.gain]:
            layout = layouts[survey.parameter_names()[norm.direction]]
            return {axis: [tuple(piece) for piece in layout[axis]] for axis in use.growing}
    if "bias" not in attribute or len(use.narrow_shape) != 1:
        return {}
    weight = survey.names_of_weights().get(f"{module_name}." * bool(module_name) + attribute.replace("bias", "weight"))
    if weight is None or weight not in layouts:
        return {}
    return _like(layouts[weight], sides[weight][1], use.narrow_shape, use.wide_shape)


def _like(
    layouts: tuple[Layout, ...], sides: tuple[Side, ...], narrow: tuple[int, ...], wide: tuple[int, ...]
) -> dict[int, LayoutSpec]:
    """The layout of a weight's produced axis, for a one-axis tensor of the same lengths.

    A weight with one axis, as a norm's, is that axis whatever its side: in role `readout` it is "in".
    """
    for layout, side in zip(layouts, sides, strict=True):
        lengths = (narrow_length(layout),), (wide_length(layout),)
        if (side == "out" or len(layouts) == 1) and lengths == (narrow, wide):
            return {0: [tuple(piece) for piece in layout]}
    return {}


def _merge(block_of: Mapping[str, Mapping[int, LayoutSpec]], names: Iterable[str]) -> dict[int, LayoutSpec]:
    return {axis: spec for name in names for axis, spec in block_of.get(name, {}).items()}


def _implied_blocks(survey: Survey) -> dict[str, dict[int, LayoutSpec]]:
    """What module types imply, by tensor name."""
    answer: dict[str, dict[int, LayoutSpec]] = {}
    names = survey.names_of_weights()
    for prefix, before, after in survey.modules:
        for attribute, spec in modules.own_blocks(before, after).items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            answer.setdefault(names.get(name, name), {}).update(spec)
    return answer


def _given_blocks(survey: Survey, given: Blocks | None) -> dict[str, dict[int, LayoutSpec]]:
    """Blocks by tensor name: what model classes declare, then what the caller gives."""
    shapes = {name: use.narrow_shape for use in survey.uses for name in use.names}
    shapes |= {name: tuple(buffer.shape) for name, buffer, _ in survey.buffers}
    meant = {norm.weight: norm.direction for norm in survey.weight_norms}
    shapes |= {name: shapes[direction] for name, direction in meant.items()}
    answer: dict[str, dict[int, LayoutSpec]] = {}
    for pattern, axes in [*declared(survey, "width_blocks"), *given_pairs("blocks", given)]:
        if not isinstance(axes, Mapping) or not all(isinstance(axis, int) for axis in axes):
            raise UserError(f"blocks: {pattern!r} must map to {{axis: block}} with whole numbers, got {axes!r}")
        matched = [name for name in shapes if matches(name, pattern)]
        if not matched:
            raise UserError(
                f"blocks: the pattern {pattern!r} matches no parameter or buffer; there are {some_names(shapes)}"
            )
        for axis, spec in axes.items():
            holders = [name for name in matched if -len(shapes[name]) <= axis < len(shapes[name])]
            if not holders:
                raise UserError(
                    f"blocks: nothing that {pattern!r} matches has an axis {axis}; {matched[0]!r} has shape "
                    f"{shapes[matched[0]]}"
                )
            for name in holders:
                answer.setdefault(meant.get(name, name), {})[axis % len(shapes[name])] = spec
    return answer


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


def _row(entry: TensorPlan) -> tuple[str, ...]:
    shapes = f"{_shape(entry.narrow_shape)} → {_shape(entry.wide_shape)}" if entry.grows else _shape(entry.narrow_shape)
    k_out, k_in = fractional_growth.as_text(entry.k_out), fractional_growth.as_text(entry.k_in)
    by_copies = any(is_mixed(layout) for axis, layout in enumerate(entry.layouts) if entry.relative_side(axis) == "in")
    weight = "copy" if not entry.grows else "dup" if entry.k_in == 1 else f"dup / {k_in}"
    if by_copies and entry.fractional_axes:
        weight = f"dup · {k_out} / copies" if entry.role == "mu_readout" else "dup / copies"
    if any(entry.relative_side(axis) == "in" for axis in entry.relative_shares):
        weight += ", unequal shares"
    if entry.kept:
        weight = "kept"
    if entry.unit.scale != 1:
        weight += f" · {entry.unit.scale:.3g}"
    if entry.unit.offset:
        weight += f" on {entry.unit.offset:g} + w"
    return " = ".join(entry.names), entry.role, shapes, k_out, k_in, weight, _layout_text(entry)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "()"


_MANY_PIECES = 6
"""Of an axis, more of which are only counted in the printed plan."""


def _layout_text(entry: TensorPlan) -> str:
    texts = []
    for axis, layout in enumerate(entry.layouts):
        if is_fractional(layout) and is_unit_by_unit(layout):
            factor = fractional_growth.as_text(whole_factor(layout))
            texts.append(f"axis {axis} ×{factor}" + f"{_BY}{layout[0].block}" * (layout[0].block > 1))
        elif len(layout) > _MANY_PIECES:
            texts.append(f"axis {axis}: {narrow_length(layout)} → {wide_length(layout)} in {len(layout)} pieces")
        elif len(layout) > 1:
            texts.append(f"axis {axis}: " + " + ".join(f"{p.length}·{p.factor} by {p.block}" for p in layout))
        elif layout[0].factor > 1:
            texts.append(f"axis {axis} ×{layout[0].factor}" + f"{_BY}{layout[0].block}" * (layout[0].block > 1))
    return ", ".join(texts)
