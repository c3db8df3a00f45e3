"""Tiny configurations of families of the transformers library."""

from collections.abc import Callable
from typing import Any

from torch import nn
from zoo_entry import (
    CLASSES,
    VOCABULARY,
    Entry,
    Inputs,
    frames,
    images,
    long_text,
    long_translation,
    masked_images,
    pairs,
    spectra,
    spectrograms,
    speech,
    text,
    translation,
    videos,
    waves,
)

_SIZES: dict[int | None, str] = {
    None: "activation_sparsity_pattern begin_suppress_tokens suppress_tokens",
    0: "num_kv_shared_layers pad_token_id",
    1: """bos_token_id decoder_start_token_id first_k_dense_replace input_channels moe_layer_end_index
        moe_layer_start_index n_group n_shared_experts num_conv_layers num_mem_blocks num_query_pool
        num_self_attends_per_block num_sparse_decoder_layers num_sparse_encoder_layers topk_group""",
    2: """decoder_layers downsampling_rate encoder_layers encoder_num_hidden_layers eos_token_id expand
        head_ratio linear_num_key_heads mamba_n_groups mamba_ngroups moe_k moe_topk n_groups
        n_layer n_layers num_conv_pos_embedding_groups num_decoder_layers num_encoder_layers num_experts_per_tok
        num_feat_extract_layers num_global_tokens num_hidden_layers num_key_value_heads num_layers num_register_tokens
        squeeze_factor zero_expert_num""",
    3: "conv_pos_kernel_size local_radius num_landmarks",
    4: """attention_chunk_size attention_heads attention_window attention_window_size chunk_size
        decoder_attention_heads decoder_num_key_value_heads encoder_attention_heads encoder_num_attention_heads
        encoder_num_key_value_heads frequency_stride global_block_size input_feat_per_channel laurel_rank
        linear_num_value_heads local_attention local_attn_chunk_length local_transformer_stride mamba_chunk_size
        mamba_d_state moe_num_experts n_head n_heads n_routed_experts num_attention_heads num_conv_pos_embeddings
        num_cross_attention_heads num_decoder_attention_heads num_encoder_attention_heads num_experts
        num_hash_functions num_heads num_local_experts num_mel_bins num_self_attention_heads patch_size
        qk_rope_head_dim rotary_dim sliding_window ssm_state_size state_size time_stride window_size""",
    6: "adapter_rank num_latents",
    8: """attention_head_size d_head d_kv ffn_round_up_to_multiple_of groups_width head_dim hidden_size_per_layer_input
        linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads
        mamba_num_heads qk_nope_head_dim""",
    9: "segment_means_seq_len",
    12: """entity_emb_size fusion_hidden_size image_text_hidden_size input_embedding_size kv_lora_rank projection_dim
        query_pre_attn_scalar v_head_dim""",
    16: "conv_channels image_size intra_bottleneck_size num_hash_buckets true_hidden_size",
    20: "entity_vocab_size output_embedding_size q_lora_rank",
    24: "d_latents expert_ffn_hidden_size moe_intermediate_size",
    32: "d_model dim emb_dim hidden_size lru_width n_embd word_embed_proj_dim",
    40: """decoder_ffn_dim max_decoder_position_embeddings max_encoder_position_embeddings max_position_embeddings
        max_seq_len max_source_positions max_target_positions n_positions shared_expert_intermediate_size""",
    48: """d_ff d_inner dff encoder_ffn_dim feed_forward_size ffn_dim ffn_hidden_size hidden_dim intermediate_size""",
    56: "intermediate_size_mlp",
    64: "mamba_d_ssm",
    100: "expert_capacity",
    VOCABULARY: "decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size vocab_size_per_layer_input",
}
TINY: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}


def tiny_config(family: str, settings: dict[str, Any]) -> Any:
    """The configuration of a family with the tiny sizes that it has a field for."""
    import transformers

    cls = getattr(transformers, f"{family}Config")
    known = set(vars(cls())) | set(getattr(cls, "__dataclass_fields__", ()))
    sizes = {name: value for name, value in TINY.items() if name in known and name not in settings}
    return cls(**sizes, **settings)


