"""Does a plan make the wide model compute and train as the narrow one? One forward and backward pass of both."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mupscale.checks.comparison import MASKED, Match, gradient_errors, match, planned_layouts, relative_error, size_of
from mupscale.checks.forward_pass import Call, Kind, floats_of, named_gradients, tensors_of, watched, weighted_sum
from mupscale.checks.recording import buffers_kept, copy_to_compare, float_copies, generators_kept, training_mode
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError, one_line
from mupscale.methods.base import GrowthMethod
from mupscale.methods.grow import grow
from mupscale.sharding import is_sharded
from mupscale.widening.growth import duplicate
from mupscale.widening.layers import layer_at, source_of
from mupscale.widening.modules import caveat, dropout_of
from mupscale.widening.plan import Plan
from mupscale.widening.write import is_inexact

THE_MODEL = "(the model)"


@dataclass(frozen=True)
class Agreement:
    """The result of a check. `print` it."""

    exact: bool | None
    """Whether outputs and gradients agree; None if that could not be checked."""
    outputs: float = 0.0
    """How far what the wide model returns is from what the narrow one returns, relative to its largest number."""
    gradients: float = 0.0
    """How far the wide gradients are from those of Table 1, likewise."""
    precision: str = "float64"
    first_difference: str | None = None
    reason: str = ""
    """What differs there, or why there was no check."""
    untested: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What else the check found out: differences that only training shows."""
    dropout: tuple[str, ...] = ()
    """Layers that drop units of an axis that grows; the models were compared without them."""
    settled: tuple[str, ...] = ()
    """Notes of the plan on layers that drop only units of other axes: they do not apply."""
    is_random: bool = False
    """Whether the models differ, and draw random numbers in evaluation mode."""

    def __str__(self) -> str:
        if self.exact is None:
            return f"not checked: {self.reason}"
        if not self.exact:
            return f"not exact: {self.reason}"
        numbers = f"outputs agree to {self.outputs:.0e}, gradients to {self.gradients:.0e}"
        apart = " apart from dropout" if self.dropout else ""
        return f"exact{apart}: compared with the narrow model in {self.precision}, {numbers}"


class _Tolerance(NamedTuple):
    outputs: float
    gradients: float
    least: float
    """A gradient that vanishes by symmetry is measured by this share of the largest one."""


_IN_FLOAT64 = _Tolerance(1e-9, 1e-7, 1e-6)
_WITHOUT_FLOAT64 = _Tolerance(1e-5, 1e-4, 1e-2)
_ROUNDED = 1e-13
"""The share of the largest gradient below which another one is rounding."""


class _Pass(NamedTuple):
    """What a forward and a backward pass of the narrow model gave."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


class _Differs(Exception):
    """The two models do not agree."""

    def __init__(self, reason: str, outputs: float, gradients: float = math.inf, parameter: str = "") -> None:
        super().__init__(reason)
        self.outputs, self.gradients, self.parameter = outputs, gradients, parameter


class _Fails(Exception):
    """`call` fails on the narrow model."""


def check_agreement(narrow: nn.Module, wide: nn.Module, plan: Plan, call: Call) -> Agreement:
    """Compares a copy of `narrow`, grown by `plan` without noise, with the narrow model: outputs, and all gradients.

    `call(model)` runs one forward pass and returns what it computes. Copies of both models run in float64, or in
    float32 where there is no memory for float64; the parameters are slightly perturbed, because initial zeros and ones
    would hide differences. First they are compared in evaluation mode, then in training mode without dropout. Neither
    the models nor the generators of random numbers change.
    """
    reason = _why_not_checked(narrow, wide)
    if reason is not None:
        return Agreement(None, reason=reason)
    failure: Exception | None = None
    with _undisturbed():
        for dtype in _precisions(narrow, wide):
            try:
                return _Check(narrow, wide, plan, call, dtype).agreement()
            except torch.OutOfMemoryError:
                failure = None
            except _Fails as error:  # an operation may not exist in float64
                failure = error
    if failure is not None:
        raise UserError(f"upscale: call(model) fails on the narrow model: {failure}") from failure.__cause__
    return Agreement(
        None,
        reason="copies of both models do not fit into half of the free memory, or their activations do "
        "not. Let call use fewer samples, or check with smaller models of the same family",
    )


def gradients_after(
    narrow: nn.Module, wide: nn.Module, plan: Plan, method: GrowthMethod, call: Call, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The gradients that the wide model has just after a method has grown it; computed with copies."""
    with _undisturbed():
        _, after = _grown_copies(narrow, wide, plan, dtype, method)
        _, result = watched(after, call, dtype=dtype)
        return named_gradients(after, weighted_sum(floats_of(result)))


