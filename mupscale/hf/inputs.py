"""One forward pass of a model of the transformers library, on inputs that its configuration describes."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mupscale.errors import UserError

Call = Callable[[Any], Any]
"""One forward pass of a model."""

ROWS, TOKENS, SAMPLES = 2, 12, 4000


def default_call(model: Any) -> Any:
    """A forward pass on tokens, images and sounds, whichever the model takes. UserError if it takes something else."""
    accepted = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in _inputs(model) if name in accepted}
    if model.main_input_name not in inputs:
        raise UserError(
            f"{type(model).__name__} reads {model.main_input_name!r}, for which there are no inputs here. "
            "Give call, a function that runs it: call=lambda model: model(...)"
        )
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return model(**inputs)


def _inputs(model: Any) -> Iterator[tuple[str, Any]]:
    config = model.config
    generator = torch.Generator("cpu").manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=model.dtype, device="cpu").to(model.device)

    vocabulary = _field(config, "vocab_size")
    if vocabulary is not None:
        lowest = min(3, vocabulary - 1)  # the first ones often mean padding or an end
        tokens = torch.randint(lowest, vocabulary, (ROWS, TOKENS), generator=generator, device="cpu").to(model.device)
        yield "input_ids", tokens
        if getattr(config, "is_encoder_decoder", False):
            yield "decoder_input_ids", tokens
    size = _field(config, "image_size")
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        yield "pixel_values", noise(ROWS, _field(config, "num_channels") or 3, height, width)
    bins = _field(config, "num_mel_bins")
    if bins is not None:
        yield "input_features", noise(ROWS, bins, 2 * (_field(config, "max_source_positions") or 50))
    yield "input_values", noise(ROWS, SAMPLES)


def _field(config: Any, name: str) -> Any:
    """A field of a configuration, or of one inside it."""
    inner = [getattr(config, part, None) for part in getattr(config, "sub_configs", {})]
    return next((found for part in (config, *inner) if (found := getattr(part, name, None)) is not None), None)
