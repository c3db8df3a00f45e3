"""All uses of private names of torch; `tests/test_seams.py` fails if a release changes one."""

import copy
import copyreg
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, dropout
from torch.nn.utils import parametrizations
from torch.utils import _python_dispatch, _pytree
from torch.utils.data import DataLoader

BatchNormBase = batchnorm._NormBase
ConvNd = conv._ConvNd
ConvTransposeNd = conv._ConvTransposeNd
DropoutNd = dropout._DropoutNd
TorchDispatchMode = _python_dispatch.TorchDispatchMode
WeightNormParametrization = parametrizations._WeightNorm
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map


def memory_format(name: str) -> torch.memory_format:
    """Returns the memory format of this name, such as `torch.contiguous_format`."""
    answer = getattr(torch, name.removeprefix("torch."))
    assert isinstance(answer, torch.memory_format)
    return answer


# torch finds its compiled code by a hash of pickled objects, and Python pickles a memory format with the name of the
# first module in this process that has an attribute `torch`: another process has another one
copyreg.pickle(torch.memory_format, lambda value: (memory_format, (str(value),)))


def foreach_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor, in one kernel for many of them."""
    return list(torch._foreach_norm(list(tensors)))


def foreach_mul(tensors: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
    """Each tensor times its factor, in one kernel for many of them."""
    return list(torch._foreach_mul(list(tensors), list(factors)))


Parts = dict[str, dict[str, Any]]
"""The parameters, buffers and modules that a module holds, by kind and name; None where there is nothing."""


def parts_of(module: nn.Module) -> Parts:
    return {kind: dict(vars(module)[f"_{kind}"]) for kind in ("parameters", "buffers", "modules")}


def apply_to_values_(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces the values of all tensors of a module, but for those on the meta device, which have none."""
    module._apply(lambda tensor: tensor if tensor.is_meta else function(tensor))


def allocate_parameters_(module: nn.Module, device: torch.device) -> None:
    """Gives parameters on the meta device memory; buffers stay as they are."""
    for part in module.modules():
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            buffers = dict(part._buffers)
            part.to_empty(device=device, recurse=False)
            part._buffers.update(buffers)


def with_parts(module: nn.Module, parts: Parts) -> nn.Module:
    """A module with the attributes of another, and other parts."""
    twin: nn.Module = object.__new__(type(module))  # that of FSDP2 would make a plain module
    twin.__dict__.update(module.__dict__)
    twin.__dict__.update({f"_{kind}": part for kind, part in parts.items()})
    return twin


def use_count(tensor: Tensor) -> int:
    """How many places in C++ hold the tensor, an autograd graph among them."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def without_iterator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy of a data loader that does not share its workers, which a loader with persistent ones keeps."""
    answer = copy.copy(loader)
    answer._iterator = None
    return answer


def without_transforms(tensor: Tensor) -> Tensor:
    """What a tensor inside `torch.vmap`, or another transform of a function, stands for: with all of its axes."""
    while is_under_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The attributes of the buffers that this module leaves out of its state_dict."""
    return set(module._non_persistent_buffers_set)


def forward_pre_hooks(module: nn.Module) -> Iterable[Any]:
    return module._forward_pre_hooks.values()


def gradient_hooks(parameter: Tensor) -> int:
    """The number of functions that are called with the gradient of a parameter, or after it."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return sum(len(each) for each in hooks if each)


def renew_gradient_hooks_(parameter: Tensor) -> None:
    """Registers the hooks of a parameter again, which torch keeps but does not call after its memory was swapped."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, name, None):
            setattr(parameter, name, getattr(parameter, name))


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its `forward`."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def is_too_large(error: Exception) -> bool:
    """Whether torch could not make a tensor on the CPU, or on the meta device, because it is too large."""
    wordings = (
        "can't allocate memory",
        "not enough memory",
        "Storage size calculation overflowed",
        "Overflow when unpack",
    )
    return any(wording in str(error) for wording in wordings)


def is_under_transform(tensor: Tensor) -> bool:
    """Whether a tensor exists only inside `torch.vmap`, or another transform of a function."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor exists only inside `torch.vmap`; unlike the above, this can be compiled."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def vmap_refusal(error: Exception) -> str | None:
    """Why `torch.vmap` refused an operation; None for any other error."""
    reasons = {
        "called random operation while in randomness error mode": "it draws random numbers",
        "vmap: we do not yet support": "torch.vmap does not know it",
        "Batching rule not implemented for": "torch.vmap does not know it",
        "NYI: querying is_contiguous inside of vmap": "torch.vmap does not know it",
        "vmap: We do not support batching operators that can support dynamic shape": "its shape depends on values",
        "vmap: It looks like you're": "Python code depends on its value",
    }
    return next((reason for wording, reason in reasons.items() if wording in str(error)), None)


def is_failed_write(error: BaseException) -> bool:
    """Whether `torch.save` could not write to its file; it does not say why."""
    wordings = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")
    return isinstance(error, RuntimeError) and any(wording in str(error) for wording in wordings)


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """The schedules that a SequentialLR or a ChainedScheduler is made of; none for any other."""
    inner: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return inner


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether a function of the user's changes or reads the gradient of a tensor."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def own_step_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The functions that are called before, and after, each step of this optimizer."""
    return list(optimizer._optimizer_step_pre_hooks.values()), list(optimizer._optimizer_step_post_hooks.values())


def step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """The number of functions that are called before or after each step of an optimizer."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def step_by_hand(optimizer: torch.optim.Optimizer) -> None:
    """Lets learning-rate schedules know that an optimizer steps, though its `step` is not called."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def place_in_shard(shard: str, offset: int, length: int) -> Any:
    """Where a value of a distributed checkpoint lies, as torch writes it into the metadata."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(shard, offset, length)
