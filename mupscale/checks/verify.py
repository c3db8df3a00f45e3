"""Trains narrow and wide copies in float64: `verify` compares all that they compute, `check_claim` their losses."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import TorchDispatchMode, tree_leaves
from mupscale.base_shapes import clip_grad_norm_
from mupscale.checks.comparison import Comparison, Verdict, worst_of
from mupscale.checks.forward_pass import named_gradients
from mupscale.checks.recording import (
    buffers_kept,
    copied,
    float64_copy,
    generators_kept,
    map_leaves,
    recorded,
    refuse_unless_loss,
    seed_generators,
)
from mupscale.errors import UserError, one_line, refuse_unless_level, refuse_unless_model, refuse_unless_whole
from mupscale.methods.base import Claim, GrowthMethod, Loss
from mupscale.methods.grow import as_list, grow
from mupscale.text_tables import Paint, Watch, folded, unpainted, unwatched
from mupscale.widening.growth import duplicate
from mupscale.widening.hints import Hints, checked_hints, refuse_lazy, refuse_scripted
from mupscale.widening.layers import Depth
from mupscale.widening.modules import dropout_of
from mupscale.widening.write import is_inexact

TOLERANCE = 1e-8
"""Relative drift of activations in float64."""

TOLERANCE_FLOAT32 = 1e-4
"""The same for models that compute in float32 inside, whatever their weights."""

WARM_UP = 10
"""Training steps of the narrow copy before it is widened, so that the move of optimizer state is tested too."""


@generators_kept()
def verify(
    narrow: nn.Module,
    wide: nn.Module,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]],
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    steps: int,
    clip: float | None = None,
    hints: Hints | None = None,
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

    Layers that drop units draw other masks for the wide model. Where the models differ, they are compared again without
    these layers; the verdict is then exact apart from dropout, or what else differs.

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
        refuse_lazy(model)
    if any(tensor.is_meta for tensor in (*narrow.parameters(), *narrow.buffers())):
        raise UserError("verify: narrow is on the meta device and has no values; build it on the CPU")
    refuse_unless_whole("verify: steps", steps)
    for name, value in (("clip", clip), ("tolerance", tolerance)):
        if value is not None:
            refuse_unless_level(f"verify: {name}", value)
    batches = [map_leaves(_to_float64, batch) for batch in islice(batches, WARM_UP + steps)]
    if not batches:
        raise UserError("verify: batches is empty")
    given, wide_given = narrow, wide
    narrow, wide = copied("verify: narrow", narrow), copied("verify: wide", wide)
    for module, twin in zip(narrow.modules(), wide.modules(), strict=False):
        twin.training = module.training
    narrow_opts = as_list(optimizer(list(narrow.parameters())))
    allowed = tolerance
    if allowed is None:
        rounds = _computes_in_float32(narrow, batches[0], loss) or any(map(_steps_in_float32, narrow_opts))
        allowed = TOLERANCE_FLOAT32 if rounds else TOLERANCE
    for step in range(WARM_UP):
        _backward(narrow, batches[step % len(batches)], loss, step)
        _flush(narrow, _vanishing(narrow))
        _step(narrow, narrow_opts, clip)
    report = grow(narrow, wide, narrow_opts, hints=hints)
    assert isinstance(report.optimizer, list)

    growing = {name for name, entry in report.plan.parameters.items() if entry.grows}
    tested = {name: p.detach().clone() for name, p in narrow.named_parameters() if name in growing or not growing}
    comparison = Comparison(report.plan, Verdict(False, steps=steps, tolerance=allowed, plan=report.plan), tested)
    drifts = comparison.buffer_drifts(narrow, wide)
    comparison.tracked = [name for name, drift in drifts.items() if drift <= allowed]
    for step in range(steps):
        batch = batches[(WARM_UP + step) % len(batches)]
        comparison.step = step
        with recorded(narrow) as before:
            narrow_loss = _backward(narrow, batch, loss, step)
        with recorded(wide) as after:
            wide_loss = _backward(wide, batch, loss, step)
        comparison.activations(before, after)
        comparison.loss(narrow_loss, wide_loss)
        comparison.gradients(narrow, wide, {event.name: place for place, event in enumerate(before) if event.ends})
        vanishing = _vanishing(narrow)
        _flush(narrow, vanishing)
        _flush(wide, {name: duplicate(mask, report.plan.parameters[name].layouts) for name, mask in vanishing.items()})
        _step(narrow, narrow_opts, clip)
        _step(wide, report.optimizer, clip)
        comparison.weights(narrow, wide)
        watch("comparing training steps", step + 1, steps)
    comparison.buffers(narrow, wide)
    verdict = comparison.finished()
    dropout = tuple(name for name, module in given.named_modules() if module.training and dropout_of(module))
    if verdict.passed or not dropout:
        return verdict
    without = copied("verify: narrow", given)
    for name in dropout:
        without.get_submodule(name).eval()
    if all(without.get_submodule(name).training for name in dropout):  # they are always on
        return replace(verdict, dropout=dropout)
    settings: dict[str, Any] = {"steps": steps, "clip": clip, "hints": hints, "tolerance": tolerance, "watch": watch}
    again = verify(without, wide_given, optimizer=optimizer, batches=batches, loss=loss, **settings)
    return replace(again, dropout=dropout)


_DOUBLE = (torch.float64, torch.complex128)


class _LowPrecisionWatch(TorchDispatchMode):
    """Notices an operation on the way from the weights to the loss that rounds float64 to fewer digits."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        rounded = isinstance(result, Tensor) and is_inexact(result) and result.dtype not in _DOUBLE
        self.seen |= rounded and any(
            isinstance(a, Tensor) and a.dtype in _DOUBLE and a.requires_grad for a in tree_leaves((args, kwargs))
        )
        return result


