"""A LightningModule of any class that grows: its submodules are replaced by wide ones, and the object stays.

The wide submodules come from a second module, made by the same class. Attributes that were set in its `__init__` and
depend on the sizes, such as a number of heads, are taken over too. All that the run has changed since stays: counters,
metrics, hooks into the trainer.
"""

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from mupscale.checks.recording import generators_kept, has_own_attributes
from mupscale.errors import UserError, is_finite_number
from mupscale.models._lightning import (
    OF_EVERY_MODULE,
    attach_trainer,
    averaged_copy,
    averaging_callbacks,
    make_alike,
    set_average,
    set_device_mesh,
    set_hyperparameters,
)
from mupscale.models.base import init_contexts
from mupscale.models.checkpoint import is_size
from mupscale.widening.layers import Depth
from mupscale.widening.records import Records
from mupscale.widening.write import carry_frozen_, carry_modes_, parameters_on_meta

_OF_TORCH = "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"

_MADE_AS, _WIDE = "_mupscale_made_as", "_mupscale_wide"
"""Attributes of a shell: the objects as which its submodules were made, whose code may call them `self`; and the module
whose submodules took the place of its own."""

Attributes = dict[str, Any]

SMALLEST = 8
"""Units of the narrowest layer of a small module: fewer would hide differences, such as a norm over a single unit."""

MAKE_TWIN = "make_twin"
"""A method that a module may have: given the arguments that change, it returns the wide module, not configured yet. Of
others the class is called with its saved hyperparameters."""

SIZES = ("width", "layers")
"""Arguments that are sizes of any module that has them."""


