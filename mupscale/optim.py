"""Optimizers across widths: parameter groups split and rescaled by the rules, state moved by parameter name."""

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.layout import duplicate_
from mupscale.rules import Factors, Group, OptimizerRule, Scaling, is_number, rule_of
from mupscale.sharding import gathered, whole
from mupscale.tables import Width, merged_table
from mupscale.widths import Plan, TensorPlan

SOURCE_GROUP = "source_group"
"""Key of a parameter group: the index of the group it was split from."""

_LEARNING_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""What schedulers keep in a group beside the rate itself, in the same unit."""


# --- hyperparameters -------------------------------------------------------------------------------------------------------


def apply_mup(optimizer: Optimizer, model: nn.Module | None = None) -> Optimizer:
    """Turns a plain optimizer over `model` into its muP-scaled self, in place, and returns it.

    Its hyperparameters become base constants: what they are at the base width of `set_base_shapes`. Groups are split where
    their parameters scale differently; each part remembers its origin under the key "source_group". Without the model, widths
    are read off the parameters themselves, which copies of a model do not carry.
    """
    if model is None:
        return _scaled_from_base(optimizer, _own_width)
    table = merged_table(model, mup_only=True)
    if not table:
        raise ValueError("apply_mup: the model has no base shapes. Call mupscale.set_base_shapes(model, base, delta) first")
    names = _names(model)
    widths: dict[int, Width] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(f"apply_mup: the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model")
            widths[id(parameter)] = table.get(name, Width())
    return _scaled_from_base(optimizer, lambda parameter: widths[id(parameter)])


def MuSGD(params: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    """torch's SGD under muP, over a model or its parameters."""
    return _mu_optimizer(torch.optim.SGD, params, settings)


