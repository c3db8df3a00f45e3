"""Training costs as the paper's appendix "Evaluation criteria" counts them: what a comparison charges.

A weight costs six operations per sample it sees: a multiplication and an addition in the forward pass, and as many for
the gradient of its input and for its own. `Growable.training_flops` counts the matrix products that a network really
does, with torch's FLOP counter. The paper's estimates are larger by exactly

- MLP and ResNet-18: 2 operations per multiply-accumulate of the first layer, since data needs no gradient;
- GPT-2 at its full context: 6 operations per bias and norm parameter, which no matrix product holds.
"""

import math
from collections.abc import Sequence

from mupscale.errors import UserError

LOGGED = 10**6
"""FLOPs in a unit of the horizontal axis of the curves against FLOPs."""


def first_reach(losses: Sequence[float], target: float) -> int | None:
    """How many of the logged steps (or epochs) a run takes to come down to `target`, or None if it never does.

    The paper's target is the from-scratch run's minimum training loss. Its costs of upscaled MLPs, 598 and 3,031
    TFLOPs, are those of 26.4 and 133.8 epochs: whole epochs of each run, averaged over five seeds.
    """
    if math.isnan(target):
        raise UserError("first_reach: target is NaN, wanted a loss")
    return next((count for count, loss in enumerate(losses, 1) if loss <= target), None)
