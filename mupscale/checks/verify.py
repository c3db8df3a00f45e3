"""Checks dynamic equivalence: trains narrow and wide copies side by side in float64, and compares them."""

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import TorchDispatchMode, tree_leaves
from mupscale.arguments import (
    refuse_unless_callable,
    refuse_unless_iterable,
    refuse_unless_level,
    refuse_unless_whole,
    shown,
)
from mupscale.checks.recording import Call, Recorder, buffers_kept
from mupscale.checks.structures import leaves_of, map_leaves, unknown_kinds
from mupscale.errors import UserError
from mupscale.text_tables import Paint, folded, table, unpainted
from mupscale.watching import Watch, unwatched
from mupscale.widening.clip import clip_grad_norm_
from mupscale.widening.layout import (
    Layout,
    Piece,
    duplicate,
    duplicate_,
    evenly,
    is_unit_by_unit,
    narrow_length,
    wide_length,
)
from mupscale.widening.plan import Blocks, Plan, TensorPlan
from mupscale.widening.roles import Roles
from mupscale.widening.survey import refuse_scripted, refuse_unless_model
from mupscale.widening.units import Units
from mupscale.widening.upscale import as_list, upscale
from mupscale.widening.weights import widen_
from mupscale.widening.width_table import restore_infshapes

WARM_UP = 10
"""Training steps of the narrow copy before it is widened, so that the move of optimizer state is tested too."""

TOLERANCE = 1e-8
"""Relative drift of activations in float64."""

LOSS_DIVISOR = 100
"""The loss is held to this part of that tolerance."""

GRADIENT_MULTIPLE = 10
"""Gradients and weights get this multiple of it."""

TOLERANCE_FLOAT32 = 1e-4
"""The same for models that compute in float32 inside, whatever their weights: the loss is then held to 1e-6."""

_DOUBLE = (torch.float64, torch.complex128)


@dataclass
class Verdict:
    """The result of `verify`. Each drift is a relative difference, the largest over all steps.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> class Shrink(nn.Module):
        ...     def forward(self, x):
        ...         return x / x.shape[-1] ** 0.5  # depends on the width
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), Shrink(), nn.Linear(n, 2)) for n in (4, 8))
        >>> verdict = mupscale.verify(
        ...     narrow, wide, optimizer=torch.optim.AdamW, batches=[torch.randn(5, 3)], steps=2,
        ...     loss=lambda model, batch: model(batch).square().mean())
        >>> verdict.passed, verdict.first_divergent
        (False, '1')
    """

    passed: bool
    loss_drift: float
    activation_drift: float
    gradient_drift: float
    weight_drift: float
    first_divergent: str | None
    """The name of the first module that diverges, or None."""
    reason: str | None
    """What diverged there, at which step, and the plan's notes on it; or why nothing was tested."""
    steps: int
    tolerance: float
    drift_by_module: dict[str, float] = field(default_factory=dict, repr=False)
    """The largest drift of each module's activations, in the order of the forward pass."""
    plan: Plan | None = field(default=None, repr=False)
    scaled: dict[str, float] = field(default_factory=dict, repr=False)
    """The modules inside an exact model whose outputs the wide model multiplies by another factor, and this factor.
    Their drifts are measured from the multiplied outputs."""

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text()

    def text(self, columns: int | None = None, paint: Paint = unpainted, title: str = "") -> str:
        """The verdict in a line that begins with `title`, and the drifts in a table; for a terminal of `columns`."""
        if self.passed:
            head = "exact"
        elif self.first_divergent is None:
            head = "NOTHING TESTED"
        else:
            head = f"NOT exact: {self.first_divergent} diverges first"
        lines = folded([f"{title}{head} (tolerance {self.tolerance:g}, {self.steps} steps after the upscale)"], columns)
        lines = [paint(line, "good" if self.passed else "bad") for line in lines]
        drifts = {
            "loss": (self.loss_drift, self.tolerance / LOSS_DIVISOR),
            "activations": (self.activation_drift, self.tolerance),
            "gradients": (self.gradient_drift, self.tolerance * GRADIENT_MULTIPLE),
            "weights": (self.weight_drift, self.tolerance * GRADIENT_MULTIPLE),
        }
        rows = [("", "largest relative drift", "allowed")]
        rows += [(name, f"{drift:.1e}", f"{allowed:.0e}") for name, (drift, allowed) in drifts.items()]
        beyond = [index for index, (drift, allowed) in enumerate(drifts.values(), 1) if not drift <= allowed]
        lines += table(rows, right=(1, 2), styles=dict.fromkeys(beyond, "bad"), columns=columns, paint=paint)
        below = [f"{name}: its output is multiplied by {scale:g}" for name, scale in self.scaled.items()]
        return "\n".join([*lines, *folded([self.reason] if self.reason else below, columns)])


