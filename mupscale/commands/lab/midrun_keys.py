"""The keys in the file of an experiment that only the protocol midrun has."""

import re
from dataclasses import dataclass
from typing import Any

from mupscale.commands.config import Config
from mupscale.commands.reporting.midrun import BUDGETS
from mupscale.commands.widths import Growth, Size, in_proportion, is_size, numbers_in
from mupscale.errors import UserError

TIMING_STEPS = 300
"""Steps of a width by which its time is measured, unless the file gives their number."""

SHARE_OF_STEPS = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True)
class MidrunKeys:
    middle: Size
    """The fixed width between those of the target."""
    small_middle: Size
    """Its counterpart at the tuning size."""
    shares: list[float]
    """Of the budget that is spent when a run grows."""
    tuned_at: list[float]
    """The shares at which sweep_2 grows."""
    noises: dict[str, Config]
    schedules: dict[str, Config]
    """What overrides the configuration of all runs of a schedule, by its name; see `stretched`."""
    budgets: list[str]
    timing_steps: int

    def nearest_tuned(self, share: float) -> float:
        """The share of sweep_2 whose values a run that grows at `share` takes."""
        return min(self.tuned_at, key=lambda tuned: abs(tuned - share))


def midrun_keys(content: dict[str, Any], small: Growth, target: Growth) -> MidrunKeys:
    """The keys of protocol midrun. Raises a UserError that names the one that is wrong."""
    middle = content["middle"]
    if not is_size(middle):
        raise UserError(f"middle: give a width between {target.before} and {target.after}, got {middle!r}")
    small_middle = in_proportion(middle, target.before, small.before)
    if small_middle is None or not _is_between(middle, target):
        raise UserError(
            f"middle: give a width between {target.before} and {target.after} whose counterpart at the tuning size, "
            f"{small.before}/{target.before} of it, is a whole number too; got {middle}"
        )
    shares = _shares("shares", content["shares"])
    tuned_at = _shares("tuned_at", content.get("tuned_at", shares))
    noises = named("noises", content["noises"], "{paper: {class_path: mupscale.AdditiveNoise, init_args: {std: 1.0}}}")
    schedules = named("schedules", content.get("schedules", {"constant": {}}), "{constant: {}}")
    budgets = content.get("budgets", list(BUDGETS))
    known = isinstance(budgets, list) and bool(budgets) and set(map(str, budgets)) <= set(BUDGETS)
    if not known or len(set(budgets)) < len(budgets):
        raise UserError(f"budgets: give a list of {' and '.join(BUDGETS)}, or of one of them, got {budgets!r}")
    timing_steps = content.get("timing_steps", TIMING_STEPS)
    if type(timing_steps) is not int or timing_steps < 10:
        raise UserError(f"timing_steps: give a whole number of at least 10, got {timing_steps!r}")
    return MidrunKeys(middle, small_middle, shares, tuned_at, noises, schedules, budgets, timing_steps)


def _is_between(width: Size, growth: Growth) -> bool:
    lists = [numbers_in(each) for each in (growth.before, width, growth.after)]
    if len({len(each) for each in lists}) > 1:
        return False
    if lists[1] in (lists[0], lists[2]):
        return False  # which are compared anyway
    return all(low <= each <= high for low, each, high in zip(*lists, strict=True))


def _shares(key: str, shares: Any) -> list[float]:
    """Shares of the budget, in order."""
    is_list = isinstance(shares, list) and bool(shares)
    if not is_list or not all(isinstance(share, float) and 0 < share < 1 for share in shares):
        raise UserError(f"{key}: give shares of the budget between 0 and 1, such as [0.1, 0.5], got {shares!r}")
    if len({f"{share:g}" for share in shares}) < len(shares):  # as folders are named
        raise UserError(f"{key}: a share is given twice, got {shares}")
    return sorted(shares)


def named(key: str, table: Any, example: str) -> dict[str, Config]:
    """Mappings by names that are names of folders, too."""
    if not isinstance(table, dict) or not table:
        raise UserError(f"{key}: give a mapping by name, such as {example}, got {table!r}")
    for name, value in table.items():
        if not isinstance(name, str):
            raise UserError(f"{key}: YAML reads a name as {name!r}, which is no text; quote it")
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{key}: a name is made of letters, digits, '-', '_' and '.', got {name!r}")
        if not isinstance(value or {}, dict):
            raise UserError(f"{key}.{name}: give a mapping, got {value!r}")
    return {name: value or {} for name, value in table.items()}


def stretched(schedule: Any, steps: int) -> Any:
    """The configuration of a schedule for a run of so many steps: in it, `20%` is a fifth of them."""
    if isinstance(schedule, dict):
        return {key: stretched(item, steps) for key, item in schedule.items()}
    if isinstance(schedule, list):
        return [stretched(item, steps) for item in schedule]
    share = SHARE_OF_STEPS.fullmatch(schedule) if isinstance(schedule, str) else None
    return max(1, round(float(share[1]) / 100 * steps)) if share else schedule