def hf_entry(
    name: str,
    family: str,
    model: str = "ForCausalLM",
    inputs: Callable[[], Inputs] = text,
    *,
    config: str | None = None,
    named: bool = False,
    refused: str = "",
    **settings: Any,
) -> Entry:
    """An entry by the prefix of its classes, such as Llama; `config` where its configuration has another one."""
    if "Classification" in model:
        settings |= {"num_labels": CLASSES}

    def finished(net: Any) -> nn.Module:
        if hasattr(net, "set_experts_implementation"):
            net.set_experts_implementation("eager")  # the others have no float64
        return net.eval()

    def build(factor: float) -> nn.Module:
        import transformers

        from mupscale.hf.config import wide_config

        narrow = tiny_config(config or family, settings)
        return finished(getattr(transformers, f"{family}{model}")(wide_config(narrow, factor)))

    def rebuild(net: Any, folder: str) -> nn.Module:
        net.save_pretrained(folder)
        return finished(type(net).from_pretrained(folder, dtype=next(net.parameters()).dtype))

    return Entry(name, build, inputs, rebuild, named, refused)


def hf_entries(model: str, inputs: Callable[[], Inputs], families: str, **settings: Any) -> list[Entry]:
    """Entries of one kind; each family by the prefix of its classes, after its name where that is another one."""
    pairs_of_names = [(name, family or name) for name, _, family in (each.partition(":") for each in families.split())]
    return [hf_entry(name.lower(), family, model, inputs, **settings) for name, family in pairs_of_names]


CAUSAL = "ForCausalLM"
SEQ2SEQ = "ForConditionalGeneration"
MASKED = "ForMaskedLM"
CLASSIFIER = "ForImageClassification"
T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_TOWER = "hidden_size intermediate_size num_attention_heads num_hidden_layers vocab_size"
TEXT_TOWER = {n: TINY[n] for n in f"{_TOWER} projection_dim pad_token_id bos_token_id eos_token_id".split()}
TEXT_TOWER |= {"max_position_embeddings": 16}
IMAGE_TOWER = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 5, "num_hidden_layers": 2}
IMAGE_TOWER |= {"image_size": 16, "patch_size": 4, "projection_dim": 12}
TWO_TOWERS = {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER}


def named_entries() -> list[Entry]:
    """The families that must come out exact."""
    return [
        hf_entry("gpt2", "GPT2", "LMHeadModel", named=True),
        *hf_entries(CAUSAL, text, "gpt_neox:GPTNeoX Llama", named=True),
        hf_entry("llama_tied", "Llama", named=True, tie_word_embeddings=True),
        *hf_entries(CAUSAL, text, "Mistral Qwen2", named=True),
        hf_entry("qwen2_tied", "Qwen2", named=True, tie_word_embeddings=True),
        hf_entry("qwen3", "Qwen3", named=True, head_dim=12),
        *hf_entries(CAUSAL, text, "Phi3 SmolLM3 Olmo2", named=True),
        hf_entry("gemma2", "Gemma2", named=True, head_dim=12),
        hf_entry("gemma2_untied", "Gemma2", named=True, tie_word_embeddings=False, head_dim=12),
        hf_entry("gemma3", "Gemma3", config="Gemma3Text", named=True, head_dim=12),
        hf_entry("gemma3_untied", "Gemma3", config="Gemma3Text", named=True, tie_word_embeddings=False, head_dim=12),
        hf_entry("mixtral", "Mixtral", named=True),
        hf_entry("qwen3_moe", "Qwen3Moe", named=True, head_dim=12),
        hf_entry("opt", "OPT", named=True),
        hf_entry("falcon_multi_query", "Falcon", named=True, multi_query=True),
        hf_entry("falcon_grouped", "Falcon", named=True, new_decoder_architecture=True, num_kv_heads=2),
        hf_entry("mamba", "Mamba", named=True, time_step_rank=3),
        hf_entry("rwkv", "Rwkv", named=True, attention_hidden_size=32, use_cache=False),
        *hf_entries(MASKED, text, "Bert Roberta", named=True),
        hf_entry("t5_1_0", "T5", SEQ2SEQ, translation, named=True),
        hf_entry("t5_1_1", "T5", SEQ2SEQ, translation, named=True, **T5_1_1),
        hf_entry("bart", "Bart", SEQ2SEQ, translation, named=True),
        hf_entry("whisper", "Whisper", SEQ2SEQ, spectrograms, named=True, max_source_positions=8),
        hf_entry("vit", "ViT", CLASSIFIER, images(16), named=True),
        hf_entry("clip", "CLIP", "Model", pairs, named=True, **TWO_TOWERS),
    ]


