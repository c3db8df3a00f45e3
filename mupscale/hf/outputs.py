"""What two models of the transformers library compute from one input, compared."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mupscale.errors import UserError
from mupscale.hf.inputs import Call, default_call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADROOM = 1.5
"""Memory that loading two models needs, in units of their weights in float32."""


def available_bytes() -> int | None:
    """The memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def fits(parameters: int) -> bool:
    """Whether so many parameters in float32 fit into memory."""
    available = available_bytes()
    return available is not None and parameters * 4 * HEADROOM < available


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
            return f"no input is known ({type(error).__name__}: {' '.join(str(error).split())[:80]})"
        del model
    return difference(*answers)


def logits_of(output: Any) -> Any:
    """The logits of what a model returns; all of it where there are none."""
    logits = getattr(output, "logits", None)
    return output if logits is None else logits


def difference(before: Any, after: Any) -> float | str:
    """The largest difference of two models' outputs, in units of the largest output; or why there is none.

    Logits are compared where there are any, otherwise the first output that does not grow.
    """
    before, after = _tensors(before), _tensors(after)
    kept = [name for name in before if name in after and before[name].shape == after[name].shape]
    if not kept:
        return "all of its outputs are as wide as the model"
    name = "logits" if "logits" in kept else kept[0]
    return float((after[name] - before[name]).abs().max() / before[name].abs().max().clamp_min(1e-30))


def _tensors(output: Any) -> dict[str, Tensor]:
    if isinstance(output, Tensor):
        return {"output": output}
    items = output.items() if hasattr(output, "items") else enumerate(output)
    return {str(name): value for name, value in items if isinstance(value, Tensor) and value.is_floating_point()}


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
