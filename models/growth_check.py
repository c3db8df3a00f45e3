"""Whether the growth of a module is exact: small networks of the same factor, compared in float64 on the CPU."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.checks.agreement import Agreement, check_agreement
from mupscale.checks.forward_pass import watched
from mupscale.checks.recording import float64_copy, generators_kept, leaves_of, map_leaves, state_kept
from mupscale.errors import UserError
from mupscale.models.base import Growable, hint_of_parameters_outside, without_log
from mupscale.models.checkpoint import Layers, Size, Width
from mupscale.widening.hints import Hints
from mupscale.widening.layers import Depth, layers_of
from mupscale.widening.plan import as_identity, lists_without_residual, plan

SMALLEST = 8
"""Units of the narrowest layer: fewer would hide differences, such as a norm over a single unit."""

MOST_PARAMETERS = 20_000_000
"""Of a wide network that is compared to make sure of a difference between small ones."""

SAMPLES = 2
"""Of the batch: in float64, the outputs for a large vocabulary are large."""


def check_growth(
    module: Growable,
    before: Size,
    after: Size,
    batch: Any,
    depth: Depth = "identity",
    residual: Mapping[str, float] = MappingProxyType({}),
) -> Agreement:
    """Compares the loss of new networks, and its gradients, at the smallest widths of the same factor.

    Networks that become deeper are compared with new layers that add nothing. `residual` has what makes them so, where
    their classes do not declare it.

    A model may treat few units in another way than many, so a difference counts only if it is there in the largest
    networks too that are not too large. The module and the generators of random numbers do not change.
    """
    samples = first_samples(batch, SAMPLES)
    widths = list(small_widths(before.width, after.width))
    found: Agreement | None = None
    reason = "no network of these widths can be compared"
    with _kept(module), generators_kept():
        loss = LossBySize(module)
        while widths and found is None:
            narrow, wide = widths.pop(0)
            try:
                sizes = before._replace(width=narrow), after._replace(width=wide)
                found = _compared(loss, *sizes, samples, depth, residual)
            except Exception as error:  # whatever a model does that has too few units
                reason = " ".join(str(error).split())[:300]
        if found is None:
            return Agreement(None, reason=reason)
        while widths and found.exact is False and not found.is_random:
            narrow, wide = widths.pop()
            sizes = before._replace(width=narrow), after._replace(width=wide)
            if _parameters(loss.network(*sizes[1], meta=True)) <= MOST_PARAMETERS:
                return _compared(loss, *sizes, samples, depth, residual)
    return found


def find_residual_outputs(module: Growable, size: Size, lists: Sequence[str], batch: Any) -> dict[str, float]:
    """The parameters that make layers of these lists the identity, with their values, found on small networks."""
    from mupscale.discovery.depth import find_residual

    samples, reason = first_samples(batch, SAMPLES), ""
    with _kept(module), generators_kept():
        loss = LossBySize(module)
        for width, _ in small_widths(size.width, size.width):
            try:
                net = loss.network(width, size.layers)
                with torch.no_grad():
                    watched(float64_copy(net).eval(), lambda net: loss(net, samples))
            except Exception as error:  # whatever a model does that has too few units
                reason = " ".join(str(error).split())[:300]
                continue
            return find_residual(net, lists, lambda net: loss(net, samples))
    raise UserError(f"what makes the layers of {lists[0]!r} add nothing is not found: {reason}")


def refuse_inexact(key: str, before: Size, found: Agreement) -> None:
    """Raises a UserError that names the key if a growth is not exact; not if the loss draws random numbers."""
    if found.exact is False and not found.is_random:
        reason = found.reason.replace("what call(model) returns", "the loss")
        raise UserError(f"{key}: growth from {before} is not exact: {reason}. {REMEDY}")


REMEDY = (
    "Blocks, roles or units may be missing (mupscale.discover finds them), or `loss` depends on the width. "
    "`python -m mupscale verify` compares whole steps of training"
)


def _compared(
    loss: "LossBySize", narrow: Size, wide: Size, samples: Any, depth: Depth, residual: Mapping[str, float]
) -> Agreement:
    before, after = loss.network(*narrow), loss.network(*wide)
    planned = plan(before, after, hints=Hints(depth=depth_between(before, after, depth), residual=residual))
    if planned.layers and not planned.keeps_function:
        planned = as_identity(planned, before, after, residual)
    return check_agreement(before, after, planned, lambda net: loss(net, samples))


def depth_between(narrow: nn.Module, wide: nn.Module, depth: Depth) -> Depth | None:
    """How new layers are made, if there are any."""
    names = {name for name, _ in narrow.named_modules()}
    return depth if any(name not in names for name, _ in wide.named_modules()) else None


def undeclared_lists(narrow: nn.Module, wide: nn.Module, depth: Depth, residual: Mapping[str, float]) -> list[str]:
    """The lists with new layers of which it is not known yet what makes them the identity."""
    layers = layers_of(narrow, wide, depth_between(narrow, wide, depth))
    return lists_without_residual(narrow, layers, residual)


def pending_residual(
    narrow: nn.Module, wide: nn.Module, depth: Depth, residual: Mapping[str, float]
) -> dict[str, float]:
    """What makes new layers the identity; where only a batch shows it, all of their parameters stand for it."""
    pending = undeclared_lists(narrow, wide, depth, residual)
    return {**residual, **{f"{name}.*".removeprefix("."): 0.0 for name in pending}}


def small_widths(before: Width, after: Width) -> Iterator[tuple[Width, Width]]:
    """Pairs of widths of the same factors, from the smallest to the given ones."""
    numbers = [*_listed(before), *_listed(after)]
    common = math.gcd(*numbers)
    for units in range(1, common + 1):
        if common % units == 0 and (min(_listed(before)) // common * units >= SMALLEST or units == common):
            yield _scaled(before, units, common), _scaled(after, units, common)


def _listed(width: Width) -> list[int]:
    return width if isinstance(width, list) else [width]


def _scaled(width: Width, units: int, common: int) -> Width:
    return [w // common * units for w in width] if isinstance(width, list) else width // common * units


def first_samples(batch: Any, count: int) -> Any:
    """The same structure with the first samples of all tensors that are as long as the batch."""
    sizes = [len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes:
        return batch

    def cut(leaf: Any) -> Any:
        return leaf[:count] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == sizes[0] else leaf

    return map_leaves(cut, batch)


@contextmanager
def _kept(module: Growable) -> Iterator[None]:
    """Restores the network and the size of a module at the end."""
    net, arguments = module.net, dict(module.hparams)
    try:
        with without_log(module):
            yield
    finally:
        module.net = net
        module.hparams.update(arguments)


class LossBySize:
    """The loss of networks of several sizes by one module, which has the size of each, and forgets every batch."""

    def __init__(self, module: Growable) -> None:
        self.module = module
        self._own = module.size
        self._sizes: dict[int, Size] = {}
        """By the number of parameters: networks are copied to be compared."""

    def network(self, width: Width, layers: Layers | None = None, *, meta: bool = False) -> nn.Module:
        """The network at this size, by default with as many layers as the module."""
        size = Size(width, self._own.layers if layers is None else layers)
        net = self.module.network(*size, meta=meta)
        self._sizes[_parameters(net)] = size
        return net

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        self.module.net, size = net, self._sizes[_parameters(net)]
        self.module.hparams.update({key: value for key, value in size._asdict().items() if value is not None})
        inside = set(net.modules())
        with state_kept(part for part in self.module.modules() if part not in inside):
            try:
                return self.module.loss(batch)
            except RuntimeError as error:
                hint = hint_of_parameters_outside(self.module)
                if hint is None or size == self._own:
                    raise
                raise UserError(f"the loss cannot be computed at {size} ({error}). {hint}") from error


def _parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())
