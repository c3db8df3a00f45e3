"""A whole step of a stack as one CUDA graph, launched at once instead of kernel by kernel."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mupscale.cuda_graph import StaticBatch, capturing
from mupscale.stacking.stack import Context, MaxNorm, Scoring, Stack

WARM_UP_STEPS = 3
"""Calls before a capture, in which kernels are compiled and chosen. Their effects are undone."""


class Captured:
    """A function of a batch, captured once and replayed for every further batch of the same kind."""

    def __init__(
        self, function: Callable[[Any], Any], batch: Any, device: torch.device, what: str, state: Sequence[Tensor] = ()
    ) -> None:
        """
        Args:
            function: What is captured.
            batch: One like those to come.
            device: A CUDA device.
            what: What the function does, in words.
            state: The tensors that it changes. They are as before afterwards.
        """
        self._function = function  # held, with the memory that the graph reads
        self._inputs = StaticBatch(batch, device)
        stream, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        kept = [tensor.detach().cpu() for tensor in state]  # the device may have no room for copies
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                function(self._inputs.batch)
        stream.wait_stream(side)
        with torch.no_grad():
            for tensor, before in zip(state, kept, strict=True):
                tensor.copy_(before)
        del kept
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, what):
            self._answer = function(self._inputs.batch)

    def __call__(self, batch: Any) -> Any:
        """What the function returns of a batch of the right kind; the next call overwrites it. Nothing waits."""
        self._inputs.fill(batch)
        self._graph.replay()
        return self._answer


class CapturedStack(Captured):
    """A step of a stack on a CUDA device.

    step = CapturedStack(stack, batch)
    for batch in batches:
        stack.optimizer.read_rates()
        losses = step(batch)

    Learning rates and the other numbers, the seeds of the stack, and `max_norm` where it is a tensor are read from
    memory on the device, so they may change between steps. What else a step depends on, such as the modes of
    the models, is part of the graph. Holds its gradients and activations for as long as it lives.
    """

    def __init__(
        self, stack: Stack, batch: Any, *, shared: bool = True, max_norm: MaxNorm = None, context: Context = nullcontext
    ) -> None:
        """The arguments are those of `Stack.step`. No step has been taken afterwards."""
        stack.optimizer.begin()

        def step(batch: Any) -> Tensor:
            return stack.advance(batch, shared=shared, max_norm=max_norm, context=context)

        super().__init__(step, batch, stack.seeds.device, "a step of a stack", stack.changing())

    def __call__(self, batch: Any) -> Tensor:
        """Takes the step on a batch of the right kind; the losses before it, on the device. Nothing waits."""
        return super().__call__(batch).clone()


def captured_scores(stack: Stack, function: Scoring, batch: Any, *, shared: bool, context: Context) -> Captured:
    """What a function measures of all models of a stack (`Stack.evaluate`)."""

    def evaluate(batch: Any) -> dict[str, Tensor]:
        with context():
            return stack.evaluate(function, batch, shared=shared)

    return Captured(evaluate, batch, stack.seeds.device, "a validation of a stack")
