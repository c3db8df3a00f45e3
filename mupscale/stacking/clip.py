"""Clipping of gradients that have a leading axis: each model by its own norm."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mupscale.widening.width_table import WidthFactors, merged_table


class StackedClip:
    """`mupscale.clip_grad_norm_` for models that take their steps together."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        table = merged_table(model)
        widths = [table.get(name, WidthFactors()) for name in names]
        self._factors = [width.m_out / width.m_in for width in widths]

    def __call__(self, gradients: Sequence[Tensor | None], max_norm: Tensor | float) -> list[Tensor | None]:
        """The gradients, those of each model scaled down where their width-invariant norm is above `max_norm`."""
        squares = [
            torch.linalg.vector_norm(gradient.flatten(1), dim=1) ** 2 * factor
            for gradient, factor in zip(gradients, self._factors, strict=True)
            if gradient is not None
        ]
        if not squares:
            return list(gradients)
        total = torch.stack(squares, 1).sum(1).sqrt()
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch does
        return [None if gradient is None else gradient * along(scale, gradient) for gradient in gradients]


def along(values: Tensor, tensor: Tensor) -> Tensor:
    """One value for each model, in a shape that multiplies a stacked tensor."""
    return values.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
