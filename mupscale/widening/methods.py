"""Growth methods: the ways to make a wide network of a narrow one, as one interface.

Each width axis n → ñ has two ñ × n maps: `out`, what the new units produce, and `inn`, how they are consumed. A weight
W that reads axis x and writes axis y becomes W̃ = out_y · W · inn_xᵀ + N. The function is preserved if innᵀ · out = 1 on
every axis, `out` commutes with the nonlinearities and norms, and N · out_x = 0. The gradient is inn_y · G · out_xᵀ; the
rules for optimizer state and hyperparameters follow from it, and with them the training is preserved too.

A method says:

plan        the layout of every axis, which is `out`: how many copies each unit gets, and where
widen_      the weights: `inn`, and what is not random of N
noise       a perturbation, what is random of N; None
state       a state rule: what becomes of the optimizer state (`new_copies.py`)
hyperparameters
            `table` rescales learning rate, eps and weight decay by what the maps imply, `same` leaves them
factors     k_out and k_in of a parameter: its gradient falls by k_out, its weight by k_in
claim       whether function and dynamics are preserved, for a model; `checks/claims.py` measures it

Two more are for methods that are not here yet: an edit across layers after all weights are written (bert2BERT's AKI
takes new units from the next layer), and `fit(batches, loss)`, a short run that learns the maps (LiGO).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from mupscale.errors import UserError
from mupscale.widening.layout import (
    Layout,
    copy_index,
    duplicate_,
    is_unit_by_unit,
    narrow_length,
    source_index,
    whole_factor,
)
from mupscale.widening.modules import normalises_width
from mupscale.widening.new_copies import StateRule, check_state_rule, new_copies
from mupscale.widening.noise import Noise, init_scale, is_noisy, refuse_inert
from mupscale.widening.plan import Blocks, Plan, TensorPlan
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.roles import Roles, matches
from mupscale.widening.rules import Factors
from mupscale.widening.survey import some_names
from mupscale.widening.weights import widen_

Hyperparameters = Literal["table", "same"]

AxisGroups = Mapping[str, Mapping[str, int]]
"""Axes that are one: for each group, the axis of every parameter (by name pattern) that produces or reads its units."""


class Claim(NamedTuple):
    """What a method preserves when it grows a certain model."""

    function: bool
    """The outputs just after growing."""
    dynamics: bool
    """The training after it: losses are those of the narrow network, step by step."""


class GrowthMethod(ABC):
    """How a wide network is made of a narrow one. `upscale(narrow, wide, optimizer, method=Net2Net(seed=1))`."""

    noise: Noise | None = None
    """A perturbation that belongs to the method."""
    state_to_copies: bool = True
    """Whether the optimizer state that is carried goes to all copies; if not, to the first ones alone."""

    def __init__(self, state: StateRule = "carry", hyperparameters: Hyperparameters = "table") -> None:
        """
        Args:
            state: What becomes of the optimizer state.
            hyperparameters: Rescale learning rate, eps and weight decay by the rules (`table`), or not (`same`).
        """
        check_state_rule(state, 0)
        if hyperparameters not in get_args(Hyperparameters):
            raise UserError(f"hyperparameters must be table or same, got {hyperparameters!r}")
        self.state = state
        self.hyperparameters = hyperparameters

    def plan(self, narrow: nn.Module, wide: nn.Module, roles: Roles | None, blocks: Blocks | None) -> Plan:
        """Which axes grow and in which layout; UserError where this method cannot grow the model."""
        return make_plan(narrow, wide, roles=roles, blocks=blocks)

    def widen_(self, target: Tensor, source: Tensor, entry: TensorPlan) -> None:
        """Writes the widened weight into `target`."""
        widen_(target, source, entry)

    def factors(self, entry: TensorPlan) -> Factors:
        """By how much the gradient of a parameter falls (k_out), and its weight (k_in)."""
        return entry.factors

    def rate_factors(self, entry: TensorPlan) -> Factors:
        """The factors that hyperparameters follow."""
        if self.hyperparameters == "same":
            return Factors(1, 1, entry.wide_shape, entry.wide_shape)
        return self.factors(entry)

    def mup_rate_factors(self, entry: TensorPlan) -> Factors:
        """The factors that the hyperparameters of a model under muP follow: those of its width, or none."""
        return self.rate_factors(entry) if self.hyperparameters == "same" else entry.factors

    def maps(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """`out` and `inn` of an axis with this layout, as matrices."""
        index = source_index(layout)
        out = torch.eye(narrow_length(layout), dtype=torch.float64)[index]
        return out, out / out.sum(0)

    @abstractmethod
    def claim(self, plan: Plan, narrow: nn.Module) -> Claim:
        """What is preserved when this model grows."""

    def _follows_the_rules(self) -> bool:
        return self.state == "carry" and self.hyperparameters == "table"


class Duplication(GrowthMethod):
    """The paper's: every unit is duplicated k times, and each copy consumed with 1/k. Function and training stay."""

    def claim(self, plan: Plan, narrow: nn.Module) -> Claim:
        return Claim(True, self._follows_the_rules())


