"""Optimizer state across widths: what can be continued, and the state moved by parameter name."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.arguments import refuse_unless_level
from mupscale.errors import UserError
from mupscale.widening.finite import refuse_non_finite_state
from mupscale.widening.layout import duplicate_
from mupscale.widening.new_copies import (
    GROWN_AT,
    NEW_COPIES,
    REWARM_STEPS,
    StateRule,
    check_own_count,
    new_copies,
    rewarm_new_copies,
)
from mupscale.widening.parameter_groups import (
    INITIAL_VALUE,
    LEARNING_RATES,
    begin_state_,
    is_nonzero,
    names_by_id,
    split_groups,
)
from mupscale.widening.plan import Plan, TensorPlan
from mupscale.widening.rules import Factors, Group, OptimizerRule, is_number, rule_of
from mupscale.widening.schedule import Source
from mupscale.widening.sharding import gathered, own_part, whole


def check_transfer(
    plan: Plan,
    narrow: nn.Module,
    narrow_opt: Optimizer,
    wide: nn.Module,
    wide_opt: Optimizer | None,
    *,
    state: StateRule = "carry",
) -> None:
    """Raises UserError, before anything is written, where `narrow_opt` cannot be continued on the wide model."""
    rule = rule_of(narrow_opt)
    refuse_bad_levels(narrow_opt)
    if state == "reset_new_copies":
        check_own_count(narrow_opt)
    names = names_by_id(narrow)
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UserError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the narrow "
                    "model: "
                    "it belongs to another model, or to a copy of this one. Pass the optimizer built over "
                    "narrow.parameters()"
                )
            if plan.parameters[name].mixed and not rule.entrywise:
                raise UserError(
                    f"parameter {name!r} needs a learning rate for each entry, which {type(narrow_opt).__name__} does "
                    "not support; give it to AdamW in a second optimizer"
                )
            _check_state(name, parameter, narrow_opt.state.get(parameter, {}), group, rule)
    strangers = {id(p) for p in narrow_opt.state} - {id(p) for g in narrow_opt.param_groups for p in g["params"]}
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in narrow_opt.state if id(p) in strangers)
        raise UserError(
            f"the optimizer has state for parameters (of shape {shapes}) that are in none of its groups: remove the "
            "state, or add them to a group"
        )
    refuse_non_finite_state(narrow, narrow_opt)
    if wide_opt is None:
        try:
            inspect.signature(type(narrow_opt)).bind([], **_settings(narrow_opt))
        except TypeError as error:
            raise UserError(
                f"{type(narrow_opt).__name__} cannot be built from its defaults ({error}): give wide_opt yourself"
            ) from None
        return
    if type(wide_opt) is not type(narrow_opt):
        raise UserError(
            f"the state of {type(narrow_opt).__name__} cannot move into {type(wide_opt).__name__}; give the wide model "
            "the same class"
        )
    held = {id(parameter) for group in wide_opt.param_groups for parameter in group["params"]}
    wide_named = dict(wide.named_parameters())
    unknown = held - {id(parameter) for parameter in wide_named.values()}
    if unknown:
        raise UserError("wide_opt holds parameters that are not in the wide model: build it over wide.parameters()")
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if id(wide_named[name]) in held or not parameter.requires_grad:
                continue
            if not wide_named[name].requires_grad:
                raise UserError(
                    f"parameter {name!r} is trained in the narrow model, but frozen in the wide one, and wide_opt does "
                    "not hold it. Freeze the same parameters in both models, before the optimizers are made"
                )
            if narrow_opt.state.get(parameter):
                raise UserError(
                    f"parameter {name!r} has optimizer state, but wide_opt does not hold it: build it over all "
                    "parameters"
                )


def refuse_bad_levels(optimizer: Optimizer) -> None:
    """Raises a UserError for a learning rate, eps, decay or momentum that is NaN, infinite or negative."""
    for group in optimizer.param_groups:
        for key in ("lr", "eps", "weight_decay", "momentum", "betas"):
            value = group.get(key, 0.0)
            for number in value if isinstance(value, tuple | list) else [value]:
                on_device = isinstance(number, Tensor) and number.device.type != "cpu"  # reading it would wait
                if number is not None and not on_device:
                    refuse_unless_level(f"{key} of {type(optimizer).__name__}", number)


FactorsOf = Callable[[TensorPlan], Factors]


def table_factors(entry: TensorPlan) -> Factors:
    """The factors of duplication."""
    return entry.factors


def continued_groups(
    plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, factors_of: FactorsOf = table_factors
) -> list[Group]:
    """The parameter groups that continue `narrow_opt` on the wide model, its hyperparameters rescaled."""
    names = names_by_id(narrow)
    wide_named = dict(wide.named_parameters())

    def target(parameter: Tensor) -> tuple[Tensor, Factors]:
        entry = plan.parameters[names[id(parameter)]]
        return wide_named[entry.name], factors_of(entry)

    return split_groups(narrow_opt.param_groups, rule_of(narrow_opt), target)


_NOT_CONTINUED = ("lr", "foreach", "fused", "capturable", "differentiable")
"""Keys of a group that are no hyperparameters, and the rate, which depends on the schedule too."""

_SCHEDULED = [key for key in LEARNING_RATES if key not in ("lr", "initial_lr")]
"""Rates that OneCycleLR and SWALR keep in a group."""


def continue_settings_(group: Group, source: Group, keys: Iterable[str]) -> None:
    """Gives a group the hyperparameters of the continued group `source`, except the rate.

    Values that agree but for rounding stay as they are.
    """
    for key in keys:
        if key in group and key in source and key not in _NOT_CONTINUED and not _agree(group[key], source[key]):
            group[key] = copy.copy(source[key])


def continue_scheduled_rates_(group: Group, source: Group, ratio: float) -> None:
    """Gives a group the rates that schedulers keep in the continued group `source`, times a ratio."""
    for key in _SCHEDULED:
        if key in group and key in source and not _agree(group[key], source[key] * ratio):
            group[key] = source[key] * ratio


def _agree(a: Any, b: Any) -> bool:
    """Whether two hyperparameters are equal but for rounding."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_agree, a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False  # a comparison would wait for the device
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def sources_of(
    plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, factors_of: FactorsOf = table_factors
) -> dict[int, Source]:
    """Which group of `narrow_opt` each wide parameter continues, and by which factor of the rate; by its identity."""
    names = names_by_id(narrow)
    wide_named = dict(wide.named_parameters())
    rule = rule_of(narrow_opt)
    answer: dict[int, Source] = {}
    for index, group in enumerate(narrow_opt.param_groups):
        for parameter in group["params"]:
            entry = plan.parameters[names[id(parameter)]]
            answer[id(wide_named[entry.name])] = Source(index, rule.scale(group, factors_of(entry)).lr)
    return answer


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
    factors_of: FactorsOf = table_factors,
) -> Optimizer:
    """A new optimizer of the same class over the wide parameters, with those groups."""
    groups = continued_groups(plan, narrow, narrow_opt, wide, factors_of)
    optimizer = type(narrow_opt)(groups, **_settings(narrow_opt))
    if state != "reset":
        optimizer.state.clear()  # Adagrad begins with state; what the narrow one has is moved
    return optimizer


