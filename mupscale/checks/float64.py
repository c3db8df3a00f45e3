"""Copies of models and batches in float64, and the loss computed with them."""

import copy
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import TorchDispatchMode, tree_leaves
from mupscale.checks.recording import buffers_kept, leaves_of, map_leaves, unknown_kinds
from mupscale.errors import UserError, one_line
from mupscale.widening.stepping import restore_infshapes
from mupscale.widening.write import is_inexact

_DOUBLE = (torch.float64, torch.complex128)

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


class Batches:
    """Batches by index, in float64, over and over; read from the iterable only as far as needed."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source = iter(batches)
        self._seen: list[Any] = []
        self._ended = False

    def __getitem__(self, index: int) -> Any:
        while not self._ended and index >= len(self._seen):
            try:
                self._seen.append(map_leaves(to_float64, next(self._source)))
            except StopIteration:
                self._ended = True
        if not self._seen:
            raise UserError("verify: batches is empty")
        return self._seen[index % len(self._seen)]


class _LowPrecisionWatch(TorchDispatchMode):
    """Notices an operation on the way from the weights to the loss that rounds float64 to fewer digits."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        rounded = isinstance(result, Tensor) and is_inexact(result) and result.dtype not in _DOUBLE
        self.seen |= rounded and any(
            isinstance(a, Tensor) and a.dtype in _DOUBLE and a.requires_grad for a in tree_leaves((args, kwargs))
        )
        return result


def computes_in_float32(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> bool:
    with buffers_kept(model), _LowPrecisionWatch() as watch:
        loss_in_float64(loss, model, batch)
    return watch.seen


def steps_in_float32(optimizer: Optimizer) -> bool:
    """Whether an optimizer rounds to float32: capturable ones do, and float32 learning rates when rescaled."""
    return any(
        group.get("capturable")
        or any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in group.values())
        for group in optimizer.param_groups
    )


def loss_in_float64(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    """The loss; raises a UserError where the model uses an operation that does not exist in float64."""
    try:
        return loss(model, batch)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        message = one_line(error)
        if not any(word in message for word in ("Double", "float64", "dtype", "data type", "scalar type")):
            raise
        strangers = unknown_kinds(batch)
        if strangers:
            raise UserError(
                f"verify: batches hold objects of class {', '.join(strangers)}, whose tensors verify cannot convert to "
                f"float64 ({message}). Give tensors in tuples, dictionaries or dataclasses, and make the object in loss"
            ) from error
        raise UserError(
            f"verify: the model does not compute in float64 ({message}). Give it an implementation that does, or make "
            "its tensors of the dtype of its inputs"
        ) from error


def to_float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not is_inexact(value):
        return value
    return value.to(torch.complex128) if value.is_complex() else value.double()
