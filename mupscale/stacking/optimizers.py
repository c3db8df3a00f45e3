"""SGD and Adam for stacked models, with different hyperparameters for each model.

torch's optimizers have one learning rate per tensor. Here a tensor holds the weights of all models, and hyperparameters
are tensors with one entry per model. The arithmetic is that of torch's optimizers, in the same order. The state of each
model is in the `state` of its optimizer, as usual.

A step has two parts. `factors` computes all numbers that a step needs, for all parameters at once, from small tensors
in float64. `update` reads and writes the weights, in as few passes over memory as possible.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.stacking.adjustments import Adjustment, adjustments, per_model, step_adjusted
from mupscale.stacking.compiled import Compiled
from mupscale.widening.optimizers import groups_by_id, rule_of
from mupscale.widening.records import Record, step_records, update_factor

Numbers = dict[str, Any]
"""Tensors, or flags, by name."""

_NEW = "new copies "
"""How the names of the factors of new copies begin, one for each birth."""


class StackedOptimizer:
    """The step of many optimizers of one class; `numbers` may differ between them, `flags` may not.

    A step reads no number from the optimizers: `read_numbers` does so for all of them, `read_rates` for the learning
    rates alone, which takes less time.
    """

    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    moments = 0
    """How many tensors of the size of a weight its state has, at most, without AMSGrad's."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        compiled: bool,
    ) -> None:
        self.weights = weights
        self._rule = rule_of(optimizers[0])
        self._places = [_places(model, optimizer, weights) for model, optimizer in zip(models, optimizers, strict=True)]
        self._refuse_unlike()
        device = next(iter(weights.values())).device
        self._around = {
            name: adjustments(weight.detach(), [place[name].record for place in self._places])
            for name, weight in weights.items()
        }
        self._births = self._stacked_births()
        shape = len(self.numbers), len(weights), len(models)
        self._table = torch.zeros(shape, dtype=torch.float64, device=device)
        self._groups, self._group_of = self._numbered_groups()
        self._last_read: dict[str, list[float]] = {}
        # of each parameter: one that was frozen begins later
        begun = [[place[name].has_state() for place in self._places] for name in weights]
        self.begun = torch.tensor(begun, dtype=torch.float64, device=device)
        self._is_begun = all(map(all, begun))
        self.steps = torch.zeros(len(weights), len(models), dtype=torch.float32, device=device)
        self.state: dict[str, dict[str, Tensor]] = {
            name: self._joined(name, steps) for name, steps in zip(weights, self.steps, strict=True)
        }
        if not self._rule.counts_steps:
            self._count_those_of_new_copies()
        self._update_all = Compiled(_update_all, "the update of the weights") if compiled else _update_all
        self.read_numbers()

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Moves the weights, by the numbers that were read last."""
        self.begin()
        moved = [index for index, gradient in enumerate(gradients) if gradient is not None]
        names = list(self.weights)
        table, births, steps, begun = self._table, self._births, self.steps, self.begun.clone()
        if len(moved) < len(names):
            chosen = self._chosen(tuple(moved))
            steps.index_add_(0, chosen, torch.ones_like(steps[: len(moved)]))
            table, births, steps, begun = table[:, chosen], births[:, :, chosen], steps[chosen], begun[chosen]
            self.begun.index_fill_(0, chosen, 1.0)
        else:
            steps.add_(1)
            self.begun.fill_(1.0)
        weights = [self.weights[names[index]].detach() for index in moved]
        states = [self.state[names[index]] for index in moved]
        values = dict(zip(self.numbers, table, strict=True))
        factors = self.factors(values, steps, begun)
        group = {**values, "betas": (values.get("beta1"), values.get("beta2"))}
        for level, (birth, rewarm_steps) in enumerate(births):
            factors[f"{_NEW}{level}"] = update_factor(self._rule, group, steps.double(), birth, rewarm_steps)
        if len({weight.dtype for weight in weights}) == 1:  # converted for all weights at once
            factors = {key: value.to(weights[0].dtype) for key, value in factors.items()}
        self._update_all(
            self.update,
            weights,
            [gradient for gradient in gradients if gradient is not None],
            [{key: value for key, value in state.items() if key != "step"} for state in states],
            [self._around[names[index]] for index in moved],
            factors,
            self._flags,
        )

    def begin(self) -> None:
        """Gives the optimizers views of the state that the first step fills.

        `step` does so too. A step that a CUDA graph captures cannot, so this must come before it. Checkpoints between
        here and the first step have state that is zero.
        """
        if not self._is_begun:
            for name, joined in self.state.items():
                for index, place in enumerate(self._places):
                    place[name].state().update({key: stacked[index] for key, stacked in joined.items()})
            self._is_begun = True

    def read_numbers(self) -> None:
        """Reads all numbers from the groups of the optimizers; call it where one may have changed."""
        self._flags = {key: self.flag(key) for key in self.flags}
        for key in self.numbers:
            self._read(key)

    def read_rates(self) -> None:
        """Reads the learning rates, one for each group of each model; call it where schedules changed them."""
        self._read("lr")

    def _read(self, key: str) -> None:
        values = self.values(key)
        if values != self._last_read.get(key):
            self._last_read[key] = values
            read = torch.tensor(values, dtype=torch.float64)[self._group_of]
            row = self._table[self.numbers.index(key)]
            row.copy_(read.pin_memory() if row.is_cuda else read, non_blocking=True)  # the host need not wait

    def values(self, key: str) -> list[float]:
        """A number of all groups."""
        return [float(group[key]) for group in self._groups]

    def flag(self, key: str) -> Any:
        """What all groups have in common."""
        return next(iter(self._places[0].values())).group.get(key)

    def fresh(self, weight: Tensor, steps: Tensor) -> dict[str, Tensor]:
        """The state of a weight, a stacked tensor, before its first step; `steps` counts those of each model."""
        raise NotImplementedError

    def factors(self, values: dict[str, Tensor], steps: Tensor, begun: Tensor) -> dict[str, Tensor]:
        """What the update multiplies with: [parameters, models], in float64.

        `begun` is 1 where a parameter has been moved before.
        """
        raise NotImplementedError

    @staticmethod
    def update(weight: Tensor, gradient: Tensor, state: Numbers, factors: Numbers, flags: Numbers) -> None:
        """Moves one stacked weight; each of the factors multiplies a tensor of its shape."""
        raise NotImplementedError

    def _numbered_groups(self) -> tuple[list[dict[str, Any]], Tensor]:
        """All groups of all models, and which of them has a parameter: [parameters, models]."""
        groups: dict[int, dict[str, Any]] = {}
        for place in self._places:
            groups.update({id(owner.group): owner.group for owner in place.values()})
        numbers = {key: index for index, key in enumerate(groups)}
        found = [[numbers[id(place[name].group)] for place in self._places] for name in self.weights]
        return list(groups.values()), torch.tensor(found)

    def _chosen(self, indices: tuple[int, ...]) -> Tensor:
        """The indices of parameters that have a gradient, on the device; made once, outside of a capture."""
        if self._last_chosen is None or self._last_chosen[0] != indices:
            self._last_chosen = indices, torch.tensor(indices, device=self._table.device)
        return self._last_chosen[1]

    _last_chosen: tuple[tuple[int, ...], Tensor] | None = None

    def _joined(self, name: str, steps: Tensor) -> dict[str, Tensor]:
        """The state of a parameter in all models, stacked; the optimizers get views of it."""
        joined = self.fresh(self.weights[name], steps)
        for index, place in enumerate(self._places):
            own = place[name].state() if place[name].has_state() else {}
            for key, stacked in joined.items():
                if isinstance(own.get(key), Tensor):
                    stacked[index].copy_(own[key])
                    own[key] = stacked[index]
        return joined

    def _stacked_births(self) -> Tensor:
        """[births, 2, parameters, models]: the step count at which copies were new, and the steps of their warm-up."""
        born = [[place[name].born() for place in self._places] for name in self.weights]
        levels = max((len(own) for row in born for own in row), default=0)
        padded = [[own + [(0.0, 0)] * (levels - len(own)) for own in row] for row in born]
        answer = torch.tensor(padded, dtype=torch.float64).view(len(born), len(self._places), levels, 2)
        return answer.permute(2, 3, 0, 1).contiguous().to(next(iter(self.weights.values())).device)

    def _count_those_of_new_copies(self) -> None:
        """Makes the step counts of new copies, which torch's optimizer does not have, entries of `steps`."""
        for name, steps in zip(self.weights, self.steps, strict=True):
            for index, place in enumerate(self._places):
                if place[name].record.births:
                    own = place[name].state()
                    steps[index].copy_(own["step"])
                    own["step"] = steps[index]

    def _refuse_unlike(self) -> None:
        first = next(iter(self._places[0].values())).group
        for key in self.flags:
            for place in self._places:
                for name, owner in place.items():
                    if owner.group.get(key) != first.get(key):
                        raise UserError(
                            f"optimizers that stack have {key} in common; it is {first.get(key)} and, for {name}, "
                            f"{owner.group.get(key)}"
                        )


