"""Writes a growth into the wide model: its weights, duplicated and scaled by Table 1 (Step 1 of the paper's
meta-algorithm), its buffers, and what is frozen.

A buffer that is not saved (`persistent=False`) is computed whenever the model is built: a table of frequencies, a mask,
a constant that depends on the width. If the narrow value were copied, the model would change when it is saved and
loaded. So the wide model keeps its own value. On the meta device it has none: then `rebuild` builds the model again,
without memory for its parameters, and the buffers are taken from it.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from mupscale._torch import renew_gradient_hooks_, use_count
from mupscale.errors import UserError
from mupscale.sharding import is_sharded, largest_of_ranks, local_part
from mupscale.widening import table
from mupscale.widening.growth import Growth, copies_of_entries, duplicate_, source_index
from mupscale.widening.optimizers import groups_by_id
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import Record, Records, names_by_id, records_of, restore_infshapes, store_records
from mupscale.widening.table import Scale, Side


def widen_(target: Tensor, source: Tensor, growth: Growth, rows: slice | None = None, first: int = 0) -> None:
    """Writes the widened weight into `target` (Table 1, first column); of some `rows` alone as `duplicate_`."""
    duplicate_(target, source, growth.layouts, growth.factors("weight"), growth.rescale, rows, first)
    if growth.shift:
        target.add_(growth.shift)


def widen_gradient_(target: Tensor, source: Tensor, growth: Growth) -> None:
    """Writes the gradient that a widened weight has where the narrow one has `source`."""
    own = table.deeper(table.rescaled(table.NOTHING, growth.rescale), growth.branch, 1)
    duplicate_(target, source, growth.layouts, growth.factors("gradient"), own.gradient)


def materialise_(parameter: nn.Parameter, device: torch.device) -> None:
    """Gives a meta parameter memory without changing its identity: ties, modules and optimizers keep holding it."""
    real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)
    renew_gradient_hooks_(parameter)


def materialise_recurrent_(wide: nn.Module, narrow: nn.Module) -> None:
    """Gives recurrent layers memory: they hold weak references to their parameters, and renew these themselves."""
    for name, module in wide.named_modules():
        if isinstance(module, nn.RNNBase) and any(parameter.is_meta for parameter in module.parameters()):
            module.to_empty(device=next(narrow.get_submodule(name).parameters()).device)
    restore_infshapes(wide)


def refuse_held(wide: nn.Module, optimizers: Sequence[Optimizer | None]) -> None:
    """Raises a UserError if a meta parameter cannot be allocated, because a graph or a weak reference holds it."""
    anew = {id(p) for module in wide.modules() if isinstance(module, nn.RNNBase) for p in module.parameters()}
    kept = {key for optimizer in optimizers if optimizer is not None for key in groups_by_id(optimizer)}
    for name, parameter in wide.named_parameters():
        if not parameter.is_meta or (id(parameter) in anew and id(parameter) not in kept):
            continue
        if weakref.getweakrefcount(parameter) or use_count(parameter) > 1:
            raise UserError(
                f"parameter {name!r} {tuple(parameter.shape)} of the wide model is on the meta device, and something "
                "refers to it (an output of the model, a weak reference), so it cannot be given memory. Drop that, or "
                "call wide.to_empty(device=...) before the optimizer is made"
            )


def release_(tensor: Tensor) -> None:
    """Frees the memory of a narrow parameter or buffer that has been consumed."""
    if is_sharded(tensor):
        local_part(tensor).untyped_storage().resize_(0)  # FSDP2 has views of it
    tensor.data = tensor.data.new_empty(0)
    tensor.grad = None


def remember_widths(
    plan: Plan, narrow: nn.Module, wide: nn.Module, scale_of: Callable[[Growth], Scale], *, entrywise: bool
) -> None:
    """Stores the width factors on the wide module, for clipping, unless its base shapes already determine them.

    With `entrywise`, also those by which the entries of one axis differ, for the optimizer's rates, and the shifts of
    affine units, for its decay.
    """
    before, after = records_of(narrow), records_of(wide, mup_only=True)
    widths = {}
    for name, entry in plan.parameters.items():
        old, scale = before.get(name, Record()), scale_of(entry)
        entries = _entries(entry, old) if entrywise else ()
        shift = old.shift * scale.weight + entry.shift if entrywise else 0.0
        width = Record(table.product((old.scale, scale)), old.base, entries, shift)
        if name in after and (not width.changes_steps or _same_widths(width, after[name])):
            width = replace(after[name], entries=entries, shift=shift) if width.changes_steps else after[name]
        widths.update(dict.fromkeys(entry.names, width))
    if any(widths[name] is not after.get(name) for name in widths):
        store_records(wide, Records(bool(after) or bool(records_of(narrow, mup_only=True)), widths))


def refuse_other_rescale(plan: Plan, narrow: nn.Module, wide: nn.Module) -> None:
    """Raises a UserError where base shapes do not know how a parameter is rescaled: its muP rates would be wrong."""
    before, after = records_of(narrow), records_of(wide, mup_only=True)
    for name, entry in plan.parameters.items():
        is_rescaled = entry.rescale != 1 or entry.offset
        if name not in after or entry.source or not (is_rescaled or after[name].shift):
            continue
        old = before.get(name, Record())
        width = Record(table.product((old.scale, entry.scale)))
        shift = old.shift * entry.scale.weight + entry.shift
        if not _same_widths(width, after[name]) or not math.isclose(shift, after[name].shift, abs_tol=1e-9):
            raise UserError(
                f"rescale: {name!r} is rescaled by {(entry.rescale, entry.offset)} here, and otherwise in the base "
                "shapes of the models, from which muP takes its rates. Give set_base_shapes the hints from the base "
                "model to each model, or declare them in width_rescale of the model class"
            )


def _same_widths(one: Record, other: Record) -> bool:
    """Up to the rounding of factors such as 5/3."""
    return all(map(math.isclose, one.scale, other.scale))


def _entries(entry: Growth, old: Record) -> tuple[tuple[int, Side, tuple[float, ...]], ...]:
    """The relative numbers of copies along mixed axes after this growth, on top of those of an earlier one."""
    earlier = {axis: torch.tensor(row, dtype=torch.float64, device="cpu") for axis, _, row in old.entries}
    answer = []
    for number, axis in enumerate(entry.axes):
        now = copies_of_entries(axis.pieces) / axis.reference
        if number in earlier:
            now = now * earlier[number][source_index(axis.pieces)]
        if axis.shares:
            now = now / now.new_tensor(axis.shares)
        if axis.side and not bool((now == 1).all()):
            answer.append((number, axis.relative_side, tuple(now.tolist())))
    return tuple(answer)


Rebuild = Callable[[], nn.Module]


def set_own_buffers_(plan: Plan, narrow: nn.Module, wide: nn.Module, rebuild: Rebuild | None = None) -> None:
    """Gives buffers on the meta device memory where the narrow ones are, and sets those that are not saved."""
    values, sources = own_buffers(plan, narrow, wide, rebuild), dict(narrow.named_buffers())
    real: dict[int, Tensor] = {}
    for name, target in list(wide.named_buffers(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        if target.is_meta:
            if id(target) not in real:
                real[id(target)] = torch.empty_like(target, device=sources[name].device)
            setattr(wide.get_submodule(owner), attribute, real[id(target)])
    for name, target in wide.named_buffers():
        if name in values and values[name] is not target:
            target.copy_(values[name])


def own_buffers(plan: Plan, narrow: nn.Module, wide: nn.Module, rebuild: Rebuild | None = None) -> dict[str, Tensor]:
    """What each buffer that the wide model does not save is to hold, by name. Nothing is written."""
    refuse_unknown_buffers(plan, wide, rebuild)
    rebuilt: dict[str, Tensor] = {}
    if rebuild is not None and any(entry.kept for entry in plan.buffers.values()):
        with parameters_on_meta(), torch.random.fork_rng(devices=[]):
            rebuilt = dict(rebuild().named_buffers())
        for name, target in wide.named_buffers():
            if name not in rebuilt or rebuilt[name].shape != target.shape:
                raise UserError(
                    f"rebuild: the model that it builds has no buffer {name!r} of shape {tuple(target.shape)}. Let it "
                    "build the wide model"
                )
    sources = dict(narrow.named_buffers())
    own = {name: target for name, target in wide.named_buffers() if plan.buffers[name].kept}
    return {name: rebuilt.get(name, target if _has_value(target) else sources[name]) for name, target in own.items()}


def refuse_unknown_buffers(plan: Plan, wide: nn.Module, rebuild: Rebuild | None) -> None:
    for name, target in wide.named_buffers():
        entry = plan.buffers[name]
        if entry.kept and entry.grows and rebuild is None and not _has_value(target):
            raise UserError(
                f"buffer {name!r} {entry.narrow_shape} → {entry.wide_shape} is not saved with the model, and the wide "
                "model has no value for it: it is on the meta device, or holds NaN. Build the wide model on a device, "
                "or give upscale a function that builds it"
            )


def notes_on_copied_buffers(plan: Plan, wide: nn.Module) -> Iterator[str]:
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


_WITHOUT_MEMORY: set[int] = set()
"""The threads that build models with parameters on the meta device."""


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
    _WITHOUT_MEMORY.add(thread)
    try:
        yield
    finally:
        hook.remove()
        _WITHOUT_MEMORY.discard(thread)


def parameters_have_no_memory() -> bool:
    """Whether this thread is inside of `parameters_on_meta`."""
    return threading.get_ident() in _WITHOUT_MEMORY


def carry_frozen_(narrow: nn.Module, wide: nn.Module) -> list[str]:
    """Freezes in `wide` exactly what is frozen in `narrow`; returns notes on what was frozen in `wide` alone."""
    notes = []
    targets = dict(wide.named_parameters())
    for name, source in narrow.named_parameters():
        target = targets.get(name)
        if target is None or target.requires_grad == source.requires_grad:
            continue
        if source.requires_grad:
            if not (target.is_floating_point() or target.is_complex()):
                continue
            notes.append(
                f"{name}: frozen in the wide model, but not in the narrow one, which decides: it will be trained. "
                "To freeze it, call requires_grad_(False) after the growth"
            )
        else:
            target.grad = None  # an optimizer would still apply it
        target.requires_grad_(source.requires_grad)
    return notes


def carry_modes_(narrow: nn.Module, wide: nn.Module) -> None:
    """Sets modules of the wide model to train or to evaluate as those of the same name in the narrow one."""
    modules = dict(narrow.named_modules())
    for name, module in wide.named_modules():
        if name in modules:
            module.training = modules[name].training


def largest_entries(tensors: Sequence[Tensor]) -> list[float]:
    """The largest absolute entry of each tensor, or NaN, in one wait; of sharded ones, ranks agree by one message."""
    if not tensors:
        return []
    device, parts = tensors[0].device, [local_part(tensor) for tensor in tensors]
    norms = []
    for part in parts:
        norm = torch.linalg.vector_norm(part, ord=math.inf) if part.numel() else part.new_zeros(())
        norms.append(norm.to(device, torch.float64))
    largest = torch.stack(norms)
    sharded = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    if sharded is not None:
        largest = largest_of_ranks(largest, sharded)
    return largest.tolist()


def first_non_finite(named: Iterable[tuple[str, Tensor]], *, infinite_allowed: bool = False) -> str | None:
    """The name of the first tensor with a NaN or infinite entry; with `infinite_allowed`, only NaN counts."""
    inexact = [(name, tensor) for name, tensor in named if is_inexact(tensor)]
    bad = math.isnan if infinite_allowed else _is_non_finite
    largest = largest_entries([tensor for _, tensor in inexact])
    return next((name for (name, _), value in zip(inexact, largest, strict=True) if bad(value)), None)


def refuse_non_finite_model(plan: Plan, narrow: nn.Module, wide: nn.Module) -> None:
    """Raises a UserError for NaN or infinite entries (in buffers without width, only NaN), and for an overflow."""
    parameters = [(name, p) for name, p in narrow.named_parameters() if is_inexact(p)]
    buffers = [(name, b) for name, b in narrow.named_buffers() if is_inexact(b)]
    if any(tensor.is_meta for _, tensor in (*parameters, *buffers)):
        raise UserError("the narrow model is on the meta device: it has no weights to copy. Load them first")
    largest = largest_entries([tensor for _, tensor in (*parameters, *buffers)])
    targets = dict(wide.named_parameters())
    for (name, parameter), value in zip(parameters, largest, strict=False):
        if _is_non_finite(value):
            raise UserError(
                f"parameter {name!r} {tuple(parameter.shape)} of the narrow model has NaN or infinite entries; take an "
                "earlier checkpoint"
            )
        dtype = targets[name].dtype
        value *= max(plan.parameters[name].rescale, 1)
        if (dtype.is_floating_point or dtype.is_complex) and value > torch.finfo(dtype).max:
            raise UserError(
                f"parameter {name!r} {tuple(parameter.shape)} of the narrow model has entries up to {value:g}, too "
                f"large for the {dtype} of the wide one. Give the wide model the dtype {parameter.dtype}"
            )
    for (name, buffer), value in zip(buffers, largest[len(parameters) :], strict=True):
        if math.isnan(value) or (plan.buffers[name].grows and not plan.buffers[name].kept and math.isinf(value)):
            raise UserError(
                f"buffer {name!r} {tuple(buffer.shape)} of the narrow model has NaN or infinite entries; take an "
                "earlier checkpoint"
            )


def refuse_non_finite_state(narrow: nn.Module, optimizer: Optimizer) -> None:
    """Raises a UserError for NaN or infinite entries in the state of an optimizer over `narrow`, unless on meta."""
    names = names_by_id(narrow)
    named = [
        (f"{key!r} of {names[id(parameter)]!r}", value)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
        for key, value in state.items()
        if isinstance(value, Tensor) and not value.is_meta
    ]
    # a counter on the CPU is not worth a transfer to the device of the others
    for on_cpu in (False, True):
        bad = first_non_finite((name, value) for name, value in named if (value.device.type == "cpu") is on_cpu)
        if bad is not None:
            raise UserError(
                f"optimizer state {bad} has NaN or infinite entries; use an earlier checkpoint, or grow "
                "without the state"
            )


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers, and not whole ones."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_non_finite(value: float) -> bool:
    return not math.isfinite(value)
