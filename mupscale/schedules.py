"""Learning-rate schedules relative to the base rate of each group, and schedules of any kind across an upscale."""

import copy
import math
import warnings
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mupscale._torch import inner_schedulers
from mupscale.errors import UserError, refuse_unless_whole
from mupscale.widening.optimizers import groups_by_id
from mupscale.widening.state import StateSource


class WarmupStableDecay(LRScheduler):
    """Linear warm-up over `warmup` steps, constant rate, then linear decay to 0 over the last share `decay` of `steps`.

        WarmupStableDecay(optimizer, warmup=100)                            # constant after the warm-up
        WarmupStableDecay(optimizer, warmup=100, steps=1500, decay=0.2)     # falls over the last 300 steps

    In a configuration:

        lr_scheduler:
          class_path: mupscale.schedules.WarmupStableDecay
          init_args: {warmup: 100, steps: 1500, decay: 0.2}

    Examples:
        >>> import mupscale
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
        >>> schedule = mupscale.schedules.WarmupStableDecay(optimizer, warmup=2, steps=6, decay=0.5)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.05, 0.1, 0.1, 0.1, 0.067, 0.033]
    """

    def __init__(
        self, optimizer: Optimizer, warmup: int = 0, steps: int | None = None, decay: float = 0.0, last_epoch: int = -1
    ) -> None:
        """
        Args:
            optimizer: The optimizer to schedule.
            warmup: Steps until the full rate. The first step has 1 / warmup of it.
            steps: The length of the run; required if the rate decays. The rate is zero after it.
            decay: The share of the run, at its end, over which the rate falls.
        """
        refuse_bad_schedule(warmup, steps)
        if not 0 <= decay <= 1:
            raise UserError(f"decay is the share of the steps over which the rate falls, from 0 to 1; got {decay}")
        if decay and steps is None:
            raise UserError(f"a decay of {decay} needs steps: the length of the run, such as trainer.max_steps")
        self.warmup, self.steps, self.decay = warmup, steps, decay
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        factor = warmed_up(self.last_epoch, self.warmup)
        if self.decay and self.steps is not None:
            factor *= min(1.0, max(0.0, (self.steps - self.last_epoch) / (self.decay * self.steps)))
        return [rate * factor for rate in self.base_lrs]


class WarmupCosine(LRScheduler):
    """Linear warm-up over `warmup` steps, then cosine decay to zero at `steps`.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
        >>> schedule = mupscale.schedules.WarmupCosine(optimizer, steps=6, warmup=2)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.05, 0.1, 0.1, 0.085, 0.05, 0.015]
    """

    def __init__(self, optimizer: Optimizer, steps: int, warmup: int = 0, last_epoch: int = -1) -> None:
        """
        Args:
            optimizer: The optimizer to schedule.
            steps: The length of the run. The rate is zero after it.
            warmup: Steps until the full rate. The first step has 1 / warmup of it.
        """
        refuse_bad_schedule(warmup, steps)
        self.warmup, self.steps = warmup, steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        share = (self.last_epoch - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, share)))
        factor = warmed_up(self.last_epoch, self.warmup) * cosine
        return [rate * factor for rate in self.base_lrs]


def warmed_up(step: int, warmup: int) -> float:
    """The share of the rate that a step has during the warm-up; steps are counted from 0."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def refuse_bad_schedule(warmup: Any, steps: Any) -> None:
    refuse_unless_whole("warmup", warmup, least=0)
    if steps is not None:
        refuse_unless_whole("steps", steps)
        if warmup >= steps:
            raise UserError(f"a warm-up of {warmup} steps is as long as the run, which has {steps}")


RATES = ("base_lrs", "_last_lr", "min_lrs", "max_lrs")
"""The rates that schedulers keep for each group."""

OTHERS = ("lr_lambdas", "base_momentums", "max_momentums")
"""What else they keep for each group."""

LEAST_RATE = "eta_min"
"""A rate that some schedulers keep for all groups; after a growth, perhaps a list with one for each."""


def restart_schedule_(scheduler: Any, fresh: Any) -> None:
    """Begins a schedule anew, from the present base rates of its groups; `fresh` is one that has not begun."""
    new_groups = groups_by_id(fresh.optimizer)
    for group in scheduler.optimizer.param_groups:
        new = new_groups.get(id(group["params"][0]), {})
        if new.get("initial_lr") and "initial_lr" in group:
            group["lr"] = group["initial_lr"] * (new["lr"] / new["initial_lr"])
        # a schedule of the momentum restarts with that of the rate
        for key in ("momentum", "betas") if "max_momentum" in group else ():
            if key in group and key in new:
                group[key] = copy.copy(new[key])
    state = fresh.state_dict()
    _keep_rates_of_groups(state, scheduler.state_dict(), [group["lr"] for group in scheduler.optimizer.param_groups])
    scheduler.load_state_dict(state)


def _keep_rates_of_groups(state: dict[str, Any], own: dict[str, Any], rates: list[Any]) -> None:
    """Puts what a schedule keeps for each group, in `own`, into the state_dict of a new one of the same class."""
    state.update({key: own[key] for key in (*RATES, *OTHERS, LEAST_RATE) if key in own})
    if "_last_lr" in state:
        state["_last_lr"] = rates
    for part, own_part in zip(state.get("_schedulers", ()), own.get("_schedulers", ()), strict=True):
        _keep_rates_of_groups(part, own_part, rates)


def spread_schedule_state_(state: dict[str, Any], sources: Sequence[StateSource]) -> None:
    """Lets a scheduler's state_dict go on after groups were split, each from one of the old groups."""
    _spread(state, sources)
    for part in state.get("_schedulers", ()):
        spread_schedule_state_(part, sources)


