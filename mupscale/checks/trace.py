"""What goes through the modules of a model in one forward pass, and where that of another model first differs."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mupscale._torch import is_under_transform, without_transforms
from mupscale.checks.comparison import Match, Planned, candidates, match, relative_error, size_of
from mupscale.checks.precision import OperationWatcher, Precision
from mupscale.checks.recording import leaves_of, map_leaves, seed_generators
from mupscale.widening.growth import duplicate
from mupscale.widening.layers import layer_at, source_of
from mupscale.widening.plan_text import Plan

Call = Callable[[nn.Module], Any]
"""One forward pass of a model."""

EventKind = Literal["begins", "ends", "returns"]


@dataclass(frozen=True)
class Difference:
    """What differs between a wide model, or a step of it, and the narrow one."""

    place: str
    """The name of a module."""
    what: str
    error: float
    """Relative: to an update, or to the size of what differs."""
    ratio: float = 1.0
    """What the wide value is multiplied by, where it differs by a factor alone."""
    kind: str = ""
    """The kind of a value after the step: parameter, buffer, state or setting."""

    def __str__(self) -> str:
        return self.what


class Differs(Exception):
    """A pass of the wide model ends, because something differs."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.what)
        self.difference = difference


@dataclass
class Event:
    """A call of a module begins with these tensors, or ends with them; or the whole call returns them."""

    name: str
    kind: EventKind
    tensors: list[Tensor]
    """Copies, which no operation changes in place."""


def floats_of(values: Any) -> list[Tensor]:
    """The floating-point tensors in any nested structure, with their graph; of complex ones, both parts."""
    return _real_floats(tensors_of(values))


