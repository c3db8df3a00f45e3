"""Configurations of the transformers library, wider (`wide_config`) or with more layers (`deep_config`).

Which fields are widths is decided by name patterns, not by models. A pattern matches a whole field name, and the first
list that has a match decides, in the order of `kind_of`.
"""

import copy
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from transformers import PretrainedConfig

from mupscale.errors import UserError

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
HEAD_SIZE = ("head_dim", "d_kv", "d_head", "attention_head_dim", "attention_head_size", "dim_head", "kv_channels")
DEPTH = re.compile(
    r"(.*_)?n(um)?_(hidden_|decoder_|encoder_|conv_)?layers?|(.*_)?(encoder|decoder)_layers"
    r"|depth|layers|[lrx]_layers|num_blocks"
)
LAYER_NUMBERS = re.compile(r".*(indexes|indices|idxs|layer_ids)|(mlp_only|moe|cross_attention|kv_source)_layers")

Kind = Literal["feed_forward", "heads", "width", "kept", "refused", "unknown"]

_KEPT = (  # names that look like widths and are none
    # of one head, of a low-rank factor, of a state, of a group
    r"(.*_)?head_?dim(_.*)?|(.*_)?head_size|(.*_)?dim_head|d_kv|d_rel|kv_channels|key_dim",
    r"(mamba_)?d_(state|conv|head)|groups_width|(.*_)?(ssm_)?state_(size|dim)|rotary_(emb_)?dim|(.*_)?kernel_dim",
    r"conv1d_width",
    # what goes in and comes out
    r"(.*_)?vocab_sizes?|codebook_(size|dim)|(.*_)?codevector_dim|(.*_)?image_sizes?|(.*_)?img_size|(.*_)?patch_size",
    r"num_.*(features|channels)|(audio_|input_|stem_num_)?channels|output_num_channels|patch_sizes",
    r"(text_|audio_|vision_)?projection_dim|project_dim|classifier_proj_size|(xvector_)?output_dim|input_dim",
    r"feature_projection_input_dim|(act|state|max_action|max_state|mel|model_in|visual_pos|visual_feat|query)_dim",
    r"visual_embedding_dim|speaker_embedding_(dim|size)|(lang|spkr|speaker)_embed_dim|input_feat_per_channel",
    r"pooler_output_size|retrieval_vector_size|(.*_)?input_channels|head_out_channels|image_embedding_size",
    r"frequency_embedding_size|latent_(dim|size)",
    # lengths, windows, strides, counts
    r"(.*_)?(window|block|chunk|kernel|merge|stride|grid|masked_unit|beam|batch|pool|roi|crop|tile|tubelet)_?sizes?",
    r"(.*_)?feat(ure)?_sizes|(.*_)?rope_(feat|k)_sizes",
    r"(.*_)?(cache|ngram|group|posemb|pos_emb|frame|shot|spec|input|image_feature_pool|mask|freq|final|train)_size",
    r"median_filter_width|pos_emb_width|temperature_width|intermediate_multiple_size|index_n_heads",
    r"guided_attention_loss_num_heads|fine_matching_slice_dim|.*_dilation_sizes|model_parallel_size",
    r"base_attn_unit_dims|chunk_size_.*|max_pos_emb|scale_emb|context_size|feature_size|patch_dim|(.*_)?prompt_size",
    r"kernel_predictor_conv_size|_label_trainable_num_channels|depth_separable_channels|position_embedding_size",
    r"window_positional_.*|fpn_feature_size|keypoint_decoder_dim|input_feat_size",
)
_FEED_FORWARD = (
    r"(.*_)?intermediate_(dim|size)s?(_.*)?|(.*_)?ffn_(dim|size|hidden_size)|n_inner|d_inner|d_ff|dff|dim_ff",
    r"(.*_)?dim_feedforward|(.*_)?feed_?forward_(dim|size|hidden_size)|(.*_)?mlp_(dim|size|hidden_size)",
    r"(.*_)?linear_units|(.*_)?experts?_(dim|size)|moe_(dim|size|hidden_size)",
)
_HEADS = (
    r"(.*_)?n(um)?_(.*_)?heads?(_per_(layer|stage))?|(.*_)?heads|(mamba_)?n_?groups|num_query_groups|[qkv]_groups",
    r"(intermediate|output|post_attention)_groups|upsample_groups|num_conv_pos_embedding_groups",
)
_WIDTH = (
    r"(.*_)?hidden_(size|dim|channel)s?(_.*)?|n_embd|(.*_)?d_model|dim|d_latents|emb_dim|lru_width",
    r"(.*_)?embed_dims?(_per_stage)?|(.*_)?embedding_(size|dim)|word_embed_proj_dim|(.*_)?emb_size|mamba_d_ssm",
    r"time_step_rank|mamba_dt_rank|intra_bottleneck_size|conv_dim|tdnn_dim|text_encoder_width",
    r"projector_(input|output)_dim|vision_output_dim|mask_dim|descriptor_dim|descriptor_decoder_dim|prompt_mid_dim",
    r"(.*_)?predictor_(filter_)?channels|(.*_)?(pre|post)net_units|text_projection_(in|out)_dim|bottleneck_features",
    r"(.*_)?conv_channels|depth_multiplier|width_multiplier|reduce_dim|flow_size|vit_dim",
    r"(.*_)?(stem|base|stage_in|stage_mid|stage_out|auxiliary|subsampling_conv|downsample|latent)_channels?(_list)?",
    r"coordinate_size|shape_size|upsample_initial_channel|backbone_channel_list|num_filters",
    r"mask_feature_(size|channels)|projection_size|axial_pos_embds_dim|width_coefficient|(.*_)?out_channels?",
    r"(decoder|encoder)_in_channels|(.*_)?feature_dims|vision_features_channels|output_channels|post_process_channels",
)
_LISTS_ONLY = r"in_channels|out_channels"  # a number under this name is that of an image or of a latent
_MULTIPLIER = "width_coefficient"  # where it is, the channels in the lists are multiplied by it
_REFUSED = (
    r"block_configs|stage_configs|resnet_configs|resnet_head|down_ops|detectron2_config_args|out_point_positions2D"
)
_SIZE = r".*(size|dim|width|channel|unit|head|feature|embd|emb|hidden|inner)s?|(.*_)?d_[a-z]+"
_FEED_FORWARD_BESIDE = {"hidden_dim": "dim"}  # DistilBERT's names for the feed-forward and the hidden size
_PROJECTED_TO_TEXT = {"image_token_id", "image_token_index", "vision_use_head"}
"""Beside one of these, `projection_dim` is the width of the text: PaliGemma's."""


