"""A whole training step as one CUDA graph: small networks spend most of a step launching kernels, a graph launches them at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from mupscale.optim import use_fused

_NOT_BAKED_IN = ("params", "param_names", "lr", "initial_lr")
"""What of a parameter group may change without a new capture: learning rates are read from memory."""


class CapturedStep:
    """One step of `optimizer` on a batch, captured once and replayed for every further batch of the same shapes.

    Learning rates stay numbers in the optimizer's groups, where schedules change them; each replay uses what they are then. All else
    about the groups is part of the graph: `fits` tells when a batch, or a group, asks for another one. The network must have
    trained for a few steps before, so that optimizer state exists and kernels are chosen. Holds its gradients and activations for
    as long as it lives.
    """

    def __init__(self, gradients: Callable[[Any], Tensor], optimizer: Optimizer, batch: Any) -> None:
        """
        Args:
            gradients: Computes the loss of a batch and its gradients, clipped if they are to be; returns the loss. It runs once, here:
                what it does beside work on the device is not repeated.
            optimizer: Steps on them. One whose step can be captured: fused, or capturable from its first step.
            batch: One like those to come.
        """
        use_fused(optimizer)
        leaves, self._structure = tree_flatten(batch)
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        device = next(leaf.device for leaf in self._inputs if isinstance(leaf, Tensor))
        self._optimizer = optimizer
        self._baked_in = [_constants(group) for group in optimizer.param_groups]
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates_on_device = torch.tensor(self._rates, dtype=torch.float32, device=device)
        self._graph = torch.cuda.CUDAGraph()
        with _capturable(optimizer, self._rates_on_device):
            optimizer.zero_grad()
            try:
                with torch.cuda.graph(self._graph):
                    self._loss = gradients(tree_unflatten(self._inputs, self._structure)).detach()
                    optimizer.step()
            except Exception as error:
                raise RuntimeError(
                    f"a training step with {type(optimizer).__name__} cannot be captured in a CUDA graph: {error}"
                ) from error

    def fits(self, batch: Any) -> bool:
        """Whether this graph is right for a batch, and for the optimizer as it is now."""
        leaves, structure = tree_flatten(batch)
        return (
            structure == self._structure
            and all(_alike(leaf, captured) for leaf, captured in zip(leaves, self._inputs, strict=True))
            and [_constants(group) for group in self._optimizer.param_groups] == self._baked_in
        )

    def __call__(self, batch: Any) -> Tensor:
        """Takes the step on a batch that fits; the loss before it, on the device. Nothing waits."""
        for captured, leaf in zip(self._inputs, tree_flatten(batch)[0], strict=True):
            if isinstance(leaf, Tensor):
                captured.copy_(leaf, non_blocking=True)
        for index, group in enumerate(self._optimizer.param_groups):
            if group["lr"] != self._rates[index]:
                self._rates[index] = group["lr"]
                self._rates_on_device[index].fill_(group["lr"])
        self._graph.replay()
        return self._loss.clone()


class _capturable:
    """While it lasts, the optimizer reads its learning rates from memory on the device, and may be captured."""

    def __init__(self, optimizer: Optimizer, rates: Tensor) -> None:
        self.groups, self.rates = optimizer.param_groups, rates

    def __enter__(self) -> None:
        self.before = [{key: group[key] for key in ("lr", "capturable") if key in group} for group in self.groups]
        for group, rate in zip(self.groups, self.rates.unbind(), strict=True):
            group.update({key: {"lr": rate, "capturable": True}[key] for key in ("lr", "capturable") if key in group})

    def __exit__(self, *_: object) -> None:
        for group, before in zip(self.groups, self.before, strict=True):
            group.update(before)


def _constants(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_BAKED_IN}


def _alike(leaf: Any, captured: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(captured, Tensor):
        return leaf.shape == captured.shape and leaf.dtype == captured.dtype and leaf.stride() == captured.stride()
    return type(leaf) is type(captured) and leaf == captured