class ParameterSlot(NamedTuple):
    """Where an optimizer has a parameter: its group, and its state."""

    optimizer: Optimizer
    parameter: nn.Parameter
    group: dict[str, Any]
    record: Record

    def has_state(self) -> bool:
        """Whether a step has been taken: new copies of a model that grew before have their count only."""
        return bool(self.optimizer.state.get(self.parameter, {}).keys() - {"step"})

    def born(self) -> list[tuple[float, int]]:
        """The births of new copies, and the steps of their warm-up."""
        return [(birth, steps) for _, birth, steps in self.record.born(self.parameter)] if self.record.births else []

    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.parameter]


class StackedSGD(StackedOptimizer):
    numbers = ("lr", "weight_decay", "momentum", "dampening")
    flags = ("nesterov", "maximize")
    moments = 1

    def fresh(self, weight: Tensor, steps: Tensor) -> dict[str, Tensor]:
        moved = {owner.group["momentum"] != 0 for place in self._places for owner in place.values()}
        if len(moved) > 1:
            raise UserError("optimizers that stack have a momentum, or none of them has; here it is 0 in some")
        return {"momentum_buffer": torch.zeros_like(weight, requires_grad=False)} if moved == {True} else {}

    def factors(self, values: dict[str, Tensor], steps: Tensor, begun: Tensor) -> dict[str, Tensor]:
        taken = 1 - values["dampening"] * begun  # the first gradient is taken whole
        return {"rate": values["lr"], "taken": taken, **{key: values[key] for key in ("weight_decay", "momentum")}}

    @staticmethod
    def update(weight: Tensor, gradient: Tensor, state: Numbers, factors: Numbers, flags: Numbers) -> None:
        """The step of `torch.optim.SGD`, in place; `taken` is 1 - dampening."""
        gradient = -gradient if flags["maximize"] else gradient
        gradient = torch.addcmul(gradient, weight, factors["weight_decay"])
        if "momentum_buffer" in state:
            momentum_buffer, momentum = state["momentum_buffer"], factors["momentum"]
            momentum_buffer.mul_(momentum).addcmul_(gradient, factors["taken"])
            gradient = gradient.addcmul_(momentum_buffer, momentum) if flags["nesterov"] else momentum_buffer
        weight.addcmul_(gradient, -factors["rate"])


