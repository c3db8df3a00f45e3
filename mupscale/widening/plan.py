"""The plan: which axes of each parameter and buffer are width, how they grow, in which blocks, on which side.

Factors follow from the shapes of the two models, and sides from their module types (`modules.py`), so a plain PyTorch
model needs no preparation. Where that is not enough, there are hints (`hints.py`).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from mupscale._torch import DropoutNd, non_persistent_buffers
from mupscale.errors import UserError, refuse_unless_model
from mupscale.text_tables import unwrapped
from mupscale.widening import fractional, modules
from mupscale.widening import layers as depths
from mupscale.widening.growth import Axis, Growth, Layout, LayoutSpec, Piece, is_mixed, matches, parse_layout, sizes_of
from mupscale.widening.hints import (
    Blocks,
    Hints,
    Pairing,
    Use,
    all_sides,
    checked_hints,
    match_hints,
    refuse_scripted,
    unsaved_buffers,
)
from mupscale.widening.layers import BRANCH_MULTIPLIER, Layer, Layers, joined, layer_at
from mupscale.widening.modules import rescale_of_gain
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import records_of
from mupscale.widening.table import Side

RESIDUAL_OUTPUTS = "residual_outputs"
"""Attribute of a layer: the names of its parameters that make it the identity where they are zero."""


def neutral_value(shallow: nn.Module, prefix: str, row: Layer, rest: str, given: Mapping[str, float]) -> float | None:
    """The value with which a parameter of a layer helps to make it the identity; None if it may have any."""
    name = joined(prefix, row.source, rest)
    hinted = [value for pattern, value in given.items() if matches(name, pattern)]
    if hinted:
        return float(hinted[-1])
    layer = shallow.get_submodule(joined(prefix, row.source))
    return 0.0 if rest in getattr(layer, RESIDUAL_OUTPUTS, ()) else None


def lists_without_residual(shallow: nn.Module, layers: Layers, given: Mapping[str, float]) -> list[str]:
    """The lists with new layers of which it is not known what makes them the identity."""
    answer = []
    for prefix, rows in layers.items():
        for row in rows:
            names = (name for name, _ in shallow.get_submodule(joined(prefix, row.source)).named_parameters())
            if row.is_new and all(neutral_value(shallow, prefix, row, name, given) is None for name in names):
                answer.append(prefix)
                break
    return answer


def as_identity(plan: Plan, shallow: nn.Module, deep: nn.Module, given: Mapping[str, float]) -> Plan:
    """The same plan with new layers that add nothing: what can be compared with the shallow model."""
    layers = {
        name: tuple(row._replace(how="identity") if row.is_new else row for row in rows)
        for name, rows in plan.layers.items()
    }
    parameters = {}
    for name, growth in plan.parameters.items():
        found = layer_at(plan.layers, name)
        if found is not None and (_all_copied(plan.layers[found[0]]) or found[1].how == "random"):
            plain = replace(growth, inserted=None, branch=1.0, layers=1.0, kept=False)
            growth = _deepened(plain, layers, shallow, deep, given)
        parameters[name] = replace(growth, rates_as=None)  # the shallow model has the rates that continue it
    return replace(plan, parameters=parameters, layers=layers)


def _all_copied(rows: tuple[Layer, ...]) -> bool:
    """Whether all layers of a list share in what a shallow one does; otherwise the kept ones go on alone."""
    return all(row.has_state for row in rows)


def branch_ratio(shallow: nn.Module, deep: nn.Module, place: tuple[str, Layer, str]) -> float:
    """What the residual branches of a layer are multiplied by, deep over shallow; `place` is what `layer_at` found."""
    prefix, row, _ = place
    layers = deep.get_submodule(joined(prefix, row.key)), shallow.get_submodule(joined(prefix, row.source))
    after, before = (float(getattr(layer, BRANCH_MULTIPLIER, 1.0)) for layer in layers)
    return after / before


def _deepened(
    growth: Growth, layers: Layers, shallow: nn.Module, deep: nn.Module, given: Mapping[str, float]
) -> Growth:
    """The growth of a parameter, with what its layer adds. `given` are neutral values by name pattern."""
    found = layer_at(layers, growth.name)
    if found is None:
        return growth
    prefix, row, rest = found
    rows = layers[prefix]
    branch = branch_ratio(shallow, deep, found)
    made = replace(growth, source=joined(prefix, row.source, rest))
    if _all_copied(rows):
        of_source = sum(each.source == row.source for each in rows)
        return replace(made, inserted="copy" if row.is_new else None, branch=branch, layers=of_source)
    neutral = neutral_value(shallow, prefix, row, rest, given)
    match row.how:
        case "random":
            return replace(made, inserted="random", branch=branch, kept=True)
        case "identity":
            if lists_without_residual(shallow, {prefix: (row,)}, given):
                kind = type(shallow.get_submodule(joined(prefix, row.source))).__name__
                raise UserError(
                    f"depth: it is not known which parameters of {joined(prefix, row.source)!r} ({kind}) "
                    "make it add nothing. Declare residual_outputs in its class; or give upscale a call, so that it "
                    'looks for them, or hints=Hints(residual={"' + prefix + '.*.<output projection>": 0.0}); or use '
                    'depth="interleave"'
                )
            return replace(made, inserted="identity", branch=branch, fill=neutral)
    # what a branch loses by its multiplier, its output gets back; its rates are those of the deep model
    rescale = made.rescale if neutral is None else made.rescale / branch
    return replace(made, rescale=rescale, rates_as=(made.rescale, branch)) if branch != 1 else made


def plan(narrow: nn.Module, wide: nn.Module, *, hints: Hints | None = None, depth: depths.Depth | None = None) -> Plan:
    """The dry run of `upscale`: changes nothing, and raises a UserError if the growth would not be exact.

    Args:
        narrow: The trained model.
        wide: The same architecture at a larger width. Both may be on the meta device.
        hints: How parameters grow, by name pattern, where the types of their modules do not tell.
        depth: How the model becomes deeper, if it does, as in `upscale`.

    Examples:
        >>> import mupscale
        >>> from torch import Tensor, nn
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
    refuse_unless_model("narrow", narrow)
    refuse_unless_model("wide", wide)
    hints = checked_hints(hints)
    layers = depths.layers_of(narrow, wide, hints.depth if depth is None else depth)
    shallow, narrow = narrow, depths.at_depth(narrow, wide, layers)
    pairing = Pairing(narrow, wide)
    refuse_scripted("narrow", narrow)
    refuse_scripted("wide", wide)
    pairing.refuse_inexact_modules()
    if not pairing.uses:
        raise UserError(
            f"the model ({type(narrow).__name__}) has no parameters: there is nothing to grow. Pass the network itself"
        )
    hinted = match_hints(pairing, hints)
    sides = all_sides(pairing, hinted.roles)
    rescale = hinted.rescale | _rescale_of_gains(pairing, sides, hinted.rescale)
    directions = {pairing.parameter_names[norm.direction] for norm in pairing.weight_norms}
    implied = _implied_blocks(pairing)
    layouts: dict[str, tuple[Layout, ...]] = {}
    in_pieces: dict[str, set[int]] = {}
    # a bias, or the gain of a normalised weight, follows the layout of its weight
    for use in sorted(pairing.uses, key=lambda use: "bias" in use.owners[0][3] or use.owners[0][3].endswith("_g")):
        given = _merge(hinted.blocks, use.names)
        spec = {**_merge(implied, use.names), **_inherited(pairing, layouts, sides, use), **given}
        layouts[use.name] = _layouts(use.name, use.narrow_shape, use.wide_shape, spec, given)
        in_pieces[use.name] = {axis for axis, row in spec.items() if not isinstance(row, int)}
    records = records_of(narrow, mup_only=True) | records_of(wide, mup_only=True)
    growths: dict[str, Growth] = {}
    for use in pairing.uses:
        base = records[use.name].base if use.name in records else ()
        axes = tuple(map(Axis, layouts[use.name], sides[use.name]))
        factors = rescale.get(use.name, (1.0, 0.0))
        growths[use.name] = _growth(use, axes, factors, base, normed=use.name in directions)
    wrapper = wrapper_of(growths)
    for name, growth in growths.items():
        growths[name] = replace(_deepened(growth, layers, shallow, wide, hints.residual), wrapper=wrapper)
    is_fractional = any(growth.fractional_axes for growth in growths.values())
    if is_fractional:
        fractional.refuse_norms(pairing, growths, in_pieces)
        fractional.refuse_larger_heads(pairing, growths)
    for use in pairing.uses:
        _refuse_tied(use, growths[use.name])
        _refuse_growth(use, growths[use.name])
    if is_fractional:
        fractional.refuse_one_sided(growths, in_pieces)
    buffers = _buffers(pairing, growths, implied, hinted.blocks)
    for name, buffer in buffers.items():
        found = depths.layer_at(layers, name)
        kept = buffer.kept or (found is not None and found[1].how == "random")
        buffers[name] = replace(buffer, source=depths.source_of(layers, name), kept=kept)
    return Plan(growths, buffers, tuple(_notes(pairing, growths, hinted.roles)), layers)


