"""One forward pass of a model of the transformers library: on which inputs, and how the outputs of two compare."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from transformers import masking_utils

from mupscale.checks.comparison import Planned, candidates
from mupscale.checks.trace import floats_of
from mupscale.errors import UserError, one_line
from mupscale.hf.inputs import Inputs, inputs_of
from mupscale.widening.growth import duplicate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Call = Callable[[Any], Any]
"""One forward pass of a model."""


def default_call(model: Any) -> Any:
    """A forward pass on tokens, images, videos and sounds, whichever the model takes; else a UserError."""
    return model(**arguments_of(model))


def arguments_of(model: Any) -> Inputs:
    """The arguments of that forward pass, the same ones every time."""
    accepted = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in inputs_of(model).items() if name in accepted}
    if model.main_input_name not in inputs:
        raise UserError(
            f"{type(model).__name__} reads {model.main_input_name!r}, for which there are no inputs here. "
            "Give call, a function that runs it: call=lambda model: model(...)"
        )
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


@torch.no_grad()
def largest_difference(
    narrow: Path,
    wide: Path,
    model_class: "type[PreTrainedModel]",
    call: Call | None,
    planned: Planned,
    wide_class: "type[PreTrainedModel] | None" = None,
) -> float | str:
    """The largest difference of the outputs of two folders, in units of the largest output; or why there is none."""
    call = call or default_call
    answers: list[Any] = []
    for folder in (narrow, wide):
        model = load_in_float32(model_class if folder is narrow or wide_class is None else wide_class, folder)
        try:
            answers.append(call(model))
        except Exception as error:  # only the caller knows which inputs a model takes
            if folder is wide:
                raise UserError(f"the wide model cannot compute: {type(error).__name__} {error}") from error
            return f"no input is known ({type(error).__name__}: {one_line(error, 80)})"
        del model
    return difference(answers[0], answers[1], planned)


def load_in_float32(model_class: "type[PreTrainedModel]", folder: Path) -> "PreTrainedModel":
    """A model of a folder, to be compared with another one."""
    options: dict[str, Any] = {"use_safetensors": True, "attn_implementation": "eager"}
    with quiet():
        model = model_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options).eval()
    choose_experts(model, "eager")
    return model


def choose_experts(model: Any, implementation: str) -> None:
    """Chooses how experts run, if the model has any: the default, grouped, takes neither all sizes nor all dtypes."""
    choose: Any = getattr(model, "set_experts_implementation", None)
    if callable(choose):
        choose(implementation)


def logits_of(output: Any) -> Any:
    """The logits of what a model returns; all of it where there are none."""
    logits = getattr(output, "logits", None)
    return output if logits is None else logits


def difference(before: Any, after: Any, planned: Planned = MappingProxyType({})) -> float | str:
    """The largest difference of logits, or of the first output of one shape, relative to it; or why there is none.

    Where all outputs are as wide as the model, that of the first one from its planned duplicate.
    """
    pairs = list(zip(floats_of(logits_of(before)), floats_of(logits_of(after)), strict=False))
    for one, other in pairs:
        if one.shape == other.shape:
            return _relative(one, other)
    for one, other in pairs:
        sizes = zip(one.shape, other.shape, strict=False)
        if one.ndim == other.ndim and all(n == w or (n, w) in planned for n, w in sizes):
            return min(_relative(duplicate(one, layouts), other) for layouts in candidates(one, other, planned))
    return "all of its outputs are as wide as the model"


def _relative(one: Any, other: Any) -> float:
    return float((other - one).abs().max() / one.abs().max().clamp_min(1e-30))


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
