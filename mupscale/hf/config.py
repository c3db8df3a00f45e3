"""Configurations of the transformers library, wider: `wide_config`."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from transformers import PretrainedConfig

from mupscale.errors import UserError
from mupscale.hf.config_fields import Kind, fields_of, kind_of, parts
from mupscale.hf.config_shrunken import HEAD_SIZE, HEADS, HIDDEN

Factor = int | float | Fraction

# families in which the slope of a head is a function of the number of heads, and no field says so
_SLOPES_OF_HEADS = {"bloom", "minimax"}
_HEAD_SIZE = (*HEAD_SIZE, "qk_head_dim", "mamba_d_head")


def wide_config(
    config: PretrainedConfig,
    factor: Factor,
    *,
    keep_heads: bool | None = None,
    only: Literal["feed_forward"] | None = None,
    fields: Mapping[str, Factor] | None = None,
) -> PretrainedConfig:
    """A copy of `config` in which every width is `factor` times as large, in nested configurations too.

    Hidden, feed-forward and expert sizes and numbers of heads grow. The size of a head, ranks, state sizes, vocabulary,
    depth, number of experts, and sizes of images and patches stay. Fields that are None, 0 or -1 stay as they are: the
    model derives their value from others.

    `keep_heads=True` keeps the number of heads; None does so where a head's ALiBi slope depends on their number.
    `only="feed_forward"` grows feed-forward and expert sizes alone. `fields` has other factors by field name, or by
    path as in "text_config.hidden_size"; they hold whatever the other arguments say.

    Examples:
        >>> from transformers import LlamaConfig
        >>> wide = wide_config(LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4), 2)
        >>> wide.hidden_size, wide.intermediate_size, wide.num_attention_heads, wide.head_dim
        (128, 192, 8, 16)
    """
    if not isinstance(config, PretrainedConfig):
        raise UserError(f"wide_config: config must be a PretrainedConfig of transformers, got {type(config).__name__}")
    if only not in (None, "feed_forward"):
        raise UserError(f"wide_config: only must be 'feed_forward' or None, got {only!r}")
    given = {name: _fraction(f"fields[{name!r}]", value) for name, value in (fields or {}).items()}
    common = _fraction("factor", factor)
    return _scaled(config, common, keep_heads, only, given)


@dataclass(frozen=True)
class ConfigGrowth:
    """By how much the widths of a configuration grow. `ConfigGrowth(2).wide(config)` is the wide configuration."""

    factor: float
    keep_heads: bool | None = None
    """Whether the number of heads stays, so that head_dim grows; None decides by the family."""
    only: Literal["feed_forward"] | None = None
    """`feed_forward`: only the intermediate sizes grow."""
    fields: Mapping[str, float] | None = None
    """Other factors, by the name of the field."""
    has_layers: bool = False
    """Whether the model becomes deeper too, so that its width may stay."""

    def wide(self, config: PretrainedConfig) -> PretrainedConfig:
        """The wide configuration. UserError where a size would not be whole, or where nothing grows."""
        wide = wide_config(config, self.factor, keep_heads=self.keep_heads, only=self.only, fields=self.fields)
        if not self.has_layers and not self.widens(config, wide):
            raise UserError(f"factor {self.factor:g} leaves every size as it is; give a larger one, or more layers")
        return wide

    def widens(self, config: PretrainedConfig, wide: PretrainedConfig) -> bool:
        return wide.to_dict() != config.to_dict()


def config_at(config: PretrainedConfig, hidden_size: int) -> PretrainedConfig:
    """A copy of `config` with another hidden size, larger or smaller; all that `wide_config` grows follows its ratio.

    >>> from transformers import LlamaConfig
    >>> config_at(LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4), 32).intermediate_size
    48
    """
    if hidden_size == hidden_size_of(config):
        return copy.deepcopy(config)
    return _scaled(config, Fraction(hidden_size, hidden_size_of(config)), None, None, {})


def hidden_size_of(config: PretrainedConfig) -> int:
    """The width of the residual stream; of a model with several parts, that of the text."""
    values = vars(config.get_text_config())
    for name in HIDDEN:
        if isinstance(values.get(name), int):
            return values[name]
    raise UserError(f"the configuration of {config.model_type!r} has no hidden size; it is none of {', '.join(HIDDEN)}")


def _scaled(
    config: PretrainedConfig,
    common: Fraction,
    keep_heads: bool | None,
    only: Literal["feed_forward"] | None,
    given: Mapping[str, Fraction],
) -> PretrainedConfig:
    wide = copy.deepcopy(config)
    used: set[str] = set()
    grown: set[str] = set()
    for path, part in parts(wide):
        heads_stay = _slopes(part, config) if keep_heads is None else keep_heads
        for name, value in list(fields_of(part)):
            key = next((key for key in (path + name, name) if key in given), None)
            kind = kind_of(name, value, vars(part))
            if key is not None:
                used.add(key)
                here = given[key]
            elif only is not None:
                here = common if kind == "feed_forward" else Fraction(1)
            else:
                here = _factor_of(path + name, value, kind, common, heads_stay)
            if here != 1:
                new = _times(path + name, value, here)
                if new != value:
                    grown.add(path + name)
                    setattr(part, name, new)
                elif key is not None:
                    raise UserError(
                        f"{path}{name} is {value!r}: the model derives its value; set it before it can grow"
                    )
    _refuse_unused(given.keys() - used, config)
    if common != 1 and not grown:
        what = "no feed-forward size that is set" if only else "no width"
        raise UserError(f"the configuration of {config.model_type!r} has {what}; name the fields, as in fields={{...}}")
    _refuse_odd_heads(config, wide)
    return wide


def _factor_of(name: str, value: Any, kind: Kind, factor: Fraction, heads_stay: bool) -> Fraction:
    if kind in ("feed_forward", "width") or (kind == "heads" and not heads_stay):
        return factor
    if kind == "unknown" and _sizes(value) and factor != 1:
        raise UserError(
            f"field {name!r} = {value!r} looks like a size, and it is not known whether it grows with the width. Say "
            f"so: fields={{{name!r}: {factor}}} grows it, fields={{{name!r}: 1}} keeps it"
        )
    if kind == "refused" and factor != 1:
        raise UserError(f"field {name!r} has widths among other numbers; the configuration cannot be widened by fields")
    return Fraction(1)


def _slopes(part: PretrainedConfig, whole: PretrainedConfig) -> bool:
    """Whether attention has ALiBi slopes, or others that depend on the number of heads."""
    if {part.model_type, whole.model_type} & _SLOPES_OF_HEADS:
        return True
    attention = getattr(part, "attn_config", None)
    position = str(getattr(part, "position_embedding_type", ""))
    return any(getattr(place, "alibi", False) is True for place in (part, attention)) or "alibi" in position


def _fraction(name: str, factor: Any) -> Fraction:
    whole = isinstance(factor, int | float | Fraction) and not isinstance(factor, bool)
    if not whole or not math.isfinite(factor) or factor < 1:
        raise UserError(f"wide_config: {name} must be a number of at least 1, got {factor!r}")
    return Fraction(factor).limit_denominator(1 << 16)


def _sizes(value: Any) -> Iterator[int] | list[int]:
    """The numbers in a field that are sizes: whole and positive."""
    if isinstance(value, list | tuple):
        return [size for entry in value for size in _sizes(entry)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) and value > 0 else []


def _times(name: str, value: Any, factor: Fraction) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_times(name, entry, factor) for entry in value)
    if isinstance(value, float):
        return float(value * factor)
    if value is None or isinstance(value, bool | str) or value <= 0:
        return value
    size = value * factor
    if size.denominator != 1:
        raise UserError(
            f"{name} = {value} times {factor} is not whole; choose another factor, or fields={{{name!r}: ...}}"
        )
    return int(size)


def _refuse_unused(names: set[str], config: PretrainedConfig) -> None:
    if names:
        name = sorted(names)[0]
        raise UserError(f"fields: the configuration of {config.model_type!r} has no field {name!r} with a size in it")


def _refuse_odd_heads(narrow: PretrainedConfig, wide: PretrainedConfig) -> None:
    """Where the size of a head is hidden / heads, it must stay whole."""
    for (path, before), (_, after) in zip(parts(narrow), parts(wide), strict=True):
        old, new = vars(before), vars(after)
        hidden = next((name for name in HIDDEN if isinstance(new.get(name), int)), None)
        if hidden is None or any(new.get(name) for name in _HEAD_SIZE):
            continue
        for heads in HEADS:
            count = new.get(heads)
            if isinstance(count, int) and count > 0 and new[hidden] % count and old[hidden] % old[heads] == 0:
                raise UserError(
                    f"{path}{hidden} = {new[hidden]} is not divisible by {path}{heads} = {count}; choose factors of "
                    "these two fields for which it is"
                )
