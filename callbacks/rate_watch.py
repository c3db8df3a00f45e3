"""Learning rates that a module sets by hand: after a growth, groups of an optimizer must keep the ratios of theirs."""

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.widening.state import Source

TOLERANCE = 0.01
"""Of the ratio of two rates. One rate for all groups changes it by the factor of a growth."""

REMEDY = (
    "Multiply the rate of each group, group['lr'] *= factor, or let a schedule do it, such as LambdaLR: it is relative "
    "to the rate of each group"
)


class RateWatch:
    """Looks at the rates of an optimizer before each of its steps: a warning before the growth, an error after it."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any], module: str) -> None:
        """`schedulers` are those of the optimizer; `module` is the name of what trains with it."""
        self._optimizer, self._schedulers, self._module = optimizer, schedulers, module
        self._last = _rates_of(optimizer)
        self._sources: list[Source] | None = None
        """For each group the one that it was before all growths, and the factor of its rate since then."""
        self._has_warned = False
        optimizer.register_step_pre_hook(self._look)

    def go_on(self, optimizer: Optimizer, sources: Sequence[Source]) -> None:
        """After a growth, if it is that of this optimizer: each group has a source among those before it."""
        if optimizer is not self._optimizer:
            return
        before = self._sources
        if before is not None:
            sources = [Source(before[each.group].group, before[each.group].factor * each.factor) for each in sources]
        self._sources = list(sources)

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        rates = _rates_of(optimizer)
        if self._sources is None:
            self._warn_of_own(rates, type(optimizer).__name__)
            self._last = rates
        elif len(rates) == len(self._sources):
            self._refuse_other_ratios(rates, self._sources, type(optimizer).__name__)

    def _warn_of_own(self, rates: list[float], optimizer: str) -> None:
        scheduled = [list(map(float, getattr(each, "_last_lr", rates))) for each in self._schedulers]
        if self._has_warned or rates == self._last or rates in scheduled:
            return
        self._has_warned = True
        index = next((i for i, (now, last) in enumerate(zip(rates, self._last, strict=False)) if now != last), 0)
        rank_zero_warn(
            f"{self._module} sets the learning rate of {optimizer} by hand ({self._last[index]:g} → {rates[index]:g}). "
            "After the growth its groups have different rates, and a run that gives all of them the same one is "
            f"stopped. {REMEDY}"
        )

    def _refuse_other_ratios(self, rates: list[float], sources: list[Source], optimizer: str) -> None:
        first: dict[int, tuple[float, float]] = {}
        for rate, source in zip(rates, sources, strict=True):
            known, factor = first.setdefault(source.group, (rate, source.factor))
            if not math.isclose(rate / source.factor, known / factor, rel_tol=TOLERANCE):
                raise UserError(
                    f"UpscaleCallback: since the growth, groups of {optimizer} have rates that differ by a factor of "
                    f"{source.factor / factor:g}, and {self._module} has set them to {known:g} and {rate:g}: training "
                    f"would not continue as before. {REMEDY}"
                )


def _rates_of(optimizer: Optimizer) -> list[float]:
    """The rate of each group; none on a GPU, where reading it would wait."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [] if any(isinstance(rate, Tensor) and rate.is_cuda for rate in rates) else list(map(float, rates))