def float_copies(values: Any) -> list[Tensor]:
    """Copies of them, without the graph; of tensors inside `torch.vmap`, what they stand for."""
    tensors = (without_transforms(x).detach() for x in leaves_of(values) if isinstance(x, Tensor))
    return [x.clone() for x in _real_floats(tensors)]


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in any nested structure; those inside `torch.vmap` are left out, because they cannot be looked at."""
    return (x for x in leaves_of(values) if isinstance(x, Tensor) and not is_under_transform(x))


def _real_floats(tensors: Iterable[Tensor]) -> list[Tensor]:
    real = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors)
    return [x for x in real if x.is_floating_point()]


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module], begins: Callable[[str, Any], None], ends: Callable[[str, Any], None]
) -> Iterator[None]:
    """Calls `begins` with the name and the (args, kwargs) of each call of a module, `ends` with what it returns."""

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        begins(name, (args, kwargs))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        ends(name, output)

    handles: list[Any] = []
    try:
        for name, module in modules.items():
            if "parametrizations" not in name.split("."):
                handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
                handles.append(module.register_forward_hook(partial(after, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def watched(
    model: nn.Module,
    call: Call,
    note: Callable[[str, EventKind, Any], None] = lambda name, kind, values: None,
    ran: OperationWatcher = lambda func, args, kwargs, result: None,
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

    return lambda module, args, kwargs: (map_leaves(moved, args), map_leaves(moved, kwargs))


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


def match_all(
    narrow: Sequence[Tensor], wide: Sequence[Tensor], tolerance: float, planned: Planned
) -> list[Match] | None:
    """How each tensor is made of the narrow one; None if one is not, or there are more of them."""
    if len(narrow) != len(wide):
        return None
    answer = []
    for before, after in zip(narrow, wide, strict=True):
        found = match(before.double(), after.double().to(before.device), tolerance, planned)
        if found is None:
            return None
        answer.append(found)
    return answer


Ratios = dict[tuple[int, int, torch.Size], float]
"""What tensors are multiplied by, by their place among the events, and their shape."""


class Follower:
    """Compares what modules of a wide model get and return, as they run, with what those of the narrow one did.

    Inside a model, a tensor may be multiplied by a number, the same for all passes that share `ratios`.
    """

    def __init__(
        self,
        model: nn.Module,
        events: Sequence[Event],
        plan: Plan,
        planned: Planned,
        tolerance: float,
        ratios: Ratios | None = None,
    ) -> None:
        """`events` are those of the narrow `model`."""
        self._model, self._events, self._plan = model, list(events), plan
        self._planned, self._tolerance = planned, tolerance
        self._ratios: Ratios = {} if ratios is None else ratios
        self._called = {event.name for event in events}  # a list of modules is never called
        self._place = 0
        self._begun: list[Difference | None] = []
        self.first: Difference | None = None
        """The first difference, also of a number that something is multiplied by."""
        self.differs = False
        """Whether something differs by more than such a number."""
        self.drifts: dict[str, float] = {}
        """The largest relative difference of what each module returns, apart from such a number."""

    def __call__(self, name: str, kind: EventKind, values: Any) -> None:
        found = layer_at(self._plan.layers, name)
        if found is not None and found[1].is_new:
            return
        source = source_of(self._plan.layers, name)
        before = self._events[self._place] if self._place < len(self._events) else None
        if before is None or (before.name, before.kind) != (source, kind):
            self._events.clear()
            self.first = self.first or Difference("", "the two models call different modules", math.inf)
            self.differs, self.drifts[source] = True, math.inf
            return
        after = float_copies(values)
        drift, ratio = self._compared(before.tensors, after)
        self._place += 1
        if kind == "begins":
            self._begun.append(self._difference(source, kind, drift, ratio))
            return
        begun = self._begun.pop()
        is_result = not self._begun and (not name or [x.shape for x in before.tensors] == [x.shape for x in after])
        if is_result:
            drift = max(drift, abs(ratio - 1))
        self.drifts[source] = max(self.drifts.get(source, 0.0), drift)
        self.differs |= not drift <= self._tolerance
        difference = self._difference(source, kind, drift, ratio)
        if difference is not None and self.first is None:
            # an input of a call that has ended, with an output that agrees, does no harm
            self.first = next((each for each in (*self._begun, begun) if each is not None), difference)

    def _compared(self, narrow: list[Tensor], wide: list[Tensor]) -> tuple[float, float]:
        """How far tensors are from the narrow ones, in the layouts that fit and times a ratio; and the ratio."""
        if len(narrow) != len(wide):
            return math.inf, 1.0
        drift, ratio = 0.0, 1.0
        for number, (before, after) in enumerate(zip(narrow, wide, strict=True)):
            before, after = before.double(), after.double().to(before.device)
            found = match(before, after, self._tolerance, self._planned)
            if found is None:
                layouts = candidates(before, after, self._planned) if before.ndim == after.ndim else ()
                errors = (relative_error(after, duplicate(before, each), size_of(before)) for each in layouts)
                return min(errors, default=math.inf), 1.0
            known = self._ratios.get((self._place, number, before.shape), found.ratio)
            if bool(before.any()):
                self._ratios[self._place, number, before.shape] = known
                wanted = duplicate(before, found.layouts) * known
                drift = max(drift, relative_error(after, wanted, size_of(before) * known))
                ratio = ratio if found.ratio == 1 else found.ratio
        return drift, ratio

    def _difference(self, name: str, kind: EventKind, drift: float, ratio: float) -> Difference | None:
        if drift <= self._tolerance and ratio == 1:
            return None
        by = f" by {100 * drift:.3g} %" if math.isfinite(drift) else ""
        what = f"differs{by}" if ratio == 1 else f"is multiplied by {ratio:.4g}"
        if kind == "ends":
            return Difference(name, f"what {self._named(name)} returns {what}", drift, ratio)
        parent = name.rpartition(".")[0]
        while parent and parent not in self._called:
            parent = parent.rpartition(".")[0]
        return Difference(parent, f"what {self._named(parent)} computes before {name!r} {what}", drift, ratio)

    def _named(self, name: str) -> str:
        kind = type(self._model.get_submodule(name)).__name__
        return f"{name!r} ({kind})" if name else f"the model ({kind})"
