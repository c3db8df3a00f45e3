"""The same family at the smallest size that still shows its structure: `shrunken`.

Ratios of heads, flags, activations, kinds of layers and the number of experts that a token uses stay. Equal sizes stay
equal, a whole multiple of the hidden size stays that multiple, and all other sizes become different from each other.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from mupscale.hf.config import (
    DEPTH,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    LAYER_NUMBERS,
    fields_of,
    is_count,
    kind_of,
    map_sizes,
    parts,
    set_sizes_of_layers,
    sizes_of_layers,
)

_STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("n_mamba_heads", "mamba_headdim"),
)
_SMALL_HEADS = (8, 10, 12, 16, 20, 24, 32, 40, 64)
_VOCABULARIES = (61, 67, 71, 73, 79, 83, 89, 97)  # primes: no size is equal to them, nor any multiple of one
_LAYERS = 2
_PATCH, _SIDE = 4, 4
"""Sizes of an image: pixels along the side of a patch, and patches along the side of the image."""
_STAGES = re.compile(r"depths?|block_sizes|blocks_per_stage|num_block_repeats|stage_num_blocks")
_TOKEN = re.compile(r"(.*_)?token_(ids?|index)|.*_(bos|eos|pad)_id|(begin_)?suppress_tokens|(tag|subs)_pad_id")
_CAPS = {
    r"(.*_)?max_.*position.*|n_positions|n_ctx|max_seq_len|max_(source|target)_.*": 52,
    r"(.*_)?sliding_windows?(_size)?|attention_window(_size)?|(.*_)?chunk_size|(.*_)?local_attention": 4,
    r"block_multiple_of|ffn_round_up_to_multiple_of": 8,
    r"(.*_)?(ssm_)?state_size|(mamba_)?d_state": 4,
}
"""The largest values of lengths, windows, multiples and states. Lengths are whole groups of four frames of a sound, and
no multiple of 8, as widths are."""
_EXPERTS = re.compile(r"(.*_)?num_(local_)?experts|n_routed_experts|(.*_)?n_experts")
_PER_TOKEN = re.compile(r"(.*_)?(num_experts_per_tok(en)?|moe_topk|moe_k|top_?k(_experts)?|moe_top_k|router_topk)")
_RANK = re.compile(r"(?!time_step_|mamba_dt_)(.*_)?rank")
_LINEAR_HEADS = r"linear_num_.*heads"
_LATENT_HEADS = ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")


def shrunken(config: PretrainedConfig, *, keep_layers: bool = False) -> PretrainedConfig:
    """A copy of `config` with the same structure at the smallest sizes; its model takes milliseconds to build and run.

    With `keep_layers` it has as many layers as `config`.

    >>> from transformers import LlamaConfig
    >>> small = shrunken(LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8))
    >>> small.hidden_size, small.num_attention_heads, small.num_key_value_heads, small.num_hidden_layers
    (64, 8, 2, 2)
    """
    small = copy.deepcopy(config)
    sizes = _Sizes()
    for _, part in parts(small):
        _shrink_heads(part, sizes)
    for _, part in parts(small):
        _shrink_widths(part, sizes)
        _change(part, _RANK, lambda rank: sizes.new(rank) if rank > 8 else rank)
        if not keep_layers:
            _shrink_layers(part)
        _shrink_experts(part)
        for pattern, most in _CAPS.items():
            _cap(part, pattern, most)
        _shrink_image(part)
    for _, part in parts(small):
        _shrink_features_of_images(part)
    _shrink_vocabulary(small)
    for (_, before), (_, after) in zip(parts(config), parts(small), strict=True):
        rows, old, new = sizes_of_layers(before), vars(before), vars(after)
        if rows:
            rows = {layer: row for layer, row in rows.items() if layer < new["num_hidden_layers"]}
            scaled = {n: {k: v * new[k] // old[k] if is_count(v) else v for k, v in r.items()} for n, r in rows.items()}
            set_sizes_of_layers(after, scaled)
    return small


class _Sizes:
    """Small sizes by the size they stand for. One that stands for nothing else yet is unlike all others."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self.taken: set[int] = set()

    def hold(self, size: int, small: int) -> int:
        self.of[size] = small
        self.taken.add(small)
        return small

    def new(self, size: int) -> int:
        if size in self.of:
            return self.of[size]
        candidate = 24
        while candidate in self.taken or candidate // 2 in self.taken or candidate * 2 in self.taken:
            candidate += 8
        return self.hold(size, min(candidate, size))