def wrapper_of(names: Collection[str]) -> str:
    """What all names of parameters begin with, such as "net."; not the number of a layer."""
    places = [unwrapped(name).split(".") for name in names]
    first = list(takewhile(lambda column: len(set(column)) == 1, zip(*(place[:-1] for place in places), strict=False)))
    shared = takewhile(lambda key: not key.isdigit(), (column[0] for column in first))
    return "".join(f"{key}." for key in shared)


def _buffers(
    pairing: Pairing, growths: dict[str, Growth], implied: dict[str, Blocks], given_blocks: dict[str, Blocks]
) -> dict[str, Growth]:
    answer: dict[str, Growth] = {}
    unsaved = unsaved_buffers(pairing.modules[0][2])
    for name, source, target in pairing.buffers:
        shapes = tuple(source.shape), tuple(target.shape)
        if name in unsaved:
            axes = tuple(Axis((Piece(n, max(n, 1), 1),)) for n in shapes[0])
            answer[name] = Growth((name,), *shapes, "buffer", axes, kept=True)
            continue
        _refuse_other_numbers(name, source, target)
        weight = growths.get(f"{name.rpartition('.')[0]}.weight".removeprefix("."))
        given = given_blocks.get(name, {})
        spec = {} if weight is None else _like(weight.layouts, weight.sides, *shapes)
        own = _layouts(name, *shapes, {**implied.get(name, {}), **spec, **given}, given)
        answer[name] = Growth((name,), *shapes, "buffer", tuple(map(Axis, own)))
        if answer[name].fractional_axes:
            fractional.refuse_buffer(answer[name], growths, given)
    return answer


