"""One forward pass in one precision, and the gradients of a weighted sum of what it returns."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mupscale._torch import is_under_transform, tree_map
from mupscale.checks.comparison import MASKED, Match, gradients_of
from mupscale.checks.recording import hooked, leaves_of, real_floats, seed_generators
from mupscale.widening.growth import Axis, duplicate_, narrow_length

Operation = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], None]
"""Reads an operation, its arguments, those by name, and its result."""


class Precision(TorchFunctionMode):
    """Everything is computed in one dtype, float64 or float32, on one device, so that a comparison shows more than
    rounding.

    A request for a smaller dtype becomes one for this one. What is read in a smaller dtype, or from another device, is
    converted, and so is what is made in float32 because no dtype is named: `torch.zeros(n)`.

    `ran` is called with every operation.
    """

    def __init__(
        self,
        ran: Operation = lambda func, args, kwargs, result: None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self._larger = _LARGER[dtype]
        self.ran, self.device = ran, device
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are left alone."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if _DTYPE_OF.get(func) in self._larger:
            func = _METHOD_OF[self._larger[_DTYPE_OF[func]]]
        makes_new = kwargs.get("out") is None and _makes_new(func)
        args = tuple(self._converted(value, makes_new) for value in args)
        kwargs = {name: self._converted(value, makes_new) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if makes_new and isinstance(result, Tensor) and result.dtype in self._larger:
            dtype = self._larger[result.dtype]
            takes_gradients = result.requires_grad and result.is_leaf  # with respect to it
            result = result.detach().to(dtype).requires_grad_() if takes_gradients else result.to(dtype)
        self.ran(func, args, kwargs, result)
        return result

    def _converted(self, value: Any, tensors: bool) -> Any:
        if type(value) is torch.dtype:
            return self._larger.get(value, value)
        if tensors and isinstance(value, Tensor):
            return self.converted(value)
        if tensors and type(value) in (list, tuple) and any(isinstance(each, Tensor) for each in value):
            return type(value)(self._converted(each, tensors) for each in value)
        return value

    def converted(self, tensor: Tensor) -> Tensor:
        """The tensor in no smaller dtype, on the device."""
        if tensor.dtype in self._larger:
            tensor = tensor.to(self._larger[tensor.dtype])
        return tensor if self.device is None or tensor.device == self.device else tensor.to(self.device)


_HALF = (torch.bfloat16, torch.float16)
_LARGER = {
    torch.float64: dict.fromkeys((torch.float32, *_HALF), torch.float64) | {torch.complex64: torch.complex128},
    torch.float32: dict.fromkeys(_HALF, torch.float32),
}
"""By the dtype of all computation, what others become."""

_METHOD_OF = {torch.float64: torch.Tensor.double, torch.float32: torch.Tensor.float}
_DTYPE_OF: dict[Any, torch.dtype] = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


@lru_cache(1024)
def _makes_new(func: Callable[..., Any]) -> bool:
    """Whether an operation makes a new tensor, instead of writing into one or reading an attribute of it."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__", "__setitem__", "backward"):
        return False
    return not (name.endswith("_") and not name.endswith("__")) and (not name.startswith("__i") or name in _READING)


_READING = ("__index__", "__int__", "__invert__")
"""Methods that change nothing, though they begin as the in-place ones do."""


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
    ran: Operation = lambda func, args, kwargs, result: None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    vary: int = 0,
) -> tuple[list[Tensor], Any]:
    """Runs the model, and calls `note` where each module begins and ends, `ran` with each operation.

    Returns what the model's own forward pass returned last, and what `call` returns. The generators of random numbers
    are seeded; the model gets copies of its inputs, so that a change in place does not reach the caller's batch. With
    `vary`, inputs whose entries are all equal get other ones, and whole numbers of them differ by it.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    mode = Precision(ran, device, dtype)
    outputs: list[Tensor] = []

    def begins(name: str, given: Any) -> None:
        with mode.paused():
            note(name, "begins", given)

    def ends(name: str, output: Any) -> None:
        if not name:
            outputs[:] = tensors_of(output)
        with mode.paused():
            note(name, "ends", output)

    # compiled functions run as they were written, so that each operation is seen; _dynamo takes long to import
    is_compiled = "torch._dynamo" in sys.modules
    as_written = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    handle = model.register_forward_pre_hook(_converter(mode, dtype, vary), with_kwargs=True)
    try:
        seed_generators(seed)
        with hooked(dict(model.named_modules()), begins, ends), as_written, mode:
            result = call(model)
    finally:
        handle.remove()
    return outputs, result


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
            shares = [Axis(layout, "in").scale.weight for layout in layouts]
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
    found = gradients_of(model)
    model.zero_grad()
    return found
