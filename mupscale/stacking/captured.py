"""A whole step of a stack as one CUDA graph, launched at once instead of kernel by kernel."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mupscale.cuda_graph import StaticBatch, capturing
from mupscale.stacking.stack import Context, Scoring, Stack

WARM_UP_STEPS = 3
"""Steps before a capture, in which kernels are compiled and chosen. Their effects are undone."""


class CapturedStack:
    """A step of a stack, captured once and replayed for every further step of the same kind.

    step = CapturedStack(stack, batch)
    for batch in batches:
        stack.optimizer.read_rates()
        losses = step(batch)

    Learning rates and the other numbers, the seeds of the stack, and `max_norm` where it is a tensor are read from
    memory on the device, so they may change between steps. What else a step depends on, such as the modes of
    the models, is part of the graph. Holds its gradients and activations for as long as it lives.
    """

    def __init__(
        self,
        stack: Stack,
        batch: Any,
        *,
        shared: bool = True,
        max_norm: Tensor | float | None = None,
        context: Context = nullcontext,
    ) -> None:
        """
        Args:
            stack: On a CUDA device. It is as before afterwards: no step has been taken.
            batch: One like those to come.
            shared: Whether one batch is for all models; see `Stack.step`.
            max_norm: As in `Stack.step`; a tensor must be on the device of the stack.
            context: Makes the context of the losses, such as one of `torch.autocast`.
        """
        self._stack, self._max_norm = stack, max_norm  # held, with the memory that the graph reads
        device = stack.seeds.device
        self._inputs = StaticBatch(batch, device)
        stack.optimizer.begin()

        def step() -> Tensor:
            return stack.advance(self._inputs.batch, shared=shared, max_norm=max_norm, context=context)

        stream = torch.cuda.current_stream(device)
        kept = [tensor.detach().cpu() for tensor in stack.changing()]  # the device may have no room for copies
        side = torch.cuda.Stream(device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                step()
        stream.wait_stream(side)
        with torch.no_grad():
            for tensor, before in zip(stack.changing(), kept, strict=True):
                tensor.copy_(before)
        del kept
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, "a step of a stack"):
            self._losses = step()

    def __call__(self, batch: Any) -> Tensor:
        """Takes the step on a batch of the right kind; the losses before it, on the device. Nothing waits."""
        self._inputs.fill(batch)
        self._graph.replay()
        return self._losses.clone()


class CapturedScores:
    """What a function measures of all models of a stack (`Stack.evaluate`), captured once and replayed for batches."""

    def __init__(
        self, stack: Stack, function: Scoring, batch: Any, *, shared: bool = True, context: Context = nullcontext
    ) -> None:
        """
        Args:
            stack: On a CUDA device.
            function: As of `Stack.evaluate`.
            batch: One like those to come.
            shared: Whether one batch is for all models.
            context: Makes the context in which the function is called.
        """
        self._stack = stack  # held, with the memory that the graph reads
        device = stack.seeds.device
        self._inputs = StaticBatch(batch, device)

        def evaluate() -> dict[str, Tensor]:
            with context():
                return stack.evaluate(function, self._inputs.batch, shared=shared)

        stream, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            evaluate()
        stream.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, "a validation of a stack"):
            self._scores = evaluate()

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """The scores of a batch of the right kind; the next call overwrites them. Nothing waits."""
        self._inputs.fill(batch)
        self._graph.replay()
        return self._scores
