"""The plans of growths before there is a run, and their check by small networks of the same factor."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.checks.check_step import Agreement, check_step
from mupscale.checks.recording import generators_kept, map_leaves, state_kept
from mupscale.errors import UserError, one_line, prefix_errors
from mupscale.models.base import Growable, without_log
from mupscale.models.checkpoint import Layers, Size, Width
from mupscale.models.twin import TwinSpec, depth_between
from mupscale.widening.hints import Hints
from mupscale.widening.layers import Depth, layers_of
from mupscale.widening.plan import as_identity, lists_without_residual, plan
from mupscale.widening.plan_text import Plan

NOTHING: Mapping[str, float] = MappingProxyType({})

SAMPLES = 2
"""How many samples of a batch a check uses: in float64, the outputs for a large vocabulary are large."""


def plan_growth(
    callback: UpscaleCallback, module: Growable, before: Size, residual: Mapping[str, float] = NOTHING
) -> Plan:
    """The plan of a growth from a size. Raises a UserError if the size, or the noise, does not fit.

    `residual` has what makes new layers add nothing, where their class does not declare it.
    """
    after, depth = callback.size_after(before), callback.depth
    with prefix_errors(f"UpscaleCallback.{callback.recipe}"):
        module.make_twin(after.arguments)  # which refuses layers that cannot become more
    there = f"the width before it, {before.width}" if callback.layers is None else f"the {before} before it"
    refusals = prefix_errors(f"UpscaleCallback.{callback.recipe} does not fit {there}", ValueError)
    with refusals, generators_kept([]):  # building a network must not move the run's random numbers
        narrow, wide = (module.network(*size, meta=True) for size in (before, after))
        # where only a batch shows what makes new layers the identity, all of their parameters stand for it
        pending = {f"{name}.*".removeprefix("."): 0.0 for name in undeclared_lists(narrow, wide, depth, residual)}
        hints = Hints(depth=depth_between(narrow, wide, depth), residual={**residual, **pending})
        plan = callback.method.plan(narrow, wide, hints)
    with prefix_errors("UpscaleCallback.noise", ValueError):
        callback.method.choose_noise(callback.noise, plan, narrow)
    return plan


def undeclared_lists(
    narrow: nn.Module, wide: nn.Module, depth: Depth, residual: Mapping[str, float] = NOTHING
) -> list[str]:
    """The lists of layers of which only a batch shows what makes new ones add nothing."""
    return lists_without_residual(narrow, layers_of(narrow, wide, depth_between(narrow, wide, depth)), residual)


def check_growth(
    module: Growable, before: Size, after: Size, batch: Any, depth: Depth = "identity"
) -> tuple[Hints, Agreement]:
    """Returns how a module grows, and whether new networks agree, by the loss of a batch and its gradients.

    They are the smallest of the same factor that can be compared. A difference counts only if larger ones have it too:
    a model may treat few units in another way than many.
    """
    samples = map_leaves(lambda leaf: leaf[:SAMPLES] if isinstance(leaf, Tensor) and leaf.ndim else leaf, batch)
    found: tuple[Hints, Agreement] | None = None
    reason, loss, lists = "no network of these widths can be compared", LossBySize(module), list[str]()
    for pair in TwinSpec(after.arguments, None).small_pairs(module.make_twin(before.arguments)):
        with generators_kept():
            try:
                narrow, wide = (loss.network(**dict(recipe.hparams or {})) for recipe in pair)
                lists = undeclared_lists(narrow, wide, depth)
                found = _found_between(narrow, wide, lambda net: loss(net, samples), depth, lists)
            except Exception as error:  # whatever a model does that has too few units
                reason = one_line(error, 300)
        if found is not None and (found[1].exact is not False or found[1].is_random):
            break
    if found is None and lists and depth == "identity":
        raise UserError(f"what makes the layers of {lists[0]!r} add nothing is not found: {reason}")
    return found or (Hints(depth=depth), Agreement(None, reason=reason))


def _found_between(
    narrow: nn.Module, wide: nn.Module, call: Callable[[nn.Module], Any], depth: Depth, lists: list[str]
) -> tuple[Hints, Agreement]:
    hints = Hints(depth=depth_between(narrow, wide, depth))
    if lists:
        from mupscale.discovery.depth import find_residual

        try:
            hints = replace(hints, residual=find_residual(narrow, lists, call))
        except UserError as error:
            if depth == "identity":
                raise
            return hints, Agreement(None, reason=str(error))
    planned = as_identity(plan(narrow, wide, hints=hints), narrow, wide, hints.residual)
    return hints, check_step(narrow, wide, (), call, planned)


class LossBySize:
    """The loss of networks of several sizes by one module, which has the size of each, and forgets every batch."""

    def __init__(self, module: Growable) -> None:
        self.module = module
        self._sizes: dict[int, Size] = {}
        """Sizes by the number of parameters, because networks are copied to be compared."""

    def network(self, width: Width, layers: Layers | None = None, *, meta: bool = False) -> nn.Module:
        """The network at this size, by default with as many layers as the module."""
        size = Size(width, self.module.size.layers if layers is None else layers)
        net = self.module.network(*size, meta=meta)
        self._sizes[_count(net)] = size
        return net

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        module, inside = self.module, set(net.modules())
        own, arguments = module.net, dict(module.hparams)
        module.net = net
        module.hparams.update(self._sizes[_count(net)].arguments)
        try:
            with without_log(module), state_kept(part for part in module.modules() if part not in inside):
                return module.loss(batch)
        finally:
            module.net = own
            module.hparams.update(arguments)


def _count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())
