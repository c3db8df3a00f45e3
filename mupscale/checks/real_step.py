"""A check that takes a real training step: growing and then stepping must give what stepping and then growing gives.

Parameters, buffers, optimizer state and tensors in attributes of both models have float64 copies as their data in the
meantime, and their own data again at the end. So hooks, closures and optimizers act on the objects that they know. The
expected values are those that `grow` writes after a step of the narrow model, so Table 1 is not written down twice.

`comparing` is for any way of taking a step. `check_step` takes the step of plain torch: its loss is a weighted sum of
what `call` returns. Not undone is what a step does outside of tensors and of the attributes of
models and optimizers: a line in a file, a number drawn from an iterator.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import TorchDispatchMode
from mupscale.checks.comparison import Planned, candidates, match, planned_layouts
from mupscale.checks.recording import attributes_of, contents_kept, held_values, leaves_of, put_back
from mupscale.checks.trace import Difference, Differs
from mupscale.methods.base import GrowthMethod
from mupscale.methods.grow import as_list, grow
from mupscale.text_tables import starred
from mupscale.widening.growth import duplicate
from mupscale.widening.layers import layer_at
from mupscale.widening.optimizers import held_parameters, rule_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import names_by_id
from mupscale.widening.state import LEARNING_RATES
from mupscale.widening.write import is_inexact


@dataclass(frozen=True)
class StepTolerance:
    """How far values may be from those expected."""

    update: float = 1e-6
    """The limit of a parameter, in units of its largest update; of a buffer or state, in units of its largest entry.
    A tenth of it is allowed in units of the largest update of all parameters."""
    rounding: float = 1e-11
    """The size of rounding errors, in units of the largest entry."""
    outputs: float = 1e-9
    vanishing: float = 1e-9
    """Gradients below this share of the largest one are rounding, such as that of a bias before BatchNorm."""


# ---------------------------------------------------------------------------------------------- borrowed, and put back


@contextmanager
def borrowed(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer] = (), dtype: torch.dtype = torch.float64
) -> Iterator[list[Tensor]]:
    """All tensors of models and optimizers have copies in `dtype` as their data, and no gradients, until the end.

    At the end, the attributes of all modules and optimizers are as they were, too.
    """
    tensors = own_tensors(modules, optimizers)
    to_convert = {id(x) for x in tensors} - _counters_of(optimizers)
    held = [(x, x.data, x.grad, x.requires_grad, dict(vars(x))) for x in tensors]
    with contents_kept([*(each for module in modules for each in module.modules()), *optimizers]):
        try:
            storages: dict[int, list[Tensor]] = {}
            for x in tensors:
                x.grad = None
                storages.setdefault(_storage_of(x) or -id(x), []).append(x)
            for sharing in storages.values():
                _copy_data_(sharing, dtype, to_convert)
            yield tensors
        finally:
            for x, data, gradient, requires_grad, attributes in held:
                x.grad = None
                x.data = data
                x.requires_grad_(requires_grad)
                x.grad = gradient
                vars(x).clear()
                vars(x).update(attributes)


def own_tensors(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer] = ()) -> list[Tensor]:
    """Parameters, buffers, tensors in attributes and optimizer state, each once; no activations, which have a graph."""
    found: dict[int, Tensor] = {}
    for module in modules:
        attached = (x for row in tensors_in_attributes(module).values() for x in row)
        for x in (*module.parameters(), *module.buffers(), *attached):
            found.setdefault(id(x), x)
    for optimizer in optimizers:
        for x in (x for state in optimizer.state.values() for x in leaves_of(state) if isinstance(x, Tensor)):
            found.setdefault(id(x), x)
    return [x for x in found.values() if x.is_leaf]


def tensors_in_attributes(module: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors in attributes of a module and its submodules that are no parameters or buffers, by full name."""
    known = {id(x) for x in (*module.parameters(), *module.buffers())}
    answer: dict[str, list[Tensor]] = {}
    for name, part in module.named_modules():
        for key, value in attributes_of(part).items():
            if key in _OF_EVERY_MODULE:
                continue
            found = [x for x in leaves_of(value) if isinstance(x, Tensor) and id(x) not in known]
            if found:
                answer[f"{name}.{key}".removeprefix(".")] = found
    return answer


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_trainer", "_fabric", "_forward_module", "_lightning_module"}


