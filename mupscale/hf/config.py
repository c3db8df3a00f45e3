"""Configurations of the transformers library at another width: a stand-in for the rules of all families."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mupscale.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
FEED_FORWARD = ("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim")
WIDTHS = ("hidden_size", "n_embd", "d_model")


def wide_config(
    config: "PretrainedConfig",
    factor: float,
    *,
    keep_heads: bool | None = None,
    only: str | None = None,
    fields: Mapping[str, float] | None = None,
) -> "PretrainedConfig":
    """A copy of a configuration with its widths multiplied."""
    wide = copy.deepcopy(config)
    names = FEED_FORWARD if only == "feed_forward" else (*WIDTHS, *FEED_FORWARD, *(() if keep_heads else HEADS))
    for name in dict.fromkeys((*names, *(fields or {}))):
        size = getattr(config, name, None)
        if not isinstance(size, int) or size <= 0:
            continue
        grown = size * (fields or {}).get(name, factor)
        if grown != int(grown):
            raise UserError(f"factor {factor}: {name} {size} would become {grown}; give a factor with whole sizes")
        setattr(wide, name, int(grown))
    return wide
