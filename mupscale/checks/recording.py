"""What a pass changes is put back: contents of objects, buffers, random numbers. And copies of models in float64."""

import copy
import random
import threading
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import tree_leaves, tree_map
from mupscale.errors import UserError, one_line, shown
from mupscale.widening.records import restore_infshapes


def leaves_of(values: Any, around: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What a structure holds at any depth; `around` are the ids of what contains it, as it may contain itself."""
    for leaf in tree_leaves(values):
        if id(leaf) in around:
            continue
        if isinstance(leaf, UserDict):
            yield from leaves_of(leaf.data, around | {id(leaf)})
        elif _is_instance_of_a_dataclass(leaf):
            # a configuration of transformers refuses to read a field that differs by layer
            own = (
                vars(leaf) if hasattr(leaf, "__dict__") else {x.name: getattr(leaf, x.name, None) for x in fields(leaf)}
            )
            yield from leaves_of([own.get(each.name) for each in fields(leaf)], around | {id(leaf)})
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


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores buffers and attributes of modules at the end, with the values of tensors and containers in them.

    Hooks that were registered meanwhile are removed: transformers installs its own in a first pass, and notes so in an
    attribute, without which each pass would install them once more.
    """
    parts = list(modules)
    hooks = [(vars(part)[name], [*vars(part)[name]]) for part in parts for name in _HOOKS & vars(part).keys()]
    own = [SimpleNamespace(**_own_attributes(part)) for part in parts]
    buffers = [dict(vars(part)["_buffers"]) for part in parts]
    tensors = [x for values in (*map(vars, own), *buffers) for x in values.values() if isinstance(x, Tensor)]
    held = held_values(tensors)
    with contents_kept(own):
        try:
            yield
        finally:
            for part, before, of_part in zip(parts, own, buffers, strict=True):
                for name in _own_attributes(part).keys() - vars(before).keys():
                    del vars(part)[name]
                vars(part).update(vars(before))
                vars(part)["_buffers"].update(of_part)
            for registered, earlier in hooks:
                for key in registered.keys() - earlier:
                    del registered[key]
            put_back(held)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes but those in which torch keeps parameters, hooks, and the state of sharded modules."""
    return {key: value for key, value in vars(module).items() if key not in _TORCH and not key.startswith("__")}


_TORCH = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = frozenset(name for name in _TORCH if name.endswith("_hooks"))


Held = list[tuple[Tensor, Tensor, Tensor | None]]
"""Tensors, their memory, and the values in it; without values, if something will write it."""


def held_values(tensors: Iterable[Tensor], written: Collection[int] = ()) -> Held:
    return [(x, x.data, None if id(x) in written else x.data.clone()) for x in tensors]


def put_back(rows: Held) -> None:
    for x, data, values in rows:
        x.data = data
        if values is not None:
            data.copy_(values)


@contextmanager
def contents_kept(objects: Iterable[Any]) -> Iterator[None]:
    """Objects have their attributes again at the end, and containers and plain objects in these have their contents."""
    seen: set[int] = set()
    restore = [_contents(vars(each), seen, _DEEPEST) for each in objects]
    try:
        yield
    finally:
        _call_each(restore)


_ITERATORS: tuple[Any, ...] = type(iter([])), type(iter(())), type(iter(range(0)))
_WITHOUT_CONTENTS = (int, float, str, type(None), Tensor, nn.Module)
_DEEPEST = 5
_MOST_ENTERED = 1000
"""Items of a container that are looked into; of a longer one, only the items themselves are put back."""


def _contents(value: Any, seen: set[int], depth: int) -> Callable[[], Any]:
    """A function that gives a container, or a plain object, the contents back that it has now."""
    if isinstance(value, _WITHOUT_CONTENTS) or id(value) in seen or not depth:
        return _nothing
    if isinstance(value, dict | list | set):
        seen.add(id(value))
        items: Any = dict(value) if isinstance(value, dict) else list(value)
        fill: Callable[[Any], Any] = value.extend if isinstance(value, list) else value.update
        held = list(items.values()) if isinstance(items, dict) else items
        inner = [_contents(each, seen, depth - 1) for each in held] if len(items) <= _MOST_ENTERED else []
        return partial(_call_each, [value.clear, partial(fill, items), *inner])
    if isinstance(value, FunctionType):
        cells = [_contents(cell.cell_contents, seen, depth - 1) for cell in value.__closure__ or () if _is_full(cell)]
        return partial(_call_each, cells)
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, _ITERATORS):
        position = value.__reduce__()[2:]  # nothing, at the end
        return partial(_call_each, [partial(value.__setstate__, each) for each in position])
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy())
    return _contents(vars(value), seen, depth) if has_own_attributes(value) else _nothing


def _call_each(functions: Iterable[Callable[[], Any]]) -> None:
    for function in functions:
        function()


def _nothing() -> None:
    return None


def _is_full(cell: Any) -> bool:
    """Whether a variable of an enclosing function has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


_NO_CONTENTS = (nn.Module, Optimizer, Tensor, type, FunctionType, MethodType, ModuleType)


def has_own_attributes(value: Any) -> bool:
    """Whether an object is of a user's own class, such as a meter or an average."""
    if isinstance(value, _NO_CONTENTS) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning", "builtins")


_OF_TORCH = "_parameters", "_buffers", "_modules"


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are no parameters, buffers or modules."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


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
    """Returns a float64 copy of the model. Raises a UserError that names the attribute that cannot be copied."""
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


def _not_copied(model: nn.Module) -> dict[int, Any]:
    """What a copy of a model has in place of what cannot be copied, by identity.

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
