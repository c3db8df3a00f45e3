"""Inputs of a model of the transformers library as its processors make them: random tokens, images, videos and sounds.

A model that reads images beside its text has a token that stands for a part of an image; there must be as many of these
as the model makes features of the image, so its own `get_image_features` counts them.
"""

import inspect
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from mupscale.hf.config import parts

ROWS, TOKENS, SAMPLES, FRAMES = 2, 12, 4000, 2
PATCHES = 4
"""Patches along each side of an image whose size the model does not fix."""

Inputs = dict[str, Any]

_SPECIAL = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa).*_token_(id|index)")

_KINDS = {"image": 1, "video": 2, "audio": 3}
"""What stands in a text for something else, with its number in `mm_token_type_ids`."""


def inputs_of(model: Any) -> Inputs:
    """Arguments of a forward pass; of those that the model does not take, the caller makes no use."""
    accepted = inspect.signature(model.forward).parameters
    draw = _Draw(model)
    inputs = draw.inputs_without_text(accepted)
    text = draw.text()
    if text is None:
        return inputs
    types, beside = torch.zeros_like(text), False
    for kind, number in _KINDS.items():
        token = field(model.config, f"{kind}_token_id", f"{kind}_token_index")
        is_seen = kind == "video" and "pixel_values" in inputs  # the same tower reads both
        seen = {} if token is None or is_seen else draw.seen(kind, accepted)
        count = _features_in_a_row(model, kind, seen) if seen else 0
        if count:
            inputs, beside = inputs | seen, True
            start = field(model.config, f"{'vision' if kind != 'audio' else kind}_start_token_id")
            places = [] if start is None else [start]
            row = torch.tensor([*places, *[token] * count], device=text.device).expand(ROWS, -1)
            kinds = torch.tensor([*[0 for _ in places], *[number] * count], device=text.device).expand(ROWS, -1)
            text, types = (torch.cat([x[:, :2], new, x[:, 2:]], 1) for x, new in ((text, row), (types, kinds)))
    inputs |= {"input_ids": text, "mm_token_type_ids": types}
    if beside:  # not read off the types, which have no values on the meta device
        inputs |= {"token_type_ids": (types > 0).long(), "attention_mask": torch.ones_like(text)}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = text
    return inputs


def field(config: Any, *names: str) -> Any:
    """The first value of a field of one of these names in a configuration or in its parts; None if there is none."""
    values = (getattr(part, name, None) for _, part in parts(config) for name in names)
    return next((value for value in values if value is not None), None)


@torch.no_grad()
def _features_in_a_row(model: Any, kind: str, seen: Inputs) -> int:
    """How many features a model makes of what it sees beside one row of text."""
    find = getattr(model, f"get_{kind}_features", None)
    if find is None:  # Qwen2-Audio has a formula alone
        formulas = (getattr(each, "_get_feat_extract_output_lengths", None) for each in model.modules())
        formula = next((each for each in formulas if each is not None), None)
        return 0 if formula is None else int(formula(next(iter(seen.values())).shape[-1])[1])
    accepted = inspect.signature(find).parameters
    if "args" in accepted:
        accepted = inspect.signature(getattr(model.model, f"get_{kind}_features")).parameters
    found: Any = find(**{name: value for name, value in seen.items() if name in accepted})
    features = getattr(found, "pooler_output", found)
    tensors = [features] if isinstance(features, Tensor) else list(features)
    return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors) // ROWS