def verify(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]],
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    steps: int,
    clip: float | None = None,
    roles: Roles | None = None,
    blocks: Blocks | None = None,
    units: Units | None = None,
    tolerance: float | None = None,
    watch: Watch = unwatched,
) -> Verdict:
    """Checks whether upscaling `narrow` to `wide` is exact: same function, same training.

    A float64 copy of `narrow` trains for a few steps and is upscaled without noise. Then both copies train for `steps`
    steps with `optimizer(parameters)` and `loss(model, batch)`, cycling through `batches`; with `clip`, gradients are
    clipped by the width-invariant norm. The output of every module, every gradient and every weight of the wide copy is
    compared with its duplicated narrow counterpart. The arguments are not changed. Complex weights become complex128.
    Tensors in batches are converted too, in tuples, lists, dictionaries and dataclasses.

    Inside the model, the output of a module may be multiplied by a constant (a softmax over the width makes it smaller)
    if the output of the model, the loss, all gradients, weights and buffers agree.

    The default tolerance is 1e-8 for activations and 1e-10 for the loss. If the model or the optimizer computes in
    float32 internally, it is 1e-4 and 1e-6.

    `watch(words, done, total)` is called after every step.

    The verdict is not `passed` if no growing parameter has a gradient, or if none of them moves: nothing was tested.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> def loss(model, batch):
        ...     return model(batch).square().mean()
        >>> batches = [torch.randn(5, 3) for _ in range(4)]
        >>> verdict = mupscale.verify(narrow, wide, optimizer=torch.optim.AdamW, batches=batches, loss=loss, steps=10)
        >>> print(verdict)  # doctest: +ELLIPSIS
        exact (tolerance 1e-08, 10 steps after the upscale)
        ...
    """
    for name, model in (("narrow", narrow), ("wide", wide)):
        refuse_unless_model(f"verify: {name}", model)
        refuse_scripted(f"verify: {name}", model)
    if any(tensor.is_meta for tensor in (*narrow.parameters(), *narrow.buffers())):
        raise UserError("verify: narrow is on the meta device and has no values; build it on the CPU")
    refuse_unless_whole("verify: steps", steps)
    refuse_unless_callable("verify: optimizer", optimizer, "lambda params: torch.optim.AdamW(params, lr=1e-3)")
    refuse_unless_callable("verify: loss", loss, "lambda model, batch: loss of the batch")
    refuse_unless_iterable("verify: batches", batches, "batches, as loss takes them")
    for name, value in (("clip", clip), ("tolerance", tolerance)):
        if value is not None:
            refuse_unless_level(f"verify: {name}", value)
    with torch.random.fork_rng():
        return _verify(
            narrow, wide, optimizer, _Batches(batches), loss, steps, clip, roles, blocks, units, tolerance, watch
        )


