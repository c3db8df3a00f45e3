"""Parameter groups across widths: split where their parameters scale differently, rescaled by Table 1, and what of them
continues a run."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.widening import table
from mupscale.widening.growth import Growth
from mupscale.widening.layers import standing_in
from mupscale.widening.optimizers import Group, OptimizerRule, Scaling, Sized, rule_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.stepping import RECORD, StateRule, names_by_id
from mupscale.widening.table import Scale

SOURCE_GROUP = "source_group"
"""Key of a parameter group: the index of the group it was split from."""

_OF_PARAMETERS = ("params", "param_names", RECORD)
"""Keys of a group whose values follow the order of its parameters."""

INITIAL_VALUE = "initial_accumulator_value"
"""Key of a group of Adagrad: its sum of squared gradients before the first step."""

LEARNING_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""What schedulers keep in a group beside the rate itself, in the same unit."""


class Source(NamedTuple):
    """Where a group of the wide optimizer comes from."""

    group: int
    """The index of its group in the narrow optimizer."""
    factor: float


def split_groups(
    groups: Sequence[Group], rule: OptimizerRule, target_of: Callable[[Tensor], tuple[Tensor, Sized]]
) -> list[Group]:
    """The groups over the target parameters, rescaled, and split where scalings differ into `<name>-2` and so on."""
    answer: list[Group] = []
    names = {group["name"] for group in groups if "name" in group}
    for index, group in enumerate(groups):
        parts: dict[Scaling, Group] = {}
        for position, parameter in enumerate(group["params"]):
            target, sized = target_of(parameter)
            scaling = _relevant(rule.scale(group, sized), group)
            if scaling not in parts:
                parts[scaling] = _scaled_group(group, scaling) | {
                    "params": [],
                    SOURCE_GROUP: group.get(SOURCE_GROUP, index),
                }
                if "param_names" in group:
                    parts[scaling]["param_names"] = []
                if "name" in group and len(parts) > 1:
                    free = (name for number in count(2) if (name := f"{group['name']}-{number}") not in names)
                    parts[scaling]["name"] = next(free)
                    names.add(parts[scaling]["name"])
            parts[scaling]["params"].append(target)
            if "param_names" in group:
                parts[scaling]["param_names"].append(group["param_names"][position])
        answer += parts.values()
    return answer


def _relevant(scaling: Scaling, group: Group) -> Scaling:
    """The scaling without what this group does not have, so that it is not split for nothing."""
    return Scaling(
        scaling.lr,
        scaling.eps if group.get("eps") or group.get(INITIAL_VALUE) else 1.0,
        scaling.weight_decay if is_nonzero(group.get("weight_decay")) else 1.0,
    )


def is_nonzero(value: Any) -> bool:
    return value is not None and bool(value != 0)


def _scaled_group(group: Group, scaling: Scaling) -> Group:
    scaled = {key: copy.copy(value) for key, value in group.items() if key not in _OF_PARAMETERS}
    for key in LEARNING_RATES:
        if key in scaled:
            scaled[key] = scaled[key] * scaling.lr  # out of place: a tensor learning rate belongs to the old group
    if group.get("eps"):
        scaled["eps"] = group["eps"] * scaling.eps
    if "weight_decay" in group:
        scaled["weight_decay"] = group["weight_decay"] * scaling.weight_decay
    if group.get(INITIAL_VALUE):  # eps has the unit of a gradient, the initial value that of its square
        scaled[INITIAL_VALUE] = group[INITIAL_VALUE] * table.state(Scale(gradient=scaling.eps), 2)
    return scaled