def _counters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """Optimizer state that is no tensor of the unit of gradients: fused optimizers want their counts in float32."""
    answer = set()
    for optimizer in optimizers:
        known = rule_of(optimizer).state
        for state in optimizer.state.values():
            answer |= {id(x) for key, x in state.items() if isinstance(x, Tensor) and key not in known}
    return answer


def _storage_of(tensor: Tensor) -> int | None:
    """What tells whether two tensors share memory; None where that cannot be seen."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _copy_data_(sharing: Sequence[Tensor], dtype: torch.dtype, to_convert: set[int]) -> None:
    """Gives tensors that share memory copies that share memory."""

    def wanted(x: Tensor) -> torch.dtype:
        if id(x) not in to_convert or not is_inexact(x):
            return x.dtype
        return dtype.to_complex() if x.is_complex() else dtype

    first = sharing[0]
    if len(sharing) > 1 and all(x.dtype == first.dtype for x in sharing):
        size = first.untyped_storage().nbytes() // first.element_size()
        base = torch.as_strided(first.detach(), (size,), (1,), 0).to(wanted(first), copy=True)
        for x in sharing:
            x.data = base.as_strided(x.shape, x.stride(), x.storage_offset())
        return
    for x in sharing:
        x.data = x.detach().to(wanted(x), copy=True)


# --------------------------------------------------------------------------------------------- what happens in a step


class StepWatch(TorchDispatchMode):
    """Undoes what a step writes into tensors that are not its own, and replays random numbers.

    A step of the narrow model records what random operations draw; one of the wide model, which is given them as
    `drawn`, draws copies of the same numbers. What it reads is recorded, too.
    """

    supports_higher_order_operators = True

    def __init__(self, own: Iterable[Tensor], planned: Planned, drawn: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self._inside = {None, *map(_storage_of, own)}
        self._before: list[tuple[Any, Any]] = []
        self._before_generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._planned = planned
        self.written: list[tuple[int, ...]] = []
        """The shapes of floating-point tensors outside that the step writes into."""
        self.read: set[int | None] = set()
        """The memory that operations read or write."""
        self.drawn: list[Tensor] = []
        """What random operations drew."""
        self._to_draw = None if drawn is None else iter(drawn)
        self.grows = False
        """Whether the wide step drew copies of fewer numbers: without the check it draws more."""
        self.is_not_replayed = False
        """Whether an operation drew numbers that could not be replayed, such as a fused dropout."""
        self.difference: Difference | None = None
        """The difference at which a step of the wide model ended."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors_in((*args, *kwargs.values())))
        known = {_storage_of(x) for x in given}
        self.read |= known
        schema = getattr(func, "_schema", None)
        for place, name in _written_arguments(func) if schema is not None else ():
            for x in _tensors_in([args[place] if place < len(args) else kwargs.get(name)]):
                if _storage_of(x) not in self._inside:
                    self._before.append((x.untyped_storage(), x.untyped_storage().clone()))
                    self._inside.add(_storage_of(x))
                    if x.is_floating_point():
                        self.written.append(tuple(x.shape))
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        generators = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)] if is_random else []
        for generator in generators:
            self._before_generators.setdefault(id(generator), (generator, generator.get_state()))
        before = _random_states(given, generators) if is_random else []
        result = func(*args, **kwargs)
        # a fused attention without dropout draws nothing
        if is_random and not all(map(torch.equal, before, _random_states(given, generators))):
            self._draw(result)
        # the only operation whose result is its argument's memory, and a new tensor
        is_constant = schema is not None and schema.name == "aten::lift_fresh"
        made = {_storage_of(x) for x in _tensors_in([result])}
        self._inside |= made if is_constant else made - known
        return result

    def _draw(self, result: Any) -> None:
        if not isinstance(result, Tensor) or result.layout is not torch.strided:
            self.is_not_replayed = True
            return
        if self._to_draw is None:
            self.drawn.append(result.detach().clone())
            return
        narrow = next(self._to_draw, None)
        if narrow is not None and narrow.ndim == result.ndim:
            if narrow.shape == result.shape:
                result.copy_(narrow)
                return
            if all(n <= w for n, w in zip(narrow.shape, result.shape, strict=True)):
                for layouts in candidates(narrow, result, self._planned):
                    result.copy_(duplicate(narrow, layouts))
                    self.grows = True
                    return
        self.is_not_replayed = True

    def undo(self) -> None:
        for storage, values in self._before:
            storage.copy_(values)
        for generator, state in self._before_generators.values():
            generator.set_state(state)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, also in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _random_states(tensors: Iterable[Tensor], generators: Iterable[torch.Generator]) -> list[Tensor]:
    """The state of generators, of the random numbers of the CPU, and of those of the GPUs of these tensors."""
    devices = sorted({x.device for x in tensors if x.device.type == "cuda"}, key=str)
    of_devices = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [*of_devices, *(generator.get_state() for generator in generators)]


