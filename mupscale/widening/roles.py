"""Roles: what each parameter does with its width axes, read off module types or given by name pattern."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from mup import MuReadout
from torch import nn

from mupscale.errors import UserError
from mupscale.widening import modules
from mupscale.widening.modules import Side
from mupscale.widening.readout import Readout
from mupscale.widening.survey import Survey, Use, some_names

Role = Literal["matrix", "transposed_matrix", "vector", "readout", "mu_readout", "scalar"]
"""`matrix` is (out, in), `transposed_matrix` (in, out); `vector` produces its width, `readout` sums over it,
`mu_readout` averages over it, `scalar` has none.
"""

Roles = Mapping[str, Role]

_TIED = """parameter {names} is used in conflicting roles: {uses}.
One tensor cannot be both duplicated and divided by the width factor. Remedies:
- give the readout a 1/width multiplier: mupscale.Readout with set_base_shapes, its weight tied to the embedding;
- let the last norm before the readout carry the factor: roles={{"<last norm>.*": "readout"}};
- or untie the two."""

_UNKNOWN = """parameter {name!r} {narrow} → {wide} grows along {count} axes, and its module ({module}) does not \
determine which is summed over.
Give its role: roles={{"{name}": "matrix"}} for (out, in), "transposed_matrix" for (in, out), "vector" if both are \
produced."""


def match_roles(survey: Survey, given: Roles | None) -> dict[str, Role]:
    """Roles by parameter name: what model classes declare, overridden by what the caller gives; the last match wins."""
    names = survey.names_of_weights()
    answer: dict[str, Role] = {}
    for pattern, role in [*declared(survey, "width_roles"), *given_pairs("roles", given)]:
        if role not in get_args(Role):
            raise UserError(f"roles: {pattern!r} has role {role!r}; the roles are {', '.join(get_args(Role))}")
        matched = [first for name, first in names.items() if matches(name, pattern)]
        if not matched:
            raise UserError(f"roles: the pattern {pattern!r} matches no parameter; there are {some_names(names)}")
        answer.update(dict.fromkeys(matched, role))
    return answer


def _sides_found(survey: Survey, use: Use, carried: Iterable[float], averaging: bool) -> tuple[Role, tuple[Side, ...]]:
    """The role of a parameter and the side of each of its axes, from the modules that hold it.

    `carried` are the width factors that norms in role `readout` carry: they resolve an embedding tied to a plain
    readout.
    """
    width = survey.width_of(use)
    found: dict[tuple[float, float], tuple[Role, tuple[Side, ...]]] = {}
    uses = []
    for module_name, before, after, attribute in use.owners:
        sides = _sides_of_module(use, width, before, after, attribute)
        named: Role = role_name(sides)
        if (
            modules.is_readout(before)
            and attribute == "weight"
            and (averaging or _averages(use, module_name, before, after))
        ):
            sides = tuple("out" if axis in width else None for axis in range(len(sides)))
            named = "mu_readout" if width else "scalar"
        key = growth(use, sides, "out"), growth(use, sides, "in")
        if named != "mu_readout" or key not in found:
            found[key] = named, sides
        uses.append(f"{named} in {module_name or '(the model)'!r} ({type(before).__name__})")
    if len(found) == 1:
        return next(iter(found.values()))
    for (k_out, k_in), answer in found.items():
        if k_in == 1 and k_out in carried and set(found) == {(k_out, 1), (1, k_out)}:
            return answer
    raise UserError(_TIED.format(names=" = ".join(map(repr, use.names)), uses=", ".join(uses)))


def role_name(sides: Sequence[Side]) -> Role:
    if "out" in sides and "in" in sides:
        return "matrix"
    return "vector" if "out" in sides else "readout" if "in" in sides else "scalar"


def all_sides(
    survey: Survey, role_of: Mapping[str, Role], *, averaging: bool = False
) -> dict[str, tuple[Role, tuple[Side, ...]]]:
    """The role and the sides of every parameter, by name.

    With `averaging`, muP readouts count as averaging ones even if their multiplier is not set yet.
    """
    given: dict[str, tuple[Role, tuple[Side, ...]]] = {}
    carried: set[float] = set()
    for use in survey.uses:
        if use.name in role_of:
            role = role_of[use.name]
            given[use.name] = role, _sides_of_role(survey, use, role)
            if role == "readout":  # of two axes, the one that it produces carries the factor of the readout behind it
                carried |= {use.wide_shape[axis] / use.narrow_shape[axis] for axis in use.growing}
    return {use.name: given.get(use.name) or _sides_found(survey, use, carried, averaging) for use in survey.uses}


def _sides_of_role(survey: Survey, use: Use, role: Role) -> tuple[Side, ...]:
    width = survey.width_of(use)
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
        wanted = dict.fromkeys(width, "in" if role == "readout" else "out")
    return tuple(wanted.get(axis) for axis in range(len(use.narrow_shape)))


def _sides_of_module(
    use: Use, width: Sequence[int], before: nn.Module, after: nn.Module, attribute: str
) -> tuple[Side, ...]:
    known = modules.axis_sides(before, attribute, use.narrow)
    if known is None:
        if len(width) > 1:
            raise UserError(
                _UNKNOWN.format(
                    name=use.name,
                    narrow=use.narrow_shape,
                    wide=use.wide_shape,
                    count=len(width),
                    module=type(before).__name__,
                )
            )
        known = modules.all_produced(use.narrow)
    elif modules.group_count(before) != modules.group_count(after):
        # a group reads its own channels only: whichever axis counts the groups is produced, and nothing more is summed
        known = ("out", *known[1:])[: len(known)]
    for axis in use.growing:
        if known[axis] is None:
            raise UserError(
                f"parameter {use.name!r} {use.narrow_shape} → {use.wide_shape}: axis {axis} of a "
                f"{type(before).__name__} "
                "is not a width, so it cannot grow. Build both models with the same size there"
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


def growth(use: Use, sides: Sequence[Side], side: Side) -> float:
    pairs = zip(use.narrow_shape, use.wide_shape, sides, strict=True)
    return math.prod(wide / narrow for narrow, wide, s in pairs if s == side)


def declared(survey: Survey, attribute: str) -> Iterator[tuple[str, Any]]:
    """What model classes say in `width_roles`, `width_blocks` or `width_units`, by full name pattern.

    Each of them is a mapping, or a method that takes the wide twin of the module and returns one.
    """
    for prefix, module, wide_twin in survey.modules:
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


def given_pairs(keyword: str, given: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    """What the caller gives under a keyword; raises a UserError if it is no mapping."""
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"{keyword} must map name patterns to values, got {given!r}")
    return (given or {}).items()


def matches(name: str, pattern: str) -> bool:
    """Whether a name pattern means this parameter or buffer."""
    # with the dot, "*.q_proj.weight" matches a top-level q_proj too
    return fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)
