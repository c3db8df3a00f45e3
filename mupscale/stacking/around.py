"""What a stack does around the update of a weight, as hooks do around the step of a single optimizer.

Two kinds of hooks are known: those that show the step some weights in other units (`mupscale.widening.mixed_axes`), and
those that scale the updates of new copies, which have their own step count (`mupscale.widening.new_copies`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mupscale.widening.mixed_axes import REFERENCE_UNITS
from mupscale.widening.modules import Side
from mupscale.widening.new_copies import NEW_COPIES
from mupscale.widening.step_hooks import has_other_hooks
from mupscale.widening.width_table import WidthFactors

Around = dict[str, Tensor]
"""For one weight, each with a leading axis for the models: which entries are new copies ("new"), which models see it in
other units ("mixed"), and what these are ("inward", "outward", "shift"). Empty for most weights."""


def has_unknown_hooks(optimizer: Optimizer) -> bool:
    """Whether something is called around the steps of an optimizer that a stack does not do."""
    return has_other_hooks(optimizer, REFERENCE_UNITS, NEW_COPIES)


def around(weight: Tensor, widths: Sequence[WidthFactors], new_copies: Sequence[Tensor | None]) -> Around:
    """What happens around the update of a stacked weight: the widths of its models, and their masks of new copies."""
    answer: Around = {}
    if any(mask is not None for mask in new_copies):
        none = torch.zeros_like(weight[0], dtype=torch.bool, requires_grad=False)
        answer["new"] = torch.stack([none if mask is None else mask.bool() for mask in new_copies])
    if any(width.needs_hooks for width in widths):
        one = [1] * (weight.ndim - 1)
        answer["mixed"] = torch.tensor([width.needs_hooks for width in widths], device=weight.device).view(-1, *one)
        shifts = torch.tensor([width.shift for width in widths], dtype=torch.float64)
        answer["shift"] = shifts.to(weight.device, weight.dtype).view(-1, *one)
        answer["inward"] = relative_scales(widths, "in", weight)
        answer["outward"] = relative_scales(widths, "out", weight)
    return answer


def moved_around(
    parts: Around,
    update: Callable[..., None],
    weight: Tensor,
    gradient: Tensor,
    *rest: Any,
    factor: Tensor | None = None,
) -> None:
    """Moves a weight by `update(weight, gradient, *rest)`; the updates of new copies are multiplied by `factor`."""
    if not parts:
        update(weight, gradient, *rest)
        return
    before = weight.clone()
    if "mixed" in parts:
        weight.sub_(parts["shift"]).mul_(parts["inward"])
        converted = weight.clone()
        update(weight, gradient * parts["outward"], *rest)
        # only the update is scaled back, so that rounding never touches a weight that did not move
        back = (weight - converted).div_(parts["inward"]).add_(before)
        weight.copy_(torch.where(parts["mixed"], back, weight))
    else:
        update(weight, gradient, *rest)
    if "new" in parts and factor is not None:
        weight.copy_(torch.where(parts["new"], before.lerp(weight, factor), weight))


def relative_scales(widths: Sequence[WidthFactors], side: Side, weight: Tensor) -> Tensor:
    """The relative factors of that side for each model, broadcastable to a stacked weight."""
    return torch.stack(torch.broadcast_tensors(*(width.relative_scale(side, weight[0]) for width in widths)))