DECODERS = """
    Phi Phimoe StableLm Starcoder2 Cohere Cohere2 granite_moe:GraniteMoe Olmo Olmo3 Olmoe flex_olmo:FlexOlmo Glm Glm4
    glm4_moe:Glm4Moe Nemotron Persimmon GPTJ CodeGen gpt_neox_japanese:GPTNeoXJapanese gpt_bigcode:GPTBigCode Bloom Mpt
    XGLM BioGpt qwen2_moe:Qwen2Moe Helium Exaone4 seed_oss:SeedOss hunyuan_dense:HunYuanDenseV1
    hunyuan_moe:HunYuanMoEV1 ernie4_5:Ernie4_5 ernie4_5_moe:Ernie4_5_Moe Arcee Apertus gpt_oss:GptOss MiniMax DiffLlama
    Doge Dots1 BitNet Ministral NanoChat Cwm
"""


def decoder_entries() -> list[Entry]:
    jamba = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    latent = {"num_key_value_heads": 4, "head_dim": 4}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    dbrx = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}}
    dbrx |= {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}
    return [
        *hf_entries(CAUSAL, text, DECODERS),
        hf_entry("stablelm_parallel", "StableLm", use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True),
        hf_entry("granite", "Granite", embedding_multiplier=3.0, attention_multiplier=0.3, logits_scaling=2.0),
        hf_entry("granite_moe_shared", "GraniteMoeShared", shared_intermediate_size=40),
        hf_entry("granite_moe_hybrid", "GraniteMoeHybrid", layer_types=["mamba", "attention"]),
        hf_entry("gpt_neo", "GPTNeo", attention_types=[[["global", "local"], 1]]),
        hf_entry("gpt_bigcode_multi_head", "GPTBigCode", multi_query=False),
        *hf_entries("LMHeadModel", text, "openai_gpt:OpenAIGPT CTRL"),
        hf_entry("falcon_alibi", "Falcon", alibi=True, multi_query=False),
        *hf_entries(CAUSAL, text, "Gemma vault_gemma:VaultGemma", head_dim=12),
        hf_entry("recurrent_gemma", "RecurrentGemma", num_hidden_layers=3),
        hf_entry("mamba2", "Mamba2", num_heads=8),
        hf_entry("falcon_mamba", "FalconMamba", time_step_rank=3),
        hf_entry("jamba", "Jamba", **jamba),
        hf_entry("bamba", "Bamba", attn_layer_indices=[1]),
        hf_entry("zamba", "Zamba", **ZAMBA, n_mamba_heads=2, mamba_dt_rank=3),
        hf_entry("zamba2", "Zamba2", **ZAMBA, n_mamba_heads=8),
        hf_entry("falcon_h1", "FalconH1"),
        hf_entry("nemotron_h", "NemotronH", **NEMOTRON_H),
        hf_entry("qwen3_next", "Qwen3Next", **layers),
        hf_entry("qwen3_5", "Qwen3_5", config="Qwen3_5Text", **layers),
        hf_entry("deepseek_v2", "DeepseekV2", topk_method="greedy", **latent),
        hf_entry("deepseek_v3", "DeepseekV3", n_group=2, **latent),
        hf_entry("minicpm3", "MiniCPM3", num_key_value_heads=4),
        hf_entry("dbrx", "Dbrx", **dbrx),
        hf_entry("lfm2", "Lfm2", block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]),
        hf_entry("llama4", "Llama4", config="Llama4Text"),
        hf_entry("jetmoe", "JetMoe", kv_channels=8),
        hf_entry("longcat_flash", "LongcatFlash", head_dim=4),
        hf_entry("xlstm", "xLSTM", hidden_size=128, embedding_dim=128, num_blocks=2),
        hf_entry("llama_rope_scaled", "Llama", rope_parameters=LLAMA3_ROPE),
        hf_entry("gemma3n", "Gemma3n", config="Gemma3nText"),
        hf_entry("modernbert_decoder", "ModernBertDecoder", global_attn_every_n_layers=2),
    ]


ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
ZAMBA |= {"num_key_value_heads": 4}
NEMOTRON_H = {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 16}