def MuAdam(params: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    """torch's Adam under muP, over a model or its parameters."""
    return _mu_optimizer(torch.optim.Adam, params, settings)


def MuAdamW(params: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    """torch's AdamW under muP, over a model or its parameters."""
    return _mu_optimizer(torch.optim.AdamW, params, settings)


def _mu_optimizer(kind: type[Optimizer], params: nn.Module | Iterable[Any], settings: dict[str, Any]) -> Optimizer:
    if isinstance(params, nn.Module):
        return apply_mup(kind(params.parameters(), **settings), params)
    return apply_mup(kind(params, **settings))


def _own_width(parameter: Tensor) -> Width:
    if not hasattr(parameter, "mup_width"):
        raise ValueError(
            f"muP: a parameter of shape {tuple(parameter.shape)} has no base shape (copies of a model lose it). "
            "Call mupscale.set_base_shapes, or pass the model itself: apply_mup(optimizer, model), MuAdamW(model, ...)"
        )
    return parameter.mup_width


def _scaled_from_base(optimizer: Optimizer, width_of: Callable[[Tensor], Width]) -> Optimizer:
    if any(SOURCE_GROUP in group for group in optimizer.param_groups):
        raise ValueError("apply_mup: this optimizer is muP-scaled already")
    rule = rule_of(optimizer)

    def factors(parameter: Tensor) -> Factors:
        width = width_of(parameter)
        after = tuple(parameter.shape)
        before = tuple(base or size for base, size in zip(width.base, after, strict=True)) if width.base else after
        return Factors(width.m_out, width.m_in, before, after)

    groups = split_groups(optimizer.param_groups, rule, lambda parameter: (parameter, factors(parameter)))
    for parameter in (p for group in groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        if float(state.get("step", 0)) == 0:  # Adagrad starts from an accumulator that is in the gradient's units
            for key in rule.state.keys() & state.keys():
                state[key].mul_(factors(parameter).k_out ** -rule.state[key])
    optimizer.param_groups[:] = groups
    return optimizer


def split_groups(groups: Sequence[Group], rule: OptimizerRule, target_of: Callable[[Tensor], tuple[Tensor, Factors]]) -> list[Group]:
    """The groups with every parameter replaced by its target and hyperparameters rescaled; split where the scaling differs."""
    answer: list[Group] = []
    for index, group in enumerate(groups):
        parts: dict[Scaling, Group] = {}
        for position, parameter in enumerate(group["params"]):
            target, factors = target_of(parameter)
            scaling = _relevant(rule.scale(group, factors), group)
            if scaling not in parts:
                parts[scaling] = _scaled_group(group, scaling) | {"params": [], SOURCE_GROUP: group.get(SOURCE_GROUP, index)}
                if "param_names" in group:
                    parts[scaling]["param_names"] = []
            parts[scaling]["params"].append(target)
            if "param_names" in group:
                parts[scaling]["param_names"].append(group["param_names"][position])
        answer += parts.values()
    return answer


def _relevant(scaling: Scaling, group: Group) -> Scaling:
    """The scaling without what this group does not have, so that it is not split for nothing."""
    return Scaling(
        scaling.lr, scaling.eps if group.get("eps") else 1.0, scaling.weight_decay if _nonzero(group.get("weight_decay")) else 1.0
    )


def _nonzero(value: Any) -> bool:
    return value is not None and bool(value != 0)


def _scaled_group(group: Group, scaling: Scaling) -> Group:
    scaled = {key: copy.copy(value) for key, value in group.items() if key not in ("params", "param_names")}
    for key in _LEARNING_RATES:
        if key in scaled:
            scaled[key] = scaled[key] * scaling.lr  # out of place: a tensor learning rate belongs to the old group
    if group.get("eps"):
        scaled["eps"] = group["eps"] * scaling.eps
    if "weight_decay" in group:
        scaled["weight_decay"] = group["weight_decay"] * scaling.weight_decay
    return scaled


# --- the wide optimizer ----------------------------------------------------------------------------------------------------


def check_transfer(plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, wide_opt: Optimizer | None) -> None:
    """Raises ValueError, before anything is written, where `narrow_opt` cannot be continued on the wide model."""
    rule = rule_of(narrow_opt)
    names = _names(narrow)
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the narrow model: "
                    "it belongs to another model, or to a copy of this one. Pass the optimizer built over narrow.parameters()"
                )
            if plan.parameters[name].mixed and not rule.entrywise:
                raise ValueError(
                    f"parameter {name!r} is made of unlike pieces, which {type(narrow_opt).__name__} cannot continue exactly; "
                    "give it to AdamW in a second optimizer"
                )
            _check_state(name, parameter, narrow_opt.state.get(parameter, {}), group, rule)
    strangers = {id(p) for p in narrow_opt.state} - {id(p) for g in narrow_opt.param_groups for p in g["params"]}
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in narrow_opt.state if id(p) in strangers)
        raise ValueError(
            f"the optimizer has state for parameters (of shape {shapes}) in none of its groups: remove it, or add them to a group"
        )
    if wide_opt is None:
        try:
            inspect.signature(type(narrow_opt)).bind([], **_settings(narrow_opt))
        except TypeError as error:
            raise ValueError(f"{type(narrow_opt).__name__} cannot be built from its defaults ({error}): give wide_opt yourself") from None
        return
    if type(wide_opt) is not type(narrow_opt):
        raise ValueError(
            f"the state of {type(narrow_opt).__name__} cannot move into {type(wide_opt).__name__}; give the wide model the same class"
        )
    held = {id(parameter) for group in wide_opt.param_groups for parameter in group["params"]}
    wide_named = dict(wide.named_parameters())
    unknown = held - {id(parameter) for parameter in wide_named.values()}
    if unknown:
        raise ValueError("wide_opt holds parameters that are not in the wide model: build it over wide.parameters()")
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if id(wide_named[name]) not in held and wide_named[name].requires_grad and narrow_opt.state.get(parameter):
                raise ValueError(f"parameter {name!r} has optimizer state, but wide_opt does not hold it: build it over all parameters")


def continued_groups(plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module) -> list[Group]:
    """The parameter groups that continue `narrow_opt` on the wide model, hyperparameters rescaled relative to its own."""
    names = _names(narrow)
    wide_named = dict(wide.named_parameters())

    def target(parameter: Tensor) -> tuple[Tensor, Factors]:
        entry = plan.parameters[names[id(parameter)]]
        return wide_named[entry.name], Factors(entry.k_out, entry.k_in, entry.narrow_shape, entry.wide_shape)

    return split_groups(narrow_opt.param_groups, rule_of(narrow_opt), target)


def continued_optimizer(plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module) -> Optimizer:
    """A new optimizer of the same class over the wide parameters, with those groups."""
    optimizer = type(narrow_opt)(continued_groups(plan, narrow, narrow_opt, wide), **_settings(narrow_opt))
    optimizer.state.clear()  # Adagrad begins with state; what the narrow one has is moved
    return optimizer


def off_the_rule(plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, wide_opt: Optimizer) -> list[str]:
    """A note on each hyperparameter of `wide_opt` that does not follow from `narrow_opt` by one common change of base constants."""
    rule, wide_named = rule_of(narrow_opt), dict(wide.named_parameters())
    group_of = {id(parameter): group for group in wide_opt.param_groups for parameter in group["params"]}
    names = _names(narrow)
    ratios: dict[str, dict[float, str]] = {"lr": {}, "eps": {}, "weight_decay": {}}
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:
            entry = plan.parameters[names[id(parameter)]]
            wide_group = group_of.get(id(wide_named[entry.name]))
            scaling = rule.scale(group, Factors(entry.k_out, entry.k_in, entry.narrow_shape, entry.wide_shape))
            for key, factor in scaling._asdict().items():
                if wide_group is not None and _nonzero(group.get(key)) and _nonzero(wide_group.get(key)):
                    ratio = float(wide_group[key]) / (float(group[key]) * factor)
                    ratios[key].setdefault(float(f"{ratio:.6g}"), entry.name)
    return [
        f"wide_opt: {key} is {' and '.join(f'{ratio:g} times (of {name})' for ratio, name in found.items())} what continues the narrow "
        "run; a change of base constants would be the same for all. Scale it with apply_mup, or pass wide_opt=None"
        for key, found in ratios.items()
        if len(found) > 1
    ]


def transfer_state(plan: Plan, narrow: nn.Module, narrow_opt: Optimizer, wide: nn.Module, wide_opt: Optimizer, *, consume: bool) -> None:
    """Moves all state by parameter name; with `consume`, freeing the narrow tensors one by one."""
    wide_named = dict(wide.named_parameters())
    names = _names(narrow)
    for group in narrow_opt.param_groups:
        for parameter in group["params"]:  # what wide_opt may hold from before is of another run
            wide_opt.state.pop(wide_named[names[id(parameter)]], None)
    group_of = {id(parameter): group for group in wide_opt.param_groups for parameter in group["params"]}
    rule = rule_of(narrow_opt)
    for name, source in narrow.named_parameters():
        target = wide_named[name]
        if source not in narrow_opt.state or id(target) not in group_of:
            continue
        state = narrow_opt.state.pop(source) if consume else narrow_opt.state[source]
        moved = {}
        for key in list(state):
            value = state.pop(key) if consume else state[key]
            moved[key] = _moved(key, value, plan.parameters[name], source, target, group_of[id(target)], rule)
            del value
        wide_opt.state[target] = moved


def _moved(key: str, value: Any, entry: TensorPlan, source: Tensor, target: Tensor, group: Group, rule: OptimizerRule) -> Any:
    """Tensors of the parameter's shape as dup / k_out^power in their own dtype; counters as clones in theirs."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if key not in rule.state:
        on_device = group.get("fused") or group.get("capturable") or value.device.type != "cpu"
        return value.detach().clone().to(target.device if on_device else value.device)
    dtype = target.dtype if value.dtype == source.dtype else value.dtype
    tensor = torch.empty_like(target, dtype=dtype, memory_format=torch.preserve_format)
    with whole(tensor) as state:
        # one factor for all, also where pieces grow differently: such state is kept in reference units
        duplicate_(state, gathered(value), entry.layouts, scale=entry.k_out ** -rule.state[key])
    return tensor


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments its constructor takes, from its defaults."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {key: copy.copy(value) for key, value in optimizer.defaults.items() if key in accepted}


def _check_state(name: str, parameter: Tensor, state: dict[str, Any], group: Group, rule: OptimizerRule) -> None:
    reason = rule.ready(group, state) if rule.ready and parameter.requires_grad else None
    if reason:
        raise ValueError(f"parameter {name!r}: {reason}")
    for key, value in state.items():
        if key in rule.state:
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                raise ValueError(
                    f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}: "
                    "it does not belong to this model. Load the state that was saved with it"
                )
        elif not is_number(value):
            raise ValueError(
                f"optimizer state {key!r} of {name!r} is a tensor of shape {tuple(value.shape)} that no rule covers; "
                "register the optimizer with the power of the gradient it holds"
            )


# --- parameters whose pieces grow by different factors -----------------------------------------------------------------------


def use_fused(optimizer: Optimizer) -> None:
    """Lets the optimizer do its step in one kernel a group, where torch has one for its class and nothing else was asked for."""
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):  # AdamW is an Adam; Adagrad's kernel is the CPU's alone in torch 2.11
        return
    for group in optimizer.param_groups:
        on_gpu = all(p.is_cuda and p.is_floating_point() for p in group["params"])
        if on_gpu and group.get("fused", True) is None and group.get("foreach") is None:
            group["fused"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):  # a fused step counts on the device
                    state["step"] = state["step"].to(parameter.device, torch.float32)


def keep_reference_units(model: nn.Module, optimizer: Optimizer) -> None:
    """Makes `optimizer` exact for parameters whose pieces grew by different factors, with hooks around its step.

    A layer that reads width concatenated with fixed features would need a learning rate per column. Instead the step sees every
    piece in the units of the fastest-growing one: weights · k_in / k_in(reference), gradients · k_out / k_out(reference); by
    Table 1 one learning rate, weight decay and eps are then right for all. Its update is scaled back after the step.

    `upscale` calls this. Hooks are not part of an optimizer's state: after loading one into a new process, call it again.
    """
    for handle in optimizer.__dict__.pop(_HOOKS, ()):
        handle.remove()
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    table = merged_table(model)
    mixed = [(p, table[name]) for name, p in model.named_parameters() if id(p) in held and name in table and table[name].relative]
    if not mixed:
        return
    originals: list[tuple[Tensor, Tensor, Tensor | None]] = []

    @torch.no_grad()
    def enter() -> None:
        for parameter, width in mixed:
            weights, gradient = parameter.clone(), parameter.grad
            parameter.mul_(width.relative_scale("in", parameter))
            originals.append((weights, parameter.clone(), gradient))
            if gradient is not None:
                parameter.grad = gradient * width.relative_scale("out", gradient)

    @torch.no_grad()
    def leave() -> None:
        for (parameter, width), (weights, converted, gradient) in zip(mixed, originals, strict=True):
            # only the update is scaled, so that rounding never touches a weight that did not move
            parameter.sub_(converted).div_(width.relative_scale("in", parameter)).add_(weights)
            parameter.grad = gradient
        originals.clear()

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer itself
        if closure is None:
            enter()
            return args, kwargs

        def closure_then_enter() -> Any:  # the closure computes the gradients, so it must see the weights as they are
            loss = closure()
            enter()
            return loss

        return args[:1], {**kwargs, "closure": closure_then_enter}

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(lambda *_: leave())
    optimizer.__dict__[_HOOKS] = handles


_HOOKS = "_mupscale_reference_units"


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}