def _computes_in_float32(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> bool:
    with buffers_kept(model), _LowPrecisionWatch() as watch:
        _loss_in_float64(loss, model, batch)
    return watch.seen


def _steps_in_float32(optimizer: Optimizer) -> bool:
    """Whether an optimizer rounds to float32: capturable ones do, and float32 learning rates when rescaled."""
    return any(
        group.get("capturable")
        or any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in group.values())
        for group in optimizer.param_groups
    )


def _loss_in_float64(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    """The loss; raises a UserError where the model uses an operation that does not exist in float64."""
    try:
        value = loss(model, batch)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        message = one_line(error)
        if not any(word in message for word in ("Double", "float64", "dtype", "data type", "scalar type")):
            raise
        raise UserError(
            f"verify: the model does not compute in float64 ({message}). Give it an implementation that does, make its "
            "tensors of the dtype of its inputs, and give batches as tensors in tuples, dictionaries or dataclasses"
        ) from error
    refuse_unless_loss(value)
    return value


def _to_float64(value: Any) -> Any:
    if not isinstance(value, Tensor) or not is_inexact(value):
        return value
    return value.to(torch.complex128) if value.is_complex() else value.double()


def _backward(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], seed: int) -> Tensor:
    seed_generators(seed)
    model.zero_grad()
    value = _loss_in_float64(loss, model, batch)
    if value.requires_grad:  # a constant has no gradients, which the verdict says
        value.backward()
    return value.detach()


def _vanishing(model: nn.Module) -> dict[str, Tensor]:
    """The gradient entries that are rounding noise.

    Some gradients vanish by symmetry: that of a key's bias, or of a bias before BatchNorm. An optimizer that normalises
    would turn their rounding noise into real steps of random sign, in directions that do not matter.
    """
    found = {name: p.grad for name, p in model.named_parameters() if p.numel()}
    gradients = {name: gradient for name, gradient in found.items() if gradient is not None and not gradient.is_sparse}
    largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=0.0)
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


PRESERVED = 1e-12
"""The largest relative deviation of a loss, in float64, that is rounding."""


