"""Two models walked side by side, and how their parameters grow: what module types tell, and hints where they do not.

The caller gives hints, or a model class declares them in attributes `width_roles`, `width_blocks` and `width_rescale`,
with patterns relative to the module. Each of these is a mapping, or a method that takes the same module of the wide
model and returns the mapping. What the caller gives overrides what classes declare; the last match wins.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import torch
from mup import MuReadout
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from mupscale._torch import forward_pre_hooks, non_persistent_buffers
from mupscale.errors import UserError, is_finite_number, shown
from mupscale.readout import Readout
from mupscale.widening import modules
from mupscale.widening.growth import LayoutSpec, Resized, Role, matches, role_of
from mupscale.widening.layers import Depth
from mupscale.widening.modules import WeightNorm, weight_norms, why_reparametrised
from mupscale.widening.records import records_of
from mupscale.widening.table import Scale, Side, product, scale_of_axis

COMPILED = "_orig_mod"
"""What the names of a compiled model begin with."""


Owner = tuple[str, nn.Module, nn.Module, str]
"""A place of a parameter: module name, narrow module, wide module, attribute."""


@dataclass(frozen=True)
class Use(Resized):
    """One parameter of the two models, with every module that holds it."""

    narrow: Tensor
    wide: Tensor
    owners: tuple[Owner, ...]

    def __str__(self) -> str:
        return f"{self.name!r} {self.narrow_shape} → {self.wide_shape}"


class Pairing:
    """Two models of one architecture side by side; `width_axes` are width although they do not grow (muP)."""

    def __init__(
        self, narrow: nn.Module, wide: nn.Module, width_axes: Mapping[str, Sequence[bool]] | None = None
    ) -> None:
        self.modules = _pair_modules(narrow, wide)
        self.weight_norms = weight_norms(found) if (found := self._reparametrised()) else []
        self.uses = _pair_parameters(self.modules, self.weight_norms, narrow, wide)
        self.parameter_names = {alias: use.name for use in self.uses for alias in use.names}
        """Every name a parameter goes by, and the first of them."""
        self.buffers = _pair_buffers(narrow, wide)
        self.width_axes = {**_known_width_axes(narrow), **_known_width_axes(wide), **(width_axes or {})}

    def names_of_weights(self, *, scaled: bool = False) -> dict[str, str]:
        """`parameter_names`, and those that normalised weights would have: they mean v, or g if `scaled`."""
        of_norms = {norm.weight: norm.gain if scaled else norm.direction for norm in self.weight_norms}
        return self.parameter_names | {name: self.parameter_names[meant] for name, meant in of_norms.items()}

    def width_of(self, use: Use) -> list[int]:
        """The width axes of a parameter: those that grow, and those in the muP table."""
        known = self.width_axes.get(use.name) or (False,) * use.narrow.ndim
        return [axis for axis in range(use.narrow.ndim) if axis in use.growing or known[axis]]

    def _reparametrised(self) -> dict[str, nn.Module]:
        """The modules whose weights may be made of other parameters, by name."""
        pairs = ((name, module) for name, module, _ in self.modules)
        return {name: module for name, module in pairs if is_parametrized(module) or forward_pre_hooks(module)}

    def refuse_reparametrised(self, *, weight_norm: bool) -> None:
        """Raises a UserError where parameters are not the weights, other than by an allowed `weight_norm`."""
        for name, module in self._reparametrised().items():
            reason = why_reparametrised(name or "(the model)", module, weight_norm=weight_norm)
            if reason:
                raise UserError(reason)

    def refuse_inexact_modules(self) -> None:
        self.refuse_reparametrised(weight_norm=True)
        model = self.modules[0][1]
        unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # of the transformers library
        for use in self.uses:
            if use.growing and any(name in unsaved for name in use.names):
                raise UserError(
                    f"parameter {use} cannot grow: {type(model).__name__} does not save it, and computes it "
                    "again when the wide model is loaded"
                )
        for name, before, after in self.modules:
            title = name or "(the model)"
            reason = modules.why_quantised(title, before) or modules.why_not_exact(title, before, after)
            if reason:
                raise UserError(reason)


def refuse_lazy(*models: nn.Module) -> None:
    for model in models:
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
            if lazy is not None:
                raise UserError(
                    f"{kind} {lazy!r} is a lazy one without a shape: run a batch through both models first, or build "
                    "them with all sizes"
                )


def refuse_scripted(name: str, model: nn.Module) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(
            f"{name} is compiled by torch.jit, which hides what it computes. Pass the model as it was before"
        )


def unsaved_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that the model's state_dict does not hold under any name."""
    saved: set[int] = set()
    unsaved: dict[str, int] = {}
    for prefix, module in model.named_modules():
        left_out = non_persistent_buffers(module)
        for attribute, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if attribute in left_out:
                unsaved[f"{prefix}.{attribute}".removeprefix(".")] = id(buffer)
            else:
                saved.add(id(buffer))
    return {name for name, key in unsaved.items() if key not in saved}