class _Draw:
    """Draws inputs of a model, the same ones every time."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.generator = torch.Generator("cpu").manual_seed(0)

    def noise(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=self.model.dtype, device="cpu")
        return drawn.to(self.model.device)

    def text(self) -> Tensor | None:
        """Tokens that mean nothing but themselves; None if the model reads no text."""
        sizes = [getattr(part, "vocab_size", None) for _, part in parts(self.config)]
        vocabulary = min((size for size in sizes if isinstance(size, int)), default=None)  # sounds may have their own
        if vocabulary is None:
            return None
        lowest = min(3, vocabulary - 1)  # the first ones often mean padding or an end
        special = set(self._special_tokens())
        usual = [token for token in range(lowest, vocabulary) if token not in special] if special else []
        drawn = torch.randint(lowest, vocabulary, (ROWS, TOKENS), generator=self.generator, device="cpu")
        if usual:
            drawn = torch.tensor([usual[token % len(usual)] for token in drawn.flatten().tolist()]).view(ROWS, TOKENS)
        return drawn.to(self.model.device)

    def _special_tokens(self) -> Iterator[int]:
        """Tokens that stand for images and sounds, and mark their ends."""
        for _, part in parts(self.config):
            for name, value in vars(part).items():
                if _SPECIAL.fullmatch(name) and isinstance(value, int):
                    yield value

    def size(self) -> tuple[int, int] | None:
        size = field(self.config, "image_size")
        return (size, size) if isinstance(size, int) else None if size is None else tuple(size)

    def inputs_without_text(self, accepted: Collection[str]) -> Inputs:
        """Images and sounds for a model that reads these alone, or beside a text without places for them."""
        answer: Inputs = {"input_values": self.noise(ROWS, SAMPLES)}
        if any(field(self.config, f"{kind}_token_id", f"{kind}_token_index") is not None for kind in _KINDS):
            return answer
        return answer | self.seen("image", accepted) | self.seen("audio", accepted)

    def seen(self, kind: str, accepted: Collection[str]) -> Inputs:
        """What processors make of an image, a video or a sound beside each row of text; empty if it is not taken."""
        if kind == "audio":
            return self.sound(accepted) if "input_features" in accepted else {}
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        if name not in accepted:
            return {}
        if f"{kind}_grid_thw" in accepted:
            return self.patches(kind, name)
        if kind == "video":
            return {}
        channels = field(self.config, "num_channels") or 3
        if "spatial_shapes" in accepted:
            patch = field(self.config, "patch_size")
            shape = torch.full((ROWS, 2), PATCHES, device=self.model.device)
            count = PATCHES * PATCHES
            mask = torch.ones(ROWS, count, dtype=torch.long, device=self.model.device)
            pixels = self.noise(ROWS, count, channels * patch * patch)
            return {name: pixels, "spatial_shapes": shape, "pixel_attention_mask": mask}
        size = self.size()
        if size is None:
            return {}
        if "image_sizes" in accepted and getattr(self.config.vision_config, "model_type", None) == "pixtral":
            patch = field(self.config, "patch_size")
            size = (min(size[0], PATCHES * patch), min(size[1], PATCHES * patch))
            sizes = torch.tensor([size] * ROWS, device=self.model.device)
            return {name: self.noise(ROWS, channels, *size), "image_sizes": sizes}
        several = (1,) if "pixel_attention_mask" in accepted else ()
        return {name: self.noise(ROWS, *several, channels, *size)}

    def patches(self, kind: str, name: str) -> Inputs:
        """Images cut into patches, for models that take them of any size."""
        vision = self.config.vision_config
        merged = field(vision, "spatial_merge_size") or 1
        frames = field(vision, "temporal_patch_size") or 1
        grid = (1 if kind == "image" else FRAMES, merged * 2, merged * 3)
        channels = field(vision, "in_channels", "in_chans", "num_channels") or 3
        width = channels * frames * vision.patch_size * vision.patch_size
        pixels = self.noise(ROWS * grid[0] * grid[1] * grid[2], width)
        return {name: pixels, f"{kind}_grid_thw": torch.tensor([grid] * ROWS, device=self.model.device)}

    def sound(self, accepted: Collection[str]) -> Inputs:
        bins = field(self.config, "num_mel_bins")
        if bins is None:
            return {}
        length = 2 * (field(self.config, "max_source_positions") or 50)
        ones = torch.ones(ROWS, length, dtype=torch.long, device=self.model.device)
        masks = {name: ones for name in ("feature_attention_mask", "input_features_mask") if name in accepted}
        return {"input_features": self.noise(ROWS, bins, length), **masks}
