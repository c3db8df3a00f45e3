"""Weights (Step 1 of the paper's meta-algorithm): duplicated along width axes, and divided by k_in."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import use_count
from mupscale.errors import UserError
from mupscale.widening.layout import by_entry, duplicate, duplicate_
from mupscale.widening.modules import Side
from mupscale.widening.plan import Plan, TensorPlan
from mupscale.widening.rules import Factors
from mupscale.widening.sharding import is_sharded, local_part
from mupscale.widening.units import NO_UNIT
from mupscale.widening.width_table import Table, WidthFactors, merged_table, restore_infshapes, store_table


def widen_(target: Tensor, source: Tensor, entry: TensorPlan, rows: slice | None = None) -> None:
    """Writes the widened weight into `target`: dup / k_in (Table 1, first column), times unit and unequal shares.

    `target` may be some `rows` of it alone.
    """
    _duplicate_in_units_(target, source, entry, "in", rows)
    if entry.shift:
        target.add_(entry.shift)


def widen_gradient_(target: Tensor, source: Tensor, entry: TensorPlan) -> None:
    """Writes the gradient that a widened weight has where the narrow one has `source`: dup / k_out, entry by entry."""
    _duplicate_in_units_(target, source, entry, "out", None)


def _duplicate_in_units_(
    target: Tensor, source: Tensor, entry: TensorPlan, side: Literal["out", "in"], rows: slice | None
) -> None:
    """Duplicates a tensor and divides it by the factor of one side, times unit and unequal shares."""
    powers = {"out_power": -(side == "out"), "in_power": -(side == "in")}
    duplicate_(target, source, entry.layouts, entry.scales(**powers), entry.unit_scale(**powers), rows)
    for axis, shares in entry.shares:
        if entry.relative_side(axis) == side:
            if axis == 0 and rows is not None:
                shares = shares[rows]
            target.mul_(target.new_tensor(shares).view([-1 if i == axis else 1 for i in range(target.ndim)]))


def materialise_(parameter: nn.Parameter, device: torch.device) -> None:
    """Gives a meta parameter memory without changing its identity: ties, modules and optimizers keep holding it."""
    real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def materialise_recurrent_(wide: nn.Module, narrow: nn.Module) -> None:
    """Gives recurrent layers memory: they hold weak references to their parameters, and renew these themselves."""
    for name, module in wide.named_modules():
        if isinstance(module, nn.RNNBase) and any(parameter.is_meta for parameter in module.parameters()):
            module.to_empty(device=next(narrow.get_submodule(name).parameters()).device)
    restore_infshapes(wide)


def refuse_held(wide: nn.Module, optimizers: Sequence[Optimizer | None]) -> None:
    """Raises a UserError if a meta parameter cannot be allocated, because a graph or a weak reference holds it."""
    anew = {id(p) for module in wide.modules() if isinstance(module, nn.RNNBase) for p in module.parameters()}
    kept = {
        id(p)
        for optimizer in optimizers
        if optimizer is not None
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, parameter in wide.named_parameters():
        if not parameter.is_meta or (id(parameter) in anew and id(parameter) not in kept):
            continue
        if weakref.getweakrefcount(parameter) or use_count(parameter) > 1:
            raise UserError(
                f"parameter {name!r} {tuple(parameter.shape)} of the wide model is on the meta device, and something "
                "refers to it (an "
                "output of the model, a weak reference), so it cannot be given memory. Drop that, or call "
                "wide.to_empty(device=...) "
                "before the optimizer is made"
            )


def release_(tensor: Tensor) -> None:
    """Frees the memory of a narrow parameter or buffer that has been consumed."""
    if is_sharded(tensor):
        local_part(tensor).untyped_storage().resize_(0)  # FSDP2 has views of it
    tensor.data = tensor.data.new_empty(0)
    tensor.grad = None


def remember_widths(
    plan: Plan,
    narrow: nn.Module,
    wide: nn.Module,
    factors_of: Callable[[TensorPlan], Factors],
    *,
    entrywise: bool,
) -> None:
    """Stores the width factors on the wide module, for clipping, unless its base shapes already determine them.

    With `entrywise`, also those by which the entries of one axis differ, for the optimizer's rates, and the shifts of
    affine units, for its decay.
    """
    before, after = merged_table(narrow), merged_table(wide, mup_only=True)
    widths = {}
    for name, entry in plan.parameters.items():
        old, factors = before.get(name, WidthFactors()), factors_of(entry)
        relative = _relative(entry, old) if entrywise else ()
        shift = old.shift / factors.k_in + entry.shift if entrywise else 0.0
        width = WidthFactors(old.m_out * factors.k_out, old.m_in * factors.k_in, old.base, relative, shift)
        if name in after and (not width.needs_hooks or _same_widths(width, after[name])):
            width = replace(after[name], relative=relative, shift=shift) if width.needs_hooks else after[name]
        widths.update(dict.fromkeys(entry.names, width))
    if any(widths[name] is not after.get(name) for name in widths):
        store_table(wide, Table(bool(after) or bool(merged_table(narrow, mup_only=True)), widths))


def refuse_other_units(plan: Plan, narrow: nn.Module, wide: nn.Module) -> None:
    """Raises a UserError for a unit that the base shapes of the wide model lack: its muP rates would be wrong."""
    before, after = merged_table(narrow), merged_table(wide, mup_only=True)
    for name, entry in plan.parameters.items():
        if name not in after or (entry.unit == NO_UNIT and not after[name].shift):
            continue
        old, factors = before.get(name, WidthFactors()), entry.factors
        width = WidthFactors(old.m_out * factors.k_out, old.m_in * factors.k_in)
        shift = old.shift / factors.k_in + entry.shift
        if not _same_widths(width, after[name]) or not math.isclose(shift, after[name].shift, abs_tol=1e-9):
            raise UserError(
                f"units: {name!r} has the unit {tuple(entry.unit)} here, and another one in the base shapes of the "
                "models, from which muP takes its rates. Give set_base_shapes the units from the base model to each "
                "model, or declare them in width_units of the model class"
            )


def _same_widths(one: WidthFactors, other: WidthFactors) -> bool:
    """Up to the rounding of factors such as 5/3."""
    return math.isclose(one.m_out, other.m_out) and math.isclose(one.m_in, other.m_in)


def _relative(entry: TensorPlan, old: WidthFactors) -> tuple[tuple[int, Side, tuple[float, ...]], ...]:
    """The per-entry factors of mixed axes after this growth, on top of those of an earlier one."""
    earlier = {axis: torch.tensor(row, dtype=torch.float64) for axis, _, row in old.relative}
    answer = []
    for axis, layout in enumerate(entry.layouts):
        side, reference = entry.relative_side(axis), entry.reference(axis)
        now = by_entry(layout, [piece.factor / reference for piece in layout]) * earlier.get(axis, 1.0)
        now = duplicate(now, [layout])
        if axis in entry.relative_shares:
            now = now / now.new_tensor(entry.relative_shares[axis])
        if side and not bool((now == 1).all()):
            answer.append((axis, side, tuple(now.tolist())))
    return tuple(answer)