class Net2Net(GrowthMethod):
    """Net2Net's random map (Chen et al. 2016), bert2BERT's FPI: every unit once, and the others copies of random ones.

    A unit with c copies is consumed with 1/c, and rates follow entry by entry, so that function and training are
    preserved. Only groups of axes that the model declares (`width_groups`), or that are given, are mapped at random: an
    axis under a norm cannot be, because a norm would weigh units by their number of copies. The others are duplicated.
    """

    def __init__(
        self,
        seed: int = 0,
        groups: AxisGroups | None = None,
        state: StateRule = "carry",
        hyperparameters: Hyperparameters = "table",
    ) -> None:
        """
        Args:
            seed: Of the random map.
            groups: Which axes are one, by any name: `{"hidden": {"0.weight": 0, "1.weight": 1}}`. By default what the
                model declares in `width_groups`.
            state: What becomes of the optimizer state.
            hyperparameters: Rescale learning rate, eps and weight decay by the rules (`table`), or not (`same`).
        """
        super().__init__(state, hyperparameters)
        self.seed = seed
        self.groups = groups

    def plan(self, narrow: nn.Module, wide: nn.Module, roles: Roles | None, blocks: Blocks | None) -> Plan:
        plain = make_plan(narrow, wide, roles=roles, blocks=blocks)
        groups = self.groups
        if groups is None:
            groups = _declared_groups(narrow)
        if not groups:
            raise UserError(
                f"Net2Net: {type(narrow).__name__} does not say which axes are one. Give them, as "
                'groups={"hidden": {"0.weight": 0, "1.weight": 1}}, or as an attribute width_groups of the model'
            )
        generator = torch.Generator().manual_seed(self.seed)
        mapped: dict[str, dict[int, list[tuple[int, int, int]]]] = {}
        for group, axes in groups.items():
            members = _members(plain, group, axes)
            for name, row in _random_layouts(plain, group, members, generator).items():
                mapped.setdefault(name, {})[members[name]] = row
        return make_plan(narrow, wide, roles=roles, blocks={**(blocks or {}), **mapped})

    def claim(self, plan: Plan, narrow: nn.Module) -> Claim:
        return Claim(True, self._follows_the_rules())


