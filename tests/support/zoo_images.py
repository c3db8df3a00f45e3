"""Families that read images or sounds beside text, with the sizes of a release: what a folder of them becomes."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from zoo_trial import Outcome, outcome_of

import mupscale.hf
from mupscale.hf.config_shrunken import shrunken
from mupscale.hf.forward_pass import default_call, quiet

_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_TEXT = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
_QWEN = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]}}
_QWEN3 = {**_ROPE, "mrope_section": [24, 20, 20]}
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "vision_use_head": False,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "qwen2_vl": ("Qwen2VL", lambda: hf.Qwen2VLConfig(text_config=_QWEN, vision_config={"hidden_size": 3584})),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        lambda: hf.Qwen2_5_VLConfig(
            text_config=_QWEN, vision_config={"out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]}
        ),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        lambda: hf.Qwen3VLConfig(
            text_config={"hidden_size": 4096, "num_key_value_heads": 8, "rope_parameters": _QWEN3},
            vision_config={"out_hidden_size": 4096},
        ),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        lambda: hf.Qwen3VLMoeConfig(
            text_config={"hidden_size": 2048, "rope_parameters": _QWEN3}, vision_config={"out_hidden_size": 2048}
        ),
    ),
    "llava": ("Llava", lambda: hf.LlavaConfig(vision_config=_CLIP)),
    "vipllava": ("VipLlava", lambda: hf.VipLlavaConfig(vision_config=_CLIP)),
    "gemma3": ("Gemma3", lambda: hf.Gemma3Config(vision_config={**_SIGLIP, "image_size": 896, "patch_size": 14})),
    "mistral3": ("Mistral3", hf.Mistral3Config),
    "glm4v": (
        "Glm4v",
        lambda: hf.Glm4vConfig(
            text_config={"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}
        ),
    ),
    "internvl": ("InternVL", hf.InternVLConfig),
    "idefics3": ("Idefics3", hf.Idefics3Config),
    "smolvlm": ("SmolVLM", hf.SmolVLMConfig),
    "cohere2_vision": (
        "Cohere2Vision",
        lambda: hf.Cohere2VisionConfig(vision_config={**_SIGLIP, "image_size": 512, "patch_size": 16}),
    ),
    "aya_vision": (
        "AyaVision",
        lambda: hf.AyaVisionConfig(
            vision_config={**_SIGLIP, "image_size": 364, "patch_size": 14}, vision_feature_layer=-1
        ),
    ),
    "got_ocr2": ("GotOcr2", hf.GotOcr2Config),
    "lfm2_vl": ("Lfm2Vl", hf.Lfm2VlConfig),
    "qwen2_audio": ("Qwen2Audio", hf.Qwen2AudioConfig),
    "audioflamingo3": ("AudioFlamingo3", hf.AudioFlamingo3Config),
    "paligemma": ("PaliGemma", hf.PaliGemmaConfig),
    "voxtral": ("Voxtral", lambda: hf.VoxtralConfig(audio_token_id=24)),
    "llava_next": ("LlavaNext", hf.LlavaNextConfig),
    "mllama": ("Mllama", hf.MllamaConfig),
}
"""The prefix of the class `…ForConditionalGeneration`, and a configuration."""


def images_trial(name: str, factor: float = 2) -> Outcome:
    """Grows a folder of a small model of the family, and compares both, loaded in float64, on an image and text."""
    return outcome_of(name, lambda: (0.0, _largest_difference(name, factor)), 0.0, 1e-6, as_shipped=True)


def _largest_difference(name: str, factor: float) -> float:
    prefix, config = FAMILIES[name]
    model_class = getattr(hf, f"{prefix}ForConditionalGeneration")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        narrow, wide = Path(folder) / "narrow", Path(folder) / "wide"
        with quiet():
            _drawn(model_class, shrunken(config())).save_pretrained(narrow)
        mupscale.hf.upscale_folder(narrow, factor, wide)
        before, after = (_logits(model_class, each) for each in (narrow, wide))
    return float((after - before).abs().max() / before.abs().max())


def _drawn(model_class: Any, config: Any) -> Any:
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def _logits(model_class: Any, folder: Path) -> torch.Tensor:
    with quiet():
        model = model_class.from_pretrained(folder, dtype=torch.float64).eval()
    logits: torch.Tensor = default_call(model).logits
    return logits