@lru_cache(2048)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an operation writes into."""
    rows = enumerate(func._schema.arguments)
    return tuple((i, each.name) for i, each in rows if each.alias_info is not None and each.alias_info.is_write)


@dataclass
class GradientMasks:
    """Which entries of the gradients of a narrow model are more than rounding, by the names of parameters."""

    plan: Plan
    tolerance: StepTolerance
    rounding: dict[str, Tensor] = field(default_factory=dict)
    """The entries that vanish in the last step of the narrow model."""
    seen: dict[str, Tensor] = field(default_factory=dict)
    """The entries that did not vanish in some step."""

    @contextmanager
    def flushed(self, model: nn.Module, optimizers: Sequence[Optimizer], *, is_wide: bool) -> Iterator[None]:
        """Sets gradients that vanish by symmetry to 0 before each step, after the user's hooks.

        An optimizer that normalises would make real steps of their rounding noise.
        """
        names = names_by_id(model)

        def flush(optimizer: Optimizer) -> None:
            rows = [(names.get(id(p), ""), p.grad) for _, p in held_parameters(optimizer) if p.grad is not None]
            dense = {name: g for name, g in rows if g is not None and not g.is_sparse}
            for name, g in rows:
                if g is not None and g.is_sparse and not is_wide:
                    self.note(name, g.to_dense().abs() > 0)
            largest = max(map(_size, dense.values()), default=0.0)
            for name, gradient in dense.items():
                if is_wide:
                    self._flush_wide(name, gradient, 100 * self.tolerance.vanishing * largest)
                    continue
                rounding = gradient.abs() < self.tolerance.vanishing * largest
                self.rounding[name] = rounding
                self.note(name, (gradient != 0) & ~rounding)
                gradient.masked_fill_(rounding, 0.0)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                flush(optimizer)
                return None

            def closure_then_flush() -> Any:  # Lightning lets the closure compute the gradients
                loss = closure()
                flush(optimizer)
                return loss

            return args[:1], {**kwargs, "closure": closure_then_flush}

        with ExitStack() as stack:
            for optimizer in optimizers:
                stack.callback(optimizer.register_step_pre_hook(before_step).remove)
            yield

    def note(self, name: str, has_gradient: Tensor) -> None:
        self.seen[name] = self.seen[name] | has_gradient if name in self.seen else has_gradient

    def _flush_wide(self, name: str, gradient: Tensor, most: float) -> None:
        entry = self.plan.parameters.get(name)
        if entry is None or entry.inserted or entry.origin not in self.rounding:
            return
        if bool(self.rounding[entry.origin].any()):
            mask = duplicate(self.rounding[entry.origin], entry.layouts).to(gradient.device)
            gradient.masked_fill_(mask & (gradient.abs() < most), 0.0)

    def any_seen(self) -> set[str]:
        """The parameters of the narrow model that had a gradient at all."""
        return {name for name, has_gradient in self.seen.items() if bool(has_gradient.any())}

    def untested(self, read: Collection[str]) -> list[str]:
        """Growing parameters that nothing tested: without a gradient, and alike to none that has one.

        Alike is one of the same name in another layer, and to a bias the weight beside it: that of a key, and one
        before a batch norm, have no gradient. `read` are narrow parameters without one by intention, which were used.
        """
        entries = self.plan.parameters
        growing = [name for name, entry in entries.items() if entry.grows and not entry.inserted]
        tested = [name for name in growing if self.has_tested(name) or entries[name].origin in read]
        layers = {name.rpartition(".")[0] for name in tested}
        alike = {(starred(name), entries[name].axes) for name in tested}
        return [
            name
            for name in growing
            if name not in tested
            if len(entries[name].narrow_shape) > 1 or name.rpartition(".")[0] not in layers
            if (starred(name), entries[name].axes) not in alike
        ]

    def has_tested(self, name: str) -> bool:
        """Whether a gradient is more than rounding, on every growing axis for half of the units or more.

        The queries and keys of a fused projection have none where all tokens are equal, or there is only one.
        """
        entry = self.plan.parameters[name]
        has_gradient = self.seen.get(entry.origin)
        if has_gradient is None or not bool(has_gradient.any()):
            return False
        rows = (has_gradient.movedim(axis, 0).reshape(has_gradient.shape[axis], -1) for axis in entry.growing)
        return all(float(row.any(1).double().mean()) >= 0.5 for row in rows)


# ------------------------------------------------------------------------------------------------- values after a step

Values = dict[tuple[str, str], Tensor]
"""Values by their kind (parameter, buffer, a key of optimizer state, a setting of a group) and name."""

_SETTINGS = (*LEARNING_RATES, "eps", "weight_decay", "momentum", "betas")


def values_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> Values:
    """Parameters, buffers, optimizer state and the settings of each parameter's group; no copies."""
    names = names_by_id(model)
    answer: Values = {("parameter", name): p.detach() for name, p in model.named_parameters()}
    answer |= {("buffer", name): b.detach() for name, b in model.named_buffers()}
    for optimizer in optimizers:
        for group, parameter in held_parameters(optimizer):
            name = names.get(id(parameter))
            if name is None:
                continue
            for key in _SETTINGS:
                if group.get(key) is not None:
                    answer[key, name] = torch.as_tensor(group[key], dtype=torch.float64)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    answer[f"state {key}", name] = value.detach()
    return answer


