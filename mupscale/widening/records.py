"""What a growth leaves behind for training: the record of each parameter, and what happens around an optimizer's steps.

A `Record` has the scale of a parameter since the base width, and what no parameter group can express. It is kept in two
places. On the module, by name, where clipping and muP read it: mup stores it in an attribute of each Parameter, which
deepcopy, EMA copies, `to_empty` and `load_state_dict(assign=True)` lose; a plain attribute of the module survives all
of these, and pickling. And in the optimizer's parameter groups, under the key "mupscale", in the order of the
parameters, as a JSON text, which every copy and every kind of checkpoint of an optimizer keeps as it is. One pair of
hooks around the steps of all optimizers reads it.

Two things cannot be said by one learning rate for a parameter. Entries with unequal numbers of copies, or shares, need
a rate each; a weight that acts as c + w decays towards another value. So a step sees such a parameter in other units:
weights and gradients of every entry as if it had as many copies as its axis on average, without the shift; by Table 1
one learning rate, weight decay and eps are then right for all. Only the update is scaled back after the step.

And new copies whose state was reset have their own step count, the steps since the growth: entries with zero moments
and a large step count T would get wrong updates (Adam divides by 1 - β^T, which is nearly 1 but should be small, so
that with β₂ = 0.999 the first updates are three to six times too large). After each step their update is multiplied by
the factor that turns the bias corrections for T into those for their count (`OptimizerRule.own_count`), and by the
warm-up. A new optimizer would do the same, with two differences: eps is multiplied by sqrt((1 - β₂^T) / (1 - β₂^n)),
and decoupled weight decay is part of the update.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from mup import InfDim, InfShape
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mupscale.errors import UserError, refuse_unless_model
from mupscale.sharding import is_sharded, replicated, whole
from mupscale.widening.growth import Growth, along, copy_index, source_index
from mupscale.widening.optimizers import Group, OptimizerRule, rule_of
from mupscale.widening.table import NOTHING, Scale, Side

Rows = tuple[tuple[int, tuple[float, ...]], ...]
"""Some axes, each with a number for every entry."""

Rewarm = tuple[tuple[float, int], ...]
"""(birth, steps) for each growth."""


@dataclass(frozen=True)
class Record:
    """What optimizers must know of one parameter that grew, or that follows muP."""

    scale: Scale = NOTHING
    """Since the base width, or since the first growth."""
    base: tuple[int | None, ...] = ()
    """The base size of every axis, None where it is not width (muP only)."""
    entries: tuple[tuple[int, Side, tuple[float, ...]], ...] = ()
    """(axis, side, number of copies of each entry in units of the axis') where they differ, or have unequal shares."""
    shift: float = 0.0
    """What the weights have beyond a multiple of those at the base width; decay acts on the rest."""
    births: Rows = ()
    """The step count at which the copies along an axis were new, -1 for those that never were. An entry is as new as
    the newest of its axes."""
    rewarm: Rewarm = ()
    """(birth, steps): over how many steps the rate of the copies that were new then rises."""

    @property
    def steps_in_own_units(self) -> bool:
        """Whether an optimizer must see the parameter in other units than its own."""
        return bool(self.entries) or self.shift != 0

    @property
    def changes_steps(self) -> bool:
        return self.steps_in_own_units or bool(self.births)

    def entry_scale(self, side: Side, like: Tensor) -> Tensor:
        """The relative numbers of copies on that side, broadcastable to the parameter."""
        made = self.__dict__.setdefault("_made", {})  # every step needs them, and a captured one cannot make them
        key = side, like.dtype, like.device, like.ndim
        if key not in made:
            scale = torch.ones([1] * like.ndim, dtype=torch.float64)
            for axis, axis_side, row in self.entries:
                if axis_side == side:
                    scale = scale * _along(row, axis, like.ndim)
            made[key] = scale.to(like.device, like.dtype)
        return replicated(made[key], like) if is_sharded(like) else made[key]

    def born(self, like: Tensor) -> list[tuple[Tensor, float, int]]:
        """Lists, for each birth, which entries were new then, the step count, and the steps of warm-up."""
        made = self.__dict__.setdefault("_born", {})
        key = like.device, tuple(like.shape)
        if key not in made:
            births = torch.full([1] * like.ndim, -1.0, dtype=torch.float64)
            for axis, row in self.births:
                births = torch.maximum(births, _along(row, axis, like.ndim))
            rewarm = dict(self.rewarm)
            made[key] = []
            for birth in sorted(set(births.flatten().tolist()) - {-1.0}):
                mask = torch.empty_like(like, dtype=torch.bool, memory_format=torch.preserve_format)
                with whole(mask) as new:
                    new.copy_((births == birth).expand(like.shape))
                made[key].append((mask, birth, rewarm.get(birth, 0)))
        return made[key]

    def as_primitives(self) -> dict[str, Any]:
        """The record as plain values for JSON, which makes lists of tuples, without what equals the base width's."""
        answer: dict[str, Any] = {"scale": list(self.scale)}
        for key in ("base", "entries", "births", "rewarm", "shift"):
            if getattr(self, key):
                answer[key] = getattr(self, key)
        return answer


def record_of(primitives: Mapping[str, Any]) -> Record:
    """What `as_primitives` returned. Raises a KeyError, TypeError or ValueError for anything else."""
    known = {key: _tuples(primitives[key]) for key in ("base", "entries", "births", "rewarm") if key in primitives}
    return Record(Scale(*map(float, primitives["scale"])), shift=float(primitives.get("shift", 0.0)), **known)


def _along(row: tuple[float, ...], axis: int, ndim: int) -> Tensor:
    return along(torch.tensor(row, dtype=torch.float64), axis, ndim)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Records:
    """The records of a module, by the names of its parameters."""

    ATTRIBUTE: ClassVar[str] = "_mupscale_records"
    mup: bool
    """Whether hyperparameters follow muP from these widths; if not, they are only remembered for clipping."""
    by_name: dict[str, Record] = field(default_factory=dict)


def store_records(model: nn.Module, records: Records) -> None:
    """Leaves on each module the records of its own parameters: a part is clipped alone, and takes its records along."""
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        full = {name: f"{prefix}.{name}".removeprefix(".") for name in names}
        own = {name: records.by_name[key] for name, key in full.items() if key in records.by_name}
        if own:
            object.__setattr__(module, Records.ATTRIBUTE, Records(records.mup, own))
        else:
            vars(module).pop(Records.ATTRIBUTE, None)
    restore_infshapes(model)


def records_of(model: nn.Module, *, mup_only: bool = False) -> dict[str, Record]:
    """The records of `model` and of the modules inside it (a LightningModule, DDP, EMA), by full name."""
    answer: dict[str, Record] = {}
    for prefix, module in model.named_modules():
        held = module.__dict__.get(Records.ATTRIBUTE)
        if held and (held.mup or not mup_only):
            for name, record in held.by_name.items():
                answer.setdefault(f"{prefix}.{name}" if prefix else name, record)
    return answer


def names_by_id(model: nn.Module) -> dict[int, str]:
    """The name of every parameter, by its identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def restore_infshapes(model: nn.Module) -> None:
    """Gives parameters the `infshape` that mup's layers and initialisers read, and the record for `apply_mup`."""
    for name, record in records_of(model, mup_only=True).items():
        parameter: Any = model.get_parameter(name)
        if len(record.base) != parameter.ndim:  # added after the base shapes were set: no width is known
            continue
        parameter.infshape = InfShape(
            [InfDim(base, size) for base, size in zip(record.base, parameter.shape, strict=True)]
        )
        parameter.mup_record = record


StateRule = Literal["carry", "reset", "reset_new_copies"]
"""`carry` moves all state by Table 1, and the run continues exactly. `reset` drops it: moments and counts begin at
zero. `reset_new_copies` keeps it for the first copy of every unit and sets it to zero for the others, whose learning
rate may be warmed up again."""

RECORD = "mupscale"
"""Key of a parameter group: the records of its parameters (`records.py`)."""

_WORK = "_mupscale_work"
"""Attribute of an optimizer: what its steps need, made from the records of its groups; and what a step has kept."""


def check_state_rule(rule: str, rewarm_steps: int) -> None:
    """Raises a UserError for a state rule, or a warm-up, that does not exist."""
    if rule not in get_args(StateRule):
        raise UserError(f"the state rule must be one of {', '.join(get_args(StateRule))}; got {rule!r}")
    if isinstance(rewarm_steps, bool) or not isinstance(rewarm_steps, int) or rewarm_steps < 0:
        raise UserError(f"rewarm_steps must be a whole number of at least 0, got {rewarm_steps!r}")
    if rewarm_steps and rule != "reset_new_copies":
        raise UserError(
            f"rewarm_steps = {rewarm_steps} needs the state rule reset_new_copies, got {rule!r}. Use reset_new_copies, "
            "or leave rewarm_steps out"
        )


def check_own_count(optimizer: Optimizer) -> None:
    """Raises a UserError for an optimizer that does not support a separate step count of new copies."""
    if not rule_of(optimizer).own_count:
        raise UserError(
            f"reset_new_copies: it is not known how {type(optimizer).__name__} depends on its step count, so the count "
            "of new copies cannot be reset. Use carry or reset, or train with SGD, Adam, AdamW, Adamax, Adagrad or "
            "RMSprop"
        )


def new_copies(growth: Growth) -> Tensor:
    """A mask of the wide parameter: True for every entry but the first copy of each narrow one."""
    first = torch.ones([1] * len(growth.axes), dtype=torch.bool)
    for number, layout in enumerate(growth.layouts):
        first = first & along(copy_index(layout) == 0, number, len(growth.axes))
    return ~first


def grown_births(old: Record, growth: Growth, now: float | None) -> Rows:
    """The births of a wide parameter; `now` is the step count if its new copies begin anew."""
    before, answer = dict(old.births), []
    for number, layout in enumerate(growth.layouts):
        row = before.get(number, (-1.0,) * growth.narrow_shape[number])
        births = torch.tensor(row, dtype=torch.float64)[source_index(layout)]
        if now is not None:
            births[copy_index(layout) > 0] = now
        if bool((births >= 0).any()):
            answer.append((number, tuple(births.tolist())))
    return tuple(answer)


def attach(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Makes a pair of model and optimizer whole that was restored by hand, and returns the optimizer.

    After a growth, clipping needs the widths of the model since then, and some growths need more than one learning rate
    for a parameter: fractional factors, unequal shares, new copies with a step count of their own. `upscale` leaves
    this on the model and in the optimizer's parameter groups. Load the state of both into new ones, in any way, then
    call this: what one of them lacks is taken from the other.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> def build(width):
        ...     return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
        >>> narrow, wide, x = build(4), build(6), torch.randn(5, 3)
        >>> optimizer = torch.optim.SGD(narrow.named_parameters(), lr=0.1)
        >>> report = mupscale.upscale(narrow, wide, optimizer, call=lambda model: model(x))
        >>> weights, state = wide.state_dict(), report.optimizer.state_dict()  # in a file, perhaps
        >>> model = build(6)
        >>> model.load_state_dict(weights)
        <All keys matched successfully>
        >>> named = dict(model.named_parameters())
        >>> names = [group["param_names"] for group in state["param_groups"]]
        >>> optimizer = torch.optim.SGD([{"params": [(name, named[name]) for name in group]} for group in names])
        >>> optimizer.load_state_dict(state)
        >>> optimizer = mupscale.attach(model, optimizer)
    """
    refuse_unless_model("attach: model", model)
    of_model, names = records_of(model), names_by_id(model)
    of_groups: dict[str, Record] = {}
    for group in optimizer.param_groups:
        records = [
            record or of_model.get(names.get(id(parameter), ""))
            for parameter, record in zip(group["params"], group_records(group), strict=True)
        ]
        write_records(group, records)
        for parameter, record in zip(group["params"], records, strict=True):
            if record is not None and id(parameter) in names:
                of_groups[names[id(parameter)]] = record
    missing = {name: record for name, record in of_groups.items() if of_model.get(name) != record}
    if missing:
        store_records(model, Records(bool(records_of(model, mup_only=True)), of_model | missing))
    return optimizer


def set_records(model: nn.Module, optimizer: Optimizer, births: Mapping[str, tuple[Rows, Rewarm]]) -> None:
    """Writes the records of a model into the groups of its optimizer, with the births of new copies, by name."""
    records, names = records_of(model), names_by_id(model)
    new = {
        name: replace(records.get(name, Record()), births=rows, rewarm=steps) for name, (rows, steps) in births.items()
    }
    if any(record != records.get(name, Record()) for name, record in new.items()):
        records |= new
        store_records(model, Records(bool(records_of(model, mup_only=True)), records))
    for group in optimizer.param_groups:
        write_records(group, [records.get(names.get(id(parameter), "")) for parameter in group["params"]])


def step_records(optimizer: Optimizer) -> dict[int, Record]:
    """The records that change the steps of an optimizer, by the identity of the parameter."""
    return {id(each.parameter): each.record for each in _work_of(optimizer)}


def write_records(group: Group, records: Sequence[Record | None]) -> None:
    """Leaves the records of its parameters, in their order, in a parameter group."""
    group.pop(RECORD, None)
    if any(record is not None for record in records):
        group[RECORD] = json.dumps([None if record is None else record.as_primitives() for record in records])


def group_records(group: Group) -> list[Record | None]:
    """What `write_records` left in a parameter group; None for parameters without a record."""
    if RECORD not in group:
        return [None] * len(group["params"])
    try:
        records = [None if each is None else record_of(each) for each in json.loads(group[RECORD])]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"the record of the growth in a parameter group is damaged ({type(error).__name__} {error}): load the "
            "optimizer state that was saved"
        ) from error
    if len(records) != len(group["params"]):
        raise UserError(
            f"a group of the optimizer has {len(group['params'])} parameters, and records of {len(records)}: load the "
            "optimizer state into groups of the same parameters"
        )
    return records


def update_factor(
    rule: OptimizerRule, group: Group, count: Tensor, birth: Tensor | float, rewarm_steps: Tensor | float
) -> Tensor:
    """What the update of new copies is multiplied by: their own count, and the warm-up.

    `count` is the step count in float64. It may have one entry for each of many models; the other numbers, and those in
    `group`, may then be tensors of its shape.
    """
    age = (count - birth).clamp(min=1)
    assert rule.own_count is not None
    steps = rewarm_steps.clamp(min=1) if isinstance(rewarm_steps, Tensor) else max(rewarm_steps, 1)
    return rule.own_count(group, count, age) * (age / steps).clamp(max=1)


@dataclass
class _Work:
    """A parameter whose steps are changed, and what a step needs again at its end."""

    parameter: Tensor
    group: Group
    record: Record
    weights: Tensor | None = None
    converted: Tensor | None = None
    gradient: Tensor | None = None


def _work_of(optimizer: Optimizer) -> list[_Work]:
    key = [(group.get(RECORD), [id(parameter) for parameter in group["params"]]) for group in optimizer.param_groups]
    cached = optimizer.__dict__.get(_WORK)
    if cached is None or cached[0] != key:
        work = []
        for group in optimizer.param_groups:
            if not any(f'"{key}"' in group.get(RECORD, "") for key in ("entries", "shift", "births")):
                continue  # parameters that step as usual may have been moved to other groups
            for parameter, record in zip(group["params"], group_records(group), strict=True):
                if record is not None and record.changes_steps:
                    work.append(_Work(parameter, group, record))
        optimizer.__dict__[_WORK] = cached = key, work
    return cached[1]


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not any(RECORD in group for group in optimizer.param_groups) or not _work_of(optimizer):
        return None
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is itself
    if closure is None:
        _enter(optimizer)
        return None

    def closure_then_enter() -> Any:  # the closure computes the gradients, so it must see the weights as they are
        loss = closure()
        _enter(optimizer)
        return loss

    return args[:1], {**kwargs, "closure": closure_then_enter}


@torch.no_grad()
def _enter(optimizer: Optimizer) -> None:
    for work in _work_of(optimizer):
        parameter, record = work.parameter, work.record
        work.weights, work.gradient = parameter.clone(), parameter.grad
        if record.shift:
            parameter.sub_(record.shift)
        if record.entries:
            parameter.mul_(record.entry_scale("in", parameter))
            if work.gradient is not None:
                parameter.grad = work.gradient * record.entry_scale("out", work.gradient)
        work.converted = parameter.clone() if record.steps_in_own_units else None


@torch.no_grad()
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _, every = optimizer.__dict__.get(_WORK, (None, ()))
    for work in every:
        if work.weights is None:
            continue
        parameter, record = work.parameter, work.record
        if work.converted is not None:
            # only the update is scaled, so that rounding never touches a weight that did not move
            parameter.sub_(work.converted)
            if record.entries:
                parameter.div_(record.entry_scale("in", parameter))
            parameter.add_(work.weights)
            parameter.grad = work.gradient
        if record.births:
            _slow_new_copies(optimizer, parameter, work.group, record, work.weights)
        work.weights = work.converted = work.gradient = None


def _slow_new_copies(optimizer: Optimizer, parameter: Tensor, group: Group, record: Record, before: Tensor) -> None:
    rule, state = rule_of(optimizer), optimizer.state.get(parameter, {})
    if not rule.counts_steps and parameter.grad is not None:
        state["step"].add_(1)
    if "step" not in state:  # it has not been moved
        return
    count = torch.as_tensor(state["step"]).double()
    for mask, birth, rewarm_steps in record.born(parameter):
        factor = update_factor(rule, group, count, birth, rewarm_steps)
        scaled = before.lerp(parameter, factor.to(parameter))
        parameter.copy_(torch.where(mask, scaled, parameter))


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