class StackedAdam(StackedOptimizer):
    numbers = ("lr", "eps", "weight_decay", "beta1", "beta2")
    flags = ("amsgrad", "maximize", "decoupled_weight_decay")
    moments = 2

    def values(self, key: str) -> list[float]:
        if key not in ("beta1", "beta2"):
            return super().values(key)
        return [float(group["betas"][int(key[-1]) - 1]) for group in self._groups]

    def fresh(self, weight: Tensor, steps: Tensor) -> dict[str, Tensor]:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.flag("amsgrad") else [])]
        return {"step": steps, **{key: torch.zeros_like(weight, requires_grad=False) for key in keys}}

    def factors(self, values: dict[str, Tensor], steps: Tensor, begun: Tensor) -> dict[str, Tensor]:
        rate, beta1, beta2 = values["lr"], values["beta1"], values["beta2"]
        steps = steps.double()
        decay = values["weight_decay"]
        return {
            "decay": 1 - rate * decay if self._flags["decoupled_weight_decay"] else decay,
            "new1": 1 - beta1,
            "beta2": beta2,
            "new2": 1 - beta2,
            "root": (1 - beta2**steps).sqrt(),
            "size": rate / (1 - beta1**steps),
            "eps": values["eps"],
        }

    @staticmethod
    def update(weight: Tensor, gradient: Tensor, state: Numbers, factors: Numbers, flags: Numbers) -> None:
        """The step of `torch.optim.Adam`, in place; `factors` computes the numbers."""
        gradient = -gradient if flags["maximize"] else gradient
        if flags["decoupled_weight_decay"]:
            weight.mul_(factors["decay"])
        else:
            gradient = torch.addcmul(gradient, weight, factors["decay"])
        state["exp_avg"].lerp_(gradient, factors["new1"])
        second = state["exp_avg_sq"]
        second.mul_(factors["beta2"]).addcmul_(gradient * factors["new2"], gradient)
        if flags["amsgrad"]:
            second = state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], second))
        divisor = second.sqrt().div_(factors["root"]).add_(factors["eps"])
        weight.addcmul_(state["exp_avg"] / divisor, -factors["size"])