def differences(
    got: Values, wanted: Values, updates: Mapping[str, float], plan: Plan, tolerance: StepTolerance
) -> tuple[list[Difference], float]:
    """Where values are not those wanted, the likeliest cause first; those of new layers are left out.

    `updates` are the largest updates of wide parameters. Returns also how far parameters are from those wanted, in
    units of the largest update.
    """
    worst = 0.0
    found: dict[str, list[Difference]] = {"parameter": [], "state": [], "buffer": [], "setting": []}
    largest: dict[str, float] = {}
    sizes = {key: _size(value) for key, value in wanted.items()}
    for (kind, _), size in sizes.items():
        largest[kind] = max(largest.get(kind, 0.0), size)
    most = max(updates.values(), default=0.0)
    for (kind, name), want in wanted.items():
        if _is_new(plan, name) or (kind == "buffer" and plan.buffers[name].kept):
            continue
        have, group = got.get((kind, name)), _group_of(kind)
        place = name.rpartition(".")[0]
        if have is None or have.shape != want.shape:
            what = f"{_words(kind, name)} is missing in the wide model, or has another shape there"
            found[group].append(Difference(place, what, math.inf, kind=group))
            continue
        have, size = have.to(want.device), sizes[kind, name]
        error = _size(_as_numbers(have.to(want.dtype)) - _as_numbers(want))
        worst = max(worst, error) if kind == "parameter" else worst
        moved = updates.get(name, 0.0) if kind == "parameter" else size
        allowed = tolerance.update * moved + tolerance.rounding * max(size, 1e-3 * largest[kind])
        if kind == "parameter":
            allowed += tolerance.update / 10 * most
        if error <= allowed or bool((have.isnan() & want.isnan()).any()):
            continue
        if kind == "buffer" and _is_normalised_copy(have, want):
            continue
        relative = error / max(moved, 1e-300)
        change = "the update of " if kind == "parameter" else ""
        by = f" by {100 * relative:.3g} %" if relative < 1e6 else ""
        found[group].append(Difference(place, f"{change}{_words(kind, name)} differs{by}", relative, kind=group))
    for kind, name in got.keys() - wanted.keys():
        if not _is_new(plan, name):
            what = f"{_words(kind, name)} is there only in the wide model"
            group = _group_of(kind)
            found[group].append(Difference(name.rpartition(".")[0], what, math.inf, kind=group))
    # of parameters, the last one is nearest to the loss
    rows = [*reversed(found["parameter"]), *found["setting"], *found["buffer"], *found["state"]]
    return rows, worst / max(most, 1e-300)