def off_the_rule(
    plan: Plan,
    narrow: nn.Module,
    narrow_opt: Optimizer,
    wide: nn.Module,
    wide_opt: Optimizer,
    factors_of: FactorsOf = table_factors,
) -> list[str]:
    """A note on each hyperparameter of `wide_opt` that does not follow from `narrow_opt`.

    One common change of a base constant is a choice, and gets no note.
    """
    rule, wide_named = rule_of(narrow_opt), dict(wide.named_parameters())
    group_of = {id(parameter): group for group in wide_opt.param_groups for parameter in group["params"]}
    names = names_by_id(narrow)
    ratios: dict[str, dict[float, str]] = {"lr": {}, "eps": {}, "weight_decay": {}}
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:
            entry = plan.parameters[names[id(parameter)]]
            wide_group = group_of.get(id(wide_named[entry.name]))
            scaling = rule.scale(group, factors_of(entry))
            for key, factor in scaling._asdict().items():
                if wide_group is not None and is_nonzero(group.get(key)) and is_nonzero(wide_group.get(key)):
                    ratio = float(wide_group[key]) / (float(group[key]) * factor)
                    ratios[key].setdefault(float(f"{ratio:.6g}"), entry.name)
    return [
        f"wide_opt: {key} is {' and '.join(f'{ratio:g} times (of {name})' for ratio, name in found.items())} what "
        "continues the narrow run, so the ratio differs between parameters. Scale it with apply_mup, or pass "
        "wide_opt=None"
        for key, found in ratios.items()
        if len(found) > 1
    ]