def _update_all(
    update: Any,
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    arounds: list[Adjustment],
    factors: dict[str, Tensor],
    flags: dict[str, Any],
) -> None:
    """Moves all weights. The factors are [weights, models]."""
    for index, (weight, gradient, state, parts) in enumerate(zip(weights, gradients, states, arounds, strict=True)):
        own = {key: per_model(value[index], weight) for key, value in factors.items()}
        new_factors = [own.pop(key) for key in list(own) if key.startswith(_NEW)]
        step_adjusted(parts, update, weight, gradient, state, own, flags, new_factors=new_factors)


KINDS: dict[type[Optimizer], type[StackedOptimizer]] = {
    torch.optim.SGD: StackedSGD,
    torch.optim.Adam: StackedAdam,
    torch.optim.AdamW: StackedAdam,
}
"""Classes whose steps can be taken together; not their subclasses, which may do other things."""


def stacked_kind(kind: type[Optimizer]) -> type[StackedOptimizer]:
    """The stacked step of an optimizer's class. Raises a UserError if there is none."""
    if kind not in KINDS:
        names = ", ".join(known.__name__ for known in KINDS)
        raise UserError(f"{kind.__name__} cannot step many models at once; {names} can")
    return KINDS[kind]


def stacked_optimizer(
    weights: dict[str, Tensor], models: Sequence[nn.Module], optimizers: Sequence[Optimizer], *, compiled: bool = False
) -> StackedOptimizer:
    """The optimizers of all models as one. Raises a UserError if their classes differ, or have no stacked step."""
    names = sorted({type(optimizer).__name__ for optimizer in optimizers})
    if len(names) > 1:
        raise UserError(f"optimizers that stack are of one class, got {', '.join(names)}")
    return stacked_kind(type(optimizers[0]))(weights, models, optimizers, compiled=compiled)


def _places(model: nn.Module, optimizer: Optimizer, weights: dict[str, Tensor]) -> dict[str, ParameterSlot]:
    groups, records = groups_by_id(optimizer), step_records(optimizer)
    places = {}
    for name, parameter in model.named_parameters():
        if name in weights:
            if id(parameter) not in groups:
                raise UserError(
                    f"{name} is trained, but its optimizer does not have it; freeze it, or leave it to torch"
                )
            record = records.get(id(parameter), Record())
            places[name] = ParameterSlot(optimizer, parameter, groups[id(parameter)], record)
    return places
