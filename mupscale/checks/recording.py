"""Records and copies of models for a comparison: what goes through modules, what a pass changes, copies in float64."""

import copy
import random
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mupscale._torch import tree_leaves, tree_map, without_transforms
from mupscale.errors import UserError, one_line, shown
from mupscale.widening.modules import dropout_of
from mupscale.widening.stepping import restore_infshapes
from mupscale.widening.write import is_inexact


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


def _is_instance_of_a_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


@dataclass
class Event:
    """A call of a module begins with these tensors, or ends with them; copies, which no operation changes in place."""

    name: str
    ends: bool
    tensors: list[Tensor]
    is_outermost: bool
    """Whether no recorded module made the call."""


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module], begins: Callable[[str, Any], None], ends: Callable[[str, Any], None]
) -> Iterator[None]:
    """Calls `begins` with the name and the (args, kwargs) of each call of a module, `ends` with what it returns."""

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        begins(name, (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        ends(name, output)

    handles: list[Any] = []
    try:
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(after, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(model: nn.Module, wanted: Callable[[nn.Module], bool] = lambda module: True) -> Iterator[list[Event]]:
    """The calls of modules, or of those `wanted`, as they begin and end; no parametrizations."""
    found = {name: module for name, module in model.named_modules() if wanted(module)}
    events: list[Event] = []
    depth = 0

    def begins(name: str, given: Any) -> None:
        nonlocal depth
        events.append(Event(name, False, float_copies(given), depth == 0))
        depth += 1

    def ends(name: str, output: Any) -> None:
        nonlocal depth
        depth -= 1
        events.append(Event(name, True, float_copies(output), depth == 0))

    with hooked({name: found[name] for name in found if "parametrizations" not in name.split(".")}, begins, ends):
        yield events


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
    for module in modules:
        held += [(vars(module), attributes_of(module)), (vars(module)["_buffers"], dict(vars(module)["_buffers"]))]
    values = [value for _, before in held for value in before.values() if type(value) in (Tensor, list, dict)]
    copies = [(value, value.clone() if isinstance(value, Tensor) else value.copy()) for value in values]
    try:
        yield
    finally:
        for owner, before in held:
            for name in [name for name in owner if name not in before and name not in _OF_TORCH]:
                del owner[name]  # it was not there before
            owner.update(before)
        with torch.no_grad():
            for value, copy in copies:
                _restore_(value, copy)


_OF_TORCH = "_parameters", "_buffers", "_modules"


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are no parameters, buffers or modules."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


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


_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event)


def float64_copy(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy in float64, or in float32; complex numbers have parts of that dtype."""
    restore_infshapes(model)
    twin = copy.deepcopy(model, _not_copied(model))
    twin = twin.double() if dtype is torch.float64 else twin.float()
    set_experts: Any = getattr(twin, "set_experts_implementation", None)
    if callable(set_experts):
        set_experts("eager")  # the other implementations of transformers have no float64
    for parameter in twin.parameters():
        if parameter.is_complex():  # which `double` leaves alone
            parameter.data = parameter.data.to(dtype.to_complex())
    for name, buffer in list(twin.named_buffers(remove_duplicate=False)):
        if buffer.is_complex():
            owner, _, attribute = name.rpartition(".")
            setattr(twin.get_submodule(owner), attribute, buffer.to(dtype.to_complex()))
    restore_infshapes(twin)
    return twin


def copied(name: str, model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Such a copy. Raises a UserError that names the attribute that cannot be copied."""
    try:
        return float64_copy(model, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        shared = _not_copied(model)
        for module_name, module in model.named_modules():
            for attribute, value in vars(module).items():
                try:
                    if attribute != "_modules":
                        copy.deepcopy(value, dict(shared))
                except Exception as reason:
                    raise UserError(
                        f"{name} has an attribute {f'{module_name}.{attribute}'.removeprefix('.')!r} of class "
                        f"{type(value).__name__} that cannot be copied ({one_line(reason)}). Remove it, or give its "
                        "class a method __deepcopy__"
                    ) from error
        raise


def copy_to_compare(name: str, model: nn.Module, dtype: torch.dtype = torch.float64, *, perturbed: bool) -> nn.Module:
    """Such a copy in evaluation mode, in which frozen parameters have gradients too; `perturbed` by `perturb_`."""
    twin = copied(name, model, dtype).eval()
    for parameter in twin.parameters():
        if is_inexact(parameter):
            parameter.requires_grad_()
    if perturbed:
        perturb_(twin)
    return twin


@torch.no_grad()
def perturb_(model: nn.Module) -> None:
    """Makes equal units differ a little; entries keep their sign and shrink, because a model may take logarithms."""
    generator = torch.Generator().manual_seed(0)

    def draw(distribution: Callable[..., Tensor], like: Tensor) -> Tensor:
        return distribution(like.shape, generator=generator, dtype=torch.float64).to(like.device)

    for parameter in model.parameters():
        if is_inexact(parameter):
            drawn = draw(torch.randn, parameter)
            shrunk = parameter * (1 - 0.3 * draw(torch.rand, parameter))
            parameter.copy_(torch.where(parameter == 0, _in_place_of_zeros(parameter, drawn), shrunk))
    for name in model.state_dict(keep_vars=True):
        tensor = model.state_dict(keep_vars=True)[name]
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            tensor.mul_(1 + 0.3 * draw(torch.rand, tensor))
            if not bool(tensor.any()):
                tensor.add_(0.1 * draw(torch.randn, tensor))


def _in_place_of_zeros(parameter: Tensor, drawn: Tensor) -> Tensor:
    """Small entries of the size of the others, and of their sign where all of them have the same."""
    size = float(parameter.abs().square().mean().sqrt()) if parameter.numel() else 0.0
    if not size:
        return (0.1 * drawn).to(parameter.dtype)
    if not parameter.is_complex() and bool((parameter >= 0).all()):
        drawn = drawn.abs()
    elif not parameter.is_complex() and bool((parameter <= 0).all()):
        drawn = -drawn.abs()
    return (0.3 * size * drawn).to(parameter.dtype)


def _not_copied(model: nn.Module) -> dict[int, Any]:
    """By identity, what a copy of a model has in place of what cannot be copied.

    An activation that a module keeps is part of a graph: the copy has its value. Locks are shared.
    """
    answer: dict[int, Any] = {}
    for module in model.modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters")}
        for leaf in leaves_of(own):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                answer[id(leaf)] = leaf.detach().clone()
            elif isinstance(leaf, _LOCKS):
                answer[id(leaf)] = leaf
    return answer


def refuse_unless_loss(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UserError(f"loss must return a tensor with one element, the loss of the batch, got {shown(value)}")