def some_names(names: Iterable[str]) -> str:
    """The first six of some names, for a message."""
    known = list(names)
    return ", ".join(map(repr, known[:6])) + ", ..." * (len(known) > 6)


def _pair_modules(narrow: nn.Module, wide: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    wide_modules = dict(wide.named_modules())
    narrow_modules = dict(narrow.named_modules())
    _same_names("module", narrow_modules, wide_modules)
    pairs = [(name, module, wide_modules[name]) for name, module in narrow_modules.items()]
    for name, before, after in pairs:
        kinds = {type(before).__qualname__, type(after).__qualname__}
        # stochastic depth: where the rate of a layer, which follows its number, is zero, there is none
        if len(kinds) > 1 and not ("Identity" in kinds and any("DropPath" in kind for kind in kinds)):
            raise UserError(
                f"module {name!r} is a {type(before).__qualname__} in the narrow model, a {type(after).__qualname__} "
                "in the wide one. Build both from the same class and options"
            )
    return pairs


def _pair_parameters(
    pairs: list[tuple[str, nn.Module, nn.Module]], norms: Sequence[WeightNorm], narrow: nn.Module, wide: nn.Module
) -> list[Use]:
    refuse_lazy(narrow, wide)
    wide_named = dict(wide.named_parameters(remove_duplicate=False))
    narrow_named = dict(narrow.named_parameters(remove_duplicate=False))
    _same_names("parameter", narrow_named, wide_named)
    names_of: dict[int, list[str]] = {}
    for name, parameter in narrow_named.items():
        names_of.setdefault(id(parameter), []).append(name)
    owners: dict[int, list[Owner]] = {}
    for pair in pairs:
        for attribute, held in pair[1].named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(held), []).append((*pair, attribute))
    paired, of_norms = {pair[0]: pair for pair in pairs}, dict[int, list[Owner]]()
    for norm in norms:  # its parameters belong to the layer, however torch holds them
        for part, letter in ((norm.gain, "g"), (norm.direction, "v")):
            holder = (*paired[norm.layer], f"{norm.attribute}_{letter}")
            of_norms.setdefault(id(narrow_named[part]), []).append(holder)
    owners |= of_norms
    wide_ids = Counter(map(id, wide_named.values()))
    uses = []
    for key, names in names_of.items():
        source, target = narrow_named[names[0]], wide_named[names[0]]
        if any(wide_named[name] is not target for name in names) or wide_ids[id(target)] != len(names):
            raise UserError(
                f"parameter {names[0]!r} is tied in one of the models only (narrow: {names}). Tie, or untie, it in both"
            )
        if key in wide_ids:
            raise UserError(f"parameter {names[0]!r} belongs to both models: build the wide one by itself")
        _refuse_other_axes("parameter", names[0], source, target)
        shapes = tuple(source.shape), tuple(target.shape)
        uses.append(Use(tuple(names), *shapes, source, target, tuple(owners[key])))
    return uses


