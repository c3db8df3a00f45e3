"""Training costs as the paper's appendix "Evaluation criteria" counts them.

FLOPs per sample or token, and what a comparison charges.

A weight costs six operations per sample it sees: a multiplication and an addition in the forward pass, and as many for
the gradient of its input and for its own. The formulas below give the paper's estimates. `Growable.training_flops`
counts the matrix products that a network really does, with torch's FLOP counter, and differs from them by exactly

- MLP and ResNet-18: 2 operations less per multiply-accumulate of the first layer, since data needs no gradient;
- GPT-2 at its full context: 6 operations less per bias and norm parameter, which 6N charges and no matrix product
  holds. Its first layer is a table that is looked up, so no input gradient is missing.

The paper's totals are those of 500 epochs of 464,809 samples (MLP), 100 epochs of 50,000 images (ResNet-18), and 5,000
steps of 524,288 tokens (GPT-2, for which its text says 10,000).
"""

import math
from collections.abc import Sequence

from mupscale.arguments import refuse_unless_iterable, refuse_unless_level, refuse_unless_whole
from mupscale.errors import UserError

LOGGED = 10**6
"""FLOPs in a unit of the horizontal axis of the curves against FLOPs."""


def mlp_flops(width: int, *, inputs: int = 54, outputs: int = 7, layers: int = 4) -> int:
    """FLOPs of training an MLP on one sample; biases are not charged."""
    refuse_unless_whole("mlp_flops: width", width)
    return 6 * (inputs * width + (layers - 2) * width**2 + width * outputs)


def resnet18_flops(width: int, *, outputs: int = 100) -> int:
    """FLOPs of training ResNet-18 on one 32 × 32 image; `width` is the channels of its stem, norms are not counted."""
    refuse_unless_whole("resnet18_flops: width", width)

    def convolution(channels_in: int, channels: int, kernel: int, pixels: int) -> int:
        return channels_in * channels * kernel**2 * pixels**2

    channels, pixels = width, 32
    macs = convolution(3, width, 3, pixels)
    for stage in range(4):
        for first in (True, False):
            after = width * 2**stage
            if first and stage > 0:
                pixels //= 2
                macs += convolution(channels, after, 1, pixels)  # the shortcut
            macs += convolution(channels, after, 3, pixels) + convolution(after, after, 3, pixels)
            channels = after
    return 6 * (macs + channels * outputs)


def gpt2_flops(width: int, *, layers: int = 12, vocabulary: int = 50304, context: int = 1024) -> int:
    """FLOPs of training GPT-2 on one token of a full context: 6N + 12 · layers · width · context.

    N counts every parameter, biases and norms too, but the position table; the token table counts once, as the readout
    it is tied to.
    """
    refuse_unless_whole("gpt2_flops: width", width)
    matrices = 12 * width**2
    biases, norms = 9 * width, 4 * width
    parameters = vocabulary * width + layers * (matrices + biases + norms) + 2 * width
    return 6 * parameters + 12 * layers * width * context


def speedup(cost: float, *charged: float) -> float:
    """How many times cheaper than `cost` everything charged is together.

    Tuning: `speedup(F(kn), F(kn₀))`, of one run at the target width against one at the small width. Training from
    scratch against an upscale: `speedup(scratch, upscaled)` where the base model is there already, `speedup(scratch,
    upscaled, tuning)` and `speedup(scratch, upscaled, base)` where tuning, or training the base model once and for this
    alone, is charged. `upscaled` is what the upscaled run has cost when it reaches the from-scratch run's minimum loss.
    """
    for value in (cost, *charged):
        refuse_unless_level("speedup: costs", value)
    if not sum(charged) > 0:
        raise UserError(f"speedup: give the costs to compare {cost} with; their sum must be above 0, got {charged}")
    return cost / sum(charged)


def first_reach(losses: Sequence[float], target: float) -> int | None:
    """How many of the logged steps (or epochs) a run takes to come down to `target`, or None if it never does.

    The paper's target is the from-scratch run's minimum training loss. Its costs of upscaled MLPs, 598 and 3,031
    TFLOPs, are those of 26.4 and 133.8 epochs: whole epochs of each run, averaged over five seeds.
    """
    refuse_unless_iterable("first_reach: losses", losses, "losses")
    if isinstance(target, bool | str) or target is None or math.isnan(target):
        raise UserError(f"first_reach: target must be a number, got {target!r}")
    return next((count for count, loss in enumerate(losses, 1) if loss <= target), None)
