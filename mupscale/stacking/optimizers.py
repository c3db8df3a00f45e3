"""SGD and Adam for models that take their steps together: every number may be another one in each of them.

torch's optimizers take one learning rate for a tensor. Here a tensor holds the weights of all models, and the numbers
are tensors with one entry for each; the arithmetic is that of torch's optimizers, in their order. State lies where they
keep it: each model's optimizer finds its own in `optimizer.state`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.errors import UserError
from mupscale.stacking.clip import along


class StackedOptimizer:
    """The step of many optimizers of one class; `numbers` may differ between them, `flags` may not."""

    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def __init__(
        self, weights: dict[str, Tensor], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self.weights = weights
        self._places = [_places(model, optimizer, weights) for model, optimizer in zip(models, optimizers, strict=True)]
        self._refuse_unlike()
        first = next(iter(weights.values()))
        self._table = torch.zeros(
            len(self.numbers), len(weights), len(models), dtype=torch.float64, device=first.device
        )
        self._values: list[float] = []
        begun = [any(owner.has_state() for owner in place.values()) for place in self._places]
        self.begun = torch.tensor(begun, dtype=torch.float64, device=first.device)
        self._is_begun = all(begun)
        self.state: dict[str, dict[str, Tensor]] = {name: self._joined(name) for name in weights}

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Moves the weights, by the numbers that the optimizers have now."""
        self.read_numbers()
        for index, (name, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            if gradient is not None:
                values = dict(zip(self.numbers, self._table[:, index], strict=True))
                self.update(self.weights[name], gradient, self.state[name], values)
        if not self._is_begun:
            self._hand_out()
            self.begun.fill_(1.0)
            self._is_begun = True

    def read_numbers(self) -> None:
        """Reads the numbers from the groups of the optimizers, where schedules change them."""
        values = [
            self.number(place[name].group, key)
            for key in self.numbers
            for name in self.weights
            for place in self._places
        ]
        if values != self._values:
            self._values = values
            self._table.copy_(torch.tensor(values, dtype=torch.float64).view(self._table.shape))

    def number(self, group: dict[str, Any], key: str) -> float:
        return float(group[key])

    def flag(self, key: str) -> Any:
        """What all groups have in common."""
        return next(iter(self._places[0].values())).group.get(key)

    def fresh(self, weight: Tensor) -> dict[str, Tensor]:
        """The state of a weight, a stacked tensor, before its first step."""
        raise NotImplementedError

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _joined(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter in all models, stacked; the optimizers get views of it."""
        joined = self.fresh(self.weights[name])
        for index, place in enumerate(self._places):
            own = place[name].state()
            for key, stacked in joined.items():
                if isinstance(own.get(key), Tensor):
                    stacked[index].copy_(own[key])
                    own[key] = stacked[index]
        return joined

    def _hand_out(self) -> None:
        """Gives the optimizers views of state that the first step has made."""
        for name, joined in self.state.items():
            for index, place in enumerate(self._places):
                place[name].state().update({key: stacked[index] for key, stacked in joined.items()})

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


class Place:
    """Where an optimizer has a parameter: its group, and its state."""

    def __init__(self, optimizer: Optimizer, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        self.optimizer, self.parameter, self.group = optimizer, parameter, group

    def has_state(self) -> bool:
        return bool(self.optimizer.state.get(self.parameter))

    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.parameter]


class StackedSGD(StackedOptimizer):
    numbers = ("lr", "weight_decay", "momentum", "dampening")
    flags = ("nesterov", "maximize")

    def fresh(self, weight: Tensor) -> dict[str, Tensor]:
        moved = {owner.group["momentum"] != 0 for place in self._places for owner in place.values()}
        if len(moved) > 1:
            raise UserError("optimizers that stack have a momentum, or none of them has; here it is 0 in some")
        return {"momentum_buffer": torch.zeros_like(weight, requires_grad=False)} if moved == {True} else {}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        gradient = -gradient if self.flag("maximize") else gradient
        gradient = gradient + along(values["weight_decay"], weight) * weight
        if state:
            buffer = state["momentum_buffer"]
            kept = 1 - values["dampening"] * self.begun  # the first gradient is taken whole
            buffer.mul_(along(values["momentum"], weight)).add_(gradient * along(kept, weight))
            gradient = gradient + along(values["momentum"], weight) * buffer if self.flag("nesterov") else buffer
        weight.sub_(along(values["lr"], weight) * gradient)


class StackedAdam(StackedOptimizer):
    numbers = ("lr", "eps", "weight_decay", "beta1", "beta2")
    flags = ("amsgrad", "maximize", "decoupled_weight_decay")

    def number(self, group: dict[str, Any], key: str) -> float:
        return float(group["betas"][int(key[-1]) - 1]) if key.startswith("beta") else super().number(group, key)

    def fresh(self, weight: Tensor) -> dict[str, Tensor]:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.flag("amsgrad") else [])]
        state = {key: torch.zeros_like(weight, requires_grad=False) for key in keys}
        return {"step": torch.zeros(len(weight), dtype=torch.float32, device=weight.device), **state}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        gradient = -gradient if self.flag("maximize") else gradient
        rate, beta1, beta2 = values["lr"], values["beta1"], values["beta2"]
        step = state["step"].add_(1).double()
        if self.flag("decoupled_weight_decay"):
            weight.mul_(along(1 - rate * values["weight_decay"], weight))
        else:
            gradient = gradient + along(values["weight_decay"], weight) * weight
        state["exp_avg"].lerp_(gradient, along(1 - beta1, weight))
        second = state["exp_avg_sq"].mul_(along(beta2, weight)).add_(gradient * gradient * along(1 - beta2, weight))
        if self.flag("amsgrad"):
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        root = along((1 - beta2**step).sqrt(), weight)
        size = along(rate / (1 - beta1**step), weight)
        weight.sub_(size * state["exp_avg"] / (second.sqrt() / root + along(values["eps"], weight)))


KINDS: dict[type[Optimizer], type[StackedOptimizer]] = {
    torch.optim.SGD: StackedSGD,
    torch.optim.Adam: StackedAdam,
    torch.optim.AdamW: StackedAdam,
}
"""Whose steps can be taken together. Of a class itself: a subclass may do other things."""


def stacked_optimizer(
    weights: dict[str, Tensor], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> StackedOptimizer:
    """The optimizers of all models as one. UserError where they are of different classes, or of one without a rule."""
    kinds = {type(optimizer) for optimizer in optimizers}
    if len(kinds) > 1:
        raise UserError(
            f"optimizers that stack are of one class, got {', '.join(sorted(kind.__name__ for kind in kinds))}"
        )
    kind = kinds.pop()
    if kind not in KINDS:
        names = ", ".join(known.__name__ for known in KINDS)
        raise UserError(f"{kind.__name__} has no step for many models at once; those of {names} do")
    return KINDS[kind](weights, models, optimizers)


def _places(model: nn.Module, optimizer: Optimizer, weights: dict[str, Tensor]) -> dict[str, Place]:
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    places = {}
    for name, parameter in model.named_parameters():
        if name in weights:
            if id(parameter) not in groups:
                raise UserError(
                    f"{name} is trained, but its optimizer does not have it; freeze it, or leave it to torch"
                )
            places[name] = Place(optimizer, parameter, groups[id(parameter)])
    return places