def begin_state_(optimizer: Optimizer) -> None:
    """Gives an Adagrad that has made no step the initial value of each group, in place of one for all."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get(INITIAL_VALUE) else ():
            state, value = optimizer.state[parameter], group[INITIAL_VALUE]
            if "sum" in state and float(state["step"]) == 0:
                state["sum"] = torch.full_like(parameter, complex(value, value) if parameter.is_complex() else value)


RatesOf = Callable[[Growth], Sized]


def table_rates(growth: Growth) -> Sized:
    """The scale of duplication, which hyperparameters follow."""
    return Sized(growth.scale, growth.narrow_shape, growth.wide_shape)


def continued_groups(
    plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, rates_of: RatesOf = table_rates
) -> list[Group]:
    """The parameter groups that continue `narrow_opt` on the wide model, its hyperparameters rescaled."""
    narrow, narrow_opt = standing_in(narrow, narrow_opt, wide, plan.layers)
    names = names_by_id(narrow)
    wide_named = dict(wide.named_parameters())

    def target(parameter: Tensor) -> tuple[Tensor, Sized]:
        entry = plan.parameters[names[id(parameter)]]
        return wide_named[entry.name], rates_of(entry)

    return split_groups(narrow_opt.param_groups, rule_of(narrow_opt), target)


_NOT_CONTINUED = ("lr", "foreach", "fused", "capturable", "differentiable")
"""Keys of a group that are no hyperparameters, and the rate, which depends on the schedule too."""

_SCHEDULED = [key for key in LEARNING_RATES if key not in ("lr", "initial_lr")]
"""Rates that OneCycleLR and SWALR keep in a group."""


def continue_settings_(group: Group, source: Group, keys: Iterable[str]) -> None:
    """Gives a group the hyperparameters of the continued `source`, except the rate and what differs by rounding."""
    for key in keys:
        if key in group and key in source and key not in _NOT_CONTINUED and not _agree(group[key], source[key]):
            group[key] = copy.copy(source[key])


def continue_scheduled_rates_(group: Group, source: Group, ratio: float) -> None:
    """Gives a group the rates that schedulers keep in the continued group `source`, times a ratio."""
    for key in _SCHEDULED:
        if key in group and key in source and not _agree(group[key], source[key] * ratio):
            group[key] = source[key] * ratio


def _agree(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_agree, a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False  # a comparison would wait for the device
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def _continued(
    plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, rates_of: RatesOf
) -> Iterator[tuple[int, Group, str, Tensor, Scaling]]:
    """Of each parameter: its narrow group, its name, the wide one, and what its hyperparameters are multiplied by."""
    narrow, narrow_opt = standing_in(narrow, narrow_opt, wide, plan.layers)
    names, rule, wide_named = names_by_id(narrow), rule_of(narrow_opt), dict(wide.named_parameters())
    for index, group in enumerate(narrow_opt.param_groups):
        for parameter in group["params"]:
            entry = plan.parameters[names[id(parameter)]]
            yield index, group, entry.name, wide_named[entry.name], rule.scale(group, rates_of(entry))


def sources_of(
    plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, rates_of: RatesOf = table_rates
) -> dict[int, Source]:
    """Which group of `narrow_opt` each wide parameter continues, and by which factor of the rate; by its identity."""
    rows = _continued(plan, narrow, narrow_opt, wide, rates_of)
    return {id(target): Source(index, scaling.lr) for index, _, _, target, scaling in rows}


def refuse_uneven_groups(continued: list[Group], wide: nn.Module, wide_opt: Optimizer) -> None:
    """Raises a UserError for a group of `wide_opt` with parameters that need different hyperparameters to continue."""
    source_of = {id(parameter): group for group in continued for parameter in group["params"]}
    names = names_by_id(wide)
    for group in wide_opt.param_groups:
        known = [parameter for parameter in group["params"] if id(parameter) in source_of]
        for parameter in known[1:]:
            one, other = source_of[id(known[0])], source_of[id(parameter)]
            key = _first_difference(one, other)
            if key is not None:
                raise UserError(
                    f"configure_optimizers: {names[id(known[0])]} and {names[id(parameter)]} are in one group of the "
                    f"wide model, but need different values of {key} ({float(one[key]):.4g} and "
                    f"{float(other[key]):.4g}) to continue. Call mupscale.apply_mup(optimizer, self.net) there, or "
                    "give them groups of their own"
                )


def _first_difference(one: Group, other: Group) -> str | None:
    """The first hyperparameter that is scaled and differs between two groups by more than rounding."""
    for key in ("lr", "initial_lr", "weight_decay", "eps") if one is not other else ():
        a, b = one.get(key), other.get(key)
        if a is not None and b is not None and not math.isclose(a, b, rel_tol=1e-6):
            return key
    return None


def continued_optimizer(
    plan: Plan,
    narrow: nn.Module,
    narrow_opt: Optimizer,
    wide: nn.Module,
    *,
    state: StateRule = "carry",
    rates_of: RatesOf = table_rates,
) -> Optimizer:
    """A new optimizer of the same class over the wide parameters, with those groups."""
    groups = continued_groups(plan, narrow, narrow_opt, wide, rates_of)
    optimizer = type(narrow_opt)(groups, **settings_of(narrow_opt))
    if state != "reset":
        optimizer.state.clear()  # Adagrad begins with state; what the narrow one has is moved
    return optimizer


def off_the_rule(
    plan: Plan,
    narrow: nn.Module,
    narrow_opt: Optimizer,
    wide: nn.Module,
    wide_opt: Optimizer,
    rates_of: RatesOf = table_rates,
) -> list[str]:
    """A note on each hyperparameter that does not follow from `narrow_opt`, other than by one common factor."""
    group_of = {id(parameter): group for group in wide_opt.param_groups for parameter in group["params"]}
    ratios: dict[str, dict[float, str]] = {"lr": {}, "eps": {}, "weight_decay": {}}
    for _, group, name, target, scaling in _continued(plan, narrow, narrow_opt, wide, rates_of):
        wide_group = group_of.get(id(target), {})
        for key, factor in scaling._asdict().items():
            if is_nonzero(group.get(key)) and is_nonzero(wide_group.get(key)):
                ratio = float(wide_group[key]) / (float(group[key]) * factor)
                ratios[key].setdefault(float(f"{ratio:.6g}"), name)
    return [
        f"wide_opt: {key} is {' and '.join(f'{ratio:g} times (of {name})' for ratio, name in found.items())} what "
        "continues the narrow run, so the ratio differs between parameters. Scale it with apply_mup, or pass "
        "wide_opt=None"
        for key, found in ratios.items()
        if len(found) > 1
    ]


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments its constructor takes, from its defaults."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {key: copy.copy(value) for key, value in optimizer.defaults.items() if key in accepted}