_TABLE: dict[Kind, re.Pattern[str]] = {
    "kept": re.compile("|".join(_KEPT)),
    "feed_forward": re.compile("|".join(_FEED_FORWARD)),
    "heads": re.compile("|".join(_HEADS)),
    "width": re.compile("|".join(_WIDTH)),
}


def kind_of(name: str, value: Any, beside: Any = ()) -> Kind:
    """What a field is: a feed-forward size, a number of heads, another width, or none of these.

    `beside` has the names of the other fields. `unknown` looks like a size, and no pattern decides.

    >>> kind_of("moe_intermediate_size", 768), kind_of("num_key_value_heads", 2), kind_of("head_dim", 64)
    ('feed_forward', 'heads', 'kept')
    """
    if re.fullmatch(_REFUSED, name):
        return "refused" if value else "kept"
    if re.fullmatch(_LISTS_ONLY, name):
        return "width" if isinstance(value, list | tuple) and _MULTIPLIER not in beside else "kept"
    if _FEED_FORWARD_BESIDE.get(name) in beside:
        return "feed_forward"
    if name == "projection_dim" and not _PROJECTED_TO_TEXT.isdisjoint(beside):
        return "width"
    for kind, pattern in _TABLE.items():
        if pattern.fullmatch(name):
            return kind
    return "unknown" if re.fullmatch(_SIZE, name) else "kept"


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def map_sizes(change: Callable[[int], Any], value: Any) -> Any:
    """A value with other sizes in it, in lists each of them."""
    if isinstance(value, list | tuple):
        return type(value)(map_sizes(change, each) for each in value)
    return change(value) if is_count(value) else value


