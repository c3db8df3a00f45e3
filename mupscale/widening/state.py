"""An optimizer across widths: its parameter groups split and rescaled by Table 1, and its state moved by name."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import own_step_hooks
from mupscale.errors import UserError, refuse_unless_level
from mupscale.sharding import gathered, own_part
from mupscale.widening import table
from mupscale.widening.growth import Growth, duplicate_
from mupscale.widening.layers import layer_at
from mupscale.widening.optimizers import Group, OptimizerRule, Scaling, Sized, groups_by_id, held_parameters, rule_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import (
    RECORD,
    Record,
    Rewarm,
    Rows,
    StateRule,
    check_own_count,
    grown_births,
    names_by_id,
    new_copies,
    set_records,
    step_records,
)
from mupscale.widening.table import Scale
from mupscale.widening.write import refuse_non_finite_state

SOURCE_GROUP = "source_group"
"""Key of a parameter group: the index of the group it was split from."""

_OF_PARAMETERS = ("params", "param_names", RECORD)
"""Keys of a group whose values follow the order of its parameters."""

INITIAL_VALUE = "initial_accumulator_value"
"""Key of a group of Adagrad: its sum of squared gradients before the first step."""

LEARNING_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""What schedulers keep in a group beside the rate itself, in the same unit."""


class StateSource(NamedTuple):
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
    for group, parameter in held_parameters(optimizer):
        value, state = group.get(INITIAL_VALUE), optimizer.state.get(parameter, {})
        if value and "sum" in state and float(state["step"]) == 0:
            state["sum"] = torch.full_like(parameter, complex(value, value) if parameter.is_complex() else value)


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
                    f"{names[id(known[0])]} and {names[id(parameter)]} are in one group of the "
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


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments its constructor takes, from its defaults."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {key: copy.copy(value) for key, value in optimizer.defaults.items() if key in accepted}


def refuse_bad_levels(optimizer: Optimizer) -> None:
    """Raises a UserError for a learning rate, eps, decay or momentum that is NaN, infinite or negative."""
    for group in optimizer.param_groups:
        for key in ("lr", "eps", "weight_decay", "momentum", "betas"):
            value = group.get(key, 0.0)
            for number in value if isinstance(value, tuple | list) else [value]:
                on_device = isinstance(number, Tensor) and number.device.type != "cpu"  # reading it would wait
                if number is not None and not on_device:
                    refuse_unless_level(f"{key} of {type(optimizer).__name__}", number)


def carry_step_hooks_(narrow_opt: Optimizer, wide_opt: Optimizer) -> None:
    """Registers the functions that are called before or after each step of one optimizer with another."""
    before, after = own_step_hooks(narrow_opt)
    for hook in before:
        wide_opt.register_step_pre_hook(hook)
    for hook in after:
        wide_opt.register_step_post_hook(hook)


StateAt = Callable[[Growth, str, Tensor], Tensor]
"""A function of a parameter's growth, and of the key and the value of its state."""


def as_it_is(_entry: Growth, _key: str, value: Tensor) -> Tensor:
    return value


RatesOf = Callable[[Growth], Sized]
"""What hyperparameters follow, of each parameter."""