def _pair_buffers(narrow: nn.Module, wide: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    wide_named = dict(wide.named_buffers())
    narrow_named = dict(narrow.named_buffers())
    _same_names("buffer", narrow_named, wide_named)
    for name, buffer in narrow_named.items():
        _refuse_other_axes("buffer", name, buffer, wide_named[name])
    return [(name, buffer, wide_named[name]) for name, buffer in narrow_named.items()]


def _refuse_other_axes(what: str, name: str, narrow: Tensor, wide: Tensor) -> None:
    if narrow.ndim != wide.ndim:
        raise UserError(
            f"{what} {name!r} has shape {tuple(narrow.shape)} in the narrow model, {tuple(wide.shape)} in the wide "
            "one. Build both from the same class and options"
        )


def _same_names(what: str, narrow: Mapping[str, object], wide: Mapping[str, object]) -> None:
    if set(narrow) != set(wide):
        for model, names in (("narrow", narrow), ("wide", wide)):
            if any(name.startswith(COMPILED) for name in names):
                raise UserError(
                    f"the {model} model is the result of torch.compile: give the model that was compiled, and compile "
                    "the wide one after the growth"
                )
        only_narrow, only_wide = sorted(set(narrow) - set(wide)), sorted(set(wide) - set(narrow))
        raise UserError(
            f"the models are not two widths of one architecture (different depth?): {what}s "
            f"{some_names(only_narrow) or 'none'} are in the narrow one only, {some_names(only_wide) or 'none'} in the "
            "wide one only. Build both with the same depth and options"
        )


def _known_width_axes(model: nn.Module) -> dict[str, tuple[bool, ...]]:
    return {
        name: tuple(size is not None for size in width.base) for name, width in records_of(model).items() if width.base
    }


Blocks = dict[int, LayoutSpec]
"""The length of the blocks of each axis that are repeated as wholes, or pieces (length, block, factor)."""

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
        if len(pair) != 2 or not all(map(is_finite_number, pair)) or pair[0] <= 0:
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


_SIDES_OF_MATRICES: dict[Role, tuple[Side, Side]] = {"matrix": ("out", "in"), "transposed_matrix": ("in", "out")}
_SIDE_OF_OTHERS: dict[Role, Side] = {"vector": "out", "readout": "in", "mu_readout": "mean", "scalar": None}


def _sides_of_role(pairing: Pairing, use: Use, role: Role) -> tuple[Side, ...]:
    width, axes = pairing.width_of(use), range(use.narrow.ndim)
    if role == "scalar" and use.growing:
        raise UserError(f"roles: {use} grows, so it is no scalar")
    if role not in _SIDES_OF_MATRICES:
        return tuple(_SIDE_OF_OTHERS[role] if axis in width else None for axis in axes)
    if len(width) > 2:
        raise UserError(f"roles: {use} is no {role}: {len(width)} axes are width")
    if len(width) == 1 and len(axes) != 2:
        raise UserError(
            f'roles: only one axis of {use} grows, and {role!r} does not tell its side: say "vector" if it is '
            'produced, "readout" if it is summed over'
        )
    side_of = dict(zip(axes if len(width) == 1 else width, _SIDES_OF_MATRICES[role], strict=False))
    return tuple(side_of[axis] if axis in width else None for axis in axes)


def _sides_of_module(
    use: Use, width: Sequence[int], before: nn.Module, after: nn.Module, attribute: str
) -> tuple[Side, ...]:
    known = modules.axis_sides(before, attribute, use.narrow)
    if known is None:
        if len(width) > 1:
            raise UserError(
                f"parameter {use} grows along {len(width)} axes, and its module ({type(before).__name__}) does not "
                "determine which is summed over.\nGive its role: "
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
                f"parameter {use}: axis {axis} of a {type(before).__name__} is not a width, so it cannot grow. Build "
                "both models with the same size there"
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
    factors = (wide / max(narrow, 1) for narrow, wide in use.sizes)
    return product(scale_of_axis(side, k, k) for side, k in zip(sides, factors, strict=True) if side)