def change_of_outputs(narrow: nn.Module, wide: nn.Module, plan: Plan, call: Call, dtype: torch.dtype) -> float:
    """By how much outputs change when copies grow by a plan that does not keep them: relative root mean square."""
    with _undisturbed(), torch.no_grad():
        (_, first), (_, second) = (watched(x, call, dtype=dtype) for x in _grown_copies(narrow, wide, plan, dtype))
    both = zip(floats_of(first), floats_of(second), strict=False)
    pairs = [(a.double(), b.double()) for a, b in both if a.shape == b.shape]
    difference = sum(float((b - a).square().sum()) for a, b in pairs)
    return math.sqrt(difference / max(sum(float(a.square().sum()) for a, _ in pairs), 1e-300))


def _grown_copies(
    narrow: nn.Module, wide: nn.Module, plan: Plan, dtype: torch.dtype, method: GrowthMethod | None = None
) -> tuple[nn.Module, nn.Module]:
    before = copy_to_compare("upscale: narrow", narrow, dtype, perturbed=False)
    after = copy_to_compare("upscale: wide", wide, dtype, perturbed=False)
    grow(before, after, hints=plan, method=method)
    return before, after


def _why_not_checked(narrow: nn.Module, wide: nn.Module) -> str | None:
    tensors = [tensor for model in (narrow, wide) for tensor in (*model.parameters(), *model.buffers())]
    if any(tensor.is_meta for tensor in tensors):
        return "a model on the meta device cannot run. Check with models on a device, at smaller widths if need be"
    if any(is_sharded(tensor) for tensor in tensors):
        return "parameters are sharded. Check before sharding, at smaller widths if need be"
    for model in (narrow, wide):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise UserError(
                "upscale: the check cannot copy a model inside DistributedDataParallel. Give narrow.module and "
                "wide.module, and wrap the wide model afterwards"
            )
    return None


def _precisions(narrow: nn.Module, wide: nn.Module) -> Iterator[torch.dtype]:
    """The precisions in which copies, their gradients and the narrow reference fit into half of the free memory."""
    before, after = (sum(parameter.numel() for parameter in model.parameters()) for model in (narrow, wide))
    device = next((parameter.device for parameter in wide.parameters()), torch.device("cpu"))
    free = free_bytes(device) / 2
    if device.type != "mps" and 8 * (2 * after + 3 * before) <= free:
        yield torch.float64
    if 4 * 2 * (after + before) + 8 * 3 * before <= free:
        yield torch.float32