class OptimizerTransfer:
    """How an optimizer of the narrow model continues on the wide one."""

    def __init__(
        self,
        plan: Plan,
        narrow: nn.Module,
        optimizer: Optimizer,
        wide: nn.Module,
        rates_of: RatesOf,
        state: StateRule = "carry",
    ) -> None:
        self.plan, self.narrow, self.optimizer, self.wide = plan, narrow, optimizer, wide
        self.rates_of, self.state, self.rule = rates_of, state, rule_of(optimizer)
        self.names, self.by_origin = names_by_id(narrow), plan.by_origin()
        self.sources_by_name, self.targets = dict(narrow.named_parameters()), dict(wide.named_parameters())

    def _rows(self) -> Iterator[tuple[Group, Tensor, Growth]]:
        """The growths of the optimizer's parameters, in the order of the wide groups, each with its narrow group."""
        order = {name: number for number, name in enumerate(self.plan.parameters)}
        for group in self.optimizer.param_groups:
            rows = [(group, p, entry) for p in group["params"] for entry in self.by_origin[self.names[id(p)]]]
            yield from sorted(rows, key=lambda row: order[row[2].name]) if self.plan.layers else rows

    def _state_of(self, entry: Growth) -> dict[str, Any] | None:
        """The narrow state that a parameter continues; None if it begins anew."""
        found = layer_at(self.plan.layers, entry.name)
        if found is not None and found[1].is_new and (not found[1].has_state or self.state != "carry"):
            return None
        source = self.sources_by_name[entry.origin]
        return self.optimizer.state.get(source)

    def groups(self) -> list[Group]:
        """The parameter groups over the wide model, hyperparameters rescaled."""
        groups: dict[int, Group] = {}
        entries: dict[int, Growth] = {}
        for group, _, entry in self._rows():
            target = self.targets[entry.name]
            grown = groups.setdefault(id(group), {**group, "params": []})
            grown["params"].append(target)
            entries[id(target)] = entry
            if self.plan.layers and "param_names" in group:
                grown["param_names"] = [entries[id(parameter)].name for parameter in grown["params"]]
        rows = [groups.get(id(group), group) for group in self.optimizer.param_groups]
        return split_groups(rows, self.rule, lambda target: (target, self.rates_of(entries[id(target)])))

    def sources(self) -> dict[int, StateSource]:
        """Which narrow group each wide parameter continues, and by which factor of the rate; by its identity."""
        answer = {}
        index = {id(group): number for number, group in enumerate(self.optimizer.param_groups)}
        for group, _, entry in self._rows():
            factor = self.rule.scale(group, self.rates_of(entry)).lr
            answer[id(self.targets[entry.name])] = StateSource(index[id(group)], factor)
        return answer

    def new_optimizer(self) -> Optimizer:
        """A new optimizer of the same class over the wide parameters, with those groups."""
        optimizer = type(self.optimizer)(self.groups(), **settings_of(self.optimizer))
        carry_step_hooks_(self.optimizer, optimizer)
        if self.state != "reset":
            optimizer.state.clear()  # Adagrad begins with state; what the narrow one has is moved
        return optimizer

    def notes_on_unscaled(self, wide_opt: Optimizer) -> list[str]:
        """A note on each hyperparameter that does not follow from the narrow one, other than by one common factor."""
        group_of = groups_by_id(wide_opt)
        ratios: dict[str, dict[float, str]] = {"lr": {}, "eps": {}, "weight_decay": {}}
        for group, _, entry in self._rows():
            wide_group = group_of.get(id(self.targets[entry.name]), {})
            for key, factor in self.rule.scale(group, self.rates_of(entry))._asdict().items():
                if is_nonzero(group.get(key)) and is_nonzero(wide_group.get(key)):
                    ratio = float(wide_group[key]) / (float(group[key]) * factor)
                    ratios[key].setdefault(float(f"{ratio:.6g}"), entry.name)
        return [
            f"wide_opt: {key} is {' and '.join(f'{ratio:g} times (of {name})' for ratio, name in found.items())} what "
            "continues the narrow run, so the ratio differs between parameters. Scale it with apply_mup, or pass "
            "wide_opt=None"
            for key, found in ratios.items()
            if len(found) > 1
        ]

    def check(self, wide_opt: Optimizer | None) -> None:
        """Raises UserError, before anything is written, where the optimizer cannot be continued on the wide model."""
        optimizer = self.optimizer
        kind = type(optimizer).__name__
        refuse_bad_levels(optimizer)
        if self.state == "reset_new_copies":
            check_own_count(optimizer)
        for _, parameter in held_parameters(optimizer):
            if id(parameter) not in self.names:
                raise UserError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the narrow "
                    "model: it belongs to another model, or to a copy of this one. Pass the optimizer built over "
                    "narrow.parameters()"
                )
        for group, parameter, entry in self._rows():
            if entry.mixed and not self.rule.entrywise:
                raise UserError(
                    f"parameter {entry.name!r} needs a learning rate for each entry, which {kind} does not support; "
                    "give it to AdamW in a second optimizer"
                )
            state = self._state_of(entry)
            if state is not None or not entry.inserted:  # a new layer may begin anew, with nothing to continue
                _check_state(entry.name, parameter, state or {}, group, self.rule)
        strangers = {id(p) for p in optimizer.state} - groups_by_id(optimizer).keys()
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in optimizer.state if id(p) in strangers)
            raise UserError(
                f"the optimizer has state for parameters (of shape {shapes}) that are in none of its groups: remove "
                "the state, or add them to a group"
            )
        refuse_non_finite_state(self.narrow, optimizer)
        if wide_opt is not None:
            self._check_pair(wide_opt)
            return
        try:
            inspect.signature(type(optimizer)).bind([], **settings_of(optimizer))
        except TypeError as error:
            raise UserError(f"{kind} cannot be built from its defaults ({error}): give wide_opt yourself") from None

    def _check_pair(self, wide_opt: Optimizer) -> None:
        if type(wide_opt) is not type(self.optimizer):
            raise UserError(
                f"the state of {type(self.optimizer).__name__} cannot move into {type(wide_opt).__name__}; give the "
                "wide model the same class"
            )
        held = groups_by_id(wide_opt).keys()
        unknown = held - {id(parameter) for parameter in self.targets.values()}
        if unknown:
            raise UserError("wide_opt holds parameters that are not in the wide model: build it over wide.parameters()")
        for _, parameter, entry in self._rows():
            target = self.targets[entry.name]
            if id(target) in held or not parameter.requires_grad:
                continue
            if not target.requires_grad:
                raise UserError(
                    f"parameter {entry.name!r} is trained in the narrow model, but frozen in the wide one, and "
                    "wide_opt does not hold it. Freeze the same parameters in both models, before the optimizers are "
                    "made"
                )
            if self._state_of(entry):
                raise UserError(
                    f"parameter {entry.name!r} has optimizer state, but wide_opt does not hold it: build it over all "
                    "parameters"
                )

    def transfer(
        self,
        wide_opt: Optimizer,
        *,
        consume: bool = False,
        rewarm_steps: int,
        scale_of: Callable[[Growth], Scale],
        to_copies: bool,
        read: StateAt = as_it_is,
        write: StateAt = as_it_is,
    ) -> None:
        """Moves state by name and state rule, freeing it by `consume`; without `to_copies`, to first copies only.

        `read` returns a narrow tensor that is in a file, `write` what the optimizer keeps of a wide one.
        """
        rule, resets = self.rule, self.state == "reset_new_copies"
        births = {} if self.state == "reset" else self.births(rewarm_steps)
        states = {
            name: dict(state)
            for name, entry in self.plan.parameters.items()
            if (state := self._state_of(entry)) is not None
        }
        if consume:
            self.optimizer.state.clear()  # `states` has it, and frees it tensor by tensor
        if self.state == "reset":
            begin_state_(wide_opt)
            set_records(self.wide, wide_opt, {})
            return
        set_records(self.wide, wide_opt, births)
        for _, _, entry in self._rows():  # what wide_opt may hold from before is of another run
            wide_opt.state.pop(self.targets[entry.name], None)
        group_of = groups_by_id(wide_opt)
        for name, entry in self.plan.parameters.items():
            target, source = self.targets[name], self.sources_by_name[entry.origin]
            if name not in states or id(target) not in group_of:
                continue
            group = group_of[id(target)]
            of_new_copies = group.get(INITIAL_VALUE, 0.0) if resets else None if to_copies else 0.0
            narrow_state = states.pop(name)
            moved = {}
            for key in list(narrow_state):
                value = narrow_state.pop(key)
                device = torch.device("cpu") if target.is_meta else target.device  # with the narrow one in a file
                if key in rule.state and isinstance(value, Tensor):
                    dtype = target.dtype if value.dtype == source.dtype else value.dtype
                    wide = torch.empty_like(target, dtype=dtype, device=device, memory_format=torch.preserve_format)
                    scale = table.state(scale_of(entry), rule.state[key])
                    _widen_state(wide, read(entry, key, value), entry, scale, of_new_copies)
                    moved[key] = write(entry, key, wide)
                    del wide
                else:
                    moved[key] = _copy_of(value, device, group)
                del value
            wide_opt.state[target] = moved
        for _, _, entry in self._rows() if resets and not rule.counts_steps else ():
            target = self.targets[entry.name]
            if id(target) in group_of and (entry.grows or entry.inserted):
                wide_opt.state[target].setdefault("step", torch.zeros((), dtype=torch.float32))
        self._begin_inserted(wide_opt)

    def _begin_inserted(self, optimizer: Optimizer) -> None:
        """Gives parameters of new layers without state what an optimizer has before its first step (Adagrad)."""
        held = groups_by_id(optimizer)
        new = [self.targets[name] for name in self.plan.new_parameters if id(self.targets[name]) in held]
        new = [parameter for parameter in new if parameter not in optimizer.state]
        if new:
            begun = type(optimizer)(new, **settings_of(optimizer))
            optimizer.state.update({parameter: begun.state[parameter] for parameter in new if parameter in begun.state})
            begin_state_(optimizer)

    def births(self, rewarm_steps: int = 0) -> dict[str, tuple[Rows, Rewarm]]:
        """The births of new copies in the wide model, by parameter name: of earlier growths, and of this one."""
        old_records = step_records(self.optimizer)
        answer: dict[str, tuple[Rows, Rewarm]] = {}
        resets = self.state == "reset_new_copies"
        for _, parameter, growth in self._rows():
            found = layer_at(self.plan.layers, growth.name)
            is_aged = found is None or found[1].has_state
            old = old_records.get(id(parameter), Record()) if is_aged else Record()
            if resets and growth.inserted and parameter.ndim:  # it counts from zero
                answer[growth.name] = ((0, (0.0,) * growth.wide_shape[0]),), ((0.0, rewarm_steps),)
                continue
            begins_anew = resets and growth.grows
            now = float((self._state_of(growth) or {}).get("step", 0)) if begins_anew else None
            if begins_anew or old.births:
                rewarm = old.rewarm if now is None else (*old.rewarm, (now, rewarm_steps))
                answer[growth.name] = grown_births(old, growth, now), rewarm
        return answer


