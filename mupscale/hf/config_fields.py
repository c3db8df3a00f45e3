"""The fields of a configuration of the transformers library, and which are widths: by name patterns, not by models.

The patterns match a whole field name. The first list that has a match decides, in the order of `kind_of`.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

from transformers import PretrainedConfig

Kind = Literal["feed_forward", "heads", "width", "kept", "refused", "unknown"]

_KEPT = (  # names that look like widths and are none
    # of one head, of a low-rank factor, of a state, of a group
    r"(.*_)?head_?dim(_.*)?|(.*_)?head_size|dim_head|d_head|d_kv|d_rel|kv_channels|key_dim|(mamba_)?d_(state|conv|head)",
    r"mamba_d_(state|conv|head)|groups_width|(?!time_step_|mamba_dt_)(.*_)?rank|(.*_)?(ssm_)?state_(size|dim)",
    r"rotary_(emb_)?dim|rotary_ndims|(.*_)?kernel_dim|conv1d_width",
    # what goes in and comes out
    r"(.*_)?vocab_sizes?|codebook_(size|dim)|(.*_)?codevector_dim|(.*_)?image_sizes?|(.*_)?img_size|(.*_)?patch_size",
    r"num_channels(_out)?|(audio_|input_|stem_num_)?channels|input_num_channels|output_num_channels|patch_sizes|in_chans",
    r"(text_|audio_|vision_)?projection_dim|project_dim|classifier_proj_size|(xvector_)?output_dim|input_dim",
    r"feature_projection_input_dim|(act|state|max_action|max_state|mel|model_in|visual_pos|visual_feat|query)_dim",
    r"visual_embedding_dim|speaker_embedding_(dim|size)|(lang|spkr|speaker)_embed_dim|dim_bbox(_.*)?|sampling_dim",
    r"input_feat_per_channel|num_mel_bins|pooler_output_size|dim_model_base|retrieval_vector_size|mask_input_channels",
    r"output_channels_(image|text)|head_out_channels|image_embedding_size|frequency_embedding_size|latent_(dim|size)",
    # lengths, windows, strides, counts
    r"(.*_)?(window|block|chunk|kernel|merge|stride|grid|masked_unit|beam|batch|pool|roi|crop|tile|tubelet)_?sizes?",
    r"(.*_)?(window|kernel)_size_.*|(.*_)?(stride|max|min|num)_?sizes|(.*_)?feat(ure)?_sizes|(.*_)?rope_(feat|k)_sizes",
    r"(.*_)?(cache|ngram|group|posemb|pos_emb|frame|shot|spec|input|image_feature_pool|mask|freq|final|train)_size",
    r"median_filter_width|pos_emb_width|width_factor|image_width|hop_size|temperature_width|block_sizes",
    r"index_n_heads|guided_attention_loss_num_heads|heads_per_ngram|fine_matching_slice_dim|o_groups|window_.*_size",
    r"resblock_(dilation|stride|kernel)_sizes|upsample_kernel_sizes|model_parallel_size",
    r"base_attn_unit_dims|num_.*(features|channels)|chunk_size_.*|max_pos_emb|scale_emb|context_size|feature_size|input_feat_size|patch_dim",
    r"(.*_)?prompt_size|intermediate_multiple_size|(.*_)?dim_head|(.*_)?input_channels|kernel_predictor_conv_size",
    r"_label_trainable_num_channels|depth_separable_channels|position_embedding_size|window_positional_.*",
    r"(low_res_)?mask_size|num_dense_dim|.*_dilation_sizes|fpn_feature_size|pretrained_window_sizes|keypoint_decoder_dim",
)
_FEED_FORWARD = (
    r"(.*_)?intermediate_(dim|size)s?(_.*)?|(.*_)?ffn_(dim|size|hidden_size)|n_inner|d_inner|d_ff|dff|dim_ff|block_ff_dim",
    r"(.*_)?dim_feedforward|(.*_)?feed_?forward_(dim|size|hidden_size)|(.*_)?mlp_(dim|size|hidden_size)",
    r"(.*_)?linear_units|(.*_)?experts?_(dim|size)|moe_(dim|size|hidden_size)|intermediate_size_.*",
)
_HEADS = (
    r"(.*_)?n(um)?_(.*_)?heads?(_per_(layer|stage))?|(.*_)?attention_heads(_per_(layer|stage))?|(.*_)?attn_heads|(.*_)?heads",
    r"(mamba_)?n_?groups|num_query_groups|[qkv]_groups|(intermediate|output|post_attention)_groups|upsample_groups",
    r"num_conv_pos_embedding_groups",
)
_WIDTH = (
    r"(.*_)?hidden_(size|dim|channel)s?(_.*)?|n_embd|(.*_)?d_model|d_embed|dim|dims|d_latents|emb_dim|lru_width",
    r"(.*_)?embed_dims?(_per_stage)?|(.*_)?embeds_hidden_size|(.*_)?embedding_(size|dim)|word_embed_proj_dim|(.*_)?emb_size",
    r"mamba_d_ssm|time_step_rank|mamba_dt_rank|intra_bottleneck_size|conv_dim|tdnn_dim|fpn_hidden_size|text_encoder_width",
    r"projector_(input|output)_dim|vision_output_dim|mask_dim|descriptor_dim|descriptor_decoder_dim|prompt_mid_dim",
    r"(.*_)?predictor_(filter_)?channels|(.*_)?(pre|post)net_units|text_projection_(in|out)_dim|bottleneck_features",
    r"(.*_)?conv_channels|depth_multiplier|width_multiplier|reduce_dim|flow_size|vit_dim",
    r"(.*_)?(stem|base|stage_in|stage_mid|stage_out|auxiliary|subsampling_conv|downsample|latent)_channels?(_list)?",
    r"prediction_head_size|coordinate_size|shape_size|upsample_initial_channel|backbone_channel_list|num_filters",
    r"mask_feature_(size|channels)|projection_size|axial_pos_embds_dim|width_coefficient|adapter_hidden_size|(.*_)?out_channels?",
    r"(decoder|encoder)_in_channels|(.*_)?feature_dims|vision_features_channels|output_channels|post_process_channels",
)
_LISTS_ONLY = r"in_channels|out_channels"  # a number under this name is that of an image or of a latent
_MULTIPLIER = "width_coefficient"  # where it is, the channels in the lists are multiplied by it
_REFUSED = (
    r"block_configs|stage_configs|resnet_configs|resnet_head|down_ops|detectron2_config_args|out_point_positions2D"
)
_SIZE = r".*(size|dim|width|channel|unit|head|feature|embd|emb|hidden|inner)s?|(.*_)?d_[a-z]+"
_FEED_FORWARD_BESIDE = {"hidden_dim": "dim"}  # DistilBERT's names for the feed-forward and the hidden size


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
    for kind, pattern in _TABLE.items():
        if pattern.fullmatch(name):
            return kind
    return "unknown" if re.fullmatch(_SIZE, name) else "kept"


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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
