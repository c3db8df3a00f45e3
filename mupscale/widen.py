"""Weights and buffers (Step 1 of the paper's meta-algorithm): duplicated along width axes, weights divided by k_in."""

import torch
from torch import Tensor, nn

from mupscale.layout import duplicate, duplicate_
from mupscale.tables import Table, Width, own_table, store_table
from mupscale.widths import Plan, TensorPlan


def widen_parameter_(entry: TensorPlan, source: Tensor, target: nn.Parameter) -> None:
    """Writes the widened `source` into `target`: dup / k_in (Table 1, first column)."""
    if target.is_meta:
        materialise_(target, source.device)
    duplicate_(target, source, entry.layouts, entry.scales(out_power=0, in_power=-1))


def widen_buffers_(plan: Plan, narrow: nn.Module, wide: nn.Module) -> None:
    """Buffers are statistics and tables of their units: duplicated, never rescaled."""
    sources = dict(narrow.named_buffers())
    for name, target in list(wide.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        if target.is_meta:
            target = torch.empty_like(target, device=sources[name].device)
            wide.get_submodule(owner)._buffers[attribute] = target
        duplicate_(target, sources[name], plan.buffers[name].layouts)


def materialise_(parameter: nn.Parameter, device: torch.device) -> None:
    """Gives a meta parameter memory without changing its identity: ties, modules and optimizers keep holding it."""
    real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def release_(parameter: nn.Parameter) -> None:
    """Frees the memory of a narrow parameter that has been consumed."""
    parameter.data = parameter.data.new_empty(0)
    parameter.grad = None


def remember_widths(plan: Plan, narrow: nn.Module, wide: nn.Module) -> None:
    """Leaves the width factors on the wide module, for clipping, unless it has base shapes of its own."""
    before, after = own_table(narrow), own_table(wide)
    if after is not None and after.mup:
        return
    widths = {}
    for name, entry in plan.parameters.items():
        old = before.widths.get(name, Width()) if before else Width()
        widths[name] = Width(old.m_out * entry.k_out, old.m_in * entry.k_in, old.base, _relative(entry, old))
    store_table(wide, Table(before.mup if before else False, widths))


def _relative(entry: TensorPlan, old: Width) -> tuple:
    """The per-entry factors of mixed axes after this growth, on top of those of an earlier one."""
    earlier = {axis: torch.tensor(row, dtype=torch.float64) for axis, _, row in old.relative}
    answer = []
    for axis, (layout, side) in enumerate(zip(entry.layouts, entry.sides, strict=True)):
        reference = max(piece.factor for piece in layout)
        now = torch.cat([torch.full((piece.length,), piece.factor / reference, dtype=torch.float64) for piece in layout])
        now = now * earlier.get(axis, 1.0)
        if side and not bool((now == 1).all()):
            answer.append((axis, side, tuple(duplicate(now, [layout]).tolist())))
    return tuple(answer)
