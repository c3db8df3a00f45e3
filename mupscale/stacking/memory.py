"""The memory that a model of a stack needs, without a device."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from mupscale._torch import tree_leaves, tree_map
from mupscale.stacking.optimizers import stacked_kind
from mupscale.stacking.stack import Losses, mapped

WORKSPACE = 0.01
"""The extra memory of kernels as a share of their operands, for example for partial sums over many rows."""


class Saved(NamedTuple):
    """What autograd saves for the backward pass, in bytes."""

    total: int
    largest: int


def bytes_per_model(
    model: nn.Module,
    optimizer_class: type[Optimizer],
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    losses: Losses | None = None,
    amsgrad: bool = False,
    grown: bool = False,
) -> int:
    """An upper estimate of the memory that one more model of a stack takes at the peak of a step, in bytes.

    It has the weights, their gradients, the optimizer's state, what autograd saves, and temporaries of the backward
    pass and of the update. Losses are computed with tensors that have shapes only. Each model has a batch of its own:
    with one for all of them, or with `torch.autocast`, a step takes less.

    bytes_per_model(model, torch.optim.AdamW, lambda model, batch: model.loss(batch), batch)

    Args:
        model: One of the models.
        optimizer_class: SGD, Adam or AdamW of torch.
        loss: As of `Stack`.
        batch: That of one model.
        losses: As of `Stack`.
        amsgrad: Whether Adam has it, and so a third moment.
        grown: Whether models of the stack grew, or will: their updates may need masks, or other units.
    """
    moments = stacked_kind(optimizer_class).moments + amsgrad
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fixed = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    weights = _bytes(trained)
    saved = saved_per_model(model, loss, batch, losses)
    backward = saved.total + 2 * saved.largest  # the gradients that enter and leave an operation
    largest = max((parameter.nbytes for parameter in trained), default=0)
    update = weights + (5 if grown else 2) * largest  # clipped gradients, and the temporaries of one weight
    masks = sum(parameter.numel() for parameter in trained) if grown else 0
    others = _bytes([*model.buffers(), *fixed, *_tensors(batch)])
    return int((1 + WORKSPACE) * (others + masks + weights * (2 + moments) + max(backward, update)))


def saved_per_model(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, losses: Losses | None = None
) -> Saved:
    """What autograd saves for the backward pass of one more model: the difference between stacks of three and two."""
    seeds = torch.zeros(3, dtype=torch.int64, device="meta")

    def measured(count: int) -> dict[int, int]:
        run = losses or mapped(model, loss, seeds[:count])
        parameters = {name: _stacked(tensor, count) for name, tensor in model.named_parameters()}
        buffers = {name: _stacked(tensor, count) for name, tensor in model.named_buffers()}
        inputs = tree_map(lambda leaf: _stacked(leaf, count) if isinstance(leaf, Tensor) else leaf, batch)
        given = (*parameters.values(), *buffers.values(), *_tensors(inputs))
        known = {id(tensor.untyped_storage()) for tensor in given}
        found: dict[int, Any] = {}  # storages by id; they are held, so that no other gets it

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in known:
                found[id(storage)] = storage
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
            result = run(parameters, buffers, inputs, False)
        del result
        return {key: storage.nbytes() for key, storage in found.items()}

    two, three = measured(2), measured(3)
    total = sum(three.values()) - sum(two.values())
    return Saved(total, -(-max(three.values(), default=0) // 3))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _stacked(tensor: Tensor, count: int) -> Tensor:
    made = torch.empty(count, *tensor.shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)
