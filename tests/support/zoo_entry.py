"""An entry of the zoo of models that nobody prepared: how to build it, what to give to it, and a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

VOCABULARY = 61
CLASSES = 5
LENGTH = 9
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A family: how to build its model at `factor` times its width, and what to give to it."""

    name: str
    build: Callable[[float], nn.Module]
    inputs: Callable[[], Inputs]
    """Arguments of one forward pass; others with every call."""
    rebuild: Callable[[nn.Module, str], nn.Module]
    """Saves a model into a folder and loads it from there."""
    named: bool = False
    """Whether it is one of those that must come out exact."""
    refused: str = ""
    """Where it must be refused: what the message must say."""

    def call(self, model: nn.Module) -> Tensor:
        """One forward pass on inputs that are always the same."""
        torch.manual_seed(7)
        return outputs(model(**in_its_dtype(model, self.inputs())))

    def batch(self, seed: int) -> Inputs:
        torch.manual_seed(100 + seed)
        return self.inputs()


def outputs(answer: Any) -> Tensor:
    """The tensor a loss is made of: logits or what stands for them."""
    if isinstance(answer, Tensor):
        return answer
    names = ("logits", "logits_per_image", "predicted_depth", "reconstruction", "prediction_outputs", "pred_boxes")
    for name in (*names, "prediction_logits", "start_logits", "itm_score"):
        if getattr(answer, name, None) is not None:
            return getattr(answer, name)
    raise LookupError(f"no logits among {list(answer)}")


def in_its_dtype(model: nn.Module, inputs: Inputs) -> Inputs:
    """Floating-point inputs in the dtype of the model's weights."""
    dtype = next(model.parameters()).dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def loss(model: nn.Module, batch: Inputs) -> Tensor:
    """Cross-entropy against tokens or classes, the squared error where the outputs are no logits of these."""
    logits = outputs(model(**in_its_dtype(model, batch)))
    torch.manual_seed(11)
    if logits.shape[-1] in (VOCABULARY, CLASSES, 2, 4):
        targets = torch.randint(0, logits.shape[-1], logits.shape[:-1])
        return cross_entropy(logits.flatten(0, -2), targets.flatten())
    return mse_loss(logits, torch.randn(logits.shape, dtype=logits.dtype))


# ---- inputs --------------------------------------------------------------------------------------------------------


def given(last: int | None = None, **shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Two random rows of each shape: tokens where the name ends in `ids`, with `last` as the last one of a row."""

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if not name.endswith("ids"):
            return torch.randn(2, *shape)
        ids = torch.randint(3, VOCABULARY, (2, *shape))
        if last is not None:
            ids[:, -1] = last
        return ids

    return lambda: {name: drawn(name, shape) for name, shape in shapes.items()}


def images(size: int) -> Callable[[], Inputs]:
    return given(pixel_values=(3, size, size))


def masked_images() -> Inputs:
    return images(16)() | {"noise": torch.rand(2, 16)}


text = given(input_ids=(LENGTH,))
long_text = given(input_ids=(16,))
translation = given(input_ids=(LENGTH,), decoder_input_ids=(7,))
long_translation = given(input_ids=(16,), decoder_input_ids=(8,))
videos = given(pixel_values=(4, 3, 16, 16))
pairs = given(last=2, pixel_values=(3, 16, 16), input_ids=(LENGTH,))
spectrograms = given(input_features=(4, 16), decoder_input_ids=(7,))
speech = given(input_values=(200,))
waves = given(input_values=(2000,), decoder_input_ids=(7,))
frames = given(input_features=(12, 4), decoder_input_ids=(7,))
spectra = given(input_values=(16, 8))
