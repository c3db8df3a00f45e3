"""Configurations of the transformers library with more layers: `deep_config`."""

import copy
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PretrainedConfig

from mupscale.hf.config_fields import parts
from mupscale.hf.config_shrunken import DEPTH, LAYER_NUMBERS

_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers")
"""Lists with an entry for each layer, whatever a fresh configuration says."""
_WINDOWS = "attention_window"
"""A list with an entry for each layer that is not of a decoder."""
_REPEATED = ("block_types",)
"""Lists that are shorter than the number of layers, and repeated."""
_FIRST = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers")
"""How many of the first layers are of one kind."""
_LAST = "moe_layer_end_index"
"""The last layer of one kind."""
_BRANCHES = "scale_depth"
"""Branches are multiplied by this over the square root of the number of layers."""


def numbers_of_layers(config: PretrainedConfig) -> dict[str, int]:
    """The fields that look like a number of layers, by their paths; or a list with an entry for each layer.

    >>> from transformers import T5Config
    >>> numbers_of_layers(T5Config(num_layers=6, num_decoder_layers=4))
    {'num_layers': 6, 'num_decoder_layers': 4}
    """
    answer: dict[str, int] = {}
    for path, part in parts(config):
        found = {name: value for name, value in vars(part).items() if DEPTH.fullmatch(name) and _is_count(value)}
        lists = {name: len(vars(part)[name]) for name in _BY_LAYER if vars(part).get(name)}
        answer |= {path + name: value for name, value in (found or lists).items()}
    return answer


def layers_of(config: PretrainedConfig) -> tuple[str, int] | None:
    """The path of the number of layers of the text model, and the number; None if the configuration has none."""
    text = config.get_text_config()
    name = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    numbers = numbers_of_layers(config)
    paths = [path + name for path, part in parts(config) if part is text and path + name in numbers]
    return (paths[0], numbers[paths[0]]) if paths else None


def config_with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A copy of `config` with so many layers; their kinds are spread evenly.

    >>> from transformers import GPT2Config
    >>> config_with_layers(GPT2Config(n_layer=2), 6).n_layer
    6
    """
    found = layers_of(config)
    assert found is not None
    field, old = found
    if layers == old:
        return config
    return deep_config(config, field, [number * old // layers for number in range(layers)], numbers_of_layers(config))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def deep_config(
    config: PretrainedConfig, field: str, sources: Sequence[int], others: Collection[str] = ()
) -> PretrainedConfig:
    """A copy of `config` with a layer for each of `sources`, which is of the kind of that layer in `config`.

    Args:
        config: The configuration of the shallow model.
        field: The path of the number of layers, such as `num_hidden_layers` or `text_config.num_hidden_layers`.
        sources: For each layer of the deep model, the number of a layer of the shallow one.
        others: Paths of numbers of other layers, which stay.

    Examples:
        >>> from transformers import Qwen2Config
        >>> kinds = ["sliding_attention", "full_attention"]
        >>> deep = deep_config(Qwen2Config(num_hidden_layers=2, layer_types=kinds), "num_hidden_layers", [0, 0, 1, 1])
        >>> deep.num_hidden_layers, deep.layer_types
        (4, ['sliding_attention', 'sliding_attention', 'full_attention', 'full_attention'])
    """
    deep = copy.deepcopy(config)
    prefix, dot, name = field.rpartition(".")
    part = dict(parts(deep))[prefix + dot]
    old = numbers_of_layers(config)[field]
    by_layer, equal = _following(part, name)
    by_layer |= {name, *_BY_LAYER} if "decoder" in name else {name, *_BY_LAYER, _WINDOWS}
    kept = {path.rpartition(".")[2] for path in others if path.rpartition(".")[0] == prefix} - {name}
    for each, value in list(vars(part).items()):
        if (each == name or each in equal - kept) and value == old:
            setattr(part, each, len(sources))
        elif isinstance(value, list | tuple | str) and value:
            changed = _changed_list(each, value, old, sources, by_layer)
            if changed is not None:
                setattr(part, each, changed)
        elif _FIRST.fullmatch(each) and _is_count(value) and value <= old:
            setattr(part, each, sum(source < value for source in sources))
        elif each == _LAST and _is_count(value):
            setattr(part, each, max(number for number, source in enumerate(sources) if source <= value))
        elif each == _BRANCHES and value:
            setattr(part, each, value * math.sqrt(len(sources) / old))
    return deep


def _changed_list(name: str, value: Any, old: int, sources: Sequence[int], by_layer: Collection[str]) -> Any:
    """A list of the deep configuration; None if it does not depend on the layers."""
    if name == "attention_types":  # GPT-Neo's [[kinds, how often they are repeated], ...]
        flat = [kind for kinds, times in value for _ in range(times) for kind in kinds]
        return [[[flat[source] for source in sources], 1]]
    if name in _REPEATED:
        return type(value)(value[source % len(value)] for source in sources)
    if LAYER_NUMBERS.fullmatch(name):
        if name in ("out_indices", "_out_indices") or not all(isinstance(each, int) for each in value):
            return None
        return type(value)(number for number, source in enumerate(sources) if source in value)
    if len(value) != old or not (name in by_layer or name.endswith("_pattern")):
        return None
    entries = [value[source] for source in sources]
    return "".join(entries) if isinstance(value, str) else type(value)(entries)


def _following(part: PretrainedConfig, name: str) -> tuple[set[str], set[str]]:
    """The fields whose length, and those whose value, is the number of layers in fresh configurations."""
    kind: Any = type(part)
    try:
        five, seven = (vars(kind(**{name: count})) for count in (5, 7))
    except Exception:  # whatever it is, another field has to be set too
        return set(), set()
    lists = {each for each, value in five.items() if isinstance(value, list | tuple) and len(value) == 5}
    lists = {each for each in lists if isinstance(seven[each], list | tuple) and len(seven[each]) == 7}
    numbers = {each for each, value in five.items() if DEPTH.fullmatch(each) and value == 5 and seven[each] == 7}
    return lists, numbers