@contextmanager
def _undisturbed() -> Iterator[None]:
    """As if outside of the caller's modes: with gradients, without TF32 and autocast; generators stay as they are."""
    before = torch.get_float32_matmul_precision()
    with (
        generators_kept(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.backends.cudnn.flags(allow_tf32=False),
    ):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class _Check:
    """One comparison in one precision."""

    def __init__(self, narrow: nn.Module, wide: nn.Module, plan: Plan, call: Call, dtype: torch.dtype) -> None:
        self.plan, self.call, self.dtype = plan, call, dtype
        self.planned = planned_layouts((*plan.parameters.values(), *plan.buffers.values()))
        self.modes = {name: module.training or not narrow.training for name, module in narrow.named_modules()}
        self.narrow, self.vary, self.reference = self._first_pass(narrow)
        if not self.reference.outputs:
            raise UserError(
                "upscale: call(model) returns no tensor of floats. Let it return what the model computes: "
                "call=lambda model: model(batch)"
            )
        self.tolerance = _IN_FLOAT64 if dtype is torch.float64 else self._tolerance_in_float32()
        self.wide = copy_to_compare("upscale: wide", wide, dtype, perturbed=False)
        grow(self.narrow, self.wide, hints=plan)
        self.repeated: tuple[str, ...] = ()
        """A note on outputs that grow."""
        self.tested: set[str] = set()
        """Parameters whose gradients, other than zero, were compared."""

    def _first_pass(self, narrow: nn.Module) -> tuple[nn.Module, int, _Pass]:
        """A copy that runs, how equal inputs are varied, and what it gives: perturbed and varied if that is finite."""
        failure: _Fails | None = None
        for perturbed, ways in ((True, (1, -1, 0)), (False, (0,))):
            model = copy_to_compare("upscale: narrow", narrow, self.dtype, perturbed=perturbed)
            for self.vary in ways:
                try:
                    with buffers_kept(model):
                        made = self._pass_of_narrow(model)
                except _Fails as error:
                    failure = error
                    continue
                if _is_finite(made) or not perturbed:
                    return model, self.vary, made
        assert failure is not None
        raise failure

    def agreement(self) -> Agreement:
        precision = str(self.dtype).removeprefix("torch.")
        try:
            outputs, gradients = self._compare(self.reference)
            notes = self._differences_in_training()
        except _Differs as error:
            module, reason, is_random = self._explain(error)
            return Agreement(False, error.outputs, error.gradients, precision, module, reason, is_random=is_random)
        growing = {name for name, entry in self.plan.parameters.items() if entry.grows and not entry.inserted}
        moves = {name for name, gradient in self.reference.gradients.items() if bool(gradient.any())}
        moving = {name for name, entry in self.plan.parameters.items() if entry.origin in moves} | self.tested
        if growing and not growing & moving:
            raise UserError(
                "upscale: what call(model) returns has no gradient with respect to a parameter that grows, so nothing "
                "can be compared. Let it run the model that it is given, and return what that computes, with its graph"
            )
        dropout, settled = self._dropout()
        return Agreement(
            True,
            outputs,
            gradients,
            precision,
            untested=self._untested(),
            notes=(*self.repeated, *notes),
            dropout=dropout,
            settled=settled,
        )

    def _run(self, model: nn.Module, seed: int = 0, dtype: torch.dtype | None = None) -> list[Tensor]:
        _, result = watched(model, self.call, dtype=dtype or self.dtype, seed=seed, vary=self.vary)
        return floats_of(result)

    def _pass_of_narrow(self, model: nn.Module, seed: int = 0, dtype: torch.dtype | None = None) -> _Pass:
        """Raises `_Fails` if the model does; buffers stay as the pass left them."""
        try:
            outputs = self._run(model, seed, dtype)
            gradients = named_gradients(model, weighted_sum(outputs))
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:
            raise _Fails(_shown(error)) from error
        return _Pass([output.detach() for output in outputs], gradients)

    def _tolerance_in_float32(self) -> _Tolerance:
        """Ten times the distance of the narrow float32 model from the same one in float64."""
        twin = copy_to_compare("upscale: narrow", self.narrow, perturbed=False)
        try:
            outputs, gradients = self._pass_of_narrow(twin, dtype=torch.float64)
        except _Fails:  # an operation may not exist in float64
            return _WITHOUT_FLOAT64
        pairs = zip(self.reference.outputs, outputs, strict=True)
        of_outputs = [_error(low.double(), high) for low, high in pairs]
        least, of_gradients = 1e-2 * _largest(gradients), []
        for name, high in gradients.items():
            low = self.reference.gradients[name].to(high)
            of_gradients.append(relative_error(low, high, max(size_of(high), least)))
        rounding = [10 * max([1e-7, *errors]) for errors in (of_outputs, of_gradients)]
        return _Tolerance(rounding[0], rounding[1], 1e-2)

    def _compare(self, reference: _Pass) -> tuple[float, float]:
        """The largest differences of outputs and gradients; raises `_Differs` if one is too large."""
        with buffers_kept(self.wide):
            try:
                outputs = self._run(self.wide)
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:
                raise UserError(f"upscale: call(model) fails on the wide model: {_shown(error)}") from error
            matches, worst = self._matched(reference.outputs, outputs)
            gradients = named_gradients(self.wide, weighted_sum(outputs, matches))
        return worst, self._compare_gradients(reference.gradients, gradients, worst)

    def _matched(self, narrow: Sequence[Tensor], wide: Sequence[Tensor]) -> tuple[list[Match], float]:
        if len(narrow) != len(wide):
            raise _Differs(
                f"call(model) returns {len(narrow)} tensors of the narrow model and {len(wide)} of the wide", math.inf
            )
        matches, worst = [], 0.0
        for before, after in zip(narrow, wide, strict=True):
            found = match(before.double(), after.detach().double(), self.tolerance.outputs, self.planned)
            if found is None or found.ratio != 1:
                same = before.shape == after.shape
                error = _error(after.detach(), before) if same else math.inf
                times = "" if found is None else f", which is multiplied by {found.ratio:.4g}"
                by = f" by {100 * error:.3g} %" if math.isfinite(error) else ""
                raise _Differs(f"what call(model) returns differs{by}{times}", outputs=error)
            matches.append(found)
            worst = max(worst, _error(after.detach(), duplicate(before, found.layouts)))
            if before.shape != after.shape:
                self.repeated = (
                    f"what call(model) returns grows {tuple(before.shape)} → {tuple(after.shape)}, by copies of its "
                    "entries. If these are classes or targets, give the wide model as many as the narrow one has",
                )
        return matches, worst

    def _compare_gradients(self, narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor], outputs: float) -> float:
        largest = _largest(narrow)
        errors = gradient_errors(self.plan.parameters, narrow, wide, self.tolerance.least, nan_agrees=True)
        worst = max(errors.values(), default=0.0)
        bad = [name for name, error in errors.items() if not error <= self.tolerance.gradients]
        if bad:  # the last one is nearest to the outputs
            by = f"{100 * errors[bad[-1]]:.3g} %"
            raise _Differs(f"the gradient of {bad[-1]!r} differs by {by} from that of Table 1", outputs, worst, bad[-1])
        self.tested |= {
            name
            for name, entry in self.plan.parameters.items()
            if not entry.inserted and entry.origin in narrow and self._tests(name, narrow[entry.origin], largest)
        }
        return worst

    def _tests(self, name: str, gradient: Tensor, largest: float) -> bool:
        """Whether a gradient is more than rounding, on every growing axis for more than half of the units.

        The queries and keys of a fused projection have none where all tokens are equal, or there is only one.
        """
        entry, has_gradient = self.plan.parameters[name], gradient.abs() > _ROUNDED * largest
        rows = (has_gradient.movedim(axis, 0).reshape(gradient.shape[axis], -1) for axis in entry.growing)
        return bool(has_gradient.any()) and all(float(row.any(1).double().mean()) > 0.5 for row in rows)

    def _untested(self) -> tuple[str, ...]:
        """Growing parameters without a gradient; not a bias beside a tested weight: that of a key has none."""
        tested = {name.rpartition(".")[0] for name in self.tested}
        return tuple(
            name
            for name, entry in self.plan.parameters.items()
            if entry.grows and not entry.inserted and name not in self.tested
            if len(entry.narrow_shape) > 1 or name.rpartition(".")[0] not in tested
        )

    def _differences_in_training(self) -> tuple[str, ...]:
        """Compares the models in training mode as well; what random numbers make different is a note."""
        wide_modes = {
            name: self.modes.get(source_of(self.plan.layers, name), True) for name, _ in self.wide.named_modules()
        }
        with training_mode(self.narrow, self.modes), training_mode(self.wide, wide_modes):
            try:
                with buffers_kept(self.narrow):
                    trained = self._pass_of_narrow(self.narrow)
                    statistics = {name: buffer.clone() for name, buffer in self.narrow.named_buffers()}
                if not _are_equal(trained.outputs, self.reference.outputs):
                    self._compare(trained)
            except _Fails as error:  # a model may need more to train, such as labels
                return (f"not compared in training mode: call(model) fails there: {error}",)
            except _Differs:
                with buffers_kept(self.narrow):
                    again = self._pass_of_narrow(self.narrow, seed=1)
                if _are_equal(trained.outputs, again.outputs):
                    raise
                return (
                    "in training mode the model draws random numbers outside of dropout layers, the wide one others",
                )
            return self._unlike_statistics(statistics)

    def _dropout(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The layers that drop units of an axis that grows, and the notes of the plan on those that do not."""
        dropping = {name: module for name, module in self.narrow.named_modules() if dropout_of(module)}
        if not dropping:
            return (), ()
        shapes: list[dict[str, list[torch.Size]]] = [{}, {}]
        for of_model, model in zip(shapes, (self.narrow, self.wide), strict=True):
            for name, kind, sizes in self._events(model, lambda values: [x.shape for x in tensors_of(values)]):
                if kind == "ends":
                    of_model.setdefault(name, []).extend(sizes)
        grown = tuple(name for name in dropping if shapes[0].get(name) != shapes[1].get(name))
        kept = ((name, module) for name, module in dropping.items() if name not in grown)
        return grown, tuple(f"{name or THE_MODEL}: {caveat(module, module)}" for name, module in kept)

    def _unlike_statistics(self, narrow: Mapping[str, Tensor]) -> tuple[str, ...]:
        if all(torch.equal(narrow[name], buffer) for name, buffer in self.narrow.named_buffers()):
            return ()
        with buffers_kept(self.wide):
            self._run(self.wide)
            notes = []
            for name, after in self.wide.named_buffers():
                entry = self.plan.buffers.get(name)
                before = None if entry is None else narrow.get(entry.origin)
                if entry is None or before is None or entry.kept or self._is_new(name) or not is_inexact(after):
                    continue
                if before.shape != entry.narrow_shape:
                    notes.append(f"the buffer {name!r} has another shape after a step in training mode: not compared")
                    continue
                wanted = duplicate(before, entry.layouts).to(after.device)
                if not relative_error(after, wanted, max(size_of(wanted), 1e-30)) <= self.tolerance.gradients:
                    notes.append(f"in training mode the statistic {name!r} becomes another one")
        return tuple(notes)

    def _is_new(self, name: str) -> bool:
        found = layer_at(self.plan.layers, name)
        return found is not None and found[1].is_new

    def _explain(self, error: _Differs) -> tuple[str, str, bool]:
        """The first module that differs, what differs there, and whether the model draws random numbers."""
        with buffers_kept(self.narrow):
            first, second = self._run(self.narrow), self._run(self.narrow)
            other = self._run(self.narrow, seed=1)
        if not _are_equal(first, second):
            raise UserError(
                "upscale: call(model) returns other numbers when it runs again, so nothing can be compared. Let it use "
                "one fixed batch, and no state that it changes"
            )
        module, where = self._first_difference(error)
        reason = f"{error}. First, {where}"
        is_random = not _are_equal(first, other)
        if is_random:
            reason += ". The model draws random numbers in evaluation mode, as many as its width needs"
        return module, reason, is_random

    def _first_difference(self, error: _Differs) -> tuple[str, str]:
        if error.parameter:
            module = source_of(self.plan.layers, error.parameter).rpartition(".")[0]
            return module or THE_MODEL, f"from the end, that of a parameter of {_named(self.narrow, module)}"
        before, after = self._events(self.narrow, float_copies), self._events(self.wide, float_copies)
        scaled: tuple[str, str] | None = None
        for (name, kind, narrow), (wide_name, wide_kind, wide) in zip(before, after, strict=False):
            if (name, kind) != (wide_name, wide_kind):
                return THE_MODEL, "the two models call different modules"
            matches = [
                match(a.double(), b.double(), self.tolerance.outputs, self.planned)
                for a, b in zip(narrow, wide, strict=False)
            ]
            ratios = [found.ratio for found in matches if found is not None]
            if len(narrow) != len(wide) or None in matches:
                differs = self._place(name, kind, "differs")
                return differs if scaled is None else (scaled[0], f"{scaled[1]}; then {differs[1]}")
            if scaled is None and any(ratio != 1 for ratio in ratios):
                ratio = next(ratio for ratio in ratios if ratio != 1)
                scaled = self._place(name, kind, f"is multiplied by {ratio:.4g}")
        return scaled or (THE_MODEL, "what is computed of the outputs of all modules, which agree, differs")

    def _place(self, name: str, kind: Kind, what: str) -> tuple[str, str]:
        if kind == "ends":
            return name or THE_MODEL, f"what {_named(self.narrow, name)} returns {what}"
        parent = name.rpartition(".")[0]
        return parent or THE_MODEL, f"what {_named(self.narrow, parent)} computes before {name!r} {what}"

    def _events(self, model: nn.Module, read: Callable[[Any], list[Any]]) -> list[tuple[str, Kind, list[Any]]]:
        """What `read` makes of the values with which modules begin and end, under the names of the narrow model."""
        events: list[tuple[str, Kind, list[Any]]] = []

        def note(name: str, kind: Kind, values: Any) -> None:
            if model is self.narrow:
                events.append((name, kind, read(values)))
            elif not self._is_new(name):
                events.append((source_of(self.plan.layers, name), kind, read(values)))

        with buffers_kept(model), torch.no_grad():
            watched(model, self.call, note, dtype=self.dtype, vary=self.vary)
        return events


def _named(model: nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"{name!r} ({kind})" if name else f"the model ({kind})"


def _is_finite(reference: _Pass) -> bool:
    tensors = (*reference.outputs, *reference.gradients.values())
    return all(bool((tensor.isfinite() | (tensor.abs() >= MASKED)).all()) for tensor in tensors)


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    same = len(one) == len(other) and all(a.shape == b.shape for a, b in zip(one, other, strict=True))
    return same and all(
        bool(torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())) for a, b in zip(one, other, strict=True)
    )


def _largest(gradients: Mapping[str, Tensor]) -> float:
    return max((size_of(gradient) for gradient in gradients.values()), default=0.0)


def _error(value: Tensor, wanted: Tensor) -> float:
    return relative_error(value, wanted.to(value), max(size_of(wanted), 1e-30))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 300)}"