def _group_of(kind: str) -> str:
    return kind if kind in ("parameter", "buffer") else "state" if kind.startswith("state ") else "setting"


def _words(kind: str, name: str) -> str:
    if kind == "parameter":
        return repr(name)
    if kind == "buffer":
        return f"the buffer {name!r}"
    key = kind.removeprefix("state ")
    return f"the optimizer's {key} of {name!r}" + " after a step" * (kind == key)


def _size(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    numbers = _as_numbers(tensor)
    if numbers.is_complex():
        return float(numbers.abs().max())
    least, most = numbers.aminmax()  # without a copy of the tensor
    return max(-float(least), float(most))


def _as_numbers(tensor: Tensor) -> Tensor:
    """Truth values and whole numbers as fractions, which can be subtracted."""
    return tensor if is_inexact(tensor) else tensor.double()


def _is_new(plan: Plan, name: str) -> bool:
    found = layer_at(plan.layers, name)
    return found is not None and found[1].is_new


def _is_normalised_copy(have: Tensor, want: Tensor) -> bool:
    """Whether a vector of length 1, as of a spectral norm, is the wanted one but for its length."""
    if want.numel() < 2 or abs(float(have.double().norm()) - 1) > 1e-6:
        return False
    return match(want.double(), have.double(), 1e-9) is not None


# ---------------------------------------------------------------------------------------------------- two steps

TakeStep = Callable[[nn.Module, Sequence[Optimizer]], Any]
"""Takes one training step: forward pass, gradients, step of the optimizers. It may raise `Differs`."""

Stepping = tuple[nn.Module, list[Optimizer]]
"""A model and the optimizers that train it."""

BecomeWide = Callable[[nn.Module, nn.Module, list[Optimizer]], AbstractContextManager[Stepping]]
"""Makes, of a narrow model, a wide one and the narrow optimizers, a context with what takes the wide step."""


@dataclass
class Steps:
    """The result of a comparison."""

    differences: list[Difference]
    """The likeliest cause first."""
    updates: float
    """The largest difference of an update, in units of the largest update."""
    narrow: StepWatch
    wide: StepWatch
    """What happened in the steps of the two models."""
    read: frozenset[str]
    """The parameters of the narrow model that operations read."""


def with_exact_rates(plan: Plan) -> Plan:
    """The same plan, whose kept layers beside new ones that add nothing have the rates that continue their training."""
    return replace(plan, parameters={name: replace(each, rates_as=None) for name, each in plan.parameters.items()})


Compare = Callable[..., Steps]
"""`compare(take_step, change)` compares two steps after a change of the weights of the narrow model. `optimizers` may
replace those of the comparison; if there are none, no step is expected, and only `take_step` compares."""


@contextmanager
def comparing(
    narrow: nn.Module,
    wide: nn.Module,
    optimizers: Sequence[Optimizer],
    plan: Plan,
    masks: GradientMasks,
    first: TakeStep | None = None,
    *,
    become_wide: BecomeWide | None = None,
    keep: Sequence[Any] = (),
    method: GrowthMethod | None = None,
    dtype: torch.dtype = torch.float64,
) -> Iterator[Compare]:
    """A function that compares growing after a training step with a training step after growing.

    `take_step(model, optimizers)` is called with the narrow model and its optimizers, and then with what `become_wide`
    gives: by default the wide model, grown, and new optimizers. `first` is a step of the narrow model before all
    comparisons, by which optimizers have state; weights stay. `keep` are further objects whose contents are put back
    after each step. New layers, which add nothing, do not train. Models and optimizers are in the end as they were.
    """
    planned = planned_layouts(entry for entry in (*plan.parameters.values(), *plan.buffers.values()) if not entry.kept)
    given = list(optimizers)
    parts = [*narrow.modules(), *wide.modules(), *given, *keep]

    def step(model: nn.Module, stepping: list[Optimizer], take_step: TakeStep, drawn: Any = None) -> StepWatch:
        watch = StepWatch(own_tensors([model], stepping), planned, drawn)
        with masks.flushed(model, stepping, is_wide=drawn is not None):
            try:
                with watch:
                    take_step(model, stepping)
            except Differs as error:
                watch.difference = error.difference
            finally:
                watch.undo()
                for parameter in model.parameters():
                    parameter.grad = None
        return watch

    def grown(stepping: list[Optimizer]) -> list[Optimizer]:
        return as_list(grow(narrow, wide, stepping, plan=plan, method=method).optimizer)

    @contextmanager
    def plainly(narrow: nn.Module, wide: nn.Module, stepping: list[Optimizer]) -> Iterator[Stepping]:
        yield wide, grown(stepping)

    def compare(
        take_step: TakeStep, change: Callable[[nn.Module], None], optimizers: Sequence[Optimizer] = given
    ) -> Steps:
        stepping = list(optimizers)
        with torch.no_grad():
            change(narrow)
        changed = held_values([*own_tensors([narrow], stepping)])
        before = {name: p.detach().clone() for name, p in narrow.named_parameters()}
        for x, data, _ in start_of_wide:
            x.data = data.clone()
        with contents_kept(parts):
            seen = step(narrow, stepping, take_step)
            updates = updates_since(plan, narrow, before)
            wanted = values_of(wide, grown(stepping)) if stepping else {}
        read = frozenset(name for name, p in narrow.named_parameters() if _storage_of(p) in seen.read)
        put_back([*changed, *start_of_wide])
        with contents_kept(parts), (become_wide or plainly)(narrow, wide, stepping) as (model, of_model):
            with _without_gradients(model, plan.new_parameters):
                watch = step(model, of_model, take_step, seen.drawn)
            if watch.difference is not None:
                return Steps([watch.difference], math.inf, seen, watch, read)
            if not stepping:
                return Steps([], 0.0, seen, watch, read)
            found, worst = differences(values_of(model, of_model), wanted, updates, plan, masks.tolerance)
            return Steps(found, worst, seen, watch, read)

    with borrowed([narrow, wide], given, dtype), contents_kept(keep):
        if first is not None:
            weights = held_values(narrow.parameters())
            step(narrow, given, first)
            put_back(weights)
        start = held_values(own_tensors([narrow], given))
        written = {id(p) for name, p in wide.named_parameters() if not plan.parameters[name].inserted}
        start_of_wide = held_values(own_tensors([wide]), written)

        def compare_and_put_back(*given: Any) -> Steps:
            try:
                return compare(*given)
            finally:
                put_back([*start, *start_of_wide])

        yield compare_and_put_back


@contextmanager
def _without_gradients(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """The gradients of some parameters are zero."""
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        for parameter in (parameters[name] for name in names):
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(torch.zeros_like).remove)
        yield


def without_state(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers that will have state once they have made a step."""
    return [each for each in optimizers if _keeps_state(each) and not _has_stepped(each)]


def _keeps_state(optimizer: Optimizer) -> bool:
    is_plain = type(optimizer) is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)
    return not is_plain


def _has_stepped(optimizer: Optimizer) -> bool:
    tensors = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
    return any(bool(x.any()) for x in tensors)


def updates_since(plan: Plan, narrow: nn.Module, before: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest update of each wide parameter."""
    after, answer = dict(narrow.named_parameters()), {}
    for name, entry in plan.parameters.items():
        if not entry.inserted and entry.origin in before:
            answer[name] = _size(after[entry.origin].detach() - before[entry.origin]) * float(entry.scale.weight)
    return answer