ENCODERS = """
    Camembert XLMRoberta XLMRobertaXL Ernie RoFormer Data2VecText MPNet roberta_prelayernorm:RobertaPreLayerNorm
    megatron_bert:MegatronBert DistilBert Nystromformer FNet LayoutLM Luke nomic_bert:NomicBert EuroBert
"""


def encoder_entries() -> list[Entry]:
    deberta = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    deberta_v2 = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    return [
        *hf_entries(MASKED, text, ENCODERS),
        hf_entry("splinter", "Splinter", "ForQuestionAnswering"),
        hf_entry("albert", "Albert", MASKED, embedding_size=12),
        hf_entry("distilbert_sinusoidal", "DistilBert", MASKED, sinusoidal_pos_embds=True),
        hf_entry("deberta", "Deberta", MASKED, **deberta),
        hf_entry("deberta_v2", "DebertaV2", MASKED, **deberta, **deberta_v2),
        hf_entry("electra", "Electra", MASKED, embedding_size=12),
        hf_entry("electra_equal", "Electra", MASKED, embedding_size=32),
        hf_entry("funnel", "Funnel", MASKED, block_sizes=[1, 1]),
        hf_entry("longformer", "Longformer", MASKED, long_text),
        hf_entry("xlnet", "XLNet", "LMHeadModel"),
        *hf_entries("WithLMHeadModel", text, "XLM Flaubert"),
        hf_entry("mobilebert", "MobileBert", MASKED, embedding_size=12),
        hf_entry("convbert", "ConvBert", MASKED, embedding_size=12, conv_kernel_size=3),
        hf_entry("rembert", "RemBert", MASKED),
        hf_entry("squeezebert", "SqueezeBert", MASKED, embedding_size=32),
        hf_entry("modernbert", "ModernBert", MASKED, global_attn_every_n_layers=2),
        hf_entry("big_bird", "BigBird", MASKED, attention_type="original_full"),
        hf_entry("esm", "Esm", MASKED, mask_token_id=3, position_embedding_type="rotary"),
        hf_entry("yoso", "Yoso", MASKED, use_expectation=True),
        hf_entry("perceiver", "Perceiver", MASKED, num_blocks=1),
        hf_entry("canine", "Canine", "ForTokenClassification", long_text),
        hf_entry("reformer", "Reformer", MASKED, long_text, is_decoder=False, **REFORMER),
    ]


REFORMER = {"axial_pos_embds_dim": [12, 20], "axial_pos_shape": [4, 4], "attn_layers": ["local", "local"]}

TRANSLATORS = """
    MT5 UMT5 LongT5 switch_transformers:SwitchTransformers m2m_100:M2M100 Blenderbot
    blenderbot_small:BlenderbotSmall PLBart ProphetNet Mvp
"""
LISTENERS = """
    Wav2Vec2 Hubert WavLM UniSpeech unispeech_sat:UniSpeechSat SEW sew_d:SEWD wav2vec2_conformer:Wav2Vec2Conformer
    data2vec_audio:Data2VecAudio
"""


