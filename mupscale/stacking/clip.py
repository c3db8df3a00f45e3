"""Clipping of gradients that have a leading axis: each model by its own norm."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mupscale.stacking.around import relative_scales
from mupscale.widening import table
from mupscale.widening.stepping import Record, records_of


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
        return [None if gradient is None else gradient * along(scale, gradient) for gradient in gradients]


def along(values: Tensor, tensor: Tensor) -> Tensor:
    """One value for each model, in a shape that multiplies a stacked tensor."""
    return values.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
