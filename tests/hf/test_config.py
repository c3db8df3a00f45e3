"""Configurations of the transformers library: which fields grow, and which size shows a family's structure."""

from fractions import Fraction

import pytest

hf = pytest.importorskip("transformers")

from mupscale.errors import UserError  # noqa: E402
from mupscale.hf.config import deep_config, fields_of, kind_of, sizes_of_layers, wide_config  # noqa: E402
from mupscale.hf.config_shrunken import shrunken  # noqa: E402


def llama(**settings):
    return hf.LlamaConfig(
        **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2} | settings
    )


def sizes(config, *names):
    return [getattr(config, name) for name in names]


LLAMA = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def test_widths_and_heads_grow_and_the_rest_stays():
    narrow = llama(vocab_size=61, num_hidden_layers=3)
    wide = wide_config(narrow, 3)
    assert sizes(wide, *LLAMA) == [192, 288, 12, 6, 16]
    assert sizes(wide, "vocab_size", "num_hidden_layers", "max_position_embeddings") == [61, 3, 2048]
    assert sizes(narrow, *LLAMA) == [64, 96, 4, 2, 16]
    for fraction in (1.5, Fraction(3, 2)):
        assert sizes(wide_config(llama(), fraction), *LLAMA) == [96, 144, 6, 3, 16]


def test_nested_configurations_grow():
    wide = wide_config(hf.CLIPConfig(), 2)
    assert wide.text_config.hidden_size == 2 * hf.CLIPTextConfig().hidden_size
    assert wide.vision_config.num_attention_heads == 2 * hf.CLIPVisionConfig().num_attention_heads
    assert wide.vision_config.patch_size == hf.CLIPVisionConfig().patch_size
    assert wide.projection_dim == hf.CLIPConfig().projection_dim


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (hf.BloomConfig(hidden_size=64, n_head=8), "n_head"),
        (hf.MptConfig(d_model=64, n_heads=8), "n_heads"),
        (hf.FalconConfig(hidden_size=64, num_attention_heads=8, alibi=True), "num_attention_heads"),
    ],
)
def test_the_number_of_heads_stays_under_alibi(config, heads):
    assert getattr(wide_config(config, 2), heads) == 8
    assert getattr(wide_config(config, 2, keep_heads=False), heads) == 16
    assert wide_config(config, 2).hidden_size == 128


def test_feed_forward_alone():
    assert sizes(wide_config(llama(), 2, only="feed_forward"), *LLAMA) == [64, 192, 4, 2, 16]
    wide = wide_config(hf.DistilBertConfig(dim=32, hidden_dim=48, n_heads=4), 2, only="feed_forward")
    assert sizes(wide, "dim", "hidden_dim", "n_heads") == [32, 96, 4]
    wide = wide_config(hf.Qwen2MoeConfig(), 2, only="feed_forward")
    before = hf.Qwen2MoeConfig()
    names = ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size")
    assert sizes(wide, *names) == [2 * size for size in sizes(before, *names)]
    assert sizes(wide, "hidden_size", "num_experts") == sizes(before, "hidden_size", "num_experts")


def test_other_factors_by_field():
    assert sizes(wide_config(llama(), 2, fields={"intermediate_size": 3}), *LLAMA) == [128, 288, 8, 4, 16]
    wide = wide_config(hf.CLIPConfig(), 2, fields={"text_config.hidden_size": 1, "num_attention_heads": 1})
    assert wide.text_config.hidden_size == hf.CLIPTextConfig().hidden_size
    assert wide.vision_config.hidden_size == 2 * hf.CLIPVisionConfig().hidden_size


class Odd(hf.PretrainedConfig):
    model_type = "odd"

    def __init__(self, hidden_size=32, mixer_dim=48, **rest):
        self.hidden_size, self.mixer_dim = hidden_size, mixer_dim
        super().__init__(**rest)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (llama(), {"factor": 1.3}, r"hidden_size = 64 times 13/10 is not whole"),
        (llama(), {"factor": 1.25}, r"num_key_value_heads = 2 times 5/4 is not whole"),
        (llama(), {"factor": 0.5}, r"factor must be a number of at least 1, got 0.5"),
        (llama(), {"factor": "2"}, r"factor must be a number of at least 1, got '2'"),
        (llama(), {"factor": float("nan")}, r"factor must be a number of at least 1, got nan"),
        (llama(), {"factor": 2, "fields": {"hidden": 2}}, r"has no field 'hidden'"),
        (
            llama(),
            {"factor": 2, "fields": {"hidden_size": -1}},
            r"fields\['hidden_size'\] must be a number of at least",
        ),
        (llama(), {"factor": 2, "only": "heads"}, r"only must be 'feed_forward' or None, got 'heads'"),
        (hf.GPT2Config(), {"factor": 2, "only": "feed_forward"}, r"'gpt2' has no feed-forward size that is set"),
        (hf.GPT2Config(), {"factor": 2, "fields": {"n_inner": 2}}, r"n_inner is None: the model derives its value"),
        (
            hf.GPT2Config(n_embd=24, n_head=4),
            {"factor": 2, "fields": {"n_head": 5}},
            r"n_embd = 48 is not divisible by n_head = 20",
        ),
        (Odd(), {"factor": 2}, r"field 'mixer_dim' = 48 looks like a size, and it is not known whether it grows"),
        (hf.LevitConfig(), {"factor": 2}, r"field 'down_ops' has widths among other numbers"),
        ("llama", {"factor": 2}, r"config must be a PretrainedConfig of transformers, got str"),
    ],
)
def test_bad_factors_and_fields_are_refused(config, arguments, message):
    with pytest.raises(UserError, match=message) as refusal:
        wide_config(config, **arguments)
    assert "\n" not in str(refusal.value)


