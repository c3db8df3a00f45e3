"""Two models of one architecture walked side by side: their modules, parameters and buffers in pairs, by name."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from mupscale._torch import forward_pre_hooks, non_persistent_buffers
from mupscale.errors import UserError
from mupscale.widening import modules
from mupscale.widening.modules import WeightNorm, weight_norms, why_reparametrised
from mupscale.widening.stepping import records_of

COMPILED = "_orig_mod"
"""What the names of a compiled model begin with."""


class Use(NamedTuple):
    """One parameter of the two models, with every module that holds it."""

    names: tuple[str, ...]
    narrow: Tensor
    wide: Tensor
    owners: tuple[tuple[str, nn.Module, nn.Module, str], ...]
    """(module name, narrow module, wide module, attribute) for each place."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def narrow_shape(self) -> tuple[int, ...]:
        return tuple(self.narrow.shape)

    @property
    def wide_shape(self) -> tuple[int, ...]:
        return tuple(self.wide.shape)

    @property
    def growing(self) -> tuple[int, ...]:
        return tuple(i for i, (n, w) in enumerate(zip(self.narrow_shape, self.wide_shape, strict=True)) if n != w)


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
                    f"parameter {use.name!r} {use.narrow_shape} → {use.wide_shape} cannot be widened: "
                    f"{type(model).__name__} does not save it, and computes it again when the wide model is loaded"
                )
        for name, before, after in self.modules:
            reason = modules.why_quantised(name or "(the model)", before)
            reason = reason or modules.why_not_exact(name or "(the model)", before, after)
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
    owners: dict[int, list[tuple[str, nn.Module, nn.Module, str]]] = {}
    for module_name, before, after in pairs:
        for attribute, held in before.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(held), []).append((module_name, before, after, attribute))
    paired = {module_name: (module_name, before, after) for module_name, before, after in pairs}
    of_norms: dict[int, list[tuple[str, nn.Module, nn.Module, str]]] = {}
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
        if source.ndim != target.ndim:
            raise UserError(
                f"parameter {names[0]!r} has shape {tuple(source.shape)} in the narrow model, {tuple(target.shape)} in "
                "the wide one. Build both from the same class and options"
            )
        uses.append(Use(tuple(names), source, target, tuple(owners[key])))
    return uses


def _pair_buffers(narrow: nn.Module, wide: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    wide_named = dict(wide.named_buffers())
    narrow_named = dict(narrow.named_buffers())
    _same_names("buffer", narrow_named, wide_named)
    for name, buffer in narrow_named.items():
        if buffer.ndim != wide_named[name].ndim:
            raise UserError(
                f"buffer {name!r} has shape {tuple(buffer.shape)} in the narrow model, {tuple(wide_named[name].shape)} "
                "in the wide one. Build both from the same class and options"
            )
    return [(name, buffer, wide_named[name]) for name, buffer in narrow_named.items()]


def _same_names(what: str, narrow: Mapping[str, object], wide: Mapping[str, object]) -> None:
    if set(narrow) != set(wide):
        for model, names in (("narrow", narrow), ("wide", wide)):
            if any(name.startswith(COMPILED) for name in names):
                raise UserError(
                    f"the {model} model is the result of torch.compile: give the model that was compiled, and compile "
                    "the wide one after the upscale"
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
