"""Records the inputs and outputs of modules in a forward pass, and restores what it changes.

That is buffers and attributes, modes, and the generators of torch, Python and numpy.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mupscale._torch import without_transforms
from mupscale.checks.structures import leaves_of
from mupscale.widening.modules import dropout_of


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
    """Restores the buffers at the end, also those that a forward pass replaces by others, of whatever shape.

    The names of those that changed are then in the list.
    """
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
    """Restores the buffers and attributes of modules at the end: statistics, counters, metrics, hidden states.

    Of an attribute, also the values of a tensor, and the members of a list or a dict.
    """
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
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
