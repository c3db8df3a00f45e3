"""The interface of growth methods, and those that treat all units alike: duplication, HyperCloning, padding with zeros.

Each width axis n → ñ has two ñ × n maps: `out`, what the new units produce, and `inn`, how they are read. A weight W
that reads axis x and writes axis y becomes W̃ = out_y · W · inn_xᵀ + N. The function is preserved if innᵀ · out = 1 on
every axis, `out` commutes with the nonlinearities and norms, and N · out_x = 0. The gradient is inn_y · G · out_xᵀ; the
rules for optimizer state and hyperparameters follow from it, and with them the training is preserved too. What a method
defines is in docs/which_growth.md, and below.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError, is_finite_number
from mupscale.methods.noise import AUTO_LEVEL, KINDS, Noise, NoiseOrAuto, SameNoise, SignalNoise, init_scale
from mupscale.widening.growth import Growth, copy_index, duplicate_, is_unit_by_unit
from mupscale.widening.hints import Hints, some_names
from mupscale.widening.modules import normalises_width
from mupscale.widening.optimizers import Sized, rule_of
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import StateRule, check_state_rule, names_by_id, new_copies
from mupscale.widening.state import is_nonzero
from mupscale.widening.table import Scale, Side, product, scale_of_axis
from mupscale.widening.write import is_inexact, widen_, widen_gradient_

Hyperparameters = Literal["table", "same"]

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on a batch."""

Gradients = Mapping[str, Tensor]
"""Gradients of the wide model just after growing, by name."""


class Claim(NamedTuple):
    """What a method preserves when it grows a certain model."""

    function: bool
    """The outputs just after growing."""
    dynamics: bool
    """The training after it: losses are those of the narrow network, step by step."""


