"""A whole training step as one CUDA graph, launched at once instead of kernel by kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mupscale._torch import tree_flatten, tree_unflatten
from mupscale.errors import UserError

_NOT_BAKED_IN = ("params", "param_names", "lr", "initial_lr")
"""What of a parameter group may change without a new capture: learning rates are read from memory."""


class CapturedStep:
    """One step of `optimizer` on a batch, captured once and replayed for every further step of the same kind.

    Learning rates remain numbers in the optimizer's groups, where schedules change them; each replay uses the current
    ones. Everything else that a step depends on is part of the graph, and of its `kind`. The network must have trained
    for a few steps before, so that optimizer state exists and kernels are chosen. The object keeps the memory of its
    gradients and activations.
    """

    def __init__(self, gradients: Callable[[Any], Tensor], optimizer: Optimizer, batch: Any) -> None:
        """`gradients` returns the loss of a batch after its gradients, clipped if they are to be; it runs once, here.

        The optimizer takes its learning rate from a tensor: it is fused, or one of torch's with `capturable`.
        """
        use_fused(optimizer)
        _count_on_device(optimizer)
        self.kind = step_kind(batch, optimizer)
        self._optimizer, self._state = optimizer, optimizer.state  # held, so that no other state gets its id
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._rates_on_device = torch.tensor(self._rates, dtype=torch.float32, device=parameters[0].device)
        self._inputs = StaticBatch(batch, parameters[0].device)
        self._graph = torch.cuda.CUDAGraph()
        with _capturable(optimizer, self._rates_on_device):
            optimizer.zero_grad()
            with capturing(self._graph, f"a training step with {type(optimizer).__name__}"):
                self._loss = gradients(self._inputs.batch).detach()
                optimizer.step()
        self._gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def __call__(self, batch: Any) -> Tensor:
        """Takes the step on a batch of the right kind; the loss before it, on the device. Nothing waits."""
        self._inputs.fill(batch)
        for index, group in enumerate(self._optimizer.param_groups):
            rate = float(group["lr"])
            if rate != self._rates[index]:
                self._rates[index] = rate
                self._rates_on_device[index].fill_(rate)
        parameter, gradient = self._gradients[0]
        if parameter.grad is not gradient:  # a step outside the graph, or a validation, has put others there, or none
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
        self._graph.replay()
        return self._loss.clone()

    def takes(self, batch: Any) -> bool:
        """Whether a batch is like the one that was captured; the optimizer is not looked at."""
        return batch_kind(batch) == self.kind[0]


def use_fused(optimizer: Optimizer) -> None:
    """Switches on torch's fused kernel, one for a whole group, where there is one and the user chose nothing else."""
    # AdamW is an Adam; Adagrad's kernel exists only for the CPU in torch 2.11
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        on_gpu = all(p.is_cuda and p.is_floating_point() for p in group["params"])
        if on_gpu and group.get("fused", True) is None and group.get("foreach") is None:
            group["fused"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):  # a fused step counts on the device
                    state["step"] = state["step"].to(parameter.device, torch.float32)


def step_kind(batch: Any, optimizer: Optimizer) -> tuple[Any, ...]:
    """Equal for steps that one graph can take: shapes, precisions, other values, and what the optimizer depends on."""
    constants = []
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key not in _NOT_BAKED_IN}
        constants.append(kept | {"trains": [parameter.requires_grad for parameter in group["params"]]})
    return batch_kind(batch), constants, id(optimizer.state)


def _count_on_device(optimizer: Optimizer) -> None:
    """Moves what the optimizer counts in to the device: on the host a graph would not count on."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to(parameter.device)
            elif isinstance(value, int | float):
                raise UserError(
                    f"{type(optimizer).__name__} keeps {key!r} as a number, not a tensor: a CUDA graph would never "
                    "change it"
                )


@contextmanager
def _capturable(optimizer: Optimizer, rates: Tensor) -> Iterator[None]:
    """Makes the optimizer read its learning rates from memory on the device, so that its step may be captured."""
    before = [
        {key: value for key, value in group.items() if key in ("lr", "capturable")} for group in optimizer.param_groups
    ]
    for group, rate in zip(optimizer.param_groups, rates.unbind(), strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)


# --- batches, and captures of any kind


class StaticBatch:
    """A batch in memory of its own, which a CUDA graph reads. `fill` copies another one of its kind to it."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        leaves, structure = tree_flatten(batch)
        self._leaves = [leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.batch = tree_unflatten(self._leaves, structure)

    def fill(self, batch: Any) -> None:
        for captured, leaf in zip(self._leaves, tree_flatten(batch)[0], strict=True):
            if isinstance(leaf, Tensor):
                captured.copy_(leaf, non_blocking=True)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, what: str) -> Iterator[None]:
    """Captures what runs inside. Raises a RuntimeError with the cause if that fails."""
    stream, cause = torch.cuda.current_stream(), None
    try:
        # thread_local: other threads, such as one that pins memory, may call CUDA
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                yield
            except Exception as error:
                cause = error  # the end of the capture will fail as well, with a less exact message
                raise
    except Exception as error:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
        cause = cause or error
        raise RuntimeError(f"{what} cannot be captured in a CUDA graph: {cause}") from cause


def batch_kind(batch: Any) -> tuple[Any, ...]:
    """Structure, shapes, precisions and numbers of a batch."""
    leaves, structure = tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _constant(leaf) for leaf in leaves]


def _constant(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, int | float | str):
        return leaf
    raise UserError(
        "a CUDA graph takes batches of tensors and numbers, in tuples, lists or dicts, but this has a "
        f"{type(leaf).__name__}"
    )