class ZeroPadding(GrowthMethod):
    """New units with weights of zero, in and out. They stay zero for ever where the activation of zero is zero.

    A norm over the width counts the new units: then the function changes.
    """

    state_to_copies = False

    def plan(self, narrow: nn.Module, wide: nn.Module, roles: Roles | None, blocks: Blocks | None) -> Plan:
        plan = make_plan(narrow, wide, roles=roles, blocks=blocks)
        mixed = [name for name, entry in plan.parameters.items() if entry.mixed]
        if mixed:
            raise UserError(
                f"ZeroPadding: parameter {mixed[0]!r} is made of pieces that grow by different factors. Use Duplication"
            )
        return plan

    def widen_(self, target: Tensor, source: Tensor, entry: TensorPlan) -> None:
        duplicate_(target, source, entry.layouts, scale=1 / self.factors(entry).k_in)
        target.masked_fill_(new_copies(entry).to(target.device), 0.0)

    def factors(self, entry: TensorPlan) -> Factors:
        k = entry.k_out if entry.role == "mu_readout" else 1  # whose multiplier falls with the width all the same
        return Factors(k, 1 / k, entry.wide_shape, entry.wide_shape)

    def maps(self, layout: Layout) -> tuple[Tensor, Tensor]:
        out, _ = super().maps(layout)
        out = out * (copy_index(layout) == 0)[:, None]
        return out, out

    def claim(self, plan: Plan, narrow: nn.Module) -> Claim:
        grown = {name for name, entry in plan.parameters.items() if entry.grows}
        kept = True
        for prefix, module in narrow.named_modules():
            if normalises_width(module):
                kept &= not any(f"{prefix}.{name}".removeprefix(".") in grown for name, _ in module.named_parameters())
        return Claim(kept, kept and self._follows_the_rules())


Variant = Literal["symmetric", "diagonal", "noisy"]


class HyperCloning(GrowthMethod):
    """HyperCloning (Samragh et al. 2024): duplication, or each copy connected to its own copy of the layer before.

    `symmetric` divides every weight by k, as the paper does. `diagonal` connects copy c of a layer to copy c of the one
    before, with the weight itself, and to no other (where the two grow by different factors, to the copies at the same
    place among them, in shares). `noisy` is symmetric with noise that keeps the function, 10 dB
    below the weights. As published, hyperparameters stay and the optimizer state starts anew; with `state="carry"` and
    `hyperparameters="table"` the first two preserve the training as well.
    """

    def __init__(
        self,
        variant: Variant = "symmetric",
        decibels: float = 10.0,
        state: StateRule = "reset",
        hyperparameters: Hyperparameters = "same",
    ) -> None:
        """
        Args:
            variant: `symmetric`, `diagonal` or `noisy`.
            decibels: The ratio of the mean squares of weights and noise, of the noisy variant.
            state: What becomes of the optimizer state.
            hyperparameters: Rescale learning rate, eps and weight decay by the rules (`table`), or not (`same`).
        """
        super().__init__(state, hyperparameters)
        if variant not in get_args(Variant):
            raise UserError(f"HyperCloning: variant must be one of {', '.join(get_args(Variant))}; got {variant!r}")
        self.variant = variant
        self.noise = _BelowTheWeights(decibels) if variant == "noisy" else None

    def widen_(self, target: Tensor, source: Tensor, entry: TensorPlan) -> None:
        produced = [axis for axis, side in enumerate(entry.sides) if side == "out" and _grows(entry.layouts[axis])]
        summed = [axis for axis, side in enumerate(entry.sides) if side == "in" and _grows(entry.layouts[axis])]
        if self.variant != "diagonal" or entry.mixed or not produced or not summed:
            widen_(target, source, entry)
            return
        duplicate_(target, source, entry.layouts)
        row = produced[0]
        for column in summed:
            shares = _diagonal_shares(entry.layouts[row][0].factor, entry.layouts[column][0].factor)
            of_copies = shares[copy_index(entry.layouts[row])][:, copy_index(entry.layouts[column])]
            of_copies = of_copies if row < column else of_copies.T
            shape = [size if axis in (row, column) else 1 for axis, size in enumerate(target.shape)]
            target.mul_(of_copies.reshape(shape).to(target))

    def claim(self, plan: Plan, narrow: nn.Module) -> Claim:
        return Claim(True, self._follows_the_rules() and self.variant != "noisy")


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

    def applies(self, entry: TensorPlan) -> bool:
        return is_noisy(entry, centred=True)

    def constant(self, entry: TensorPlan, narrow: Tensor, widened: Tensor, delta: Tensor) -> float:
        size = float(widened.double().square().mean().sqrt())
        return size * 10 ** (-self.decibels / 20) / init_scale(entry)


