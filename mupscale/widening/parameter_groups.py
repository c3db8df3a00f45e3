"""Parameter groups across widths: split where their parameters scale differently, rescaled by Table 1."""

import copy
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.widening.rules import Factors, Group, OptimizerRule, Scaling

SOURCE_GROUP = "source_group"
"""Key of a parameter group: the index of the group it was split from."""

INITIAL_VALUE = "initial_accumulator_value"
"""Key of a group of Adagrad: its sum of squared gradients before the first step."""

LEARNING_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""What schedulers keep in a group beside the rate itself, in the same unit."""


def split_groups(
    groups: Sequence[Group], rule: OptimizerRule, target_of: Callable[[Tensor], tuple[Tensor, Factors]]
) -> list[Group]:
    """The groups over the target parameters, hyperparameters rescaled; split where the scaling differs.

    The first part of a named group keeps its name, the others are `<name>-2` and so on.
    """
    answer: list[Group] = []
    names = {group["name"] for group in groups if "name" in group}
    for index, group in enumerate(groups):
        parts: dict[Scaling, Group] = {}
        for position, parameter in enumerate(group["params"]):
            target, factors = target_of(parameter)
            scaling = _relevant(rule.scale(group, factors), group)
            if scaling not in parts:
                parts[scaling] = _scaled_group(group, scaling) | {
                    "params": [],
                    SOURCE_GROUP: group.get(SOURCE_GROUP, index),
                }
                if "param_names" in group:
                    parts[scaling]["param_names"] = []
                if "name" in group and len(parts) > 1:
                    parts[scaling]["name"] = _free_name(group["name"], names)
                    names.add(parts[scaling]["name"])
            parts[scaling]["params"].append(target)
            if "param_names" in group:
                parts[scaling]["param_names"].append(group["param_names"][position])
        answer += parts.values()
    return answer


def _free_name(name: Any, taken: set[Any]) -> str:
    """The first of `<name>-2`, `<name>-3` and so on that is not taken."""
    return next(free for number in count(2) if (free := f"{name}-{number}") not in taken)


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
    scaled = {key: copy.copy(value) for key, value in group.items() if key not in ("params", "param_names")}
    for key in LEARNING_RATES:
        if key in scaled:
            scaled[key] = scaled[key] * scaling.lr  # out of place: a tensor learning rate belongs to the old group
    if group.get("eps"):
        scaled["eps"] = group["eps"] * scaling.eps
    if "weight_decay" in group:
        scaled["weight_decay"] = group["weight_decay"] * scaling.weight_decay
    if group.get(INITIAL_VALUE):
        scaled[INITIAL_VALUE] = group[INITIAL_VALUE] * scaling.eps**2  # eps has the unit of a gradient
    return scaled


def begin_state_(optimizer: Optimizer) -> None:
    """Gives an Adagrad that has made no step the initial value of each group, in place of one for all."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get(INITIAL_VALUE) else ():
            state, value = optimizer.state[parameter], group[INITIAL_VALUE]
            if float(state["step"]) == 0:
                state["sum"] = torch.full_like(parameter, complex(value, value) if parameter.is_complex() else value)


def names_by_id(model: nn.Module) -> dict[int, str]:
    """The name of every parameter, by its identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
