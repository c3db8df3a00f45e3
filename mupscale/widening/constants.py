"""Finds constants of a module that depend on its width, for which duplication does not compensate, and reports them.

These are numbers that differ between the two models (`embed_scale`), roots of a size in the code of a forward pass
(`d_model ** -0.5`), ALiBi's slopes, which depend on the number of heads, and tables that are not saved and whose size
is the width (sinusoids).
"""

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mupscale._torch import ConvNd, DropoutNd, non_persistent_buffers
from mupscale.widening import modules

_ROOTS = (
    re.compile(r"self\.(?:config\.)?(\w+)\s*\*\*\s*\(?\s*-?\s*0\.5"),
    re.compile(r"sqrt\(\s*self\.(?:config\.)?(\w+)"),
)
"""Finds the size under a root in Python: `self.d_model ** -0.5`, `math.sqrt(self.config.hidden_size)`."""

_LOGIT_SCALES = ("scale", "scaling", "softmax_scale", "inv_norm_factor")

_REMEDY = "if it multiplies something that grows, compensate for it with `units`"


def constant_caveats(narrow: nn.Module, wide: nn.Module) -> Iterator[str]:
    """What differs between the two modules besides their parameters."""
    logits = None if isinstance(narrow, (nn.Linear, ConvNd)) else _logit_scale(narrow, wide)
    if logits:
        yield logits
    yield from _changed_numbers(narrow, wide)
    for size in sorted(_sizes_under_roots(type(narrow).forward)):
        before, after = _size(narrow, size), _size(wide, size)
        if before is not None and after is not None and before != after:
            yield f"its forward pass takes a root of {size}, which grows {before} → {after}; {_REMEDY}"
    heads = modules.growing_heads(narrow, wide)
    if heads and _has_alibi(narrow):
        yield f"{heads}, and the slopes of ALiBi depend on the number of heads: not exact. Keep the number of heads"


def buffer_caveats(narrow: nn.Module, wide: nn.Module) -> Iterator[tuple[str, str]]:
    """The buffers that the wide module does not save, with a note where its own is not the narrow one duplicated."""
    for attribute in sorted(non_persistent_buffers(wide)):
        before, after = getattr(narrow, attribute, None), getattr(wide, attribute, None)
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.is_meta or after.is_meta:
            continue
        if before.shape == after.shape:
            if not torch.equal(before, after.to(before)):
                text = "this buffer is not saved with the model, and differs between the two"
                yield attribute, f"{text}; the wide model keeps its own"
        elif not _is_duplicate(before, after.to(before)):
            yield (
                attribute,
                f"this buffer {tuple(before.shape)} → {tuple(after.shape)} is not saved with the model, and the wide "
                "one is not a duplicate of the narrow one (such as sinusoids). The wide model keeps its own, so "
                "modules that read it are not exact",
            )


def _logit_scale(narrow: nn.Module, wide: nn.Module) -> str | None:
    for attribute in _LOGIT_SCALES:
        before, after = getattr(narrow, attribute, None), getattr(wide, attribute, None)
        if isinstance(before, float) and isinstance(after, float) and before > after > 0:
            k = (before / after) ** 2
            if round(k) > 1 and abs(k - round(k)) < 1e-6:
                return (
                    f"{attribute} shrinks by sqrt({round(k)}), as 1/sqrt(head_dim) does; growing head_dim is exact "
                    f"only under c/head_dim, or with a unit of 1/sqrt({round(k)}) on what produces the queries"
                )
    return None


def _changed_numbers(narrow: nn.Module, wide: nn.Module) -> Iterator[str]:
    if isinstance(narrow, DropoutNd) or modules.is_readout(narrow):
        return
    for attribute, before in vars(narrow).items():
        after = vars(wide).get(attribute)
        if attribute.startswith("_") or not isinstance(before, float) or not isinstance(after, float):
            continue
        is_logit_scale = attribute in _LOGIT_SCALES and before > after
        if before != after and before * after > 0 and not is_logit_scale:
            yield f"its constant {attribute} changes {before:g} → {after:g}; {_REMEDY}"


@cache
def _sizes_under_roots(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of sizes of which a forward pass takes a root."""
    if (forward.__module__ or "").partition(".")[0] == "torch":
        return frozenset()
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(name for pattern in _ROOTS for name in pattern.findall(source))


def _size(module: nn.Module, name: str) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _has_alibi(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    for owner in (config, getattr(config, "attn_config", None)):
        asked = getattr(owner, "alibi", None)
        if asked is not None:
            return bool(asked)
        if getattr(owner, "position_embedding_type", None) == "alibi":
            return True
    return any("alibi" in attribute.lower() for attribute in dir(module))


def _is_duplicate(narrow: Tensor, wide: Tensor) -> bool:
    """Whether `wide` is `narrow` repeated entry by entry, or as a whole, along the axes that grow."""
    if any(n == 0 or w % n for n, w in zip(narrow.shape, wide.shape, strict=True)):
        return False
    factors = [w // n for n, w in zip(narrow.shape, wide.shape, strict=True)]
    interleaved = narrow
    for axis, factor in enumerate(factors):
        interleaved = interleaved.repeat_interleave(factor, axis)
    return torch.equal(interleaved, wide) or torch.equal(narrow.repeat(factors), wide)
