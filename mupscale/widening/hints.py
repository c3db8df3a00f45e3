"""How parameters grow, by name: what module types tell, and hints where they do not.

The caller gives hints, or a model class declares them in attributes `width_roles`, `width_blocks` and `width_rescale`,
with patterns relative to the module. Each of these is a mapping, or a method that takes the same module of the wide
model and returns the mapping. What the caller gives overrides what classes declare; the last match wins.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

from mup import MuReadout
from torch import nn

from mupscale.errors import UserError, shown
from mupscale.readout import Readout
from mupscale.widening import modules
from mupscale.widening.growth import LayoutSpec, Role, role_of
from mupscale.widening.layers import Depth
from mupscale.widening.pairing import Pairing, Use, some_names
from mupscale.widening.table import Scale, Side, product, scale_of_axis

Blocks = dict[int, LayoutSpec]
"""By axis: the length of the blocks that are repeated as wholes, or pieces (length, block, factor)."""

Rescale = float | tuple[float, float]
"""s, by which a weight w is multiplied, or (s, c) if it acts as c + w, as a gain 1 + w does: then c + w is multiplied.

It compensates for a constant in the model that depends on its width, such as sqrt(width) on an embedding."""


@dataclass(frozen=True)
class Hints:
    """How parameters grow, by name pattern; `discover` finds them.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> def build(width):
        ...     return nn.Sequential(nn.Conv1d(1, width, 3), nn.Flatten(), nn.Linear(4 * width, 2))
        >>> narrow, wide, x = build(4), build(8), torch.randn(5, 1, 6)
        >>> hints = mupscale.Hints(blocks={"2.weight": {1: 4}})  # 4 positions of each channel are repeated together
        >>> report = mupscale.upscale(narrow, wide, hints=hints, call=lambda model: model(x))
        >>> report.exact
        True
    """

    roles: Mapping[str, Role] = field(default_factory=dict)
    """What a parameter does with its width axes: `{"head.weight": "readout"}`."""
    blocks: Mapping[str, Mapping[int, LayoutSpec]] = field(default_factory=dict)
    """How axes are duplicated: `{"*.q.weight": {0: 64}}` repeats blocks of 64."""
    rescale: Mapping[str, Rescale] = field(default_factory=dict)
    """Extra factors of weights: `{"embed.weight": 0.5}`, or `{"norm.weight": (0.5, 1.0)}` for a gain 1 + w."""
    depth: Depth | None = field(default=None, kw_only=True)
    """How the model becomes deeper, as in `upscale`."""
    residual: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Which parameters make a layer the identity, and with which value: `{"layers.*.down.weight": 0.0}`. A layer class
    declares those that must be zero in `residual_outputs`."""
    evidence: str = field(default="", kw_only=True)
    """Where they were found, for the report."""


NO_HINTS = Hints()


def checked_hints(hints: Hints | None) -> Hints:
    """Hints, for None those that say nothing. Raises a UserError for anything else."""
    hints = NO_HINTS if hints is None else hints
    if not isinstance(hints, Hints):
        raise UserError(f"hints must be mupscale.Hints(roles=..., blocks=..., rescale=...), got {shown(hints)}")
    return hints


class Matched(NamedTuple):
    """Hints by the names of parameters and buffers."""

    roles: dict[str, Role]
    blocks: dict[str, Blocks]
    rescale: dict[str, tuple[float, float]]


def match_hints(pairing: Pairing, hints: Hints | None, *, with_blocks: bool = True) -> Matched:
    """Which parameters and buffers the hints mean. Raises a UserError where they mean none, or say nothing sensible."""
    hints = checked_hints(hints)
    blocks = _blocks(pairing, hints) if with_blocks else {}
    return Matched(_roles(pairing, hints), blocks, _rescale(pairing, hints))


def _roles(pairing: Pairing, hints: Hints) -> dict[str, Role]:
    names, answer = pairing.names_of_weights(), {}
    for pattern, role, matched in _matches(pairing, "roles", hints.roles, names):
        if role not in get_args(Role):
            raise UserError(f"roles: {pattern!r} has role {role!r}; the roles are {', '.join(get_args(Role))}")
        answer.update({names[name]: role for name in matched})
    return answer


def _rescale(pairing: Pairing, hints: Hints) -> dict[str, tuple[float, float]]:
    names, answer = pairing.names_of_weights(scaled=True), {}
    for pattern, value, matched in _matches(pairing, "rescale", hints.rescale, names):
        pair = value if isinstance(value, tuple | list) else (value, 0.0)
        if len(pair) != 2 or not all(_is_finite(number) for number in pair) or pair[0] <= 0:
            raise UserError(
                f"rescale: {pattern!r} must map to a finite number above 0, or to such a number and a finite offset, "
                f"(s, c); got {value!r}"
            )
        answer.update({names[name]: (float(pair[0]), float(pair[1])) for name in matched})
    return answer


