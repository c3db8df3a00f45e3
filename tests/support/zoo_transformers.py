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

_HIDDEN = dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim"), 32)
_FEED_FORWARD = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "dff", "ffn_hidden_size", "d_inner"), 48
)
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
)
_LAYERS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2)
_LAYERS |= {"encoder_layers": 2, "decoder_layers": 2}
_POSITIONS = {"max_position_embeddings": 40, "n_positions": 40, "max_source_positions": 40, "max_target_positions": 40}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_topk": 2}
_EXPERTS |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "moe_num_experts": 4, "moe_k": 2}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_IMAGES = {"image_size": 16, "patch_size": 4}
TINY: dict[str, Any] = {
    **_HIDDEN,
    **_FEED_FORWARD,
    **_HEADS,
    **_LAYERS,
    **_POSITIONS,
    **_EXPERTS,
    **_TOKENS,
    **_IMAGES,
    "decoder_ffn_dim": 40,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": VOCABULARY,
    "sliding_window": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}


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


SEQ2SEQ = "ForConditionalGeneration"
MASKED = "ForMaskedLM"
CLASSIFIER = "ForImageClassification"
T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
WHISPER = {"num_mel_bins": 4, "max_source_positions": 8, "suppress_tokens": None, "begin_suppress_tokens": None}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12}
TEXT_TOWER = {n: v for n, v in TINY.items() if n in ("hidden_size", "num_attention_heads", "num_hidden_layers")} | {
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "projection_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE_TOWER = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 5, "num_hidden_layers": 2}
IMAGE_TOWER |= {"image_size": 16, "patch_size": 4, "projection_dim": 12}
TWO_TOWERS = {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 12}


def named_entries() -> list[Entry]:
    """The families that must come out exact."""
    return [
        hf_entry("gpt2", "GPT2", "LMHeadModel", named=True),
        hf_entry("gpt_neox", "GPTNeoX", named=True),
        hf_entry("llama", "Llama", named=True),
        hf_entry("llama_tied", "Llama", named=True, tie_word_embeddings=True),
        hf_entry("mistral", "Mistral", named=True),
        hf_entry("qwen2", "Qwen2", named=True),
        hf_entry("qwen2_tied", "Qwen2", named=True, tie_word_embeddings=True),
        hf_entry("qwen3", "Qwen3", named=True, head_dim=12),
        hf_entry("phi3", "Phi3", named=True),
        hf_entry("smollm3", "SmolLM3", named=True),
        hf_entry("olmo2", "Olmo2", named=True),
        hf_entry("gemma2", "Gemma2", named=True, **GEMMA),
        hf_entry("gemma2_untied", "Gemma2", named=True, tie_word_embeddings=False, **GEMMA),
        hf_entry("gemma3", "Gemma3", config="Gemma3Text", named=True, **GEMMA),
        hf_entry("gemma3_untied", "Gemma3", config="Gemma3Text", named=True, tie_word_embeddings=False, **GEMMA),
        hf_entry("mixtral", "Mixtral", named=True),
        hf_entry("qwen3_moe", "Qwen3Moe", named=True, head_dim=12),
        hf_entry("opt", "OPT", named=True, word_embed_proj_dim=32),
        hf_entry("falcon_multi_query", "Falcon", named=True, multi_query=True),
        hf_entry("falcon_grouped", "Falcon", named=True, new_decoder_architecture=True, num_kv_heads=2),
        hf_entry("mamba", "Mamba", named=True, state_size=4, time_step_rank=3),
        hf_entry("rwkv", "Rwkv", named=True, attention_hidden_size=32, use_cache=False),
        hf_entry("bert", "Bert", MASKED, named=True),
        hf_entry("roberta", "Roberta", MASKED, named=True),
        hf_entry("t5_1_0", "T5", SEQ2SEQ, translation, named=True),
        hf_entry("t5_1_1", "T5", SEQ2SEQ, translation, named=True, **T5_1_1),
        hf_entry("bart", "Bart", SEQ2SEQ, translation, named=True),
        hf_entry("whisper", "Whisper", SEQ2SEQ, spectrograms, named=True, **WHISPER),
        hf_entry("vit", "ViT", CLASSIFIER, images(16), named=True),
        hf_entry("clip", "CLIP", "Model", pairs, named=True, **TWO_TOWERS),
    ]


def decoder_entries() -> list[Entry]:
    mamba2 = {"head_dim": 8, "num_heads": 8, "state_size": 4, "n_groups": 2, "expand": 2, "chunk_size": 4}
    hybrid = {"mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}
    jamba = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}
    latent = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    latent |= {"num_key_value_heads": 4, "head_dim": 4}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    dbrx = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "max_seq_len": 40}
    dbrx |= {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}
    return [
        hf_entry("phi", "Phi"),
        hf_entry("phimoe", "Phimoe"),
        hf_entry("stablelm", "StableLm"),
        hf_entry("stablelm_parallel", "StableLm", use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True),
        hf_entry("starcoder2", "Starcoder2"),
        hf_entry("cohere", "Cohere"),
        hf_entry("cohere2", "Cohere2"),
        hf_entry("granite", "Granite", embedding_multiplier=3.0, attention_multiplier=0.3, logits_scaling=2.0),
        hf_entry("granite_moe", "GraniteMoe"),
        hf_entry("granite_moe_shared", "GraniteMoeShared", shared_intermediate_size=40),
        hf_entry("granite_moe_hybrid", "GraniteMoeHybrid", layer_types=["mamba", "attention"], **hybrid),
        hf_entry("olmo", "Olmo"),
        hf_entry("olmo3", "Olmo3"),
        hf_entry("olmoe", "Olmoe"),
        hf_entry("flex_olmo", "FlexOlmo"),
        hf_entry("glm", "Glm"),
        hf_entry("glm4", "Glm4"),
        hf_entry("glm4_moe", "Glm4Moe", n_group=1, topk_group=1, first_k_dense_replace=1),
        hf_entry("nemotron", "Nemotron"),
        hf_entry("persimmon", "Persimmon"),
        hf_entry("gptj", "GPTJ", rotary_dim=4),
        hf_entry("codegen", "CodeGen", rotary_dim=4),
        hf_entry("gpt_neo", "GPTNeo", attention_types=[[["global", "local"], 1]], window_size=4),
        hf_entry("gpt_neox_japanese", "GPTNeoXJapanese"),
        hf_entry("gpt_bigcode", "GPTBigCode"),
        hf_entry("gpt_bigcode_multi_head", "GPTBigCode", multi_query=False),
        hf_entry("openai_gpt", "OpenAIGPT", "LMHeadModel"),
        hf_entry("bloom", "Bloom"),
        hf_entry("mpt", "Mpt", max_seq_len=40),
        hf_entry("falcon_alibi", "Falcon", alibi=True, multi_query=False),
        hf_entry("xglm", "XGLM", attention_heads=4),
        hf_entry("biogpt", "BioGpt"),
        hf_entry("ctrl", "CTRL", "LMHeadModel"),
        hf_entry("gemma", "Gemma", head_dim=12),
        hf_entry("vault_gemma", "VaultGemma", **GEMMA),
        hf_entry("recurrent_gemma", "RecurrentGemma", lru_width=32, attention_window_size=4, num_hidden_layers=3),
        hf_entry("mamba2", "Mamba2", **mamba2),
        hf_entry("falcon_mamba", "FalconMamba", state_size=4, time_step_rank=3),
        hf_entry("jamba", "Jamba", **jamba),
        hf_entry("bamba", "Bamba", attn_layer_indices=[1], **hybrid),
        hf_entry("zamba", "Zamba", **ZAMBA),
        hf_entry("zamba2", "Zamba2", **ZAMBA2),
        hf_entry("falcon_h1", "FalconH1", mamba_d_ssm=64, **hybrid),
        hf_entry("nemotron_h", "NemotronH", **NEMOTRON_H),
        hf_entry("qwen2_moe", "Qwen2Moe"),
        hf_entry("qwen3_next", "Qwen3Next", **linear),
        hf_entry("qwen3_5", "Qwen3_5", config="Qwen3_5Text", **linear),
        hf_entry("deepseek_v2", "DeepseekV2", topk_method="greedy", **latent | {"n_group": 1}),
        hf_entry("deepseek_v3", "DeepseekV3", **latent),
        hf_entry("minicpm3", "MiniCPM3", num_key_value_heads=4),
        hf_entry("dbrx", "Dbrx", **dbrx),
        hf_entry("helium", "Helium"),
        hf_entry("exaone4", "Exaone4"),
        hf_entry("seed_oss", "SeedOss"),
        hf_entry("hunyuan_dense", "HunYuanDenseV1"),
        hf_entry("hunyuan_moe", "HunYuanMoEV1"),
        hf_entry("ernie4_5", "Ernie4_5"),
        hf_entry("ernie4_5_moe", "Ernie4_5_Moe", moe_layer_start_index=1, moe_layer_end_index=1),
        hf_entry("arcee", "Arcee"),
        hf_entry("apertus", "Apertus"),
        hf_entry("lfm2", "Lfm2", block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]),
        hf_entry("gpt_oss", "GptOss"),
        hf_entry("llama4", "Llama4", config="Llama4Text", intermediate_size_mlp=56, attention_chunk_size=4),
        hf_entry("minimax", "MiniMax"),
        hf_entry("jetmoe", "JetMoe", kv_channels=8),
        hf_entry("diffllama", "DiffLlama"),
        hf_entry("doge", "Doge"),
        hf_entry("dots1", "Dots1", n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
        hf_entry("bitnet", "BitNet"),
        hf_entry("ministral", "Ministral"),
        hf_entry("nanochat", "NanoChat"),
        hf_entry("cwm", "Cwm"),
        hf_entry("modernbert_decoder", "ModernBertDecoder", local_attention=4, global_attn_every_n_layers=2),
        hf_entry("longcat_flash", "LongcatFlash", ffn_hidden_size=48, **LONGCAT),
        hf_entry(
            "xlstm",
            "xLSTM",
            hidden_size=128,
            embedding_dim=128,
            num_blocks=2,
            chunk_size=4,
            ffn_round_up_to_multiple_of=8,
        ),
        hf_entry("llama_rope_scaled", "Llama", rope_parameters=LLAMA3_ROPE),
        hf_entry("gemma3n", "Gemma3n", config="Gemma3nText", **GEMMA3N),
    ]


ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_d_state": 4}
ZAMBA |= {"n_mamba_heads": 2, "mamba_dt_rank": 3, "num_key_value_heads": 4}
ZAMBA2 = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_d_state": 4}
ZAMBA2 |= {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 4, "adapter_rank": 6}
ZAMBA2 |= {"num_key_value_heads": 4, "num_mem_blocks": 1}
NEMOTRON_H = {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8}
NEMOTRON_H |= {"ssm_state_size": 4, "n_groups": 2, "chunk_size": 4, "num_hidden_layers": 4}
LONGCAT = {"expert_ffn_hidden_size": 24, "zero_expert_num": 2, "head_dim": 4}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 16}
GEMMA3N = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
GEMMA3N |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None}