def _verify(
    narrow: nn.Module,
    wide: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]],
    batches: "_Batches",
    loss: Callable[[nn.Module, Any], Tensor],
    steps: int,
    clip: float | None,
    roles: Roles | None,
    blocks: Blocks | None,
    units: Units | None,
    tolerance: float | None,
    watch: Watch,
) -> Verdict:
    narrow, wide = _copied("narrow", narrow), _copied("wide", wide)
    for module, twin in zip(narrow.modules(), wide.modules(), strict=False):
        twin.training = module.training
    made = make_optimizer(list(narrow.parameters()))
    narrow_opts = as_list(made)
    if tolerance is None:
        rounds = _computes_in_float32(narrow, batches[0], loss) or any(
            _steps_in_float32(optimizer) for optimizer in narrow_opts
        )
        tolerance = TOLERANCE_FLOAT32 if rounds else TOLERANCE
    for step in range(WARM_UP):
        _backward(narrow, batches[step], loss, step)
        _flush(narrow, _vanishing(narrow))
        _step(narrow, narrow_opts, clip)
    report = upscale(narrow, wide, narrow_opts, roles=roles, blocks=blocks, units=units)
    assert isinstance(report.optimizer, list)

    comparison = _Comparison(report.plan, tolerance)
    comparison.note_buffers(narrow, wide)
    for step in range(steps):
        batch = batches[WARM_UP + step]
        comparison.begin(step)
        with Recorder(narrow) as before:
            narrow_loss = _backward(narrow, batch, loss, step)
        with Recorder(wide) as after:
            wide_loss = _backward(wide, batch, loss, step)
        comparison.activations(before.calls, after.calls)
        comparison.loss(narrow_loss, wide_loss)
        comparison.gradients(narrow, wide, before.order())
        comparison.note_gradients(narrow)
        vanishing = _vanishing(narrow)
        _flush(narrow, vanishing)
        _flush(wide, {name: duplicate(mask, report.plan.parameters[name].layouts) for name, mask in vanishing.items()})
        with comparison.movement_of(narrow):
            _step(narrow, narrow_opts, clip)
        _step(wide, report.optimizer, clip)
        comparison.weights(narrow, wide)
        watch("comparing training steps", step + 1, steps)
    comparison.buffers(narrow, wide)
    return comparison.verdict(steps)