def test_an_unknown_size_grows_or_stays_as_said():
    assert wide_config(Odd(), 2, fields={"mixer_dim": 2}).mixer_dim == 96
    assert wide_config(Odd(), 2, fields={"mixer_dim": 1}).mixer_dim == 48


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("hidden_size", 8, "width"),
        ("n_embd", 8, "width"),
        ("word_embed_proj_dim", 8, "width"),
        ("lru_width", 8, "width"),
        ("time_step_rank", 8, "width"),
        ("kv_lora_rank", 8, "kept"),
        ("qk_rope_head_dim", 8, "kept"),
        ("moe_intermediate_size", 8, "feed_forward"),
        ("encoder_ffn_dim", 8, "feed_forward"),
        ("num_key_value_heads", 8, "heads"),
        ("n_groups", 8, "heads"),
        ("n_group", 8, "kept"),
        ("state_size", 8, "kept"),
        ("vocab_size", 8, "kept"),
        ("num_local_experts", 8, "kept"),
        ("out_channels", [8, 16], "width"),
        ("out_channels", 3, "kept"),
    ],
)
def test_kinds_of_fields(name, value, kind):
    assert kind_of(name, value) == kind


def test_what_images_are_projected_to_is_the_width_of_the_text_in_paligemma():
    both = (
        kind_of("projection_dim", 8, ["text_config", "image_token_index"]),
        kind_of("projection_dim", 8, ["text_config"]),
    )
    assert both == ("width", "kept"), "CLIP has a space of its own"


@pytest.mark.slow
def test_every_causal_family_of_transformers_is_decided():
    """A field of a new family that no pattern knows is a gap in the table."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    undecided = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # its defaults do not fit each other
            continue
        unknown = [field for field, value in fields_of(config) if value and kind_of(field, value) == "unknown"]
        if unknown:
            undecided[model_type] = unknown
    assert undecided == {}


# ---- shrunken ------------------------------------------------------------------------------------------------------


def parameters(config):
    return sum(parameter.numel() for parameter in hf.AutoModelForCausalLM.from_config(config).parameters())


def test_shrunken_keeps_the_ratio_of_heads_and_the_flags():
    small = shrunken(
        hf.Qwen2Config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)
    )
    assert sizes(small, "num_attention_heads", "num_key_value_heads", "num_hidden_layers") == [14, 2, 2]
    assert small.hidden_size == 14 * 8
    assert small.tie_word_embeddings
    assert small.hidden_act == hf.Qwen2Config().hidden_act


def test_shrunken_has_every_kind_of_layer():
    small = shrunken(hf.Gemma3TextConfig())
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert len(small.layer_types) == small.num_hidden_layers == 6
    assert 0 < small.sliding_window < 8
    small = shrunken(hf.DeepseekV3Config())
    assert sizes(small, "num_hidden_layers", "first_k_dense_replace", "num_experts_per_tok") == [2, 1, 8]


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mamba", "Falcon", "Qwen3Moe", "DeepseekV3", "GPTNeoX", "Gemma2"])
def test_a_shrunken_model_is_small_and_can_be_widened(name):
    config = getattr(hf, f"{name}Config")()
    small = shrunken(config)
    wide = wide_config(small, 2)
    assert 4_000 < parameters(small) < 400_000
    assert parameters(wide) > 3 * parameters(small)
    assert type(small) is type(config)


def test_shrunken_sizes_fit_each_other():
    """Layers that a backbone names; heads of Mamba 2; halves of a head that turn with rows and columns of patches."""
    dino = shrunken(hf.DINOv3ViTConfig(num_hidden_layers=12))
    assert type(dino).from_dict(dino.to_dict()).stage_names == ["stem", "stage1", "stage2"]
    mamba = shrunken(hf.Mamba2Config(hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=1))
    assert mamba.num_heads * mamba.head_dim == mamba.expand * mamba.hidden_size
    vision = shrunken(hf.Qwen2VLConfig(vision_config={"hidden_size": 3584})).vision_config
    assert vision.embed_dim // vision.num_heads % 4 == 0
    gemma = shrunken(hf.Gemma4TextConfig())
    assert (gemma.num_hidden_layers, sizes_of_layers(gemma)) == (6, {5: {"head_dim": 16}})
    deep = deep_config(gemma, "num_hidden_layers", [0, 1, 2, 3, 4, 5, 5])
    assert sizes_of_layers(deep) == {5: {"head_dim": 16}, 6: {"head_dim": 16}}