def _rescale_of_gains(
    pairing: Pairing, sides: Mapping[str, tuple[Side, ...]], given: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """What the gains of normalised weights are multiplied by, times what is given."""
    names, uses = pairing.parameter_names, {use.name: use for use in pairing.uses}
    answer = {}
    for norm in pairing.weight_norms:
        direction, gain = uses[names[norm.direction]], names[norm.gain]
        factors = [wide / max(narrow, 1) for narrow, wide in direction.sizes]
        own = rescale_of_gain(norm, sides[direction.name], factors)
        by, offset = given.get(gain, (1.0, 0.0))
        answer[gain] = by * own, offset
    return answer


def _growth(
    use: Use, axes: tuple[Axis, ...], rescale: tuple[float, float], base: tuple[int | None, ...], *, normed: bool
) -> Growth:
    _, before, _, attribute = use.owners[0]
    known = modules.axis_sides(before, attribute, use.narrow)
    sides = tuple(axis.side for axis in axes)
    matrix_axes = next(
        ((s.index("out"), s.index("in")) for s in (known, sides) if s and s.count("in") == 1 and "out" in s), None
    )
    summed = [axis for axis, side in enumerate(sides) if side == "in"]
    return Growth(
        names=use.names,
        narrow_shape=use.narrow_shape,
        wide_shape=use.wide_shape,
        kind=modules.kind_of(before, attribute, use.narrow),
        axes=axes,
        matrix_axes=matrix_axes,
        rescale=rescale[0],
        offset=rescale[1],
        base=math.prod(base[axis] or use.wide_shape[axis] for axis in summed) if base else None,
        zero_initialised=any(getattr(owner, "readout_zero_init", False) for _, owner, _, _ in use.owners),
        quiet=tuple(set.intersection(*(modules.untrained_rows(wide, key) for _, _, wide, key in use.owners))),
        summed_axes=_summed_axes(use, sides),
        normed=normed,
    )


def _summed_axes(use: Use, sides: tuple[Side, ...]) -> tuple[int, ...]:
    if "mean" not in sides:
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


def _refuse_tied(use: Use, entry: Growth) -> None:
    mixed = {axis for axis, layout in enumerate(entry.layouts) if is_mixed(layout)}
    is_read = any(modules.is_readout(module) and attribute == "weight" for _, module, _, attribute in use.owners)
    if is_read and not mixed <= set(entry.summed_axes):
        raise UserError(
            f"readout {use} is tied to an embedding, and the units that it reads grow by different factors: an "
            "embedding repeats its entries, a readout divides them by their number of copies. Untie the two, or grow "
            "this width by a whole factor"
        )


def _refuse_growth(use: Use, entry: Growth) -> None:
    _, owner, _, _ = use.owners[0]
    is_scaled = entry.scale.weight < 1 or entry.rescale != 1
    if is_scaled and not (use.narrow.is_floating_point() or use.narrow.is_complex()):
        raise UserError(
            f"{use} holds whole numbers ({use.narrow.dtype}), which cannot be multiplied by {entry.scale.weight:g}. "
            "Give both models floating-point weights"
        )
    refuse_uneven_shift(entry)
    if entry.normed and entry.mixed:
        raise UserError(
            f"{use} is divided by its norm (weight_norm), and its units grow by different factors, which changes the "
            "norm. Grow this width by a whole factor, or remove the norm"
        )
    _refuse_other_numbers(use.name, use.narrow, use.wide)
    whole_groups = isinstance(owner, nn.GroupNorm) and all(
        piece.block == modules.channels_of_a_group(owner) for piece in entry.layouts[0]
    )
    if entry.mixed and isinstance(owner, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) and not whole_groups:
        raise UserError(
            f"{use.name!r} belongs to a {type(owner).__name__} over pieces that grow by different factors, which "
            "changes the average. Normalise the pieces separately"
        )


def _refuse_other_numbers(name: str, narrow: Tensor, wide: Tensor) -> None:
    """Raises a UserError for packed numbers that would grow, and for a dtype that would cut values off."""
    if narrow.shape != wide.shape and (narrow.is_quantized or narrow.dtype in (torch.int8, torch.uint8)):
        raise UserError(
            f"{name!r} {tuple(narrow.shape)} → {tuple(wide.shape)} is quantised ({narrow.dtype}): its scales lie "
            "elsewhere. Take the model as it was before, in floating point, and quantise the wide one"
        )
    if not torch.can_cast(narrow.dtype, wide.dtype):
        raise UserError(
            f"{name!r} holds {narrow.dtype} in the narrow model and {wide.dtype} in the wide one, which would cut off "
            "its values. Give both models the same kind of numbers"
        )


def refuse_uneven_shift(entry: Growth) -> None:
    uneven = any(axis.relative_side == "in" and (axis.shares or is_mixed(axis.pieces)) for axis in entry.axes)
    if entry.offset and uneven:
        raise UserError(
            f"rescale: {entry.name!r} {entry.narrow_shape} → {entry.wide_shape} has an offset to rescale, "
            f"{(entry.rescale, entry.offset)}, and its entries are divided by different numbers of copies. Grow this "
            "width by a whole factor"
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
        if n == w and axis not in spec:
            answer.append((Piece(n, max(n, 1), 1),))
            continue
        try:
            answer.append(parse_layout(spec.get(axis, 1), n, w))
        except ValueError as error:
            where = f"axis {axis} of {name!r} {narrow} → {wide}: {error}"
            if axis in given:
                raise UserError(f"blocks: {where}") from None
            remedy = f'hints=Hints(blocks={{"{name}": {{{axis}: [(length, block, factor), ...]}}}})'
            implied = f". The module implies this layout; give another: {remedy}" if axis in spec else ""
            raise UserError(where + implied) from None
    return tuple(answer)


def _inherited(
    pairing: Pairing, layouts: Mapping[str, tuple[Layout, ...]], sides: Mapping[str, tuple[Side, ...]], use: Use
) -> dict[int, LayoutSpec]:
    """A bias, or a norm's shift, is duplicated as the rows of the weight beside it; a weight norm's gain, as its v."""
    module_name, _, _, attribute = use.owners[0]
    for norm in pairing.weight_norms:
        if use.growing and use.name == pairing.parameter_names[norm.gain]:
            layout = layouts[pairing.parameter_names[norm.direction]]
            return {axis: [tuple(piece) for piece in layout[axis]] for axis in use.growing}
    if "bias" not in attribute or len(use.narrow_shape) != 1:
        return {}
    weight = pairing.names_of_weights().get(f"{module_name}." * bool(module_name) + attribute.replace("bias", "weight"))
    if weight is None or weight not in layouts:
        return {}
    return _like(layouts[weight], sides[weight], use.narrow_shape, use.wide_shape)


def _like(
    layouts: tuple[Layout, ...], sides: tuple[Side, ...], narrow: tuple[int, ...], wide: tuple[int, ...]
) -> dict[int, LayoutSpec]:
    """The layout of a weight's produced axis (of one axis, whatever its side) for a tensor of the same lengths."""
    for layout, side in zip(layouts, sides, strict=True):
        if (side == "out" or len(layouts) == 1) and [sizes_of(layout)] == list(zip(narrow, wide, strict=True)):
            return {0: [tuple(piece) for piece in layout]}
    return {}


def _merge(block_of: Mapping[str, Mapping[int, LayoutSpec]], names: Iterable[str]) -> dict[int, LayoutSpec]:
    return {axis: spec for name in names for axis, spec in block_of.get(name, {}).items()}


def _implied_blocks(pairing: Pairing) -> dict[str, dict[int, LayoutSpec]]:
    answer: dict[str, dict[int, LayoutSpec]] = {}
    names = pairing.names_of_weights()
    for prefix, before, after in pairing.modules:
        for attribute, spec in modules.own_blocks(before, after).items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            answer.setdefault(names.get(name, name), {}).update(spec)
    return answer


def _notes(pairing: Pairing, growths: dict[str, Growth], hinted: Collection[str]) -> Iterator[str]:
    """A note on each guess, on constants that change with the width, and on what is inexact. `hinted` have a role."""
    growing = [name for growth in growths.values() if growth.grows for name in growth.names]
    in_blocks = [name for growth in growths.values() if growth.in_blocks for name in growth.names]
    rescaled = [name for growth in growths.values() if growth.rescale != 1 for name in growth.names]
    for name, before, after in pairing.modules:
        inside, title = f"{name}." if name else "", name or "(the model)"
        # a configuration is handed to every module, and only some of them have heads
        counts = modules.head_counts(before, after, of_configuration=not name or modules.is_attention(before))
        heads = next((f"{key} grows {old} → {new}" for key, old, new in counts if new > old), None)
        knows_blocks = isinstance(before, nn.MultiheadAttention) or _any_inside(inside, in_blocks)
        if heads and _any_inside(inside, growing) and not knows_blocks:
            yield f"{title}: {heads}; its projections need blocks of whole heads"
        text = modules.caveat(before, after)
        if text:
            yield f"{title}: {text}"
        if not _any_inside(inside, rescaled):
            for constant in _changed_numbers(before, after):
                yield f"{title}: {constant}"
        for attribute, note in _own_buffers(before, after):
            yield f"{inside}{attribute}: {note}"
    for use in pairing.uses:
        _, owner, _, attribute = use.owners[0]
        guessed = use.name not in hinted and modules.axis_sides(owner, attribute, use.narrow) is None
        if guessed and use.growing and len(use.narrow_shape) == 2:
            yield (
                f"{use.name}: treated as a vector, whose width is its output; if its width is summed over, give "
                f'hints=Hints(roles={{"{use.name}": "readout"}})'
            )


def _any_inside(prefix: str, names: list[str]) -> bool:
    return any(name.startswith(prefix) for name in names)


def _changed_numbers(narrow: nn.Module, wide: nn.Module) -> Iterator[str]:
    """Constants of a module that differ between the two models, such as `embed_scale`."""
    if isinstance(narrow, DropoutNd) or modules.is_readout(narrow):
        return
    for attribute, before in vars(narrow).items():
        after = vars(wide).get(attribute)
        if (
            attribute.startswith("_")
            or attribute == BRANCH_MULTIPLIER
            or not isinstance(before, float)
            or not isinstance(after, float)
        ):
            continue
        if before != after and before * after > 0:
            yield (
                f"its constant {attribute} changes {before:g} → {after:g}; if it multiplies something that grows, "
                "compensate for it with Hints(rescale=...)"
            )


def _own_buffers(narrow: nn.Module, wide: nn.Module) -> Iterator[tuple[str, str]]:
    """The buffers that the wide module does not save, with a note where its own is not the narrow one duplicated."""
    for attribute in sorted(non_persistent_buffers(wide)):
        before, after = getattr(narrow, attribute, None), getattr(wide, attribute, None)
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.is_meta or after.is_meta:
            continue
        if before.shape == after.shape:
            if not torch.equal(before, after.to(before)):
                text = "this buffer is not saved with the model, and differs between the two"
                yield attribute, f"{text}; the wide model keeps its own"
        elif not _is_duplicate(before, after.to(before)):
            yield (
                attribute,
                f"this buffer {tuple(before.shape)} → {tuple(after.shape)} is not saved with the model, and the wide "
                "one is not a duplicate of the narrow one (such as sinusoids). The wide model keeps its own, so "
                "modules that read it are not exact",
            )


def _is_duplicate(narrow: Tensor, wide: Tensor) -> bool:
    """Whether `wide` is `narrow` repeated entry by entry, or as a whole, along the axes that grow."""
    if any(n == 0 or w % n for n, w in zip(narrow.shape, wide.shape, strict=True)):
        return False
    factors = [w // n for n, w in zip(narrow.shape, wide.shape, strict=True)]
    interleaved = narrow
    for axis, factor in enumerate(factors):
        interleaved = interleaved.repeat_interleave(factor, axis)
    return torch.equal(interleaved, wide) or torch.equal(narrow.repeat(factors), wide)
