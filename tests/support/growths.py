"""Growths of a model in the middle of training, in float64, and how far their losses drift from those of the model."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from nets import take_steps
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale
from mupscale.widening.records import records_of

CLIP = 0.05
"""Below the norm of the gradients when these runs begin."""


class Grown:
    """A model after five steps, and the models to which it grew, one from the other."""

    def __init__(
        self,
        build: Callable[[Any], nn.Module],
        sizes: Sequence[Any],
        make_optimizer: Callable[..., Optimizer],
        batches: Sequence[Any],
        loss: Callable[[nn.Module, Any], Tensor],
        hints: Callable[[Any, Any], mupscale.Hints] = lambda before, after: mupscale.Hints(),
        **settings: Any,
    ) -> None:
        """`hints` are those from one size to the next; a model with base shapes trains under muP."""
        torch.manual_seed(0)
        self.models = [build(size).double() for size in sizes]
        self.batches, self.loss, self.count = batches, loss, 0
        self.optimizers = [make_optimizer(self.models[0].parameters())]
        if records_of(self.models[0]):
            mupscale.apply_mup(self.optimizers[0], self.models[0])
        self.steps(5)
        assert mupscale.clip_grad_norm_(self.models[0], 1.0) > 0.999 * CLIP, "nothing is clipped"
        self.reports = []
        for (before, after), wide in zip(pairwise(sizes), self.models[1:], strict=True):
            pair = self.models[len(self.reports)], wide, self.optimizers[-1]
            self.reports.append(mupscale.upscale(*pair, hints=hints(before, after), **settings))
            self.optimizers.append(self.reports[-1].optimizer)
            self.steps(2)

    def steps(self, count: int) -> list[list[float]]:
        """Takes steps of all models that there are; the losses of each."""
        data = [self.batches[(self.count + index) % len(self.batches)] for index in range(count)]
        self.count += count
        pairs = zip(self.models, self.optimizers, strict=False)
        return [take_steps(*pair, data, self.loss, CLIP) for pair in pairs]

    def drift(self, steps: int = 20) -> float:
        """The largest deviation of a loss from the first model's, relative."""
        first, *others = self.steps(steps)
        return max(abs(loss / wanted - 1) for losses in others for loss, wanted in zip(losses, first, strict=True))

    def reload(self) -> None:
        """Makes copies of the last pair, as a resumed run does: hooks are not part of an optimizer's state."""
        model, optimizer = self.models[-1], self.optimizers[-1]
        self.models[-1] = copy.deepcopy(model)
        named = dict(zip(model.parameters(), self.models[-1].parameters(), strict=True))
        groups = [{**group, "params": [named[p] for p in group["params"]]} for group in optimizer.param_groups]
        self.optimizers[-1] = type(optimizer)(groups, lr=1.0)
        self.optimizers[-1].load_state_dict(optimizer.state_dict())
        mupscale.attach(self.models[-1], self.optimizers[-1])