def transfer_state(
    plan: Plan,
    narrow: nn.Module,
    narrow_opt: Optimizer,
    wide: nn.Module,
    wide_opt: Optimizer,
    *,
    consume: bool,
    state: StateRule = "carry",
    rewarm_steps: int = 0,
    factors_of: FactorsOf = table_factors,
    to_copies: bool = True,
) -> None:
    """Moves state by parameter name, by a state rule; with `consume`, freeing the narrow tensors one by one.

    Without `to_copies` only the first copy of each entry gets it, and the others are zero.
    """
    if state == "reset":
        if consume:
            narrow_opt.state.clear()
        begin_state_(wide_opt)
        return
    wide_named = dict(wide.named_parameters())
    names = names_by_id(narrow)
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:  # what wide_opt may hold from before is of another run
            wide_opt.state.pop(wide_named[names[id(parameter)]], None)
    group_of = {id(parameter): group for group in wide_opt.param_groups for parameter in group["params"]}
    rule = rule_of(narrow_opt)
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:
            target = wide_named[names[id(parameter)]]
            if GROWN_AT in group and id(target) in group_of:  # a warm-up that is under way goes on
                group_of[id(target)].update({key: group[key] for key in (GROWN_AT, REWARM_STEPS)})
    for name, source in narrow.named_parameters():
        target = wide_named[name]
        if source not in narrow_opt.state or id(target) not in group_of:
            continue
        narrow_state = narrow_opt.state.pop(source) if consume else narrow_opt.state[source]
        moved = {}
        for key in list(narrow_state):
            value = narrow_state.pop(key) if consume else narrow_state[key]
            entry = plan.parameters[name]
            k_out = factors_of(entry).k_out
            moved[key] = _moved(key, value, entry, k_out, source, target, group_of[id(target)], rule)
            if key in rule.state and not to_copies and isinstance(value, Tensor):
                with whole(moved[key]) as copies:
                    duplicate_(copies, gathered(value), entry.layouts, scale=k_out ** -rule.state[key])
                    copies.masked_fill_(new_copies(entry).to(copies.device), 0.0)
            del value
        wide_opt.state[target] = moved
    if state == "reset_new_copies":
        _reset_new_copies(plan, wide_named, wide_opt, rule, rewarm_steps)
    rewarm_new_copies(wide_opt)


def _reset_new_copies(
    plan: Plan, wide_named: dict[str, nn.Parameter], wide_opt: Optimizer, rule: OptimizerRule, rewarm_steps: int
) -> None:
    """Sets the state of new copies to zero, and notes which they are and when they came."""
    name_of = {id(parameter): name for name, parameter in wide_named.items()}
    for group in wide_opt.param_groups:
        counts = [0.0]
        for parameter in group["params"]:
            entry = plan.parameters[name_of[id(parameter)]]
            state = wide_opt.state.get(parameter, {})
            if not entry.grows or (rule.counts_steps and not state):
                continue
            if not rule.counts_steps:
                state["step"] = torch.zeros((), dtype=torch.float32)
            counts.append(float(state["step"]))
            mask = torch.empty_like(parameter, dtype=torch.bool, memory_format=torch.preserve_format)
            with whole(mask) as new:
                new.copy_(new_copies(entry))
            state[NEW_COPIES] = mask
            for key in rule.state.keys() & state.keys():
                if isinstance(state[key], Tensor):
                    state[key].masked_fill_(mask, group.get(INITIAL_VALUE, 0.0))
            wide_opt.state[parameter] = state
        group[GROWN_AT], group[REWARM_STEPS] = max(counts), rewarm_steps


def _moved(
    key: str,
    value: Any,
    entry: TensorPlan,
    k_out: float,
    source: Tensor,
    target: Tensor,
    group: Group,
    rule: OptimizerRule,
) -> Any:
    """Tensors of the parameter's shape as dup / k_out^power in their own dtype; counters as clones in theirs."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if key == NEW_COPIES:
        mask = torch.empty_like(target, dtype=value.dtype, memory_format=torch.preserve_format)
        with own_part(mask) as (copies, rows):
            duplicate_(copies, gathered(value), entry.layouts, rows=rows)
        return mask
    if key not in rule.state:
        on_device = group.get("fused") or group.get("capturable") or value.device.type != "cpu"
        return value.detach().clone().to(target.device if on_device else value.device)
    dtype = target.dtype if value.dtype == source.dtype else value.dtype
    tensor = torch.empty_like(target, dtype=dtype, memory_format=torch.preserve_format)
    with own_part(tensor) as (state, rows):
        # one factor for all, also where pieces grow differently: such state is kept in reference units
        duplicate_(state, gathered(value), entry.layouts, scale=k_out ** -rule.state[key], rows=rows)
    return tensor


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments its constructor takes, from its defaults."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {key: copy.copy(value) for key, value in optimizer.defaults.items() if key in accepted}


def _check_state(name: str, parameter: Tensor, state: dict[str, Any], group: Group, rule: OptimizerRule) -> None:
    reason = rule.ready(group, state) if rule.ready and parameter.requires_grad else None
    if reason:
        raise UserError(f"parameter {name!r}: {reason}")
    for key, value in state.items():
        if key in rule.state or key == NEW_COPIES:
            if not isinstance(value, Tensor | None):
                raise UserError(
                    f"optimizer state {key!r} of {name!r} is {value!r}, wanted a tensor of shape "
                    f"{tuple(parameter.shape)}. Load the state that was saved with the model"
                )
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                raise UserError(
                    f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(parameter.shape)}: "
                    "it does not belong to this model. Load the state that was saved with it"
                )
        elif not is_number(value):
            raise UserError(
                f"optimizer state {key!r} of {name!r} is a tensor of shape {tuple(value.shape)} that no rule covers; "
                "register the optimizer with the power of the gradient it holds"
            )