def _blocks(pairing: Pairing, hints: Hints) -> dict[str, Blocks]:
    shapes = {name: use.narrow_shape for use in pairing.uses for name in use.names}
    shapes |= {name: tuple(buffer.shape) for name, buffer, _ in pairing.buffers}
    meant = {norm.weight: norm.direction for norm in pairing.weight_norms}
    shapes |= {name: shapes[direction] for name, direction in meant.items()}
    answer: dict[str, Blocks] = {}
    for pattern, axes, matched in _matches(pairing, "blocks", hints.blocks, shapes):
        if not isinstance(axes, Mapping) or not all(isinstance(axis, int) for axis in axes):
            raise UserError(f"blocks: {pattern!r} must map to {{axis: block}} with whole numbers, got {axes!r}")
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


def _matches(
    pairing: Pairing, keyword: str, given: Mapping[str, Any] | None, names: Collection[str]
) -> Iterator[tuple[str, Any, list[str]]]:
    """Each pattern, declared and then given, with its value and the names that it matches."""
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"{keyword} must map name patterns to values, got {given!r}")
    for pattern, value in [*_declared(pairing, f"width_{keyword}"), *(given or {}).items()]:
        matched = [name for name in names if matches(name, pattern)]
        if not matched:
            what = "parameter or buffer" if keyword == "blocks" else "parameter"
            raise UserError(f"{keyword}: the pattern {pattern!r} matches no {what}; there are {some_names(names)}")
        yield pattern, value, matched


def _declared(pairing: Pairing, attribute: str) -> Iterator[tuple[str, Any]]:
    for prefix, module, wide_twin in pairing.modules:
        mapping = getattr(module, attribute, None) or {}
        if callable(mapping):
            mapping = mapping(wide_twin) or {}
        if not isinstance(mapping, Mapping):
            raise UserError(
                f"{attribute} of module {prefix or '(the model)'!r} ({type(module).__name__}) must map name patterns "
                f"to values, or be a method that takes the wide module and returns such a mapping; got {mapping!r}"
            )
        for pattern, value in mapping.items():
            yield (f"{prefix}.{pattern}" if prefix else pattern), value


def _is_finite(number: Any) -> bool:
    return isinstance(number, float | int) and not isinstance(number, bool) and math.isfinite(number)


def matches(name: str, pattern: str) -> bool:
    """Whether a name pattern means this parameter or buffer."""
    # with the dot, "*.q_proj.weight" matches a top-level q_proj too
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)


_TIED = """parameter {names} is used in conflicting roles: {uses}.
One tensor cannot be both duplicated and divided by the width factor. Remedies:
- give the readout a 1/width multiplier: mupscale.Readout with set_base_shapes, its weight tied to the embedding;
- let the last norm before the readout carry the factor: hints=Hints(roles={{"<last norm>.*": "readout"}});
- or untie the two."""


def _sides_found(pairing: Pairing, use: Use, carried: Iterable[float], averaging: bool) -> tuple[Side, ...]:
    """The side of each axis of a parameter, from the modules that hold it.

    `carried` are the width factors that norms in role `readout` carry: they resolve an embedding tied to a plain
    readout.
    """
    width = pairing.width_of(use)
    found: dict[Scale, tuple[Side, ...]] = {}
    uses = []
    for module_name, before, after, attribute in use.owners:
        sides = _sides_of_module(use, width, before, after, attribute)
        if (
            modules.is_readout(before)
            and attribute == "weight"
            and (averaging or _averages(use, module_name, before, after))
        ):
            sides = tuple("mean" if axis in width else None for axis in range(len(sides)))
        key = scale_of_sides(use, sides)
        if "mean" not in sides or key not in found:
            found[key] = sides
        uses.append(f"{role_of(sides)} in {module_name or '(the model)'!r} ({type(before).__name__})")
    if len(found) == 1:
        return next(iter(found.values()))
    for k in carried:
        embedding, readout = (scale_of_axis(side, k, k) for side in ("out", "in"))
        if set(found) == {embedding, readout}:
            return found[embedding]
    raise UserError(_TIED.format(names=" = ".join(map(repr, use.names)), uses=", ".join(uses)))