@dataclass(frozen=True)
class TwinSpec:
    """How the wide module is made: from the saved hyperparameters with some changed, or by a function."""

    hparams: Mapping[str, Any] | None
    make: Callable[[], LightningModule] | None

    def __str__(self) -> str:
        if self.hparams is None:
            return "make"
        if self.hparams.keys() <= set(SIZES):
            return " and ".join(f"{key} = {value}" for key, value in self.hparams.items())
        return f"hparams = {dict(self.hparams)}"

    @property
    def target(self) -> str:
        """What a module grows to, in words."""
        if self.hparams is None:
            return "what `make` returns"
        return ", ".join(f"{key} {value}" for key, value in self.hparams.items())

    def refuse_unknown(self, module: LightningModule) -> None:
        """Raises a UserError for a hyperparameter that the module does not have."""
        for name in self.hparams or ():
            try:
                _value_of(module.hparams, name)
            except (AttributeError, KeyError, IndexError, TypeError):
                kept = ", ".join(module.hparams)
                remedy = "Name one of them" if kept else "Call self.save_hyperparameters() in its __init__"
                raise UserError(
                    f"UpscaleCallback.hparams: {name!r} is not among the hyperparameters of {type(module).__name__} "
                    f"({kept or 'none'}). {remedy}, or give make=, a function that returns the wide module"
                ) from None

    def changes(self, module: LightningModule) -> dict[str, Any] | None:
        """The hyperparameters that differ, each whole: "cfg.dim" changes an entry of "cfg". None of a `make`."""
        if self.hparams is None:
            return None
        answer: dict[str, Any] = {}
        for name, value in self.hparams.items():
            first, *rest = [name] if name in module.hparams else name.split(".")
            before = answer[first] if first in answer else module.hparams[first]
            answer[first] = _changed(before, rest, value)
        return answer

    def size_of(self, module: LightningModule) -> Any:
        """The present size of a module: its width, if that is all that changes; else in words."""
        if self.hparams is None:
            return f"{sum(p.numel() for p in module.parameters()):,} parameters"
        if self.hparams.keys() == {"width"}:
            return module.hparams["width"]
        return ", ".join(f"{name}={_value_of(module.hparams, name)}" for name in self.hparams)

    def refuse_settings(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Raises a UserError for a hyperparameter that an optimizer was made with, whose settings a growth leaves."""
        for name, value in (self.hparams or {}).items():
            before = _value_of(module.hparams, name)
            for optimizer in optimizers:
                for setting, own in optimizer.defaults.items():
                    means = setting in name.lower() or (setting == "lr" and "rate" in name.lower())
                    if means and is_finite_number(own) and before == own and before != value:
                        remedy = "UpscaleCallback.lr changes the rate" if setting == "lr" else "leave it out"
                        raise UserError(
                            f"UpscaleCallback.hparams: {name} = {value} would not reach {type(optimizer).__name__}, "
                            f"which goes on with {setting} = {own:g}: {remedy}"
                        )

    def may_be_there(self, module: LightningModule) -> bool:
        """Whether a module may be the wide one already."""
        return all(module.hparams[key] == value for key, value in (self.changes(module) or {}).items())

    def build(
        self,
        module: LightningModule,
        trainer: Trainer,
        *,
        on_meta: bool = False,
        sharded: bool = True,
        seed: int | None = None,
    ) -> LightningModule:
        """The wide module, with all its layers; `on_meta` its parameters have no memory, and its buffers have values.

        It is made as in a run: by its class and `setup`, then by `configure_model` in the trainer's contexts, where it
        may shard itself. Its numbers are converted last, so that buffers are rounded as those of the narrow one. The
        random numbers of the run stay as they are. New values depend on the `seed`, if there is one.
        """
        with generators_kept([module.device]), parameters_on_meta() if on_meta else nullcontext():
            if seed is not None:
                torch.manual_seed(seed)
            try:
                wide = self.make_unbuilt(module)
                with attach_trainer(wide, trainer):
                    set_device_mesh(wide, module.device_mesh if sharded else None)
                    if is_overridden("setup", wide):
                        wide.setup(stage=trainer.state.fn.value if trainer.state.fn is not None else "fit")
                    with init_contexts(trainer):
                        wide.configure_model()
                trainer.precision_plugin.convert_module(wide)
            except UserError as error:
                raise UserError(f"UpscaleCallback.{self}: {error}") from error
            except Exception as error:
                raise UserError(f"UpscaleCallback.{self}: {_why_not_made(module, error)}") from error
        return wide

    def build_for_growth(self, module: LightningModule, trainer: Trainer, seed: int | None = None) -> LightningModule:
        """The wide module on the meta device, so that it takes no memory yet; if its class needs values, with them."""
        if seed is None:
            with suppress(Exception):  # whatever its class does with the values of its parameters
                wide = self.build(module, trainer, on_meta=True)
                if not any(buffer.is_meta for buffer in wide.buffers()):
                    return wide
        return self.build(module, trainer, seed=seed)

    def small_pairs(self, module: LightningModule) -> Iterator[tuple["TwinSpec", "TwinSpec"]]:
        """The module and the wide one at smaller sizes with the same ratios, from the smallest; none without sizes."""
        before = {name: _value_of(module.hparams, name) for name in self.hparams or ()}
        sizes = {name: (before[name], value) for name, value in (self.hparams or {}).items() if name != "layers"}
        if not sizes or not all(is_size(number) for pair in sizes.values() for number in pair):
            return
        common = math.gcd(*(number for pair in sizes.values() for each in pair for number in _listed(each)))
        least = min(number for before, _ in sizes.values() for number in _listed(before))
        for units in (units for units in range(1, common + 1) if common % units == 0):
            if least // common * units >= SMALLEST or units == common:
                scaled = {name: [_scaled(each, units, common) for each in pair] for name, pair in sizes.items()}
                narrow, wide = ({name: both[side] for name, both in scaled.items()} for side in (0, 1))
                yield TwinSpec({**before, **narrow}, None), TwinSpec({**(self.hparams or {}), **wide}, None)

    def make_unbuilt(self, module: LightningModule) -> LightningModule:
        """The wide module, before `setup` and `configure_model`."""
        if self.make is not None:
            try:
                wide: Any = self.make()
            except Exception as error:
                raise UserError(_why_not_made(module, error)) from error
        else:
            own, changes = getattr(module, MAKE_TWIN, None), self.changes(module) or {}
            wide = make_alike(module, changes) if own is None else own(changes)
        if not isinstance(wide, nn.Module):
            raise UserError(f"make must return the wide module, got {wide!r}")
        if type(wide) is not type(module):
            raise UserError(
                f"make returned a {type(wide).__name__}, but the run trains a {type(module).__name__}. "
                "Return one of the same class"
            )
        return wide


def _why_not_made(module: LightningModule, error: Exception) -> str:
    return (
        f"the wide {type(module).__name__} cannot be made ({type(error).__name__}: {error}). Give make=, a function "
        "that returns it"
    )


def merge_recipes(recipes: Sequence[TwinSpec]) -> list[TwinSpec]:
    """Recipes that follow each other, with all changes of arguments in one where nothing else is between them."""
    answer: list[TwinSpec] = []
    for recipe in recipes:
        if answer and recipe.hparams is not None and answer[-1].hparams is not None:
            recipe = TwinSpec({**answer.pop().hparams, **recipe.hparams}, None)  # type: ignore[dict-item]
        answer.append(recipe)
    return answer


def plain_attributes(module: LightningModule) -> Attributes:
    """Copies of the attributes with plain values: numbers, text, and containers and dataclasses of them."""
    own = {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}
    return {key: copy.deepcopy(value) for key, value in own.items() if _is_plain(value)}


def references(module: LightningModule) -> Attributes:
    """The attributes that hold submodules or parameters of the module: in a list, an object, a function."""
    parts = {id(part) for part in (*module.modules(), *module.parameters())}
    own = {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}
    return {key: value for key, value in own.items() if any(id(x) in parts for x in held_in(value, {id(module)}))}


_DEEPEST = 6
_LONGEST = 1000
"""Items of a container that are looked into: longer ones are data."""


def held_in(value: Any, known: Collection[int] = (), depth: int = _DEEPEST) -> Iterator[Tensor | nn.Module]:
    """The tensors and modules in containers, objects and functions, at any depth; `known` are ids of what is left out.

    What modules hold is not looked at.
    """
    if id(value) in known or not depth:
        return
    inner: Iterable[Any] = ()
    if isinstance(value, Tensor | nn.Module):
        yield value
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif isinstance(value, partial):
        inner = value.func, value.args, value.keywords
    elif isinstance(value, MethodType):
        inner = value.__self__, value.__func__
    elif isinstance(value, FunctionType):
        inner = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    elif has_own_attributes(value):
        inner = vars(value).values()
    for each in inner if not isinstance(inner, Sized) or len(inner) <= _LONGEST else ():
        yield from held_in(each, {*known, id(value)}, depth - 1)


def shallow_twin(module: LightningModule) -> LightningModule:
    """Returns a shell: a second object with the same submodules, parameters and attributes."""
    shell = copy.copy(module)
    for key in _OF_TORCH:
        vars(shell)[key] = copy.copy(vars(module)[key])
    vars(shell).setdefault(_MADE_AS, ())
    return shell


def replace_submodules_(
    module: LightningModule, wide: LightningModule, changes: Mapping[str, Any] | None, built: Attributes
) -> LightningModule:
    """Puts the submodules of `wide` in the place of those of `module`; returns a shell with the old ones.

    `changes` are the hyperparameters that differ; None takes those of `wide`. `built` are the plain attributes that
    `module` had when it was new. Those that the run has not changed since take the values of `wide`, and so do those
    that hold submodules. Metric objects stay, with what they have collected. Hooks and functions that the class made as
    methods of `wide` see the attributes of `module` from now on.
    """
    narrow = shallow_twin(module)
    vars(narrow)[_WIDE] = wide
    of_parts = references(wide)
    _keep_metrics(narrow, wide)
    for key in _OF_TORCH:
        vars(module)[key] = vars(wide)[key]
    for key, value in plain_attributes(wide).items():
        own = vars(module).get(key)
        if key in vars(module) and _is_plain(own) and (key not in built or own == built[key]):
            vars(module)[key] = value
    # the records of widths are of the old parameters; the growth writes those of the new ones
    vars(module).pop(Records.ATTRIBUTE, None)
    if Records.ATTRIBUTE in vars(wide):
        vars(module)[Records.ATTRIBUTE] = vars(wide)[Records.ATTRIBUTE]
    vars(module).update({key: value for key, value in of_parts.items() if key in vars(module)})
    set_hyperparameters(module, {**module.hparams, **(wide.hparams if changes is None else changes)})
    made_as = vars(wide).get(_MADE_AS, (wide,))
    if _MADE_AS in vars(module):
        vars(module)[_MADE_AS] = made_as
    _share_attributes(made_as, module)
    return narrow


def restore_submodules_(module: LightningModule, narrow: LightningModule) -> None:
    for key in (*_OF_TORCH, *plain_attributes(narrow), *references(narrow), Records.ATTRIBUTE):
        vars(module).pop(key, None)
        if key in vars(narrow):
            vars(module)[key] = vars(narrow)[key]
    set_hyperparameters(module, narrow.hparams)
    wide = vars(narrow)[_WIDE]
    _share_attributes(vars(wide).get(_MADE_AS, ()), wide)


def _share_attributes(made_as: Iterable[LightningModule], module: LightningModule) -> None:
    """Lets objects have the attributes of a module, these very ones: what is set in one is set in all."""
    for each in made_as:
        object.__setattr__(each, "__dict__", vars(module))


def rebuild_(
    module: LightningModule, wide: LightningModule, changes: Mapping[str, Any] | None, built: Attributes
) -> None:
    """Gives a module the layers of `wide`, before the weights of a checkpoint load; averages begin anew."""
    narrow = replace_submodules_(module, wide, changes, built)
    carry_frozen_(narrow, module)
    carry_modes_(narrow, module)
    for callback in averaging_callbacks(module):
        set_average(callback, averaged_copy(callback, module))


def depth_between(narrow: nn.Module, wide: nn.Module, depth: Depth) -> Depth | None:
    """How new layers are made, if there are any."""
    names = {name for name, _ in narrow.named_modules()}
    return depth if any(name not in names for name, _ in wide.named_modules()) else None


def _listed(size: int | Sequence[int]) -> Sequence[int]:
    return [size] if isinstance(size, int) else size


def _scaled(size: Any, units: int, common: int) -> Any:
    return size // common * units if isinstance(size, int) else [number // common * units for number in size]


def _value_of(hparams: Mapping[str, Any], name: str) -> Any:
    """The hyperparameter of a name; of "cfg.dim" an entry of "cfg"."""
    if name in hparams:
        return hparams[name]
    value: Any = hparams
    for key in name.split("."):
        value = value[key] if isinstance(value, Mapping) else getattr(value, key)
    return value


def _changed(before: Any, keys: Sequence[str], value: Any) -> Any:
    """A hyperparameter with an entry that has another value; of two mappings, with all entries of the new one."""
    if not keys:
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            for key, each in value.items():
                before = _changed(before, [key], each)
            return before
        return value
    key, *rest = keys
    if is_dataclass(before) and not isinstance(before, type):
        return replace(before, **{key: _changed(getattr(before, key), rest, value)})
    answer: Any = copy.copy(before)
    if isinstance(before, Mapping):
        answer[key] = _changed(before.get(key), rest, value)
    else:
        setattr(answer, key, _changed(getattr(before, key), rest, value))
    return answer


def refuse_same_shapes(recipe: TwinSpec, narrow: nn.Module, wide: nn.Module) -> None:
    if shapes_of(narrow) == shapes_of(wide):
        raise UserError(
            f"UpscaleCallback.{recipe}: no parameter of {type(narrow).__name__} becomes larger. Name an argument that "
            "sets the size of its layers, or give make="
        )
    before = shapes_of(narrow)
    for name, shape in shapes_of(wide).items():
        if any(new < old for old, new in zip(before.get(name, shape), shape, strict=False)):
            raise UserError(
                f"UpscaleCallback.{recipe}: {name!r} would shrink, {before[name]} → {shape}. Give sizes larger than "
                "the present ones"
            )


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def names_that_grow(narrow: nn.Module, wide: nn.Module) -> set[str]:
    """The parameters of a narrow module that are larger in the wide one."""
    after = shapes_of(wide)
    return {name for name, shape in shapes_of(narrow).items() if after.get(name) != shape}


def _keep_metrics(narrow: nn.Module, wide: nn.Module) -> None:
    for name, part in vars(narrow)["_modules"].items():
        if isinstance(part, Metric | MetricCollection):
            vars(wide)["_modules"][name] = part
        elif part is not None and vars(wide)["_modules"].get(name) is not None:
            _keep_metrics(part, vars(wide)["_modules"][name])


def _is_plain(value: Any) -> bool:
    if isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.Size | None):
        return True
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, each.name, None)) for each in fields(value))
    return isinstance(value, Namespace) and all(map(_is_plain, vars(value).values()))
