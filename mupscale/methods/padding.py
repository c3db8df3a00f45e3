"""Methods whose new units are zero: zero padding, and shrinking before it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.methods.base import Claim, GrowthMethod
from mupscale.methods.groups import norms_over_width
from mupscale.widening.axes import copy_index, duplicate_, is_unit_by_unit
from mupscale.widening.growth import Growth
from mupscale.widening.hints import Hints
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan_text import Plan
from mupscale.widening.stepping import new_copies
from mupscale.widening.table import Scale, product, scale_of_axis
from mupscale.widening.write import is_inexact


class ZeroPadding(GrowthMethod):
    """New units have input and output weights of zero. They never train if the activation of zero is zero.

    The function is preserved, unless a norm averages over the width: it counts the new units. The training is
    preserved as well if new units never train, which `check_claim` measures: it is not before a sigmoid.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(narrow, wide, method=mupscale.methods.ZeroPadding(), call=lambda model: model(x))
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
    """

    equal_copies = False
    state_to_copies = False

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plan = make_plan(narrow, wide, hints=hints)
        own = type(self).__name__
        in_units = [name for name, entry in plan.parameters.items() if entry.rescale != 1 or entry.offset]
        if in_units:
            raise UserError(
                f"{own}: parameter {in_units[0]!r} has a unit (a factor that is right for duplication only). Use "
                "Duplication"
            )
        for name, entry in plan.parameters.items():
            for axis in entry.fractional_axes:
                if not is_unit_by_unit(entry.layouts[axis]):
                    continue
                n, w = entry.narrow_shape[axis], entry.wide_shape[axis]
                raise UserError(
                    f"{own}: axis {axis} of parameter {name!r} does not grow by a whole factor ({n} → {w}). Choose a "
                    f"multiple of {n}, or use Duplication"
                )
        mixed = [name for name, entry in plan.parameters.items() if entry.mixed]
        if mixed:
            raise UserError(
                f"{own}: parameter {mixed[0]!r} is made of pieces that grow by different factors. Use Duplication"
            )
        return plan

    def widen_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        duplicate_(target, source, entry.layouts, scale=self.scale(entry).weight)
        target.masked_fill_(new_copies(entry).to(target.device), 0.0)

    def widen_gradient_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        duplicate_(target, source, entry.layouts, scale=self.scale(entry).gradient)
        target.masked_fill_(new_copies(entry).to(target.device), 0.0)

    def scale(self, growth: Growth) -> Scale:
        """One copy of each entry. The multiplier of a muP readout falls with the width all the same."""
        return product(scale_of_axis(axis.side, 1, axis.reference) for axis in growth.axes if axis.side == "mean")

    def maps(self, entry: Growth, axis: int) -> tuple[Tensor, Tensor]:
        out, _ = super().maps(entry, axis)
        out = out * (copy_index(entry.layouts[axis]) == 0)[:, None]
        return out, out

    def claim(self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer]) -> Claim:
        return Claim(not any(norms_over_width(plan, narrow)), False)

    def claim_measured(
        self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer], gradients: Mapping[str, Tensor]
    ) -> Claim:
        """The training is preserved if new units never train: the activation before them maps zero to zero."""
        kept = self.claim(plan, narrow, optimizers).function
        trains = any(bool(gradient[new_copies(plan.parameters[name])].any()) for name, gradient in gradients.items())
        return Claim(kept, kept and self._follows_the_rules() and not trains)


class ShrinkAndPad(ZeroPadding):
    """Shrinks the weights and pads them with zeros (Mallik et al. 2024). Use it with `noise`, so that new units train.

    The authors add a new muP initialisation of the wide network, which is `noise=AdditiveNoise(1.0)`. Biases and the
    gains of norms are padded without shrinking. The function changes. As published, the optimizer state is reset.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> noise = mupscale.AdditiveNoise(1.0)
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(
        ...     narrow, wide, method=mupscale.methods.ShrinkAndPad(shrink=0.4), noise=noise, call=lambda model: model(x)
        ... )
    """

    published_state = "reset"

    def __init__(self, shrink: float = 0.4, **options: Any) -> None:
        """
        Args:
            shrink: The factor on the weights.
            options: `state`, `hyperparameters` and `rewarm_steps` of every method.
        """
        super().__init__(**options)
        number = isinstance(shrink, float | int) and not isinstance(shrink, bool)
        if not number or not math.isfinite(shrink) or not 0 < shrink <= 1:
            raise UserError(f"ShrinkAndPad: shrink must be a number above 0 and at most 1, got {shrink!r}")
        self.shrink = shrink

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plan = super().plan(narrow, wide, hints)
        for name, parameter in narrow.named_parameters():
            if plan.parameters[name].kind == "weight" and not is_inexact(parameter) and self.shrink != 1:
                raise UserError(
                    f"ShrinkAndPad: {name!r} holds whole numbers ({parameter.dtype}), which cannot be multiplied by "
                    f"{self.shrink:g}. Use Duplication, or give both models floating-point weights"
                )
        return plan

    def widen_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        super().widen_(target, source, entry)
        if entry.kind == "weight":
            target.mul_(self.shrink)

    def claim(self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer]) -> Claim:
        return super().claim(plan, narrow, optimizers) if self.shrink == 1 else Claim(False, False)