def spread_schedule_(scheduler: Any, sources: Sequence[StateSource]) -> None:
    """Lets a scheduler go on after the groups of its optimizer were split, each from one of the old groups."""
    for part in inner_schedulers(scheduler):
        spread_schedule_(part, sources)
    # not `vars`: a scheduler may have properties
    values = {key: getattr(scheduler, key) for key in (*RATES, *OTHERS, LEAST_RATE) if hasattr(scheduler, key)}
    _spread(values, sources)
    for key, value in values.items():
        setattr(scheduler, key, value)
    if values.get(LEAST_RATE) and not isinstance(scheduler, _LeastRates):
        kind = type(scheduler)
        scheduler.__class__ = type(kind.__name__, (_LeastRates, kind), {"__module__": kind.__module__})


def _spread(values: dict[str, Any], sources: Sequence[StateSource]) -> None:
    """Gives each group what its source had: rates times the factor, others as they are."""
    for key in values.keys() & {*RATES}:
        values[key] = [values[key][source.group] * source.factor for source in sources]
    for key in values.keys() & {*OTHERS}:
        values[key] = [values[key][source.group] for source in sources]
    least = values.get(LEAST_RATE)
    if least:
        each = least if isinstance(least, list) else None
        grown = [(least if each is None else each[source.group]) * source.factor for source in sources]
        values[LEAST_RATE] = grown[0] if len(set(grown)) == 1 else grown


class _LeastRates:
    """A part of a schedule that has a list in the place of its least rate: the rate of each group follows its own."""

    eta_min: Any

    def get_lr(self) -> list[Any]:
        least = self.eta_min
        if not isinstance(least, list):
            return super().get_lr()  # type: ignore[misc]
        rates = []
        try:
            for index, self.eta_min in enumerate(least):
                rates.append(super().get_lr()[index])  # type: ignore[misc]
        finally:
            self.eta_min = least
        return rates


def refuse_one_rate_for_all(state: dict[str, Any], factors: Collection[float], schedule: str, remedy: str) -> None:
    """Raises a UserError for a state_dict with a least rate that all groups share, if their factors differ."""
    for part in state.get("_schedulers", ()):
        refuse_one_rate_for_all(part, factors, schedule, remedy)
    if state.get(LEAST_RATE) and len(set(factors)) > 1:
        raise UserError(
            f"{schedule} has one absolute rate for all groups ({LEAST_RATE} = {state[LEAST_RATE]:g}), but their rates "
            f"grow by different factors. {remedy}"
        )


TRIED = (0, 1, 10, 100)
"""Steps after the present one at which the rates of a schedule are compared."""


def follows_rates(scheduler: Any) -> bool:
    """Whether the rates of a schedule of the user's own class are relative to those of groups; tried on copies.

    Schedules of torch, and all that cannot be tried, pass.
    """
    if type(scheduler).__module__.startswith(("torch.", "mupscale.")) or inner_schedulers(scheduler):
        return True
    for steps in TRIED:
        try:
            with warnings.catch_warnings(action="ignore"):
                whole, half = (_rates_after(scheduler, steps, factor) for factor in (1.0, 0.5))
        except Exception:  # whatever it does with a copy
            return True
        if any(not math.isclose(rate, 2 * other, rel_tol=1e-6) for rate, other in zip(whole, half, strict=True)):
            return False
    return True


def refuse_unless_relative(scheduler: Any, schedule: str, why: str) -> None:
    """Raises a UserError for a schedule of the user's own class that sets absolute rates."""
    if not follows_rates(scheduler):
        raise UserError(
            f"{schedule} sets absolute rates, {why}. Let its get_lr multiply self.base_lrs, or use LambdaLR"
        )


def _rates_after(scheduler: Any, steps: int, factor: float) -> list[float]:
    """What a schedule answers some steps later, if the rates of all groups are multiplied by a factor."""
    groups = scheduler.optimizer.param_groups
    asked = copy.copy(scheduler)
    rates = {"lr", "initial_lr"}
    own = [{key: value * factor if key in rates else value for key, value in group.items()} for group in groups]
    asked.optimizer = SimpleNamespace(param_groups=own, defaults=scheduler.optimizer.defaults)
    spread_schedule_(asked, [StateSource(index, factor) for index in range(len(groups))])
    asked.last_epoch = scheduler.last_epoch + steps
    return list(map(float, asked.get_lr()))