def seq2seq_entries() -> list[Entry]:
    part = {n: TINY[n] for n in f"{_TOWER} num_key_value_heads query_pre_attn_scalar".split()} | {"head_dim": 12}
    return [
        *hf_entries(SEQ2SEQ, translation, TRANSLATORS),
        *hf_entries(SEQ2SEQ, translation, "bart_scaled:Bart Pegasus MBart", scale_embedding=True),
        hf_entry("pegasus_x", "PegasusX", SEQ2SEQ, translation, block_size=4),
        hf_entry("nllb_moe", "NllbMoe", SEQ2SEQ, translation, encoder_sparse_step=2, decoder_sparse_step=2),
        hf_entry("marian", "Marian", "MTModel", translation, scale_embedding=True),
        hf_entry("fsmt", "FSMT", SEQ2SEQ, translation, langs=["en", "de"]),
        hf_entry("led", "LED", SEQ2SEQ, long_translation),
        hf_entry("bigbird_pegasus", "BigBirdPegasus", SEQ2SEQ, translation, attention_type="original_full"),
        hf_entry("t5gemma", "T5Gemma", SEQ2SEQ, translation, encoder=part, decoder=part),
        hf_entry("speech_to_text", "Speech2Text", SEQ2SEQ, frames, conv_kernel_sizes=[3]),
        hf_entry("moonshine", "Moonshine", SEQ2SEQ, waves, decoder_num_hidden_layers=2, decoder_num_attention_heads=4),
        *hf_entries("ForCTC", speech, LISTENERS, **CONVOLUTIONS),
        hf_entry("wav2vec2_layer_norm", "Wav2Vec2", "ForCTC", speech, **CONVOLUTIONS, **LAYER_NORM),
        hf_entry("audio_spectrogram", "AST", "ForAudioClassification", spectra, max_length=16, num_mel_bins=8),
    ]


CONVOLUTIONS = {"conv_dim": (16, 16), "conv_kernel": (5, 3), "conv_stride": (4, 2)}
LAYER_NORM = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}


VISION = "DeiT Beit data2vec_vision:Data2VecVision vit_msn:ViTMSN IJepa Dinov2 dinov2_registers:Dinov2WithRegisters"


