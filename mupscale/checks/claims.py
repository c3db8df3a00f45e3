"""Whether a growth method keeps what it claims: how far function and training deviate from the narrow run."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mupscale.checks.comparison import worst_of
from mupscale.checks.forward_pass import named_gradients
from mupscale.checks.recording import buffers_kept, float64_copy, map_leaves, to_float64
from mupscale.checks.verify import WARM_UP
from mupscale.errors import UserError
from mupscale.methods.base import Claim, GrowthMethod, Loss
from mupscale.methods.grow import grow
from mupscale.text_tables import Paint, folded, unpainted
from mupscale.widening.hints import Hints, checked_hints
from mupscale.widening.layers import Depth

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
    batches = [map_leaves(to_float64, batch) for batch in batches]
    before = optimizer(list(narrow.parameters()))
    for step in range(WARM_UP):
        _step(narrow, before, batches[step % len(batches)], loss)
    method = copy.deepcopy(method)
    method.fit(narrow, wide, batches, loss, hints=hints)
    report = grow(narrow, wide, before, method=method, hints=hints)
    after = report.optimizer
    assert isinstance(after, Optimizer)
    static = dynamic = 0.0
    for batch in batches:
        with torch.no_grad(), buffers_kept(narrow), buffers_kept(wide):
            static = worst_of(static, _deviation(float(loss(wide, batch)), float(loss(narrow, batch))))
    with buffers_kept(wide):
        gradients = named_gradients(wide, loss(wide, batches[0]))
    claim = method.claim_measured(report.plan, narrow, [before], gradients)
    if report.plan.layers:  # new layers learn, which no narrow run does
        claim = Claim(claim.function and report.plan.keeps_function, False)
    for step in range(steps):
        batch = batches[(WARM_UP + step) % len(batches)]
        dynamic = worst_of(dynamic, _deviation(_step(wide, after, batch, loss), _step(narrow, before, batch, loss)))
    return ClaimCheck(type(method).__name__, claim, static, dynamic)


def _step(model: nn.Module, optimizer: Optimizer, batch: Any, loss: Loss) -> float:
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return float(value.detach())


def _deviation(wide: float, narrow: float) -> float:
    return abs(wide - narrow) / abs(narrow)
