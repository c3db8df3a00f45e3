"""Methods that treat all units alike: the paper's duplication, HyperCloning, and padding with zeros."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.methods.base import Claim, GrowthMethod
from mupscale.methods.by_groups import norms_over_width
from mupscale.methods.noise import Noise, init_scale, is_noisy, refuse_inert
from mupscale.widening.growth import Growth, copy_index, duplicate_, is_unit_by_unit
from mupscale.widening.hints import Hints
from mupscale.widening.optimizers import rule_of
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import is_nonzero
from mupscale.widening.stepping import names_by_id, new_copies
from mupscale.widening.table import Scale, Side, product, scale_of_axis
from mupscale.widening.write import is_inexact, widen_


class Duplication(GrowthMethod):
    """The paper's method: k copies of every unit, each read with 1/k of its weight. Preserves function and training."""

    grows_weight_norms = True

    def claim(self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer]) -> Claim:
        return Claim(True, self._follows_the_rules())


Variant = Literal["symmetric", "diagonal", "noisy"]


class HyperCloning(GrowthMethod):
    """HyperCloning (Samragh et al. 2024): duplication, or copies that are connected one to one.

    `symmetric` divides every weight by k, as the paper of this project does. `diagonal` connects copy c of a unit only
    to copy c of the previous layer, with the full weight; if the two layers grow by different factors, each copy is
    connected to those at the same relative position, in shares. `noisy` is `symmetric` with noise that preserves the
    function, 10 dB below the weights. As published, hyperparameters are unchanged and the optimizer state is reset;
    with `state="carry"` and `hyperparameters="table"`, `symmetric` preserves the training as well, and so does
    `diagonal`, except under Adam and its relatives with weight decay that is part of the gradient (not AdamW).
    """

    published_state = "reset"
    published_hyperparameters = "same"

    def __init__(self, variant: Variant = "symmetric", decibels: float = 10.0, **options: Any) -> None:
        """
        Args:
            variant: `symmetric`, `diagonal` or `noisy`.
            decibels: For `noisy`: the ratio of the mean squares of weights and noise.
            options: `state`, `hyperparameters` and `rewarm_steps` of every method.
        """
        super().__init__(**options)
        if variant not in get_args(Variant):
            raise UserError(f"HyperCloning: variant must be one of {', '.join(get_args(Variant))}; got {variant!r}")
        self.variant = variant
        self.grows_weight_norms = variant != "diagonal"
        self.noise = _BelowTheWeights(decibels) if variant == "noisy" else None

    def widen_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        if not self._is_diagonal(entry):
            widen_(target, source, entry)
            return
        duplicate_(target, source, entry.layouts, scale=entry.rescale)
        row = _growing(entry, "out")[0]
        for column in _growing(entry, "in"):
            shares = _diagonal_shares(entry.layouts[row][0].factor, entry.layouts[column][0].factor)
            of_copies = shares[copy_index(entry.layouts[row])][:, copy_index(entry.layouts[column])]
            of_copies = of_copies if row < column else of_copies.T
            shape = [size if axis in (row, column) else 1 for axis, size in enumerate(target.shape)]
            target.mul_(of_copies.reshape(shape).to(target))

    def claim(self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer]) -> Claim:
        if self.variant == "noisy" or not self._follows_the_rules():
            return Claim(True, False)
        return Claim(True, not any(self._is_diagonal(plan.parameters[name]) for name in _decayed(narrow, optimizers)))

    def _is_diagonal(self, entry: Growth) -> bool:
        """Whether copies of a weight differ."""
        both = bool(_growing(entry, "out")) and bool(_growing(entry, "in"))
        return self.variant == "diagonal" and both and not entry.mixed and not entry.offset


def _decayed(narrow: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Parameters whose decay is part of a gradient that updates are not linear in: only equal copies stay multiples."""
    names = names_by_id(narrow)
    for optimizer in optimizers:
        rule = rule_of(optimizer)
        for group in optimizer.param_groups:
            coupled = is_nonzero(group.get("weight_decay")) and not rule.decouples_decay(group)
            for parameter in group["params"] if coupled and rule.degree == 0 else ():
                if parameter.requires_grad:
                    yield names[id(parameter)]


class _BelowTheWeights(Noise):
    """Centred noise with a mean square that is so many decibels below that of the widened weight."""

    centred = True

    def __init__(self, decibels: float) -> None:
        self.decibels = decibels

    def check_level(self) -> None:
        if not (isinstance(self.decibels, float | int) and math.isfinite(self.decibels)):
            raise UserError(f"HyperCloning: decibels must be a finite number, got {self.decibels!r}")

    def check(self, plan: Plan) -> None:
        self.check_level()
        refuse_inert(self, plan)

    def applies(self, entry: Growth) -> bool:
        return is_noisy(entry, centred=True)

    def constant(self, entry: Growth, narrow: Tensor, widened: Tensor, delta: Tensor) -> float:
        size = float(widened.abs().double().square().mean().sqrt())
        return size * 10 ** (-self.decibels / 20) / init_scale(entry)


def _growing(entry: Growth, side: Side) -> list[int]:
    axes = zip(entry.layouts, entry.sides, strict=True)
    return [i for i, (layout, own) in enumerate(axes) if own == side and any(piece.factor > 1 for piece in layout)]


def _diagonal_shares(rows: int, columns: int) -> Tensor:
    """A staircase from copies of inputs to copies of outputs: every row sums to 1, every column to rows / columns.

    Row r covers the interval [r, r + 1] / rows, column c the interval [c, c + 1] / columns; the entry is their overlap.
    """
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    end = torch.minimum((row + 1) * columns, (column + 1) * rows)
    start = torch.maximum(row * columns, column * rows)
    return (end - start).clamp(min=0).double() / columns


class ZeroPadding(GrowthMethod):
    """New units have input and output weights of zero. They never train if the activation of zero is zero.

    The function is preserved, unless a norm averages over the width: it counts the new units. The training is
    preserved as well if new units never train, which `check_claim` measures: it is not before a sigmoid.
    """

    equal_copies = False
    state_to_copies = False

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plan = make_plan(narrow, wide, hints=hints)
        own = type(self).__name__
        for name, entry in plan.parameters.items():
            if entry.rescale != 1 or entry.offset:
                raise UserError(
                    f"{own}: parameter {name!r} has a unit, which is right for duplication only. Use Duplication"
                )
            for axis in entry.fractional_axes:
                if is_unit_by_unit(entry.layouts[axis]):
                    n, w = entry.narrow_shape[axis], entry.wide_shape[axis]
                    raise UserError(
                        f"{own}: axis {axis} of parameter {name!r} does not grow by a whole factor ({n} → {w}). "
                        f"Choose a multiple of {n}, or use Duplication"
                    )
            if entry.mixed:
                raise UserError(f"{own}: {name!r} is made of pieces that grow by different factors. Use Duplication")
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
