"""The verdict of `verify`, and the tolerances that it is held to."""

from dataclasses import dataclass, field

from mupscale.text_tables import Paint, folded, table, unpainted
from mupscale.widening.pairing import some_names
from mupscale.widening.plan_text import Plan

TOLERANCE = 1e-8
"""Relative drift of activations in float64."""

LOSS_DIVISOR = 100
"""The loss is held to this part of that tolerance."""

GRADIENT_MULTIPLE = 10
"""Gradients and weights get this multiple of it."""

TOLERANCE_FLOAT32 = 1e-4
"""The same for models that compute in float32 inside, whatever their weights: the loss is then held to 1e-6."""


_REMEDY = "mupscale.discover looks for a plan with which the models agree, where there is one: give it as hints"


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
    dropout: tuple[str, ...] = ()
    """Layers that draw other masks for the wide model; they were left out."""

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text()

    def text(self, columns: int | None = None, paint: Paint = unpainted, title: str = "") -> str:
        """The verdict in a line that begins with `title`, and the drifts in a table; for a terminal of `columns`."""
        if self.passed:
            head = "exact apart from dropout" if self.dropout else "exact"
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
        if self.dropout:
            below.append(f"compared without {some_names(self.dropout)}, whose masks are others in the wide model")
        if self.reason:
            below = [self.reason, _REMEDY] if self.first_divergent is not None else [self.reason]
        return "\n".join([*lines, *folded(below, columns)])
