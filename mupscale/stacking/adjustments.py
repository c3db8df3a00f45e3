"""What a stack does around the update of a weight, as `mupscale.widening.records` does around a single optimizer's:
it clips gradients, shows the step some weights in other units, and scales the updates of new copies, which have their
own step count.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.widening import table
from mupscale.widening.records import Record, records_of
from mupscale.widening.table import Side

Adjustment = dict[str, Tensor]
"""Tensors for one weight, each with an axis for the models: the new copies of each birth ("new"), which models
see it in other units ("mixed"), and what these are ("inward", "outward", "shift"). Empty for most weights."""


def adjustments(weight: Tensor, records: Sequence[Record]) -> Adjustment:
    """What happens around the update of a stacked weight, from the records of its parameter in each model."""
    answer: Adjustment = {}
    born = [record.born(weight[0]) if record.births else [] for record in records]
    if any(born):
        none = torch.zeros_like(weight[0], dtype=torch.bool, requires_grad=False)
        levels = range(max(map(len, born)))
        masks = [torch.stack([own[level][0] if level < len(own) else none for own in born]) for level in levels]
        answer["new"] = torch.stack(masks)
    if any(record.steps_in_own_units for record in records):
        one = [1] * (weight.ndim - 1)
        mixed = torch.tensor([record.steps_in_own_units for record in records], device=weight.device)
        answer["mixed"] = mixed.view(-1, *one)
        shifts = torch.tensor([record.shift for record in records], dtype=torch.float64)
        answer["shift"] = shifts.to(weight.device, weight.dtype).view(-1, *one)
        answer["inward"] = relative_scales(records, "in", weight)
        answer["outward"] = relative_scales(records, "out", weight)
    return answer


def step_adjusted(
    parts: Adjustment,
    update: Callable[..., None],
    weight: Tensor,
    gradient: Tensor,
    *rest: Any,
    new_factors: Sequence[Tensor] = (),
) -> None:
    """Moves a weight by `update(weight, gradient, *rest)`; those of new copies are multiplied by a factor per birth."""
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
    for mask, factor in zip(parts.get("new", ()), new_factors, strict=False):
        weight.copy_(torch.where(mask, before.lerp(weight, factor), weight))


def relative_scales(records: Sequence[Record], side: Side, weight: Tensor) -> Tensor:
    """The relative factors of that side for each model, broadcastable to a stacked weight."""
    return torch.stack(torch.broadcast_tensors(*(record.entry_scale(side, weight[0]) for record in records)))


class StackedClip:
    """`mupscale.clip_grad_norm_` for models that take their steps together."""

    def __init__(self, models: Sequence[nn.Module], weights: dict[str, Tensor]) -> None:
        tables = [records_of(model) for model in models]
        self._factors: list[tuple[Tensor, tuple[Tensor, Tensor] | None]] = []
        for name, weight in weights.items():
            widths = [records.get(name, Record()) for records in tables]
            factors = torch.tensor([table.clip(width.scale) for width in widths], dtype=torch.float64)
            sides = None
            if any(width.entries for width in widths):
                outward, inward = (relative_scales(widths, side, weight.detach()).sqrt() for side in ("out", "in"))
                sides = outward, inward
            self._factors.append((factors.to(weight.device, weight.dtype), sides))

    def __call__(self, gradients: Sequence[Tensor | None], max_norm: Tensor | float) -> list[Tensor | None]:
        """The gradients, those of each model scaled down where their width-invariant norm is above `max_norm`."""
        squares = []
        for gradient, (factors, sides) in zip(gradients, self._factors, strict=True):
            if gradient is not None:
                scaled = gradient if sides is None else gradient * sides[0] / sides[1]
                squares.append(torch.linalg.vector_norm(scaled.flatten(1), dim=1) ** 2 * factors)
        if not squares:
            return list(gradients)
        total = torch.stack(squares, 1).sum(1).sqrt()
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch does
        return [None if gradient is None else gradient * per_model(scale, gradient) for gradient in gradients]


def per_model(values: Tensor, tensor: Tensor) -> Tensor:
    """One value for each model, in a shape that multiplies a stacked tensor."""
    return values.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
