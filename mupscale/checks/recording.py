"""Records the inputs and outputs of modules in a forward pass, and restores what it changes.

That is buffers and attributes, modes, and the generators of torch, Python and numpy.
"""

import copy
import random
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mupscale._torch import tree_leaves, tree_map, without_transforms
from mupscale.widening.modules import dropout_of

_SIMPLE = (Tensor, int, float, complex, str, bytes, type(None))


def leaves_of(values: Any, around: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What a structure holds at any depth; `around` are the ids of what contains it, as it may contain itself."""
    for leaf in tree_leaves(values):
        if id(leaf) in around:
            continue
        if isinstance(leaf, UserDict):
            yield from leaves_of(leaf.data, around | {id(leaf)})
        elif _is_instance_of_a_dataclass(leaf):
            yield from leaves_of([getattr(leaf, each.name, None) for each in fields(leaf)], around | {id(leaf)})
        else:
            yield leaf


def map_leaves(function: Callable[[Any], Any], values: Any) -> Any:
    """The same structure with what the function makes of each leaf; `values` is not changed."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            answer = copy.copy(leaf)
            answer.data = map_leaves(function, leaf.data)
            return answer
        if not _is_instance_of_a_dataclass(leaf):
            return function(leaf)
        answer = copy.copy(leaf)
        for each in fields(leaf):
            if hasattr(leaf, each.name):
                object.__setattr__(answer, each.name, map_leaves(function, getattr(leaf, each.name)))
        return answer

    return tree_map(mapped, values)


def unknown_kinds(values: Any) -> list[str]:
    """The classes of leaves that are neither tensors nor simple values, and so may hold tensors."""
    return sorted({type(leaf).__name__ for leaf in leaves_of(values) if not isinstance(leaf, _SIMPLE)})


def _is_instance_of_a_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


@dataclass
class Call:
    """One call of a module, by the module's name. Tensors are copies: a later in-place operation cannot change them."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    is_outermost: bool = False
    """Whether no recorded module made this call."""


class Recorder:
    """Records what goes in and out of modules, in the order in which they finish; of all modules, or of those wanted.

    What makes the weights of a layer (`torch.nn.utils.parametrize`) is not recorded.

    with Recorder(model) as recorder:
        model(batch)
    print([call.name for call in recorder.calls])
    """

    def __init__(self, model: nn.Module, wanted: Callable[[nn.Module], bool] = lambda module: True) -> None:
        self.modules = {
            name: module
            for name, module in model.named_modules()
            if wanted(module) and "parametrizations" not in name.split(".")
        }
        self.calls: list[Call] = []
        self._handles: list[Any] = []
        self._inputs: list[list[Tensor]] = []

    def __enter__(self) -> "Recorder":
        for name, module in self.modules.items():
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def order(self) -> dict[str, int]:
        """The place of each module's last call."""
        return {call.name: index for index, call in enumerate(self.calls)}

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append(float_copies((args, kwargs)))

    def _after(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            inputs = self._inputs.pop()
            self.calls.append(Call(name, inputs, float_copies(output), is_outermost=not self._inputs))

        return hook


def float_copies(values: Any) -> list[Tensor]:
    """Copies of the floating-point tensors in any nested structure; of complex ones, the real and imaginary parts."""
    tensors = (without_transforms(x).detach() for x in leaves_of(values) if isinstance(x, Tensor))
    return [x.clone() for x in real_floats(tensors)]


def real_floats(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The floating-point tensors among these; of complex ones, the real and imaginary parts."""
    real = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors)
    return [x for x in real if x.is_floating_point()]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[list[str]]:
    """Restores buffers at the end, also replaced ones; the names of those that changed are then in the list."""
    held = [
        (f"{name}.{attribute}".removeprefix("."), module, attribute, buffer, buffer.clone())
        for name, module in model.named_modules()
        for attribute, buffer in module.named_buffers(recurse=False)
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        with torch.no_grad():
            for name, module, attribute, buffer, value in held:
                if getattr(module, attribute) is not buffer:
                    setattr(module, attribute, buffer)
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)
                    changed.append(name)


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores buffers and attributes of modules at the end, with the values of tensors, lists and dicts in them."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    copies: list[tuple[Any, Any]] = []
    for module in modules:
        others = attributes_of(module)
        for owner, values in ((vars(module), others), (vars(module)["_buffers"], dict(vars(module)["_buffers"]))):
            held.append((owner, values))
            copies += [(value, _copied(value)) for value in values.values() if type(value) in (Tensor, list, dict)]
    try:
        yield
    finally:
        for owner, values in held:
            for name in [name for name in owner if name not in values and name not in _OF_TORCH]:
                del owner[name]  # it was not there before
            owner.update(values)
        with torch.no_grad():
            for value, copy in copies:
                _restore_(value, copy)


_OF_TORCH = "_parameters", "_buffers", "_modules"


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are no parameters, buffers or modules."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value.copy()


def _restore_(value: Any, copy: Any) -> None:
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict):
        value.clear()
        value.update(copy)
    elif not value.is_meta and not torch.equal(value, copy):
        value.copy_(copy)


@contextmanager
def training_mode(model: nn.Module, modes: Mapping[str, bool] = MappingProxyType({})) -> Iterator[None]:
    """These modes by module, or else training; but for layers that drop units, which the plan notes."""
    before = {module: module.training for module in model.modules()}
    try:
        for name, module in model.named_modules():
            module.training = not dropout_of(module) and modes.get(name, True)
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def seed_generators(seed: int) -> None:
    """Seeds all of them: a loss may draw from any, for a mix of samples or a mask."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def generators_kept(devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Restores all of them at the end; of those of CUDA devices the given ones, by default all."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(None if devices is None else [each for each in devices if each.type == "cuda"]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
