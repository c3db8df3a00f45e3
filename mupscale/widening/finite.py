"""Finds NaN and infinite numbers before they are used, and names the tensor."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.widening.parameter_groups import names_by_id
from mupscale.widening.plan import Plan
from mupscale.widening.sharding import is_sharded, largest_of_ranks, local_part

Named = tuple[str, Tensor]


def largest_entries(tensors: Sequence[Tensor]) -> list[float]:
    """The largest absolute entry of each tensor, NaN where it has one. Waits for the device once.

    Of sharded tensors every rank looks at its part, which may be empty, and all of them agree by one message.
    """
    if not tensors:
        return []
    device, parts = tensors[0].device, [local_part(tensor) for tensor in tensors]
    norms = []
    for part in parts:
        norm = torch.linalg.vector_norm(part, ord=math.inf) if part.numel() else part.new_zeros(())
        norms.append(norm.to(device, torch.float64))
    largest = torch.stack(norms)
    sharded = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    if sharded is not None:
        largest = largest_of_ranks(largest, sharded)
    return largest.tolist()


def first_non_finite(named: Iterable[Named], *, infinite_allowed: bool = False) -> str | None:
    """The name of the first tensor with a NaN or infinite entry; with `infinite_allowed`, only NaN counts."""
    inexact = [(name, tensor) for name, tensor in named if _is_inexact(tensor)]
    bad = math.isnan if infinite_allowed else _is_non_finite
    largest = largest_entries([tensor for _, tensor in inexact])
    return next((name for (name, _), value in zip(inexact, largest, strict=True) if bad(value)), None)


def refuse_non_finite_model(plan: Plan, narrow: nn.Module, wide: nn.Module) -> None:
    """Raises a UserError if the narrow model has NaN or infinite entries, or weights that overflow the wide dtype.

    A buffer without a width axis may hold infinities, as an attention mask does, but no NaN.
    """
    parameters = [(name, p) for name, p in narrow.named_parameters() if _is_inexact(p)]
    buffers = [(name, b) for name, b in narrow.named_buffers() if _is_inexact(b)]
    if any(tensor.is_meta for _, tensor in (*parameters, *buffers)):
        raise UserError("the narrow model is on the meta device: it has no weights to widen. Load them first")
    largest = largest_entries([tensor for _, tensor in (*parameters, *buffers)])
    targets = dict(wide.named_parameters())
    for (name, parameter), value in zip(parameters, largest, strict=False):
        if _is_non_finite(value):
            raise UserError(
                f"parameter {name!r} {tuple(parameter.shape)} of the narrow model has NaN or infinite entries; take an "
                "earlier checkpoint"
            )
        dtype = targets[name].dtype
        value *= max(plan.parameters[name].unit.scale, 1)
        if (dtype.is_floating_point or dtype.is_complex) and value > torch.finfo(dtype).max:
            raise UserError(
                f"parameter {name!r} {tuple(parameter.shape)} of the narrow model has entries up to {value:g}, too "
                f"large for the {dtype} of the wide one. Give the wide model the dtype {parameter.dtype}"
            )
    for (name, buffer), value in zip(buffers, largest[len(parameters) :], strict=True):
        if math.isnan(value) or (plan.buffers[name].grows and not plan.buffers[name].kept and math.isinf(value)):
            raise UserError(
                f"buffer {name!r} {tuple(buffer.shape)} of the narrow model has NaN or infinite entries; take an "
                "earlier checkpoint"
            )


def refuse_non_finite_state(narrow: nn.Module, optimizer: Optimizer) -> None:
    """Raises a UserError for NaN or infinite entries in the state of an optimizer over `narrow`, unless on meta."""
    names = names_by_id(narrow)
    named = [
        (f"{key!r} of {names[id(parameter)]!r}", value)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
        for key, value in state.items()
        if isinstance(value, Tensor) and not value.is_meta
    ]
    # a counter on the CPU is not worth a transfer to the device of the others
    for on_cpu in (False, True):
        bad = first_non_finite((name, value) for name, value in named if (value.device.type == "cpu") is on_cpu)
        if bad is not None:
            raise UserError(
                f"optimizer state {bad} has NaN or infinite entries; use an earlier checkpoint, or upscale "
                "without the state"
            )


def _is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor can hold NaN."""
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.is_complex())


def _is_non_finite(value: float) -> bool:
    return not math.isfinite(value)