def _widen_state(target: Tensor, source: Tensor, entry: Growth, scale: float, of_new_copies: float | None) -> None:
    """Writes `source` times a scale, duplicated; with `of_new_copies`, only to first copies, and that to the others."""
    with own_part(target) as (state, rows):
        # one factor for all, also where pieces grow differently: such state is kept in reference units
        duplicate_(state, gathered(source), entry.layouts, scale=scale, rows=rows)
        if of_new_copies is not None:
            new = new_copies(entry) if rows is None else new_copies(entry)[rows]
            state.masked_fill_(new.to(state.device), of_new_copies)


def _copy_of(value: Any, device: torch.device, group: Group) -> Any:
    """A copy of a step count or the like, on the device if the optimizer of this group counts there."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    on_device = group.get("fused") or group.get("capturable") or value.device.type != "cpu"
    return value.detach().clone().to(device if on_device else value.device)


def _check_state(name: str, parameter: Tensor, state: dict[str, Any], group: Group, rule: OptimizerRule) -> None:
    reason = rule.ready(group, state) if rule.ready and parameter.requires_grad else None
    if reason:
        raise UserError(f"parameter {name!r}: {reason}")
    for key, value in state.items():
        if key in rule.state:
            if not isinstance(value, Tensor | None):
                raise UserError(
                    f"optimizer state {key!r} of {name!r} is {value!r}, wanted a tensor of shape "
                    f"{tuple(parameter.shape)}. Load the state that was saved with the model"
                )
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                raise UserError(
                    f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(parameter.shape)}: it does not belong to this model. Load the state that was saved with it"
                )
        elif isinstance(value, Tensor) and value.numel() != 1:  # no step count or running product
            raise UserError(
                f"optimizer state {key!r} of {name!r} is a tensor of shape {tuple(value.shape)} that no rule covers; "
                "register the optimizer with the power of the gradient it holds"
            )