def all_sides(pairing: Pairing, role_of: Mapping[str, Role], *, averaging: bool = False) -> dict[str, tuple[Side, ...]]:
    """The sides of every parameter; with `averaging`, muP readouts average before their multiplier is set."""
    given: dict[str, tuple[Side, ...]] = {}
    carried: set[float] = set()
    for use in pairing.uses:
        if use.name in role_of:
            role = role_of[use.name]
            given[use.name] = _sides_of_role(pairing, use, role)
            if role == "readout":  # of two axes, the one that it produces carries the factor of the readout behind it
                carried |= {use.wide_shape[axis] / use.narrow_shape[axis] for axis in use.growing}
    return {use.name: given.get(use.name) or _sides_found(pairing, use, carried, averaging) for use in pairing.uses}


def _sides_of_role(pairing: Pairing, use: Use, role: Role) -> tuple[Side, ...]:
    width = pairing.width_of(use)
    wanted: dict[int, Side]
    if role in ("matrix", "transposed_matrix"):
        if len(width) > 2:
            raise UserError(
                f"roles: {use.name!r} {use.narrow_shape} → {use.wide_shape} is no {role}: {len(width)} axes are width"
            )
        if len(width) == 1:
            if len(use.narrow_shape) != 2:
                raise UserError(
                    f"roles: only one axis of {use.name!r} {use.narrow_shape} → {use.wide_shape} grows, and {role!r} "
                    "does not tell its "
                    'side: say "vector" if it is produced, "readout" if it is summed over'
                )
            wanted = {width[0]: "out" if width[0] == 0 else "in"}
        else:
            wanted = dict(zip(width, ("out", "in"), strict=False))
        if role == "transposed_matrix":
            wanted = {axis: "in" if side == "out" else "out" for axis, side in wanted.items()}
    elif role == "scalar":
        if use.growing:
            raise UserError(f"roles: {use.name!r} {use.narrow_shape} → {use.wide_shape} grows, so it is no scalar")
        wanted = {}
    else:
        side: Side = "in" if role == "readout" else "mean" if role == "mu_readout" else "out"
        wanted = dict.fromkeys(width, side)
    return tuple(wanted.get(axis) for axis in range(len(use.narrow_shape)))


def _sides_of_module(
    use: Use, width: Sequence[int], before: nn.Module, after: nn.Module, attribute: str
) -> tuple[Side, ...]:
    known = modules.axis_sides(before, attribute, use.narrow)
    if known is None:
        if len(width) > 1:
            raise UserError(
                f"parameter {use.name!r} {use.narrow_shape} → {use.wide_shape} grows along {len(width)} axes, and its "
                f"module ({type(before).__name__}) does not determine which is summed over.\nGive its role: "
                f'hints=Hints(roles={{"{use.name}": "matrix"}}) for (out, in), "transposed_matrix" for (in, out), '
                '"vector" if both are produced.'
            )
        known = modules.all_produced(use.narrow)
    elif modules.group_count(before) != modules.group_count(after):
        # a group reads its own channels only: whichever axis counts the groups is produced, and nothing more is summed
        known = ("out", *known[1:])[: len(known)]
    for axis in use.growing:
        if known[axis] is None:
            raise UserError(
                f"parameter {use.name!r} {use.narrow_shape} → {use.wide_shape}: axis {axis} of a "
                f"{type(before).__name__} is not a width, so it cannot grow. Build both models with the same size there"
            )
    return tuple(side if axis in width else None for axis, side in enumerate(known))


def _averages(use: Use, name: str, before: nn.Module, after: nn.Module) -> bool:
    """Whether the readout's multiplier falls as its width grows; one that stays makes it a plain linear layer."""
    ratio = readout_multiplier(name, before) / readout_multiplier(name, after)
    k = use.wide_shape[1] / use.narrow_shape[1]
    if math.isclose(ratio, k, rel_tol=1e-9):
        return True
    if math.isclose(ratio, 1.0, rel_tol=1e-9):
        return False
    raise UserError(
        f"readout {name!r} grows {k:g}-fold but its multiplier falls {ratio:g}-fold: "
        "call mupscale.set_base_shapes on both models with the same base model"
    )


def readout_multiplier(name: str, module: nn.Module) -> float:
    if isinstance(module, Readout):
        return module.multiplier
    assert isinstance(module, MuReadout)
    if not hasattr(module.weight, "infshape"):
        raise UserError(
            f"mup.MuReadout {name!r} has lost its base shape (a copy does): call mupscale.set_base_shapes, or use "
            "mupscale.Readout"
        )
    return module.output_mult / module.width_mult()


def scale_of_sides(use: Use, sides: Sequence[Side]) -> Scale:
    """The scale of a parameter whose axes have these sides and grow as wholes."""
    factors = (wide / max(narrow, 1) for narrow, wide in zip(use.narrow_shape, use.wide_shape, strict=True))
    return product(scale_of_axis(side, k, k) for side, k in zip(sides, factors, strict=True) if side)
