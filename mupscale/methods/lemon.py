"""LEMON: copies of a unit are consumed in unequal shares."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.methods.base import Claim, GrowthMethod
from mupscale.methods.groups import AxisGroups, UnitGroup, norms_over_width, unit_groups, with_biases
from mupscale.widening.hints import Hints
from mupscale.widening.plan import plan as make_plan
from mupscale.widening.plan import refuse_uneven_shift
from mupscale.widening.plan_text import Plan


class Lemon(GrowthMethod):
    """LEMON's unequal split (Wang et al. 2024): the copies of a unit are read with unequal shares that sum to 1.

    Every entry gets a matching learning rate, so that function and training are preserved. With
    `hyperparameters="same"` all entries have one rate, and copies become different without noise. Only the axes in
    `groups`, or in the model's `width_groups`, are split unequally. Axes under a norm are split equally, as LEMON does
    if the width is a multiple: the gradient of a norm mixes the shares of all units, so unequal shares are not exact.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> groups = {"hidden": {"0.weight": 0, "2.weight": 1}}  # the axes that hold the hidden units
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(
        ...     narrow, wide, method=mupscale.methods.Lemon(groups=groups), call=lambda model: model(x)
        ... )
        >>> torch.allclose(wide(x), narrow(x), atol=1e-6)
        True
    """

    def __init__(self, seed: int = 0, spread: float = 0.5, groups: AxisGroups | None = None, **options: Any) -> None:
        """
        Args:
            seed: The seed of the random shares.
            spread: Shares are drawn evenly between 1 - spread and 1 + spread, and divided by their sum.
            groups: Axes that hold the same units, by any name: `{"hidden": {"0.weight": 0, "1.weight": 1}}`. By default
                the model's `width_groups`.
            options: `state`, `hyperparameters` and `rewarm_steps` of every method.
        """
        super().__init__(**options)
        if isinstance(spread, bool) or not isinstance(spread, float | int) or not 0 < spread < 1:
            raise UserError(f"Lemon: spread must be a number between 0 and 1, got {spread!r}")
        self.seed = seed
        self.spread = spread
        self.groups = groups

    def plan(self, narrow: nn.Module, wide: nn.Module, hints: Hints | None = None) -> Plan:
        plan = make_plan(narrow, wide, hints=hints)
        normalised = set(norms_over_width(plan, narrow))
        generator = torch.Generator().manual_seed(self.seed)
        parameters = dict(plan.parameters)
        for group in unit_groups("Lemon", narrow, plan, self.groups):
            for name in normalised & group.axes.keys():
                raise UserError(
                    f"Lemon: the group {group.name!r} has {name!r}, whose norm averages over the units: with unequal "
                    "shares its gradient would not be exact. Give groups without it: what is in none is duplicated"
                )
            shares = self._shares(group, generator)
            for name, (axis, block) in with_biases(plan, group.axes).items():
                entry = parameters[name]
                times = entry.narrow_shape[axis] // (group.units * block)
                row = shares.repeat_interleave(block).repeat(times)
                axes = list(entry.axes)
                axes[axis] = axes[axis]._replace(shares=tuple(row.tolist()))
                parameters[name] = replace(entry, axes=tuple(axes))
                refuse_uneven_shift(parameters[name])
        return replace(plan, parameters=parameters)

    def claim(self, plan: Plan, narrow: nn.Module, optimizers: Sequence[Optimizer]) -> Claim:
        return Claim(True, self._follows_the_rules())

    def _shares(self, group: UnitGroup, generator: torch.Generator) -> Tensor:
        """How much of its unit each copy stands for, in units of the equal share; unit by unit. A single one has 1."""
        drawn = torch.rand(group.wide_units, generator=generator, dtype=torch.float64)
        shares = 1 + self.spread * (2 * drawn - 1)
        copies = torch.tensor(group.copies)
        unit = torch.arange(group.units).repeat_interleave(copies)
        mean = torch.bincount(unit, weights=shares) / copies
        return shares / mean[unit]
