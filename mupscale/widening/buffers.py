"""Buffers: saved ones are duplicated; for the others, the wide model keeps its own values.

A buffer that is not saved (`persistent=False`) is computed whenever the model is built: a table of frequencies, a mask,
a constant that depends on the width. If the narrow value were copied, the model would change when it is saved and
loaded. So the wide model keeps its own value. On the meta device it has none: then `rebuild` builds the model again,
without memory for its parameters, and the buffers are taken from it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mupscale.errors import UserError
from mupscale.widening.layout import duplicate
from mupscale.widening.plan import Plan

Rebuild = Callable[[], nn.Module]
"""Builds the wide model again, on the CPU."""


def widen_buffers_(plan: Plan, narrow: nn.Module, wide: nn.Module, rebuild: Rebuild | None = None) -> None:
    """Writes the buffers of `wide`, and gives those on the meta device memory where the narrow ones are."""
    values = wide_buffers(plan, narrow, wide, rebuild)
    sources = dict(narrow.named_buffers())
    real: dict[int, Tensor] = {}
    for name, target in list(wide.named_buffers(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        if target.is_meta:
            if id(target) not in real:
                real[id(target)] = torch.empty_like(target, device=sources[name].device)
            setattr(wide.get_submodule(owner), attribute, real[id(target)])
    for name, target in wide.named_buffers():
        if values[name] is not target:
            target.copy_(values[name])


def wide_buffers(plan: Plan, narrow: nn.Module, wide: nn.Module, rebuild: Rebuild | None = None) -> dict[str, Tensor]:
    """What each buffer of the wide model is to hold, by name. Nothing is written."""
    refuse_unknown_buffers(plan, wide, rebuild)
    rebuilt: dict[str, Tensor] = {}
    if rebuild is not None and any(entry.kept for entry in plan.buffers.values()):
        with parameters_on_meta(), torch.random.fork_rng(devices=[]):
            rebuilt = dict(rebuild().named_buffers())
        refuse_other_shapes(rebuilt, wide)
    answer = {}
    sources = dict(narrow.named_buffers())
    for name, target in wide.named_buffers():
        entry = plan.buffers[name]
        if not entry.kept:
            answer[name] = duplicate(sources[name], entry.layouts)
        elif name in rebuilt:
            answer[name] = rebuilt[name]
        else:
            answer[name] = target if _has_value(target) else sources[name]
    return answer


def refuse_unknown_buffers(plan: Plan, wide: nn.Module, rebuild: Rebuild | None) -> None:
    """Raises a UserError for a growing buffer that is not saved, where the wide model has no value for it."""
    for name, target in wide.named_buffers():
        entry = plan.buffers[name]
        if entry.kept and entry.grows and rebuild is None and not _has_value(target):
            raise UserError(
                f"buffer {name!r} {entry.narrow_shape} → {entry.wide_shape} is not saved with the model, and the wide "
                "model has no value for it: it is on the meta device, or holds NaN. Build the wide model on a device, "
                "or give upscale `rebuild`, a function that builds it"
            )


def refuse_other_shapes(rebuilt: dict[str, Tensor], wide: nn.Module) -> None:
    """Raises a UserError if these are not the buffers of the wide model."""
    for name, target in wide.named_buffers():
        if name not in rebuilt or rebuilt[name].shape != target.shape:
            raise UserError(
                f"rebuild: the model that it builds has no buffer {name!r} of shape {tuple(target.shape)}. Let it "
                "build the wide model"
            )


def copied_for_want_of_own(plan: Plan, wide: nn.Module) -> Iterator[str]:
    """A note on each unsaved buffer that is copied from the narrow model, because the wide one has no value for it."""
    for name, target in wide.named_buffers():
        if plan.buffers[name].kept and not _has_value(target):
            yield (
                f"{name}: this buffer is not saved with the model, and the wide model has no value for it (it is on "
                "the meta device, or holds NaN); it gets the narrow one, which is wrong if it depends on the width"
            )


def _has_value(buffer: Tensor) -> bool:
    """Whether a model has computed this buffer; memory that was never written may hold NaN."""
    return not buffer.is_meta and not bool(buffer.isnan().any())


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Models that this thread builds inside have real buffers, and parameters on the meta device, without memory."""
    thread = threading.get_ident()

    def on_meta(_: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch types its answer as None, and uses it
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