def _change(part: PretrainedConfig, pattern: str | re.Pattern[str], small: Callable[[int], int]) -> None:
    """Makes the sizes smaller in the fields that match, in lists each of them."""
    for name, value in list(fields_of(part)):
        if re.fullmatch(pattern, name):
            setattr(part, name, map_sizes(small, value))


def _cap(part: PretrainedConfig, pattern: str | re.Pattern[str], most: int) -> None:
    """Lowers the fields that match to at most a number."""
    _change(part, pattern, lambda value: min(value, most))


def _first(values: dict[str, Any], names: Iterable[str]) -> str | None:
    return next((name for name in names if is_count(values.get(name))), None)


def _hidden(values: dict[str, Any]) -> str | None:
    """The field of the width; the hidden size of Qwen2-VL's vision tower is that of what it returns."""
    own = ("embed_dim",) if "spatial_merge_size" in values else ()
    return _first(values, (*own, *HIDDEN))


def _attention_heads(part: PretrainedConfig) -> dict[str, int]:
    """Numbers of heads of attention: whole numbers, those of state-space and linear layers left out."""
    heads = {name: value for name, value in fields_of(part) if is_count(value) and kind_of(name, value) == "heads"}
    return {name: value for name, value in heads.items() if not re.search("mamba|linear|groups", name)}


def _base(ratios: list[int], common: int) -> int:
    """How many heads the smallest number of them becomes."""
    candidates = (4, 2, 3, 5, 7) if len(set(ratios)) == 1 else (2, 3, 5, 7)
    return next((count for count in candidates if common % count == 0), min(common, 3))