@dataclass
class _Comparison:
    """Collects the drifts of one `verify` and remembers what exceeded the tolerance first."""

    plan: Plan
    tolerance: float
    step: int = 0
    loss_drift: float = 0.0
    activation_drift: float = 0.0
    gradient_drift: float = 0.0
    weight_drift: float = 0.0
    first: tuple[str, str] | None = None
    by_module: dict[str, float] = field(default_factory=dict)
    layouts: dict[Any, tuple[tuple[Layout, ...], float]] = field(default_factory=dict)
    is_inexact: bool = False
    """Whether anything differed by more than the scale of an activation inside the model."""
    scaled: dict[str, float] = field(default_factory=dict)
    """The scale of the outputs of modules that differ by no more than that."""
    scales: dict[Any, tuple[tuple[Layout, ...], float]] = field(default_factory=dict)
    """The same for single tensors, with their layouts."""
    unscaled_drift: dict[str, float] = field(default_factory=dict)
    """The largest drift of each module's activations, apart from such a scale."""
    tracked: list[str] = field(default_factory=list)
    """The buffers that agreed before the first step."""
    has_gradient: bool = False
    """Whether a parameter that matters had a gradient other than zero, at any step."""
    has_moved: bool = False
    """Whether such a parameter moved, at any step."""

    def begin(self, step: int) -> None:
        self.step = step

    def blame(self, module: str, what: str, *, is_inexact: bool = True) -> None:
        self.is_inexact = self.is_inexact or is_inexact
        if self.first is None:
            self.first = module or "(the model)", f"{what} at step {self.step} after the upscale"

    def loss(self, narrow: Tensor, wide: Tensor) -> None:
        drift = _relative(wide, narrow, float(narrow.abs()))
        self.loss_drift = _worst(self.loss_drift, drift)
        if not drift <= self.tolerance / LOSS_DIVISOR:
            self.blame("(the loss)", f"the loss drifts by {drift:.1e} while every module's output agrees,")

    def activations(self, narrow: list[Call], wide: list[Call]) -> None:
        if [call.name for call in narrow] != [call.name for call in wide]:
            self.blame("(the model)", "the two models call different modules")
            self.activation_drift = math.inf
            return
        for index, (before, after) in enumerate(zip(narrow, wide, strict=True)):
            drift = self._tensors_drift((index, "out"), before.outputs, after.outputs)
            self.activation_drift = _worst(self.activation_drift, drift)
            self.by_module[before.name] = _worst(self.by_module.get(before.name, 0.0), drift)
            apart = drift
            if not drift <= self.tolerance:
                apart = self._unscaled_drift((index, "out"), before, after)
                is_inexact = not apart <= self.tolerance
                given = self._tensors_drift((index, "in"), before.inputs, after.inputs)
                if given <= self.tolerance:
                    what = f"its output drifts by {drift:.1e} although its input agrees,"
                    self.blame(before.name, what, is_inexact=is_inexact)
                elif self.first is None:
                    self._blame_container(index, given, narrow, wide, is_inexact=is_inexact)
                self.is_inexact = self.is_inexact or is_inexact
            self.unscaled_drift[before.name] = _worst(self.unscaled_drift.get(before.name, 0.0), apart)

    def _blame_container(
        self, index: int, given: float, narrow: list[Call], wide: list[Call], *, is_inexact: bool
    ) -> None:
        """Blames the innermost module around this call whose own input agrees.

        A computation between two modules happens in the forward pass of a module that contains both. Calls are in the
        order in which they end, so the call of a container comes after those of its parts.
        """
        inner = narrow[index].name
        parent = inner
        while parent:
            parent = parent.rpartition(".")[0]
            around = next((i for i in range(index + 1, len(narrow)) if narrow[i].name == parent), None)
            if around is None:  # a list of modules is never called
                continue
            drift = self._tensors_drift((around, "in"), narrow[around].inputs, wide[around].inputs)
            if drift <= self.tolerance:
                break
            inner, given = parent, drift
        self.blame(parent, f"what it computes before {inner!r} drifts by {given:.1e}", is_inexact=is_inexact)

    def gradients(self, narrow: nn.Module, wide: nn.Module, order: dict[str, int]) -> None:
        targets = dict(wide.named_parameters())
        rows, largest = [], 0.0
        for name, source in narrow.named_parameters():
            if (source.grad is None) != (targets[name].grad is None):
                rows.append((name, math.inf, 0.0))
            elif source.grad is not None:
                entry = self.plan.parameters[name]
                wanted = _widened_gradient(entry, _dense(source.grad))
                size = float(_dense(source.grad).abs().max()) if source.numel() else 0.0
                error = float((_dense(targets[name].grad) - wanted).abs().max())
                rows.append((name, error * entry.factors.k_out, size))
                largest = max(largest, size)
        # a gradient that vanishes by symmetry (a bias before BatchNorm, of a key) is rounding noise: measure it by the
        # others
        drifts = {name: error / max(size, 1e-4 * largest, 1e-300) for name, error, size in rows}
        bad = [name for name, drift in drifts.items() if not drift <= self.tolerance * GRADIENT_MULTIPLE]
        self.gradient_drift = _worst(self.gradient_drift, *drifts.values())
        if bad:  # the fault is nearest to the loss: everything before it inherits a wrong gradient
            name = max(bad, key=lambda n: order.get(n.rpartition(".")[0], -1))
            self.blame(name.rpartition(".")[0], f"the gradient of {name!r} drifts by {drifts[name]:.1e}")

    def weights(self, narrow: nn.Module, wide: nn.Module) -> None:
        targets = dict(wide.named_parameters())
        for name, source in narrow.named_parameters():
            wanted = torch.empty_like(targets[name])
            widen_(wanted, source.detach(), self.plan.parameters[name])
            drift = _relative(targets[name].detach(), wanted, float(wanted.abs().max()) if wanted.numel() else 0.0)
            self.weight_drift = _worst(self.weight_drift, drift)
            if not drift <= self.tolerance * GRADIENT_MULTIPLE:
                self.blame(
                    name.rpartition(".")[0],
                    f"the update of {name!r} drifts by {drift:.1e} although its gradient agrees,",
                )

    def note_buffers(self, narrow: nn.Module, wide: nn.Module) -> None:
        """Notes which buffers agree before the first step: one that is not saved has its own value in each model."""
        self.tracked = [name for name, drift in self._buffer_drifts(narrow, wide).items() if drift <= self.tolerance]

    def buffers(self, narrow: nn.Module, wide: nn.Module) -> None:
        """Statistics of activations with another scale would show only in evaluation."""
        drifts = self._buffer_drifts(narrow, wide)
        allowed = self.tolerance * GRADIENT_MULTIPLE
        if self.scaled and not all(drifts.get(name, math.inf) <= allowed for name in self.tracked):
            self.is_inexact = True

    def _buffer_drifts(self, narrow: nn.Module, wide: nn.Module) -> dict[str, float]:
        """Of the buffers that both models have, in the shapes of the plan."""
        targets = dict(wide.named_buffers())
        drifts = {}
        for name, source in narrow.named_buffers():
            entry, target = self.plan.buffers.get(name), targets.get(name)
            if entry is None or target is None or source.shape != entry.narrow_shape:
                continue
            before, after = duplicate(source.detach(), entry.layouts), target.detach()
            if before.shape != after.shape:
                continue
            if _is_inexact(before):
                drifts[name] = _relative(after, before, float(before.abs().max()) if before.numel() else 0.0)
            else:
                drifts[name] = 0.0 if torch.equal(before, after) else math.inf
        return drifts

    def tested(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters whose training tests the widening: those that grow; all, where none does."""
        growing = {name for name, entry in self.plan.parameters.items() if entry.grows}
        return {name: p for name, p in model.named_parameters() if name in growing or not growing}

    def note_gradients(self, narrow: nn.Module) -> None:
        gradients = [p.grad for p in self.tested(narrow).values() if p.grad is not None]
        self.has_gradient = self.has_gradient or any(bool(_dense(gradient).any()) for gradient in gradients)

    @contextmanager
    def movement_of(self, narrow: nn.Module) -> Iterator[None]:
        """Notes whether a parameter that matters moves inside."""
        tested = {} if self.has_moved else self.tested(narrow)
        before = {name: parameter.detach().clone() for name, parameter in tested.items()}
        yield
        self.has_moved = self.has_moved or any(not torch.equal(p, before[name]) for name, p in tested.items())

    def untested(self, steps: int) -> str | None:
        """Why agreement proves nothing; None if it does."""
        if not self.has_gradient:
            return (
                f"nothing was tested: no parameter that grows has a gradient in any of {steps} steps. The loss does "
                "not depend on them, the network is dead (a ReLU that is always 0), or they are frozen"
            )
        if not self.has_moved:
            return (
                f"nothing was tested: no parameter that grows moves in any of {steps} steps. Is the learning rate 0, "
                "or the clip?"
            )
        return None

    def verdict(self, steps: int) -> Verdict:
        if self.first is not None and not self.is_inexact:  # only scales inside the model differ
            self.first, self.by_module = None, self.unscaled_drift
            self.activation_drift = _worst(0.0, *self.by_module.values())
        else:
            self.scaled = {}
        module, reason = self.first or (None, None)
        untested = self.untested(steps) if self.first is None else None
        if reason:
            hints = [note for note in self.plan.notes if _concerns(note.partition(":")[0], str(module))]
            reason = "\n  ".join([reason.rstrip(","), *(f"note: {hint}" for hint in hints)])
        return Verdict(
            passed=self.first is None and untested is None,
            loss_drift=self.loss_drift,
            activation_drift=self.activation_drift,
            gradient_drift=self.gradient_drift,
            weight_drift=self.weight_drift,
            first_divergent=module,
            reason=reason or untested,
            steps=steps,
            tolerance=self.tolerance,
            drift_by_module=self.by_module,
            plan=self.plan,
            scaled=self.scaled,
        )

    def _tensors_drift(self, key: Any, narrow: list[Tensor], wide: list[Tensor]) -> float:
        if len(narrow) != len(wide):
            return math.inf
        drifts = [self._drift((key, i), a, b) for i, (a, b) in enumerate(zip(narrow, wide, strict=True))]
        return _worst(0.0, *drifts)

    def _drift(self, key: Any, narrow: Tensor, wide: Tensor) -> float:
        """How far `wide` is from `narrow` duplicated in the layout that fits best, which is stored.

        The layout of an activation is not known: heads may be a separate axis, or be flattened with positions. So every
        block length is tried. If a layout is wrong for the next module, the output of that module differs.
        """
        if narrow.ndim != wide.ndim:
            return math.inf
        size = float(narrow.abs().max()) if narrow.numel() else 0.0
        key = key, narrow.shape, wide.shape
        known = self.layouts.get(key)
        best = _duplication_error(narrow, wide, *known, size) if known else math.inf
        if best <= self.tolerance:
            return best
        if known and (self.is_inexact or key in self.scales):  # once diverged, no other layout will fit
            return best
        candidates = list(islice(self._candidates(narrow, wide), 4096))
        if not candidates:  # a concatenation that no parameter describes: what follows will show
            return 0.0
        for candidate in candidates:
            error = _duplication_error(narrow, wide, *candidate, size)
            if not error >= best:
                best, self.layouts[key] = error, candidate
            if best <= self.tolerance:
                break
        return best

    def _unscaled_drift(self, key: Any, narrow: Call, wide: Call) -> float:
        """The drift of a module's output, apart from one scale for each tensor, the same at all steps.

        If a scale is wrong for what follows, that differs too. Nothing follows the output of the model.
        """
        if len(narrow.outputs) != len(wide.outputs):
            return math.inf
        drifts = []
        for i, (a, b) in enumerate(zip(narrow.outputs, wide.outputs, strict=True)):
            drift = self._drift((key, i), a, b)
            is_final = narrow.is_outermost and (not narrow.name or a.shape == b.shape)
            if not drift <= self.tolerance and not is_final and a.ndim == b.ndim:
                drift, scale = self._scaled_drift(((key, i), a.shape, b.shape), a, b)
                if drift <= self.tolerance:
                    self.scaled.setdefault(narrow.name, scale)
            drifts.append(drift)
        return _worst(0.0, *drifts)

    def _scaled_drift(self, key: Any, narrow: Tensor, wide: Tensor) -> tuple[float, float]:
        """The drift from the narrow tensor times the scale that fits best, and this scale."""
        size = float(narrow.abs().max()) if narrow.numel() else 0.0
        if key in self.scales:
            layouts, scale = self.scales[key]
            return _duplication_error(narrow, wide, layouts, scale, size), scale
        candidates = dict.fromkeys(layouts for layouts, _ in islice(self._candidates(narrow, wide), 4096))
        for layouts in candidates:
            scale = _fitted_scale(duplicate(narrow, layouts), wide)
            error = _duplication_error(narrow, wide, layouts, scale, size) if scale > 0 else math.inf
            if error <= self.tolerance:
                self.scales[key] = layouts, scale
                return error, scale
        return math.inf, 1.0

    def _candidates(self, narrow: Tensor, wide: Tensor) -> Iterator[tuple[tuple[Layout, ...], float]]:
        planned = {layout for entry in self.plan.parameters.values() for layout in entry.layouts}
        by_units = [layout for layout in planned if is_unit_by_unit(layout)]
        fractions = {Fraction(wide_length(layout), narrow_length(layout)) for layout in by_units if layout[0].length}
        axes: list[list[Layout]] = []
        for n, w in zip(narrow.shape, wide.shape, strict=True):
            if n == w:
                axes.append([(Piece(n, max(n, 1), 1),)])
                continue
            options = [x for x in planned if narrow_length(x) == n and wide_length(x) == w]
            if n and (w % n == 0 or Fraction(w, n) in fractions):
                blocks = [block for block in range(1, n + 1) if n % block == 0 and w % block == 0]
                options += [x for block in blocks if (x := evenly(n, w, block)) not in options]
            axes.append(options)
        # the output of a norm or a matrix in role `readout` carries the 1/k of the readout behind it, and any output
        # the unit of what produced it
        scales = {1.0} | {entry.unit.scale for entry in self.plan.parameters.values()}
        for entry in self.plan.parameters.values():
            summed = [axis for axis, side in enumerate(entry.sides) if side == "in"]
            if entry.role == "readout" and (entry.kind == "gain" or len(summed) > 1):
                scales |= {entry.unit.scale / entry.reference(axis) for axis in summed}
        if _is_normalised(narrow, wide):
            scales.add(math.sqrt(narrow.numel() / wide.numel()))
        for scale in sorted(scales, reverse=True):
            for layouts in product(*axes):
                yield layouts, scale


class _Batches:
    """Batches by index, in float64, over and over; read from the iterable only as far as needed."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source = iter(batches)
        self._seen: list[Any] = []
        self._ended = False

    def __getitem__(self, index: int) -> Any:
        while not self._ended and index >= len(self._seen):
            try:
                self._seen.append(map_leaves(_to_float64, next(self._source)))
            except StopIteration:
                self._ended = True
        if not self._seen:
            raise UserError("verify: batches is empty")
        return self._seen[index % len(self._seen)]


class _LowPrecisionWatch(TorchDispatchMode):
    """Notices an operation on the way from the weights to the loss that rounds float64 to fewer digits."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        rounded = isinstance(result, Tensor) and _is_inexact(result) and result.dtype not in _DOUBLE
        self.seen |= rounded and any(
            isinstance(a, Tensor) and a.dtype in _DOUBLE and a.requires_grad for a in tree_leaves((args, kwargs))
        )
        return result


def _concerns(noted: str, module: str) -> bool:
    """Whether a note on one module may explain a divergence that shows in another: one contains the other."""
    return (
        "(the model)" in (noted, module) or f"{noted}.".startswith(f"{module}.") or f"{module}.".startswith(f"{noted}.")
    )


def _computes_in_float32(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> bool:
    with buffers_kept(model), _LowPrecisionWatch() as watch:
        _in_float64(loss, model, batch)
    return watch.seen


def _steps_in_float32(optimizer: Optimizer) -> bool:
    """Whether an optimizer rounds to float32: capturable ones do, and float32 learning rates when rescaled."""
    return any(
        group.get("capturable")
        or any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in group.values())
        for group in optimizer.param_groups
    )


def _in_float64(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    """The loss; raises a UserError where the model uses an operation that does not exist in float64."""
    try:
        return loss(model, batch)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        message = " ".join(str(error).split())
        if not any(word in message for word in ("Double", "float64", "dtype", "data type", "scalar type")):
            raise
        strangers = unknown_kinds(batch)
        if strangers:
            raise UserError(
                f"verify: batches hold objects of class {', '.join(strangers)}, whose tensors verify cannot convert to "
                f"float64 ({message}). Give tensors in tuples, dictionaries or dataclasses, and make the object in loss"
            ) from error
        raise UserError(
            f"verify: the model does not compute in float64 ({message}). Give it an implementation that does, or make "
            "its tensors of the dtype of its inputs"
        ) from error


def _backward(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], seed: int) -> Tensor:
    torch.manual_seed(seed)
    model.zero_grad()
    value = _in_float64(loss, model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UserError(f"loss must return a tensor with one element, the loss of the batch, got {shown(value)}")
    if value.requires_grad:  # a constant has no gradients, which the verdict says
        value.backward()
    return value.detach()


def _vanishing(model: nn.Module) -> dict[str, Tensor]:
    """The gradient entries that are rounding noise.

    Some gradients vanish by symmetry: that of a key's bias, or of a bias before BatchNorm. An optimizer that normalises
    would turn their rounding noise into real steps of random sign, in directions that do not matter.
    """
    gradients = {
        name: p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and not p.grad.is_sparse and p.numel()
    }
    if not gradients:
        return {}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    return {name: gradient.abs() < 1e-11 * largest for name, gradient in gradients.items()}


def _flush(model: nn.Module, masks: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in masks and parameter.grad is not None:
            parameter.grad.masked_fill_(masks[name], 0.0)


def _step(model: nn.Module, optimizers: Sequence[Optimizer], clip: float | None) -> None:
    if clip is not None:
        clip_grad_norm_(model, clip)
    for optimizer in optimizers:
        optimizer.step()


def _copied(name: str, model: nn.Module) -> nn.Module:
    """A copy in float64. Raises a UserError that names the attribute that cannot be copied."""
    try:
        return float64_copy(model)
    except Exception as error:
        shared = _not_copied(model)
        for module_name, module in model.named_modules():
            for attribute, value in vars(module).items():
                try:
                    if attribute != "_modules":
                        copy.deepcopy(value, dict(shared))
                except Exception as reason:
                    raise UserError(
                        f"verify: {name} has an attribute {f'{module_name}.{attribute}'.removeprefix('.')!r} of class "
                        f"{type(value).__name__} that cannot be copied ({' '.join(str(reason).split())}). Remove it, "
                        "or give its class a method __deepcopy__"
                    ) from error
        raise


_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event)


def _not_copied(model: nn.Module) -> dict[int, Any]:
    """By identity, what a copy of a model has in place of what cannot be copied.

    An activation that a module keeps is part of a graph: the copy has its value. Locks are shared.
    """
    answer: dict[int, Any] = {}
    for module in model.modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters")}
        for leaf in leaves_of(own):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                answer[id(leaf)] = leaf.detach().clone()
            elif isinstance(leaf, _LOCKS):
                answer[id(leaf)] = leaf
    return answer


def float64_copy(model: nn.Module) -> nn.Module:
    restore_infshapes(model)
    twin = copy.deepcopy(model, _not_copied(model)).double()
    set_experts: Any = getattr(twin, "set_experts_implementation", None)
    if callable(set_experts):
        set_experts("eager")  # the other implementations of transformers have no float64
    for parameter in twin.parameters():
        if parameter.is_complex():  # which `double` leaves alone
            parameter.data = parameter.data.to(torch.complex128)
    for name, buffer in list(twin.named_buffers(remove_duplicate=False)):
        if buffer.is_complex():
            owner, _, attribute = name.rpartition(".")
            setattr(twin.get_submodule(owner), attribute, buffer.to(torch.complex128))
    restore_infshapes(twin)
    return twin


def _widened_gradient(entry: TensorPlan, source: Tensor) -> Tensor:
    target = source.new_empty(entry.wide_shape)
    powers = {"out_power": -1, "in_power": 0}
    duplicate_(target, source, entry.layouts, entry.scales(**powers), entry.unit_scale(**powers))
    return target


def _duplication_error(narrow: Tensor, wide: Tensor, layouts: tuple[Layout, ...], scale: float, size: float) -> float:
    return _relative(wide, duplicate(narrow, layouts) * scale, size * scale)


def _fitted_scale(narrow: Tensor, wide: Tensor) -> float:
    """The factor of the narrow tensor that comes nearest to the wide one, by the entries that are finite in both."""
    finite = narrow.isfinite() & wide.isfinite()
    a, b = narrow.masked_fill(~finite, 0.0), wide.masked_fill(~finite, 0.0)
    square = float(a.square().sum())
    return float((a * b).sum()) / square if square > 0 else math.nan


def _is_normalised(narrow: Tensor, wide: Tensor) -> bool:
    """Whether the narrow tensor holds vectors of length 1 along the axes that grow, so that its copies are smaller."""
    axes = [axis for axis, (n, w) in enumerate(zip(narrow.shape, wide.shape, strict=True)) if n != w]
    if not axes or not narrow.numel() or not wide.numel():
        return False
    return bool((torch.linalg.vector_norm(narrow, dim=axes) - 1).abs().max() < 1e-5)


def _relative(value: Tensor, wanted: Tensor, size: float) -> float:
    if value.numel() == 0:
        return 0.0
    error = (value - wanted).abs().nan_to_num(nan=math.inf)
    both = (value == wanted) | (value.isnan() & wanted.isnan())  # -inf in a masked score agrees with itself
    return float(error.masked_fill(both, 0.0).max()) / max(size if math.isfinite(size) else 1.0, 1e-30)


def _worst(*drifts: float) -> float:
    return max((math.inf if math.isnan(drift) else drift for drift in drifts), default=0.0)


def _dense(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_dense() if tensor.is_sparse else tensor


def _to_float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not _is_inexact(value):
        return value
    return value.to(torch.complex128) if value.is_complex() else value.double()


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