class GrowthMethod:
    """A way to make a wide network from a narrow one.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> groups = {"hidden": {"0.weight": 0, "2.weight": 1}}  # the axes that hold the hidden units
        >>> x, method = torch.randn(5, 3), mupscale.methods.Net2Net(seed=1, groups=groups)
        >>> report = mupscale.upscale(narrow, wide, method=method, call=lambda model: model(x))
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
    """

    published_state: StateRule = "carry"
    """What the authors do with the optimizer state, and the default."""
    published_hyperparameters: Hyperparameters = "table"
    """Whether the authors rescale hyperparameters, and the default."""
    keeps_function: bool = False
    """Whether the wide network computes what the narrow one did, just after growing."""
    noise: Noise | None = None
    """A perturbation that belongs to the method."""
    equal_copies: bool = True
    """Whether all copies of a unit compute the same, so that centred noise cancels out."""
    state_to_copies: bool = True
    """Whether optimizer state is carried to all copies, or only to the first copy of each unit."""
    grows_weight_norms: bool = False
    """Whether all copies of a weight are equal, as `modules.py` requires."""
    needs_batches: bool = False
    """Whether `fit` must run before the weights can be written."""
    measures_claim: bool = False
    """Whether only gradients show what `claim` preserves, so that it has to be given them."""

    def __init__(
        self, state: StateRule | None = None, hyperparameters: Hyperparameters | None = None, rewarm_steps: int = 0
    ) -> None:
        """
        Args:
            state: `carry` moves the optimizer state, `reset` drops it. `reset_new_copies` moves it for the first copy
                of each unit; the other copies start with zero state and a step count of zero. By default as published.
            hyperparameters: Rescale learning rate, eps and weight decay by the rules (`table`), or not (`same`). By
                default as published.
            rewarm_steps: With `reset_new_copies`, the steps over which the learning rate of new copies rises.
        """
        self.state: StateRule = self.published_state if state is None else state
        self.hyperparameters = self.published_hyperparameters if hyperparameters is None else hyperparameters
        self.rewarm_steps = rewarm_steps
        check_state_rule(self.state, rewarm_steps)
        if self.hyperparameters not in get_args(Hyperparameters):
            raise UserError(f"hyperparameters must be table or same, got {hyperparameters!r}")

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        """Which axes grow and in which layout; raises a UserError if this method cannot grow the model."""
        return make_plan(narrow, wide, hints=hints)

    def fit(
        self,
        narrow: nn.Module,
        wide: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        *,
        hints: Hints | None = None,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Learns from batches how to grow `narrow`, changing neither model; `average` averages over processes."""

    def forget(self) -> None:
        """Drops what `fit` learned, once the weights are written."""

    def check(self, plan: Plan) -> None:
        """Raises a UserError if the weights of this plan cannot be written, or not yet; runs before anything is."""
        normed = next((name for name, entry in plan.parameters.items() if entry.normed and entry.grows), None)
        if normed is not None and not self.grows_weight_norms:
            raise UserError(
                f"{type(self).__name__}: the layer of {normed!r} divides it by its norm (weight_norm), which is exact "
                "only if all copies are equal. Use Duplication(), or remove the norm"
            )

    def leaves_copies_equal(self, plan: Plan) -> bool:
        """Whether copies of units, without noise, stay equal for ever."""
        return self.equal_copies and any(entry.copies_summed > 1 for entry in plan.parameters.values())

    def choose_noise(
        self, given: NoiseOrAuto, plan: Plan, narrow: nn.Module, nonlinear: Iterable[str] = ()
    ) -> tuple[Noise | None, list[str]]:
        """The noise to add, `given` or the method's own, and notes. Raises a UserError if this model cannot get it.

        "auto" is centred and relative to each weight. It leaves out the weights that the model reads nonlinearly.
        """
        own = type(self).__name__
        notes: list[str] = []
        if given == "auto":
            unlike = [name for name in nonlinear if name in plan.parameters]
            whole = [name for name, parameter in narrow.named_parameters() if not is_inexact(parameter)]
            where = dict.fromkeys([*unlike, *whole], False)
            given = SignalNoise(AUTO_LEVEL, where=where or None, centred=True)
            why = ""
            if self.noise is not None:
                given, why = None, f"{own} has noise of its own"
            elif not self.equal_copies:
                given, why = None, f"the copies of {own} are not equal"
            elif not any(map(given.applies, plan.parameters.values())):
                at_all = f"the model does not read {some_names(unlike)} linearly"
                given, why = None, at_all if unlike else "no weight sums over copies of a unit"
            notes = [f"noise: auto adds none, because {why}"] if why else []
            if unlike and not why:
                notes = [f"noise: auto leaves out {some_names(unlike)}, which the model does not read linearly"]
        if not isinstance(given, Noise | None):
            raise UserError(f"{KINDS}; got {given!r}")
        if given is not None and self.noise is not None and not isinstance(given, SameNoise):
            raise UserError(f"{own} has noise of its own. Give none, or use another method")
        noise = self.noise if given is None else given
        if noise is None:
            return None, notes
        noise.check(plan)
        for name, parameter in narrow.named_parameters():
            if not is_inexact(parameter) and noise.applies(plan.parameters[name]):
                raise UserError(
                    f"noise: {name!r} holds whole numbers ({parameter.dtype}), to which noise cannot be added. Leave "
                    f"it out, where={{{name!r}: False}}, or give both models floating-point weights"
                )
        if noise.centred and not self.equal_copies:
            raise UserError(
                "noise: centred noise keeps the function only if all copies of a unit compute the same, and those of "
                f"{own} do not. Use plain noise (centred=False), or Duplication"
            )
        return noise, notes

    def widen_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        """Writes the widened weight into `target`."""
        widen_(target, source, entry)

    def widen_gradient_(self, target: Tensor, source: Tensor, entry: Growth) -> None:
        """Writes the gradient that the widened weight has where the narrow one has `source`."""
        widen_gradient_(target, source, entry)

    @property
    def widens_by_rows(self) -> bool:
        """Whether rows of a weight are widened as `weights.widen_` does it, which needs none of the others."""
        return type(self).widen_ is GrowthMethod.widen_

    def edit_(self, plan: Plan, wide: nn.Module) -> None:
        """Changes the wide model across layers, after all weights are written."""

    def refuse_across_layers(self, what: str) -> None:
        """Raises a UserError if the method changes weights across layers; `what` is grown tensor by tensor."""
        if type(self).edit_ is not GrowthMethod.edit_:
            raise UserError(
                f"{type(self).__name__} changes weights across layers, and {what} is grown tensor by tensor. Use "
                "another method, or grow the loaded model"
            )

    def state_settings(self) -> dict[str, Any]:
        """How optimizer state moves: the arguments of `OptimizerTransfer.transfer`."""
        return {"scale_of": self.scale, "to_copies": self.state_to_copies, "rewarm_steps": self.rewarm_steps}

    def scale(self, growth: Growth) -> Scale:
        """What the weight and the gradient of a parameter are multiplied by."""
        return growth.scale

    def rates(self, growth: Growth) -> Sized:
        """What hyperparameters follow: the copies of this method, under muP the width; or nothing."""
        if self.hyperparameters == "same":
            return Sized(Scale(), growth.wide_shape, growth.wide_shape)
        scale = self.scale(growth.for_rates) if growth.base is None else growth.for_rates.scale
        return Sized(scale, growth.narrow_shape, growth.wide_shape)

    def claim(
        self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer], gradients: Gradients | None = None
    ) -> Claim:
        """What is preserved when this model grows and `optimizers` train it on; no more than is known of any data.

        With `gradients`, what is known of data that has these. Under muP rates are those of the width, which are right
        for copies of units alone.
        """
        has_own_rates = any(e.base is not None and self.scale(e) != e.scale for e in plan.parameters.values())
        follows_the_rules = self.state == "carry" and self.hyperparameters == "table" and not has_own_rates
        return Claim(self.keeps_function, self.keeps_function and follows_the_rules)


def norms_over_width(plan: Plan, narrow: nn.Module) -> Iterator[str]:
    """The growing parameters of modules that average over their units."""
    for prefix, module in narrow.named_modules():
        if not normalises_width(module):
            continue
        for attribute, _ in module.named_parameters():
            name = f"{prefix}.{attribute}".removeprefix(".")
            if name in plan.parameters and plan.parameters[name].grows:
                yield name


class Duplication(GrowthMethod):
    """The paper's method: k copies of every unit, each read with 1/k of its weight. Preserves function and training."""

    keeps_function = True
    grows_weight_norms = True


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
    keeps_function = True

    def __init__(self, variant: Variant = "symmetric", decibels: float = 10.0, **options: Any) -> None:
        """
        Args:
            variant: `symmetric`, `diagonal` or `noisy`.
            decibels: For `noisy`: the ratio of the mean squares of weights and noise.
            options: `state`, `hyperparameters` and `rewarm_steps` of every method.
        """
        super().__init__(**options)
        if not is_finite_number(decibels):
            raise UserError(f"HyperCloning: decibels must be a finite number, got {decibels!r}")
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

    def claim(
        self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer], gradients: Gradients | None = None
    ) -> Claim:
        claim = super().claim(plan, narrow, optimizers)
        if not claim.dynamics or self.noise is not None:
            return Claim(claim.function, False)
        unequal = any(self._is_diagonal(plan.parameters[name]) for name in _decayed(narrow, optimizers))
        return Claim(claim.function, not unequal)

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
                if parameter.requires_grad and id(parameter) in names:
                    yield names[id(parameter)]


class _BelowTheWeights(Noise):
    """Centred noise with a mean square that is so many decibels below that of the widened weight."""

    centred = True

    def __init__(self, decibels: float) -> None:
        self.decibels = decibels

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

    keeps_function = True
    equal_copies = False
    state_to_copies = False
    measures_claim = True

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

    def claim(
        self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer], gradients: Gradients | None = None
    ) -> Claim:
        """The training is preserved if new units never train: the activation before them maps zero to zero."""
        kept = self.keeps_function and not any(norms_over_width(plan, narrow))
        trains = gradients is None or any(
            bool(gradient[new_copies(plan.parameters[name])].any()) for name, gradient in gradients.items()
        )
        return Claim(kept, kept and not trains and super().claim(plan, narrow, optimizers).dynamics)


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
        if not is_finite_number(shrink) or not 0 < shrink <= 1:
            raise UserError(f"ShrinkAndPad: shrink must be a number above 0 and at most 1, got {shrink!r}")
        self.shrink = shrink
        self.keeps_function = shrink == 1

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