def _shrink_heads(part: PretrainedConfig, sizes: _Sizes) -> None:
    values = vars(part)
    heads = _attention_heads(part)
    hidden, count = _hidden(values), _first(values, HEADS)
    is_mamba_2 = "state_size" in values and "head_dim" in values  # which has no attention
    if _has_stages(part) or not heads or is_mamba_2:
        return
    if count is None:
        count = max(heads, key=lambda name: heads[name])
    common = math.gcd(*heads.values())
    base = _base([value // common for value in heads.values()], common)
    before = values[count]
    for name, value in heads.items():
        setattr(part, name, value // common * base)
    if values.get("qk_nope_head_dim"):
        _shrink_latent_heads(part)
    explicit = _first(values, HEAD_SIZE)
    width = values[hidden] if hidden is not None else 0
    head_size = values[explicit] if explicit is not None else max(width // before, 1)
    if values.get("qk_nope_head_dim"):
        small = 8
    else:
        small = _small_head(part, head_size)
        if explicit is not None:
            setattr(part, explicit, small)
    sizes.taken |= {small * value for value in _attention_heads(part).values()}
    if hidden is None:
        return
    attention, ratio = before * head_size, values[count] * small
    if width % attention == 0 and not values.get("qk_nope_head_dim"):
        ratio *= width // attention
    elif attention % width == 0 and ratio % (attention // width) == 0:
        ratio //= attention // width
    else:
        ratio = sizes.new(width)
    already = sizes.of.get(width)
    if already is not None and already % ratio:
        ratio = math.lcm(already, ratio)
    sizes.hold(width, max(ratio, already or 0))


def _shrink_latent_heads(part: PretrainedConfig) -> None:
    """The head sizes of latent attention: one with positions, one without, one of the values."""
    before = {name: vars(part)[name] for name in _LATENT_HEADS}
    plain, value, rotary = (before[name] for name in _LATENT_HEADS)
    after = {
        "qk_nope_head_dim": 8,
        "v_head_dim": 8 if value == plain else 12,
        "qk_rope_head_dim": 4 + 4 * (rotary == plain),
    }
    small = {before[name]: after[name] for name in _LATENT_HEADS}
    small[plain + rotary] = after["qk_nope_head_dim"] + after["qk_rope_head_dim"]
    for name in ("qk_head_dim", "head_dim"):
        if vars(part).get(name) in small:
            setattr(part, name, small[vars(part)[name]])
    for name, size in after.items():
        setattr(part, name, size)


def _rope_tables(part: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """The rotary parameters: one table, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        table = vars(part).get(name)
        if isinstance(table, dict):
            yield table
            yield from (entry for entry in table.values() if isinstance(entry, dict))


def _small_head(part: PretrainedConfig, before: int) -> int:
    """A small size of a head of which the rotary part is whole and even; the rotary tables follow it."""
    values = vars(part)
    found: list[Any] = [values.get(name) for name in ("partial_rotary_factor", "rotary_pct", "rotary_percent")]
    found += [table.get("partial_rotary_factor") for table in _rope_tables(part)]
    if is_count(values.get("rotary_dim")):
        found.append(values["rotary_dim"] / before)
    if "spatial_merge_size" in values:  # half of the head turns with the row of a patch, half with its column
        found.append(0.5)
    shares = [share for share in found if isinstance(share, int | float) and 0 < share <= 1]
    sections = any("mrope_section" in table for table in _rope_tables(part))
    fitting = [size for size in _SMALL_HEADS if 16 * sections <= size < before]
    rotary = {size: [size * share / 2 for share in shares] for size in fitting}
    small = next((size for size in fitting if all(abs(half - round(half)) < 5e-10 for half in rotary[size])), before)
    if is_count(values.get("rotary_dim")):
        part.rotary_dim = round(values["rotary_dim"] / before * small)
    for table in _rope_tables(part):
        _shrink_rope(table, small, min([1.0, *shares]))
    return small


def _shrink_rope(table: dict[str, Any], head_size: int, share: float) -> None:
    pairs = round(head_size * share) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(table.get(name), list):
            table[name] = table[name][:pairs]
    sections = table.get("mrope_section")
    if isinstance(sections, list) and sections:
        small = [max(1, entry * pairs // sum(sections)) for entry in sections]
        small[-1] += pairs - sum(small)
        table["mrope_section"] = small


def _has_stages(part: PretrainedConfig) -> bool:
    """Whether widths or heads are given by stage, as in a convolutional network or Swin."""
    return any(
        isinstance(value, list | tuple) and kind_of(name, value) in ("width", "heads") and all(map(is_count, value))
        for name, value in fields_of(part)
        if value and name not in ("conv_dim", "tdnn_dim") and not name.endswith("_per_layer")
    )


def _shrink_widths(part: PretrainedConfig, sizes: _Sizes) -> None:
    values = vars(part)
    widths = {n: v for n, v in fields_of(part) if kind_of(n, v, values) in ("width", "feed_forward")}
    if _has_stages(part):
        _shrink_stages(part, widths)
        return
    hidden = _hidden(values)
    before = values[hidden] if hidden is not None else 0
    after = sizes.new(before) if hidden is not None else 0
    for name, value in widths.items():
        is_rank = name in ("time_step_rank", "mamba_dt_rank")
        small = (lambda _: math.ceil(after / 16)) if is_rank else partial(_related, before, after, sizes)
        setattr(part, name, map_sizes(small, value))
    for heads, head_size in _STATE_HEADS:
        _shrink_state_heads(part, heads, head_size, before, after)
    if "state_size" in values and "head_dim" in values and before:  # Mamba 2 has no attention
        _shrink_state_heads(part, "num_heads", "head_dim", before, after)
    _cap(part, "linear_(key_|value_)?head_dim", 8)
    common = math.gcd(*(v for n, v in fields_of(part) if re.fullmatch(_LINEAR_HEADS, n) and is_count(v)))
    _change(part, _LINEAR_HEADS, lambda count: count // common * min(2, common))


def _related(before: int, after: int, sizes: _Sizes, value: int) -> int:
    """A multiple of the hidden size stays that multiple; other sizes get one of their own."""
    if value < 8:
        return value
    if before and value % before == 0 and value // before <= 8:
        return sizes.hold(value, value // before * after) if value not in sizes.of else sizes.of[value]
    return sizes.new(value)


def _shrink_state_heads(part: PretrainedConfig, heads: str, head_size: str, before: int, after: int) -> None:
    values = vars(part)
    if not is_count(values.get(heads)):
        return
    inner = values[heads] * values[head_size] if is_count(values.get(head_size)) else 0
    if values.get("mamba_d_ssm") and inner:  # a width of its own
        setattr(part, head_size, 8)
        setattr(part, heads, values["mamba_d_ssm"] // 8)
    elif inner and inner % before == 0:
        setattr(part, head_size, 8)
        setattr(part, heads, inner // before * after // 8)
    elif not inner:
        setattr(part, heads, min(values[heads], 2))
    _cap(part, "n_groups|mamba_n_?groups", 2)


def _shrink_stages(part: PretrainedConfig, widths: dict[str, Any]) -> None:
    """Widths by stage keep their ratios, numbers of heads by stage as well."""
    heads = {n: v for n, v in fields_of(part) if kind_of(n, v) == "heads"}
    for sizes, most in ((widths, 8), (heads, 1)):
        found: list[int] = []
        map_sizes(found.append, list(sizes.values()))
        common = math.gcd(*found)
        for name, value in sizes.items():
            setattr(part, name, map_sizes(partial(_rescaled, common, min(common, most)), value))


def _rescaled(common: int, unit: int, size: int) -> int:
    return size // common * unit


def _shrink_layers(part: PretrainedConfig) -> None:
    values = vars(part)
    depth_names = [n for n, v in fields_of(part) if DEPTH.fullmatch(n) and is_count(v)]
    main = _first(values, ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth"))
    whole = values[main] if main is not None else 0
    per_layer = {
        name: value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == whole > _LAYERS and not LAYER_NUMBERS.fullmatch(name)
    }
    offsets = [value + 1 for name, value in fields_of(part) if name.endswith("_layer_offset") and is_count(value)]
    kept = max([_LAYERS, *offsets, *(_until_all_seen(value) for value in per_layer.values())])
    pattern = values.get("attention_types")
    if isinstance(pattern, list) and pattern and isinstance(pattern[0], list):
        part.attention_types = [[pattern[0][0], 1]]
        kept = len(pattern[0][0])
        per_layer["attention_layers"] = values.get("attention_layers", [])
    for name in depth_names:
        setattr(part, name, min(values[name], kept if name == main else _LAYERS))
    for name, value in per_layer.items():
        setattr(part, name, value[:kept])
    for name, value in list(vars(part).items()):
        if name in per_layer or not isinstance(value, list | tuple) or not value:
            continue
        if _STAGES.fullmatch(name) and all(map(is_count, value)):
            setattr(part, name, type(value)(min(entry, 2) for entry in value))
        elif LAYER_NUMBERS.fullmatch(name) and all(isinstance(entry, int) for entry in value) and main is not None:
            setattr(part, name, type(value)([entry for entry in value if entry < kept] or [kept - 1]))
    stages = values.get("stage_names")
    if isinstance(stages, list) and len(stages) == whole + 1:  # a backbone that names each layer
        part.stage_names = stages[: kept + 1]
        part._out_features = [part.stage_names[number] for number in part._out_indices]
    _cap(part, "first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1)
    if is_count(values.get("moe_layer_end_index")):
        part.moe_layer_end_index = kept - 1


def _until_all_seen(kinds: list[Any]) -> int:
    """How many layers it takes until every kind of layer was there.

    >>> _until_all_seen(["sliding", "sliding", "full", "sliding", "sliding", "full"])
    3
    """
    seen = [str(kind) for kind in kinds]
    return max(seen.index(kind) for kind in set(seen)) + 1


def _shrink_experts(part: PretrainedConfig) -> None:
    values = vars(part)
    used = max([1, *(v for n, v in fields_of(part) if _PER_TOKEN.fullmatch(n) and is_count(v))])
    groups = next((values[n] for n in ("n_group", "num_expert_group", "moe_n_group") if is_count(values.get(n))), 1)
    chosen = values["topk_group"] if is_count(values.get("topk_group")) else groups
    least = max(4, used + 1, 2 * groups, -(-used * groups // chosen))
    least = -(-least // groups) * groups
    _cap(part, _EXPERTS, least)


def _shrink_image(part: PretrainedConfig) -> None:
    image: Any = vars(part).get("image_size")
    patch: Any = vars(part).get("patch_size")
    sizes = list(image) if isinstance(image, list | tuple) else [image]
    patches = list(patch) if isinstance(patch, list | tuple) else [patch]
    if not all(map(is_count, [*sizes, *patches])) or len(set(patches)) > 1 or _has_stages(part):
        return
    if all(size % patches[0] == 0 for size in sizes):
        small = min(patches[0], _PATCH)
        part.patch_size = type(patch)([small] * len(patches)) if isinstance(patch, list | tuple) else small
        found = [small * min(size // patches[0], _SIDE) for size in sizes]
        part.image_size = type(image)(found) if isinstance(image, list | tuple) else found[0]


def _shrink_features_of_images(part: PretrainedConfig) -> None:
    """What a model takes of the layers and patches of its small vision tower."""
    tower = vars(part).get("vision_config")
    layers = next((getattr(tower, n) for n, _ in fields_of(tower) if DEPTH.fullmatch(n)), 1) if tower else 1
    taken = vars(part).get("vision_feature_layer")
    if isinstance(taken, list | tuple):
        part.vision_feature_layer = type(taken)(-1 - index % layers for index in range(len(taken)))
    elif isinstance(taken, int):
        part.vision_feature_layer = max(taken, -1 - layers) if taken < 0 else min(taken, layers)
    if is_count(vars(part).get("mm_tokens_per_image")):
        part.mm_tokens_per_image = min(part.mm_tokens_per_image, _SIDE)


def _shrink_vocabulary(config: PretrainedConfig) -> None:
    """Vocabularies become small ones; numbers of tokens that are beyond the smallest become its last ones."""
    new: dict[int, int] = {}
    for _, part in parts(config):
        for name, value in list(fields_of(part)):
            if re.fullmatch(r"(.*_)?vocab_size(_.*)?", name) and is_count(value) and value > _VOCABULARIES[-1]:
                new.setdefault(value, _VOCABULARIES[len(new) % len(_VOCABULARIES)])
                setattr(part, name, new[value])
    if not new:
        return
    last = min(new.values())
    tokens: dict[int, int] = {}

    def renumbered(token: Any) -> Any:
        if not isinstance(token, int) or isinstance(token, bool) or token < last - 16:
            return token
        return tokens.setdefault(token, last - 1 - len(tokens) % 16)

    for _, part in parts(config):
        for name, value in list(vars(part).items()):
            if not _TOKEN.fullmatch(name):
                continue
            if name.endswith("suppress_tokens"):
                setattr(part, name, None if value is None else [])
            else:
                many = isinstance(value, list | tuple)
                setattr(part, name, [renumbered(token) for token in value] if many else renumbered(value))
