"""Operations for many models at once, where `torch.vmap` of torch's own kernels fails on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class FoldedAttention(torch.autograd.Function):
    """Attention inside of `torch.vmap`: it has no weights, so the models' batches are one larger batch.

    It is differentiated by torch, outside of the mapping; a gradient inside of it is not defined.
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
    ) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=gqa)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        gqa: bool,
    ) -> tuple[Tensor, int]:
        models = info.batch_size
        q, k, v = (_of_each(t, dim, models).flatten(0, 1) for t, dim in zip((query, key, value), in_dims, strict=False))
        if mask is not None:
            batch = len(q) // models
            mask = _of_each(mask, in_dims[3], models)
            if mask.ndim > q.ndim:  # it has a batch axis of its own
                mask = mask.expand(models, batch, *mask.shape[2:]).flatten(0, 1)
            else:
                missing = (1,) * (q.ndim + 1 - mask.ndim)
                mask = mask.view(models, *missing, *mask.shape[1:]).expand(models, batch, *missing[1:], *mask.shape[1:])
                mask = mask.flatten(0, 1)
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
        return y.unflatten(0, (models, -1)), 0


def _of_each(tensor: Tensor, dim: int | None, models: int) -> Tensor:
    """With an axis for the models in front."""
    return tensor.expand(models, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def batch_norm(*arguments: Any, **options: Any) -> Tensor:
    """Without cuDNN, whose kernel asks for a memory format that a mapped tensor does not have."""
    if torch.compiler.is_compiling():  # there it is made of operations that can be mapped
        return F.batch_norm(*arguments, **options)
    with torch.backends.cudnn.flags(enabled=False):  # the argument of torch.batch_norm does not reach the choice
        return F.batch_norm(*arguments, **options)


KERNELS: dict[Any, Callable[..., Tensor]] = {F.batch_norm: batch_norm}
