"""Dropout for stacked models: the mask of a model depends on its own seed only.

A mask is a hash of the model's seed, the number of the call in this step, and the position of the element. So a model
drops the same elements in any stack.
"""

from collections.abc import Callable, Iterable
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mupscale._torch import vmap_refusal
from mupscale.errors import UserError


class StackedDropout(TorchFunctionMode):
    """Inside of `torch.vmap`, makes dropout depend on a seed; refuses other functions that draw random numbers."""

    def __init__(self, seed: Tensor) -> None:
        """`seed` is that of this model, in this step: an int64 tensor without axes, mapped by `torch.vmap`."""
        super().__init__()
        self._seed = seed
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) == "unflatten":
            return _unflattened(*args, **kwargs)  # torch.compile cannot call it from here
        if func is F.batch_norm:
            return batch_norm(*args, **kwargs)
        if func in RULES:
            return RULES[func](self.kept, *args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            reason = vmap_refusal(error)
            if reason is None:
                raise
            name = getattr(func, "__name__", func)
            raise UserError(f"{name} has no rule for many models at once: {reason}") from None

    def kept(self, shape: Iterable[int], p: float, device: torch.device) -> Tensor:
        """Which elements this call keeps: each of them with probability 1 - p."""
        key = mixed(self._seed, self._calls)
        self._calls += 1
        return kept(key, tuple(shape), p, device)


Kept = Callable[[Iterable[int], float, torch.device], Tensor]


def mixed(seeds: Tensor, number: int) -> Tensor:
    """A hash of each seed with a number, such as that of a step: int64 tensors, by splitmix64.

    stack.seeds.copy_(mixed(seeds_of_runs, global_step))
    """
    state = seeds + _signed((number + 1) * 0x9E3779B97F4A7C15, 64)
    state = (state ^ _shifted(state, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    state = (state ^ _shifted(state, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return state ^ _shifted(state, 31, 64)


def kept(key: Tensor, shape: tuple[int, ...], p: float, device: torch.device) -> Tensor:
    """True with probability 1 - p at each place, by the two rounds of murmur3's finaliser, one half of the key in each.

    In int32, which a GPU multiplies much faster than int64.
    """
    place = torch.arange(prod(shape), dtype=torch.int32, device=device).view(shape)
    first, second = key.to(torch.int32), (key >> 32).to(torch.int32)
    state = place + first
    state = (state ^ _shifted(state, 16, 32)) * _signed(0x85EBCA6B, 32) ^ second
    state = (state ^ _shifted(state, 13, 32)) * _signed(0xC2B2AE35, 32)
    threshold = round(p * 2**32) - 2**31  # only the high bits of the product are well mixed; they decide
    return state >= threshold if threshold < 2**31 else torch.zeros_like(state, dtype=torch.bool)


def _signed(number: int, bits: int) -> int:
    """The number that has these bits in two's complement, as torch's integers do."""
    number %= 2**bits
    return number - 2**bits if number >= 2 ** (bits - 1) else number


def _shifted(state: Tensor, by: int, bits: int) -> Tensor:
    """A shift to the right that fills with zeros; torch's fills with the sign."""
    return (state >> by) & (2 ** (bits - by) - 1)


def _dropout(
    kept: Kept, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, axes: int | None = None
) -> Tensor:
    """Torch's dropout, which drops the first `axes` axes one by one, and those after them as a whole."""
    if not 0 <= p <= 1:
        raise UserError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return input
    single = input.ndim if axes is None else axes
    keep = kept(input.shape[:single] + (1,) * (input.ndim - single), p, input.device)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return input.mul_(keep).mul_(scale) if inplace else input * keep * scale


def _channels(spatial: int | None) -> Callable[..., Tensor]:
    """Dropout of whole channels, of inputs with so many spatial axes; without a batch axis, if torch takes them so."""

    def rule(kept: Kept, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        alone = spatial is not None and input.ndim == spatial + 1
        return _dropout(kept, input, p, training, inplace, axes=1 if alone else 2)

    return rule


def _attention(
    kept: Kept,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention step by step, where it has dropout: the kernels draw their own random numbers."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    logits = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril()
        logits = logits.masked_fill(~seen, -torch.inf)
    if attn_mask is not None:
        is_choice = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if is_choice else logits + attn_mask
    return _dropout(kept, logits.softmax(-1), dropout_p) @ value


RULES: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _channels(1),
    F.dropout2d: _channels(None),
    F.dropout3d: _channels(3),
    F.scaled_dot_product_attention: _attention,
}
"""The functions that draw random numbers and work for many models at once; each rule gets `kept` first."""


def _unflattened(tensor: Tensor, dim: int, sizes: Iterable[int]) -> Tensor:
    dim %= tensor.ndim
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def batch_norm(*arguments: Any, **options: Any) -> Tensor:
    """Normalises without cuDNN, whose kernel asks for a memory format that a mapped tensor does not have."""
    if torch.compiler.is_compiling():  # there it is made of operations that can be mapped
        return F.batch_norm(*arguments, **options)
    with torch.backends.cudnn.flags(enabled=False):  # the argument of torch.batch_norm does not reach the choice
        return F.batch_norm(*arguments, **options)
