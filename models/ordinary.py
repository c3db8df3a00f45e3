"""A LightningModule of any class that grows: its submodules are replaced by wide ones, and the object stays.

The wide submodules come from a second module, made by the same class. Attributes that were set in its `__init__` and
depend on the sizes, such as a number of heads, are taken over too. All that the run has changed since stays: counters,
metrics, hooks into the trainer.
"""

import copy
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from mupscale.checks.recording import generators_kept
from mupscale.errors import UserError, is_finite_number
from mupscale.models._lightning import OF_EVERY_MODULE, attach_trainer, make_alike, set_hyperparameters
from mupscale.models.base import init_contexts

_OF_TORCH = "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"

Attributes = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How the wide module is made: from the saved hyperparameters with some changed, or by a function."""

    hparams: Mapping[str, Any] | None
    make: Callable[[], LightningModule] | None

    def __str__(self) -> str:
        return "make" if self.hparams is None else f"hparams = {dict(self.hparams)}"

    def refuse_unknown(self, module: LightningModule) -> None:
        """Raises a UserError for a hyperparameter that the module does not have."""
        unknown = [name for name in self.hparams or () if name not in module.hparams]
        if unknown:
            kept = ", ".join(module.hparams) or "none"
            raise UserError(
                f"UpscaleCallback.hparams: {unknown[0]!r} is not among the hyperparameters of {type(module).__name__} "
                f"({kept}). Call self.save_hyperparameters() in its __init__, or give make=, a function that returns "
                "the wide module"
            )

    def refuse_settings(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Raises a UserError for a hyperparameter that an optimizer was made with, whose settings a growth leaves."""
        for name, value in (self.hparams or {}).items():
            before = module.hparams[name]
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
        return self.hparams is None or all(module.hparams[key] == value for key, value in self.hparams.items())

    def build(self, module: LightningModule, trainer: Trainer) -> LightningModule:
        """The wide module, with all its layers. The random numbers of the run stay as they are."""
        with generators_kept([]), init_contexts(trainer):
            try:
                wide = make_alike(module, self.hparams or {}) if self.make is None else self.make()
            except Exception as error:
                raise UserError(
                    f"UpscaleCallback.{self}: the wide {type(module).__name__} cannot be made "
                    f"({type(error).__name__}: {error}). Give make=, a function that returns it"
                ) from error
            if not isinstance(wide, nn.Module):
                raise UserError(f"UpscaleCallback.make must return the wide module, got {wide!r}")
            if type(wide) is not type(module):
                raise UserError(
                    f"UpscaleCallback.make returned a {type(wide).__name__}, but the run trains a "
                    f"{type(module).__name__}. Return one of the same class"
                )
            with attach_trainer(wide, trainer):
                wide.configure_model()
        return wide


def plain_attributes(module: LightningModule) -> Attributes:
    """Copies of the attributes with plain values: numbers, text, and containers and dataclasses of them."""
    own = {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}
    return {key: copy.deepcopy(value) for key, value in own.items() if _is_plain(value)}


def make_shell(module: LightningModule) -> LightningModule:
    """A second object with the same submodules, parameters and attributes, but without the trainer."""
    shell = copy.copy(module)
    for key in _OF_TORCH:
        vars(shell)[key] = copy.copy(vars(module)[key])
    return shell


def graft_(
    module: LightningModule, wide: LightningModule, changes: Mapping[str, Any] | None, built: Attributes
) -> LightningModule:
    """Puts the submodules of `wide` in the place of those of `module`; returns a shell with the old ones.

    `changes` are the hyperparameters that differ; None takes those of `wide`. `built` are the plain attributes that
    `module` had when it was new. Those that the run has not changed since take the values of `wide`. Metric objects
    stay, with what they have collected.
    """
    narrow = make_shell(module)
    _keep_metrics(narrow, wide)
    for key in _OF_TORCH:
        vars(module)[key] = vars(wide)[key]
    for key, value in plain_attributes(wide).items():
        if key in vars(module) and (key not in built or _are_equal(vars(module)[key], built[key])):
            vars(module)[key] = value
    set_hyperparameters(module, {**module.hparams, **(wide.hparams if changes is None else changes)})
    return narrow


def ungraft_(module: LightningModule, narrow: LightningModule) -> None:
    for key in (*_OF_TORCH, *plain_attributes(narrow)):
        vars(module)[key] = vars(narrow)[key]
    set_hyperparameters(module, narrow.hparams)


def refuse_same_shapes(recipe: Recipe, narrow: nn.Module, wide: nn.Module) -> None:
    if shapes_of(narrow) == shapes_of(wide):
        raise UserError(
            f"UpscaleCallback.{recipe}: no parameter of {type(narrow).__name__} becomes larger. Name an argument that "
            "sets the size of its layers, or give make="
        )
    for name, shape in shapes_of(wide).items():
        if 0 in shape:
            raise UserError(f"UpscaleCallback.{recipe}: {name!r} of the wide {type(wide).__name__} is empty, {shape}")


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


def _are_equal(one: Any, other: Any) -> bool:
    return _is_plain(one) and bool(one == other)
