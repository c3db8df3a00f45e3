"""One forward pass of a model of the transformers library: on which inputs, and how the outputs of two compare."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import masking_utils

from mupscale.checks.forward_pass import floats_of
from mupscale.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    inner = [getattr(config, part, None) for part in getattr(config, "sub_configs", {})]
    return next((found for part in (config, *inner) if (found := getattr(part, name, None)) is not None), None)


@torch.no_grad()
def largest_difference(
    narrow: Path, wide: Path, model_class: "type[PreTrainedModel]", call: Call | None = None
) -> float | str:
    """The largest difference of the outputs of two folders, in units of the largest output; or why there is none."""
    call = call or default_call
    answers = []
    for folder in (narrow, wide):
        with quiet():
            model = model_class.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, attn_implementation="eager"
            ).eval()
        try:
            answers.append(call(model))
        except Exception as error:  # only the caller knows which inputs a model takes
            if folder is wide:
                raise UserError(f"the wide model cannot compute: {type(error).__name__} {error}") from error
            return f"no input is known ({type(error).__name__}: {one_line(error, 80)})"
        del model
    return difference(*answers)


def logits_of(output: Any) -> Any:
    """The logits of what a model returns; all of it where there are none."""
    logits = getattr(output, "logits", None)
    return output if logits is None else logits


def difference(before: Any, after: Any) -> float | str:
    """The largest difference of logits, or of the first output of one shape, relative to it; or why there is none."""
    for one, other in zip(floats_of(logits_of(before)), floats_of(logits_of(after)), strict=False):
        if one.shape == other.shape:
            return float((other - one).abs().max() / one.abs().max().clamp_min(1e-30))
    return "all of its outputs are as wide as the model"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers from drawing progress bars and from warning of what is checked here anyway."""
    from transformers.utils import logging as own

    level, bars = own.get_verbosity(), own.is_progress_bar_enabled()
    own.set_verbosity(logging.ERROR)
    own.disable_progress_bar()
    try:
        yield
    finally:
        own.set_verbosity(level)
        if bars:
            own.enable_progress_bar()


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Models that run inside do not look for several sequences in a row of tokens.

    Without attention mask transformers reads from the positions whether there are several. On a GPU it waits for them,
    on the meta device it fails, and in a CUDA graph it makes a mask, with which attention is slower.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original