def parts(config: PretrainedConfig, path: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """The configuration, then every nested one once, each with the path in front of its fields' names."""
    seen: set[int] = set()
    queue = [(path, config)]
    while queue:
        path, part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        queue += [
            (f"{path}{name}.", value) for name, value in vars(part).items() if isinstance(value, PretrainedConfig)
        ]


def fields_of(part: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The fields that may hold sizes: numbers, and lists of numbers."""
    for name, value in vars(part).items():
        if name in ("transformers_version", "id2label", "label2id", "torch_dtype", "dtype"):
            continue
        if isinstance(value, bool | str | dict | PretrainedConfig):
            continue
        yield name, value


def sizes_of_layers(part: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """The fields that single layers have for themselves, by the number of the layer: Gemma 4's larger heads."""
    spec = vars(part).get("_heterogeneity_spec")
    return {} if spec is None else dict(spec.per_layer_overrides)


def set_sizes_of_layers(part: PretrainedConfig, sizes: dict[Any, dict[str, Any]]) -> None:
    part.per_layer_config = None  # or reading a field that is set here would be refused
    if sizes:
        part.per_layer_config = sizes


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
            if key is not None and DEPTH.fullmatch(name):
                raise UserError(f"{path}{name} is a number of layers, no width: give --layers {path}{name}=N")
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
        for row in sizes_of_layers(part).values():
            widths = {name: value for name, value in row.items() if kind_of(name, value, vars(part)) != "kept"}
            if widths and common != 1:
                raise UserError(f"{path}{min(widths)} differs by layer ({widths}); how such sizes grow is not known")
    unused = sorted(given.keys() - used)
    if unused:
        raise UserError(f"fields: the configuration of {config.model_type!r} has no field {unused[0]!r} of sizes")
    if common != 1 and not grown:
        what = "no feed-forward size that is set" if only else "no width"
        raise UserError(f"the configuration of {config.model_type!r} has {what}; name the fields, as in fields={{...}}")
    _refuse_odd_heads(config, wide)
    return wide


def _factor_of(name: str, value: Any, kind: Kind, factor: Fraction, heads_stay: bool) -> Fraction:
    if kind in ("feed_forward", "width") or (kind == "heads" and not heads_stay):
        return factor
    if kind == "unknown" and factor != 1 and map_sizes(lambda size: 0, value) != value:
        raise UserError(
            f"field {name!r} = {value!r} looks like a size, and it is not known whether it grows with the width. Say "
            f"so: fields={{{name!r}: {factor}}} grows it, fields={{{name!r}: 1}} keeps it"
        )
    if kind == "refused" and factor != 1:
        raise UserError(f"field {name!r} has widths among other numbers; the configuration cannot grow by fields")
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


def _times(name: str, value: Any, factor: Fraction) -> Any:
    def times(size: int) -> int:
        product = size * factor
        if product.denominator != 1:
            raise UserError(
                f"{name} = {size} times {factor} is not whole; choose another factor, or fields={{{name!r}: ...}}"
            )
        return int(product)

    return float(value * factor) if isinstance(value, float) else map_sizes(times, value)


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


BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers")
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
        found = {name: value for name, value in vars(part).items() if DEPTH.fullmatch(name) and is_count(value)}
        lists = {name: len(vars(part)[name]) for name in BY_LAYER if vars(part).get(name)}
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


def deep_config(
    config: PretrainedConfig, field: str, sources: Sequence[int], others: Collection[str] = ()
) -> PretrainedConfig:
    """A copy of `config` with a layer for each of `sources`, which is of the kind of that layer in `config`.

    `field` is the path of the number of layers, such as `text_config.num_hidden_layers`; `others` are paths of numbers
    of other layers, which stay.

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
    by_layer |= {name, *BY_LAYER} if "decoder" in name else {name, *BY_LAYER, _WINDOWS}
    kept = {path.rpartition(".")[2] for path in others if path.rpartition(".")[0] == prefix} - {name}
    for each, value in list(vars(part).items()):
        if (each == name or each in equal - kept) and value == old:
            setattr(part, each, len(sources))
        elif isinstance(value, list | tuple | str) and value:
            changed = _changed_list(each, value, old, sources, by_layer)
            if changed is not None:
                setattr(part, each, changed)
        elif _FIRST.fullmatch(each) and is_count(value) and value <= old:
            setattr(part, each, sum(source < value for source in sources))
        elif each == _LAST and is_count(value):
            setattr(part, each, max(number for number, source in enumerate(sources) if source <= value))
        elif each == _BRANCHES and value:
            setattr(part, each, value * math.sqrt(len(sources) / old))
    own = sizes_of_layers(part)
    if own:
        set_sizes_of_layers(part, {new: own[source] for new, source in enumerate(sources) if source in own})
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