def vision_entries() -> list[Entry]:
    swin = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
    dpt = {"backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4, "neck_hidden_sizes": [8, 12, 16, 20]}
    dpt |= {"image_size": 32, "patch_size": 8}
    mae = {"decoder_hidden_size": 24, "decoder_num_attention_heads": 3, "decoder_num_hidden_layers": 1}
    mae |= {"decoder_intermediate_size": 40}
    segformer = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}
    segformer |= {"decoder_hidden_size": 20}
    stages = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1]}
    efficientnet = {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320, "depth_divisor": 4}
    efficientnet |= {"in_channels": [32, 16], "out_channels": [16, 32], "kernel_sizes": [3, 3], "strides": [1, 2]}
    efficientnet |= {"num_block_repeats": [1, 1], "expand_ratios": [1, 2], "depthwise_padding": []}
    cvt = {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3]}
    poolformer = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1]}
    pvt = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}
    pvt |= {"image_size": 32}
    levit = {"hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 4, 6], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}
    mobilevit = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64}
    mobilevit |= {"patch_size": 2}
    mobilevitv2 = {"base_attn_unit_dims": [8, 16, 24], "width_multiplier": 0.25, "image_size": 64, "patch_size": 2}
    focalnet = {"embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 2}
    regnet = {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 8}
    swiftformer = {"embed_dims": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "image_size": 64}
    hiera = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": [32, 32], "patch_stride": [4, 4]}
    hiera |= {"patch_size": [7, 7], "masked_unit_size": [4, 4], "masked_unit_attention": [True, False]}
    return [
        *hf_entries(CLASSIFIER, images(16), VISION),
        hf_entry("beit_relative", "Beit", CLASSIFIER, images(16), use_relative_position_bias=True),
        hf_entry("dinov2_swiglu", "Dinov2", CLASSIFIER, images(16), use_swiglu_ffn=True),
        hf_entry("vit_mae", "ViTMAE", "ForPreTraining", masked_images, **mae),
        hf_entry("vit_hybrid_depth", "DPT", "ForDepthEstimation", images(32), **dpt),
        *hf_entries(CLASSIFIER, images(16), "swin_hf:Swin swinv2_hf:Swinv2", **swin),
        *hf_entries(CLASSIFIER, images(32), "convnext_hf:ConvNext convnextv2_hf:ConvNextV2", **stages),
        hf_entry("resnet_hf", "ResNet", CLASSIFIER, images(32), embedding_size=8, **RESNET),
        hf_entry("resnet_basic_hf", "ResNet", CLASSIFIER, images(32), embedding_size=8, layer_type="basic", **RESNET),
        hf_entry("bit", "Bit", CLASSIFIER, images(32), embedding_size=8, num_groups=4, **RESNET),
        hf_entry("regnet_hf", "RegNet", CLASSIFIER, images(32), **regnet),
        hf_entry("segformer", "Segformer", "ForSemanticSegmentation", images(32), num_labels=CLASSES, **segformer),
        hf_entry("efficientnet_hf", "EfficientNet", CLASSIFIER, images(32), **efficientnet),
        *hf_entries(CLASSIFIER, images(32), "mobilenet_v1:MobileNetV1 mobilenet_v2:MobileNetV2", depth_multiplier=0.25),
        hf_entry("mobilevit", "MobileViT", CLASSIFIER, images(64), **mobilevit),
        hf_entry("mobilevitv2", "MobileViTV2", CLASSIFIER, images(64), **mobilevitv2),
        hf_entry("cvt", "Cvt", CLASSIFIER, images(32), **cvt),
        hf_entry("poolformer_hf", "PoolFormer", CLASSIFIER, images(64), **poolformer),
        *hf_entries(CLASSIFIER, images(32), "Pvt pvt_v2:PvtV2", **pvt),
        hf_entry("levit", "Levit", CLASSIFIER, images(64), refused="down_ops", image_size=64, patch_size=16, **levit),
        hf_entry("focalnet", "FocalNet", CLASSIFIER, images(16), **focalnet),
        hf_entry("swiftformer", "SwiftFormer", CLASSIFIER, images(64), **swiftformer),
        hf_entry("hiera", "Hiera", CLASSIFIER, images(32), **hiera),
        hf_entry("videomae", "VideoMAE", "ForVideoClassification", videos, num_frames=4),
        hf_entry("vivit", "Vivit", "ForVideoClassification", videos, num_frames=4, tubelet_size=[2, 4, 4]),
        hf_entry("timesformer", "Timesformer", "ForVideoClassification", videos, num_frames=4),
        hf_entry("imagegpt", "ImageGPT", "ForCausalImageModeling"),
        hf_entry("siglip", "Siglip", "Model", pairs, text_config=SIGLIP_TOWER, vision_config=IMAGE_TOWER),
        hf_entry("altclip", "AltCLIP", "Model", pairs, **TWO_TOWERS | {"text_config": ALT_TOWER}),
        hf_entry("chinese_clip", "ChineseCLIP", "Model", pairs, **TWO_TOWERS),
        hf_entry("blip", "Blip", "ForImageTextRetrieval", pairs, **BLIP),
        hf_entry("git", "Git", "ForCausalLM", pairs, vision_config=IMAGE_TOWER),
        hf_entry("vilt", "Vilt", "ForQuestionAnswering", pairs, num_labels=CLASSES),
    ]


RESNET = {"hidden_sizes": [16, 32], "depths": [1, 1]}
SIGLIP_TOWER = TEXT_TOWER | {"projection_size": 40}
ALT_TOWER = TEXT_TOWER | {"project_dim": 12, "type_vocab_size": 2}
BLIP = {"text_config": TEXT_TOWER | {"encoder_hidden_size": 40}, "vision_config": IMAGE_TOWER}


def transformers_entries() -> list[Entry]:
    return [*named_entries(), *decoder_entries(), *encoder_entries(), *seq2seq_entries(), *vision_entries()]