@dataclass(frozen=True)
class ClaimCheck:
    """The result of `check_claim`. Each deviation is relative, the largest over batches or steps."""

    method: str
    claim: Claim
    static: float
    """Of the losses just after growing."""
    dynamic: float
    """Of the losses of the steps after it."""

    @property
    def holds(self) -> bool:
        """Whether the method preserves exactly what it claims, no less and no more."""
        return self.claim == Claim(self.static <= PRESERVED, self.dynamic <= PRESERVED)

    def text(self, columns: int | None = None, paint: Paint = unpainted, title: str = "") -> str:
        """The check in a line that begins with `title`; for a terminal of `columns`."""
        rows = zip(("function", "training"), self.claim, (self.static, self.dynamic), strict=True)
        parts = [f"{name} {'not ' * (not kept)}preserved (deviation {found:.1e})" for name, kept, found in rows]
        line = f"{title}{self.method}: {', '.join(parts)}: {'confirmed' if self.holds else 'REFUTED'}"
        return "\n".join(paint(part, "good" if self.holds else "bad") for part in folded([line], columns))

    __str__ = text


def check_claim(
    narrow: nn.Module,
    wide: nn.Module,
    method: GrowthMethod,
    *,
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    batches: Sequence[Any],
    loss: Loss,
    steps: int = 20,
    hints: Hints | None = None,
    depth: Depth | None = None,
) -> ClaimCheck:
    """Checks what a growth method claims to preserve, on float64 copies of the models.

    A copy of `narrow` trains for a few steps and grows. Then both train for `steps` steps; their losses are compared.
    With `depth` it becomes deeper, too.

    `print(check_claim(narrow, wide, Net2Net(), optimizer=torch.optim.AdamW, batches=batches, loss=loss))`

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> groups = {"hidden": {"0.weight": 0, "2.weight": 1}}  # the axes that hold the hidden units
        >>> def loss(model, batch):
        ...     return model(batch).square().mean()
        >>> batches = [torch.randn(5, 3) for _ in range(4)]
        >>> method = mupscale.methods.Net2Net(groups=groups)
        >>> check = mupscale.check_claim(
        ...     narrow, wide, method, optimizer=torch.optim.AdamW, batches=batches, loss=loss)
        >>> check.claim, check.holds
        (Claim(function=True, dynamics=True), True)
    """
    if steps < 1 or not batches:
        raise UserError(f"check_claim: give at least one step and one batch, got {steps} and {len(batches)}")
    if depth is not None:
        hints = replace(checked_hints(hints), depth=depth)
    narrow, wide = float64_copy(narrow), float64_copy(wide)
    batches = [map_leaves(_to_float64, batch) for batch in batches]
    before = optimizer(list(narrow.parameters()))
    for step in range(WARM_UP):
        _train_step(narrow, before, batches[step % len(batches)], loss)
    method = copy.deepcopy(method)
    method.fit(narrow, wide, batches, loss, hints=hints)
    report = grow(narrow, wide, before, method=method, hints=hints)
    after = report.optimizer
    assert isinstance(after, Optimizer)
    static = dynamic = 0.0
    for batch in batches:
        with torch.no_grad(), buffers_kept(narrow), buffers_kept(wide):
            static = worst_of(static, _deviation(float(loss(wide, batch)), float(loss(narrow, batch))))
    gradients = {}
    if method.measures_claim:
        with buffers_kept(wide):
            gradients["gradients"] = named_gradients(wide, loss(wide, batches[0]))
    claim = method.claim(report.plan, narrow, [before], **gradients)
    if report.plan.layers:  # new layers learn, which no narrow run does
        claim = Claim(claim.function and report.plan.keeps_function, False)
    for step in range(steps):
        batch = batches[(WARM_UP + step) % len(batches)]
        dynamic = worst_of(
            dynamic, _deviation(_train_step(wide, after, batch, loss), _train_step(narrow, before, batch, loss))
        )
    return ClaimCheck(type(method).__name__, claim, static, dynamic)


def _train_step(model: nn.Module, optimizer: Optimizer, batch: Any, loss: Loss) -> float:
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return float(value.detach())


def _deviation(wide: float, narrow: float) -> float:
    return abs(wide - narrow) / abs(narrow)