def encoder_entries() -> list[Entry]:
    bert_like = ("Camembert", "XLMRoberta", "XLMRobertaXL", "Ernie", "RoFormer", "Data2VecText", "MPNet", "Splinter")
    prelayernorm = {"RobertaPreLayerNorm": "roberta_prelayernorm", "MegatronBert": "megatron_bert"}
    entries = [hf_entry(name.lower(), name, MASKED) for name in bert_like[:-1]]
    entries += [hf_entry(name, family, MASKED) for family, name in prelayernorm.items()]
    return [
        *entries,
        hf_entry("splinter", "Splinter", "ForQuestionAnswering"),
        hf_entry("albert", "Albert", MASKED, embedding_size=12),
        hf_entry("distilbert", "DistilBert", MASKED),
        hf_entry("distilbert_sinusoidal", "DistilBert", MASKED, sinusoidal_pos_embds=True),
        hf_entry("deberta", "Deberta", MASKED, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        hf_entry(
            "deberta_v2",
            "DebertaV2",
            MASKED,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=4,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
        ),
        hf_entry("electra", "Electra", MASKED, embedding_size=12),
        hf_entry("electra_equal", "Electra", MASKED, embedding_size=32),
        hf_entry("funnel", "Funnel", MASKED, block_sizes=[1, 1], d_head=8),
        hf_entry("longformer", "Longformer", MASKED, long_text, attention_window=4),
        hf_entry("xlnet", "XLNet", "LMHeadModel", d_head=8),
        hf_entry("xlm", "XLM", "WithLMHeadModel"),
        hf_entry("flaubert", "Flaubert", "WithLMHeadModel"),
        hf_entry("modernbert", "ModernBert", MASKED, local_attention=4, global_attn_every_n_layers=2),
        hf_entry("mobilebert", "MobileBert", MASKED, embedding_size=12, intra_bottleneck_size=16, true_hidden_size=16),
        hf_entry("convbert", "ConvBert", MASKED, embedding_size=12, head_ratio=2, conv_kernel_size=3),
        hf_entry("rembert", "RemBert", MASKED, input_embedding_size=12, output_embedding_size=20),
        hf_entry("nystromformer", "Nystromformer", MASKED, num_landmarks=3, segment_means_seq_len=9),
        hf_entry("fnet", "FNet", MASKED),
        hf_entry("squeezebert", "SqueezeBert", MASKED, embedding_size=32),
        hf_entry("layoutlm", "LayoutLM", MASKED),
        hf_entry("big_bird", "BigBird", MASKED, attention_type="original_full"),
        hf_entry("esm", "Esm", MASKED, mask_token_id=3, position_embedding_type="rotary"),
        hf_entry("luke", "Luke", MASKED, entity_vocab_size=20, entity_emb_size=12),
        hf_entry("nomic_bert", "NomicBert", MASKED),
        hf_entry("yoso", "Yoso", MASKED, use_expectation=True),
        hf_entry("perceiver", "Perceiver", MASKED, **PERCEIVER),
        hf_entry("canine", "Canine", "ForTokenClassification", long_text, **CANINE),
        hf_entry("reformer", "Reformer", MASKED, long_text, **REFORMER),
        hf_entry("eurobert", "EuroBert", MASKED),
    ]


PERCEIVER = {"d_latents": 24, "num_latents": 6, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 1}
PERCEIVER |= {"num_self_attention_heads": 4, "num_cross_attention_heads": 4}
CANINE = {"local_transformer_stride": 4, "downsampling_rate": 2, "num_hash_buckets": 16, "num_hash_functions": 4}
REFORMER = {"attention_head_size": 8, "axial_pos_embds_dim": [12, 20], "axial_pos_shape": [4, 4]}
REFORMER |= {"attn_layers": ["local", "local"], "local_attn_chunk_length": 4, "feed_forward_size": 48}
REFORMER |= {"is_decoder": False}


def seq2seq_entries() -> list[Entry]:
    led = {"attention_window": 4, "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 40}
    speech2text = {"num_conv_layers": 1, "conv_channels": 16, "conv_kernel_sizes": [3], "input_feat_per_channel": 4}
    speech2text |= {"input_channels": 1}
    moonshine = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4}
    moonshine |= {"decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}
    prophetnet = {"num_encoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
    fsmt = {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]}
    switch = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 100}
    nllb = {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 100}
    part = {n: TINY[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    part |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 12}
    return [
        hf_entry("mt5", "MT5", SEQ2SEQ, translation),
        hf_entry("umt5", "UMT5", SEQ2SEQ, translation),
        hf_entry("longt5", "LongT5", SEQ2SEQ, translation, local_radius=3, global_block_size=4),
        hf_entry("switch_transformers", "SwitchTransformers", SEQ2SEQ, translation, **switch),
        hf_entry("bart_scaled", "Bart", SEQ2SEQ, translation, scale_embedding=True),
        hf_entry("pegasus", "Pegasus", SEQ2SEQ, translation, scale_embedding=True),
        hf_entry("pegasus_x", "PegasusX", SEQ2SEQ, translation, num_global_tokens=2, block_size=4),
        hf_entry("mbart", "MBart", SEQ2SEQ, translation, scale_embedding=True),
        hf_entry("m2m_100", "M2M100", SEQ2SEQ, translation),
        hf_entry("nllb_moe", "NllbMoe", SEQ2SEQ, translation, **nllb),
        hf_entry("marian", "Marian", "MTModel", translation, scale_embedding=True, decoder_vocab_size=VOCABULARY),
        hf_entry("blenderbot", "Blenderbot", SEQ2SEQ, translation),
        hf_entry("blenderbot_small", "BlenderbotSmall", SEQ2SEQ, translation),
        hf_entry("plbart", "PLBart", SEQ2SEQ, translation),
        hf_entry("fsmt", "FSMT", SEQ2SEQ, translation, **fsmt),
        hf_entry("led", "LED", SEQ2SEQ, long_translation, **led),
        hf_entry("bigbird_pegasus", "BigBirdPegasus", SEQ2SEQ, translation, attention_type="original_full"),
        hf_entry("prophetnet", "ProphetNet", SEQ2SEQ, translation, **prophetnet),
        hf_entry("mvp", "Mvp", SEQ2SEQ, translation),
        hf_entry("t5gemma", "T5Gemma", SEQ2SEQ, translation, encoder=part, decoder=part),
        hf_entry("speech_to_text", "Speech2Text", SEQ2SEQ, frames, **speech2text),
        hf_entry("moonshine", "Moonshine", SEQ2SEQ, waves, **moonshine),
        hf_entry("wav2vec2", "Wav2Vec2", "ForCTC", speech, **WAV2VEC2),
        hf_entry("wav2vec2_layer_norm", "Wav2Vec2", "ForCTC", speech, **WAV2VEC2_LARGE),
        hf_entry("hubert", "Hubert", "ForCTC", speech, **WAV2VEC2),
        hf_entry("wavlm", "WavLM", "ForCTC", speech, **WAV2VEC2),
        hf_entry("unispeech", "UniSpeech", "ForCTC", speech, **WAV2VEC2),
        hf_entry("unispeech_sat", "UniSpeechSat", "ForCTC", speech, **WAV2VEC2),
        hf_entry("sew", "SEW", "ForCTC", speech, squeeze_factor=2, **WAV2VEC2),
        hf_entry("sew_d", "SEWD", "ForCTC", speech, squeeze_factor=2, **WAV2VEC2),
        hf_entry("wav2vec2_conformer", "Wav2Vec2Conformer", "ForCTC", speech, **WAV2VEC2),
        hf_entry("data2vec_audio", "Data2VecAudio", "ForCTC", speech, conv_pos_kernel_size=3, **WAV2VEC2),
        hf_entry("audio_spectrogram", "AST", "ForAudioClassification", spectra, max_length=16, **AST),
    ]


WAV2VEC2 = {"conv_dim": (16, 16), "conv_kernel": (5, 3), "conv_stride": (4, 2), "num_conv_pos_embeddings": 4}
WAV2VEC2 |= {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
WAV2VEC2_LARGE = WAV2VEC2 | {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
AST = {"num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4}


def vision_entries() -> list[Entry]:
    swin = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
    dpt = {
        "backbone_out_indices": [0, 1, 2, 3],
        "num_hidden_layers": 4,
        "neck_hidden_sizes": [8, 12, 16, 20],
        "fusion_hidden_size": 12,
    }
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
    pvt2 = pvt | {"num_attention_heads": [1, 2, 3, 4]}
    levit = {"hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 4, 6], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}
    mobilevit = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64}
    mobilevit |= {"patch_size": 2}
    mobilevitv2 = {"base_attn_unit_dims": [8, 16, 24], "width_multiplier": 0.25, "image_size": 64, "patch_size": 2}
    focalnet = {"embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 2}
    regnet = {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 8, "groups_width": 8}
    swiftformer = {"embed_dims": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "image_size": 64}
    hiera = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": [32, 32], "patch_stride": [4, 4]}
    hiera |= {"num_query_pool": 1, "patch_size": [7, 7], "masked_unit_size": [4, 4]}
    hiera |= {"masked_unit_attention": [True, False]}
    return [
        hf_entry("deit", "DeiT", CLASSIFIER, images(16)),
        hf_entry("beit", "Beit", CLASSIFIER, images(16)),
        hf_entry("beit_relative", "Beit", CLASSIFIER, images(16), use_relative_position_bias=True),
        hf_entry("data2vec_vision", "Data2VecVision", CLASSIFIER, images(16)),
        hf_entry("vit_msn", "ViTMSN", CLASSIFIER, images(16)),
        hf_entry("ijepa", "IJepa", CLASSIFIER, images(16)),
        hf_entry("dinov2", "Dinov2", CLASSIFIER, images(16)),
        hf_entry("dinov2_swiglu", "Dinov2", CLASSIFIER, images(16), use_swiglu_ffn=True),
        hf_entry("dinov2_registers", "Dinov2WithRegisters", CLASSIFIER, images(16), num_register_tokens=2),
        hf_entry("vit_mae", "ViTMAE", "ForPreTraining", masked_images, **mae),
        hf_entry("vit_hybrid_depth", "DPT", "ForDepthEstimation", images(32), **dpt),
        hf_entry("swin_hf", "Swin", CLASSIFIER, images(16), **swin),
        hf_entry("swinv2_hf", "Swinv2", CLASSIFIER, images(16), **swin),
        hf_entry("convnext_hf", "ConvNext", CLASSIFIER, images(32), **stages),
        hf_entry("convnextv2_hf", "ConvNextV2", CLASSIFIER, images(32), **stages),
        hf_entry("resnet_hf", "ResNet", CLASSIFIER, images(32), embedding_size=8, **RESNET),
        hf_entry("resnet_basic_hf", "ResNet", CLASSIFIER, images(32), embedding_size=8, layer_type="basic", **RESNET),
        hf_entry("bit", "Bit", CLASSIFIER, images(32), embedding_size=8, num_groups=4, **RESNET),
        hf_entry("regnet_hf", "RegNet", CLASSIFIER, images(32), **regnet),
        hf_entry("segformer", "Segformer", "ForSemanticSegmentation", images(32), num_labels=CLASSES, **segformer),
        hf_entry("efficientnet_hf", "EfficientNet", CLASSIFIER, images(32), **efficientnet),
        hf_entry("mobilenet_v1", "MobileNetV1", CLASSIFIER, images(32), depth_multiplier=0.25),
        hf_entry("mobilenet_v2", "MobileNetV2", CLASSIFIER, images(32), depth_multiplier=0.25),
        hf_entry("mobilevit", "MobileViT", CLASSIFIER, images(64), **mobilevit),
        hf_entry("mobilevitv2", "MobileViTV2", CLASSIFIER, images(64), **mobilevitv2),
        hf_entry("cvt", "Cvt", CLASSIFIER, images(32), **cvt),
        hf_entry("poolformer_hf", "PoolFormer", CLASSIFIER, images(64), **poolformer),
        hf_entry("pvt", "Pvt", CLASSIFIER, images(32), **pvt),
        hf_entry("pvt_v2", "PvtV2", CLASSIFIER, images(32), **pvt2),
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
BLIP = {"text_config": TEXT_TOWER | {"encoder_hidden_size": 40}, "vision_config": IMAGE_TOWER, "projection_dim": 12}
BLIP |= {"image_text_hidden_size": 12}


def transformers_entries() -> list[Entry]:
    return [*named_entries(), *decoder_entries(), *encoder_entries(), *seq2seq_entries(), *vision_entries()]