METHODS: dict[str, Callable[[], GrowthMethod]] = {
    "duplication": Duplication,
    "net2net": Net2Net,
    "zero-padding": ZeroPadding,
    "hypercloning": HyperCloning,
    "hypercloning-diagonal": partial(HyperCloning, "diagonal"),
    "hypercloning-noisy": partial(HyperCloning, "noisy"),
}
"""As published, by the names of the command line."""


def _grows(layout: Layout) -> bool:
    return any(piece.factor > 1 for piece in layout)


def _diagonal_shares(rows: int, columns: int) -> Tensor:
    """A staircase from copies of inputs to copies of outputs: every row sums to 1, every column to rows / columns.

    Row r covers the interval [r, r + 1] / rows, column c the interval [c, c + 1] / columns; the entry is their overlap.
    """
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    end = torch.minimum((row + 1) * columns, (column + 1) * rows)
    start = torch.maximum(row * columns, column * rows)
    return (end - start).clamp(min=0).double() / columns


def _declared_groups(model: nn.Module) -> dict[str, dict[str, int]]:
    """What model classes say in `width_groups`, with full names."""
    answer: dict[str, dict[str, int]] = {}
    for prefix, module in model.named_modules():
        for group, axes in (getattr(module, "width_groups", None) or {}).items():
            answer[f"{prefix}.{group}".removeprefix(".")] = {
                f"{prefix}.{pattern}".removeprefix("."): axis for pattern, axis in axes.items()
            }
    return answer


def _members(plan: Plan, group: str, axes: Mapping[str, int]) -> dict[str, int]:
    """The axis of every parameter in a group, by name."""
    members: dict[str, int] = {}
    for pattern, axis in axes.items():
        found = [name for name in plan.parameters if matches(name, pattern)]
        if not found:
            raise UserError(
                f"Net2Net: {pattern!r} of the group {group!r} matches no parameter; there are "
                f"{some_names(plan.parameters)}"
            )
        for name in found:
            if not -len(plan.parameters[name].layouts) <= axis < len(plan.parameters[name].layouts):
                raise UserError(f"Net2Net: {name!r} of the group {group!r} has no axis {axis}. Give one that it has")
            members[name] = axis % len(plan.parameters[name].layouts)
    return members


def _random_layouts(
    plan: Plan, group: str, members: Mapping[str, int], generator: torch.Generator
) -> dict[str, list[tuple[int, int, int]]]:
    """The pieces of every axis of a group: each unit with its number of copies.

    A unit may be a block of entries, of another length on each axis, as a head is. An axis may hold the units several
    times over, as the three sections of a fused QKV do.
    """
    layouts = {name: plan.parameters[name].layouts[axis] for name, axis in members.items()}
    in_pieces = [name for name, layout in layouts.items() if len(layout) > 1 and not is_unit_by_unit(layout)]
    if in_pieces:
        raise UserError(
            f"Net2Net: {in_pieces[0]!r} of the group {group!r} is made of pieces already. Give other groups"
        )
    blocks = {name: layout[0].block for name, layout in layouts.items()}
    counted = {name: narrow_length(layout) // blocks[name] for name, layout in layouts.items()}
    units, factors = min(counted.values()), {whole_factor(layout) for layout in layouts.values()}
    if len(factors) > 1 or any(count % units for count in counted.values()):
        raise UserError(
            f"Net2Net: the axes of the group {group!r} are not one: {some_names(list(members))} have {counted} units, "
            f"and grow by {sorted(factors)}. Give axes of the same units"
        )
    factor = factors.pop()
    if factor == 1:
        return {}
    extra = torch.randint(units, (round(units * factor) - units,), generator=generator)
    copies = (1 + torch.bincount(extra, minlength=units)).tolist()
    answer = {}
    for name, block in blocks.items():
        answer[name] = [(block, block, count) for count in copies] * (counted[name] // units)
    return answer
