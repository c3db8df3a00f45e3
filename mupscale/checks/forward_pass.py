"""One forward pass in one precision, and the gradients of a weighted sum of what it returns."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mupscale._torch import is_under_transform, tree_map
from mupscale.checks.matching import MASKED, Match
from mupscale.checks.precision import Operation, Precision
from mupscale.checks.recording import real_floats, seed_generators
from mupscale.checks.structures import leaves_of
from mupscale.widening.axes import duplicate_, narrow_length

Call = Callable[[nn.Module], Any]
"""One forward pass of a model."""

Kind = Literal["begins", "ends", "returns"]


def floats_of(values: Any) -> list[Tensor]:
    """The floating-point tensors in any nested structure, with their graph; of complex ones, both parts."""
    return real_floats(tensors_of(values))


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in any nested structure; those inside `torch.vmap` are left out, because they cannot be looked at."""
    return (x for x in leaves_of(values) if isinstance(x, Tensor) and not is_under_transform(x))


def watched(
    model: nn.Module,
    call: Call,
    note: Callable[[str, Kind, Any], None] = lambda name, kind, values: None,
    made: Callable[[Tensor], None] = lambda tensor: None,
    ran: Operation = lambda func, args, result: None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    vary: int = 0,
) -> tuple[list[Tensor], Any]:
    """Runs the model, and calls `note` where each module begins and ends, `made` with what each operation makes.

    Returns what the model's own forward pass returned last, and what `call` returns. The generators of random numbers
    are seeded; the model gets copies of its inputs, so that a change in place does not reach the caller's batch. With
    `vary`, inputs whose entries are all equal get other ones, and whole numbers of them differ by it.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    mode = Precision(made, ran, device, dtype)
    outputs: list[Tensor] = []

    def begins(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            with mode.paused():
                note(name, "begins", (args, kwargs))

        return hook

    def ends(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not name:
                outputs[:] = tensors_of(output)
            with mode.paused():
                note(name, "ends", output)

        return hook

    handles = [model.register_forward_pre_hook(_converter(mode, dtype, vary), with_kwargs=True)]
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(begins(name), with_kwargs=True))
            handles.append(module.register_forward_hook(ends(name)))
        seed_generators(seed)
        with _not_compiled(), mode:
            result = call(model)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, result


def _not_compiled() -> AbstractContextManager[Any]:
    """Functions that are compiled run as they were written, so that each operation is seen."""
    if "torch._dynamo" not in sys.modules:  # which nothing can be compiled without, and which takes long to import
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _converter(mode: Precision, dtype: torch.dtype, vary: int) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """A hook that gives a model copies of its inputs in one dtype."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
        return mode.converted(_varied(copied, vary) if vary else copied)

    return lambda module, args, kwargs: (tree_map(moved, args), tree_map(moved, kwargs))


def _varied(value: Tensor, step: int) -> Tensor:
    """Unlike entries in place of equal ones, which hide how positions and features are laid out."""
    on_gpu = value.device.type != "cpu"  # where a number that no table has ends the process
    if value.is_complex() or value.dtype is torch.bool or (on_gpu and not value.is_floating_point()):
        return value
    if value.numel() < 2 or not bool((value == value.flatten()[0]).all()) or not bool(value.isfinite().all()):
        return value
    generator = torch.Generator().manual_seed(2)
    if value.is_floating_point():
        size = 0.3 * float(value.flatten()[0].abs()) or 0.3
        return value + size * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    return value + step * torch.randint(2, value.shape, generator=generator).to(value)


def weighted_sum(outputs: Sequence[Tensor], matches: Sequence[Match] | None = None) -> Tensor:
    """A sum of all outputs with fixed random weights. Fill values of masks do not count.

    With `matches`, which say how the outputs of a wide model are made of the narrow one's, the sum is the same: the
    copies of an output share its weight.
    """
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for index, output in enumerate(outputs):
        layouts = None if matches is None else matches[index].layouts
        shape = output.shape if layouts is None else [narrow_length(layout) for layout in layouts]
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        if matches is not None and layouts is not None:
            shares = [[1 / piece.factor for piece in layout] for layout in layouts]
            spread = weights.new_empty(output.shape)
            duplicate_(spread, weights, layouts, shares, 1 / matches[index].ratio)
            weights = spread
        total = total + torch.where(output.detach().abs() < MASKED, output * weights.to(output), 0.0).sum()
    return total


def named_gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    """The gradients of a number by the names of parameters; those that it does not depend on are left out."""
    model.zero_grad()
    if total.requires_grad:
        total.backward()
    found = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in found.items()}
