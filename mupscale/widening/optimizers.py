"""The registry of optimizers that Table 1 holds for: the degree m of each, and what its state holds."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mupscale.errors import UserError
from mupscale.widening import table
from mupscale.widening.table import Scale

Group = dict[str, Any]


class Sized(NamedTuple):
    """The scale of one parameter, and its shapes before and after, which Muon's rate depends on."""

    scale: Scale
    before: tuple[int, ...]
    after: tuple[int, ...]


class Scaling(NamedTuple):
    """What the hyperparameters of one parameter are multiplied by."""

    lr: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class OptimizerRule:
    """How one optimizer class scales with width."""

    degree: int
    """m: 1 for SGD, 0 for the Adam family."""
    state: Mapping[str, int] = field(default_factory=dict)
    """The power of the gradient that each state tensor of the parameter's shape holds."""
    decoupled_weight_decay: bool | None = None
    """None means: as `decoupled_weight_decay` in each parameter group says, and False if it is not there."""
    scaling: Callable[[Group, Sized], Scaling] | None = None
    """Computes the scaling of an optimizer that is not entrywise, in place of Table 1."""
    ready: Callable[[Group, Mapping[str, Any]], str | None] | None = None
    """Why this parameter's state cannot be moved yet, or None."""
    entrywise: bool = True
    own_count: Callable[[Group, Tensor, Tensor], Tensor] | None = None
    """A function of group, T and n: the factor for updates of entries whose state was reset n steps ago, at a step
    count of T, so that they move as if their step count were n. None if it is not known."""
    counts_steps: bool = True
    """Whether the optimizer itself keeps a step count in its state."""

    def decouples_decay(self, group: Group) -> bool:
        """Whether weight decay acts on the weights, and not through the gradient."""
        if self.decoupled_weight_decay is None:
            return bool(group.get("decoupled_weight_decay", False))
        return self.decoupled_weight_decay

    def scale(self, group: Group, sized: Sized) -> Scaling:
        """What the hyperparameters of a parameter of this group are multiplied by."""
        if self.scaling:
            return self.scaling(group, sized)
        scale, decay = sized.scale, table.coupled_weight_decay(sized.scale)
        if self.decouples_decay(group):
            decay = table.decoupled_weight_decay(scale, self.degree)
        return Scaling(table.lr(scale, self.degree), table.eps(scale), decay)


def trust_ratio_scaling(group: Group, sized: Sized) -> Scaling:
    """The update of LAMB, with its weight decay, has a share of the norm of the weights: it grows with these."""
    return Scaling(1.0, table.eps(sized.scale), table.decoupled_weight_decay(sized.scale, 0))


def muon_scaling(group: Group, sized: Sized) -> Scaling:
    """Muon's update has the size of the matrix, and torch adjusts the rate by the shape."""
    lr, eps = table.muon(sized.scale)
    lr *= _muon_adjustment(group, sized.before) / _muon_adjustment(group, sized.after)
    return Scaling(lr, eps, 1 / lr)


def _muon_adjustment(group: Group, shape: tuple[int, ...]) -> float:
    rows, columns = shape[:2]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _radam_ready(group: Group, state: Mapping[str, Any]) -> str | None:
    """RAdam takes plain momentum steps (degree 1) until its variance term switches on at ρ_t > 5."""
    beta2 = group["betas"][1]
    step = float(state.get("step", 0)) + 1
    rho = 2 / (1 - beta2) - 1 - 2 * step * beta2**step / (1 - beta2**step)
    if rho > 5:
        return None
    off = f"RAdam's variance term is still off (ρ = {rho:.2f} ≤ 5 at its next step, {step:.0f})"
    never = 2 / (1 - beta2) - 1 <= 5
    return (
        f"{off}, and with β₂ = {beta2} it never switches on; use a larger β₂, or Adam"
        if never
        else f"{off}; train a few more steps first"
    )


def _adam_own_count(group: Group, count: Tensor, age: Tensor) -> Tensor:
    """Both moments are divided by 1 - β^count."""
    beta1, beta2 = group["betas"]
    return (1 - beta1**count) / (1 - beta1**age) * ((1 - beta2**age) / (1 - beta2**count)).sqrt()


def _adamax_own_count(group: Group, count: Tensor, age: Tensor) -> Tensor:
    """The first moment is divided by 1 - β₁^count, the largest gradient by nothing."""
    beta1 = group["betas"][0]
    return (1 - beta1**count) / (1 - beta1**age)


def _adagrad_own_count(group: Group, count: Tensor, age: Tensor) -> Tensor:
    """The rate is divided by 1 + (count - 1) · lr_decay."""
    return (1 + (count - 1) * group["lr_decay"]) / (1 + (age - 1) * group["lr_decay"])


def _no_count(group: Group, count: Tensor, age: Tensor) -> Tensor:
    """The update does not depend on the count."""
    return torch.ones_like(age)


_REGISTRY: dict[type, OptimizerRule] = {}

_NOT_HOMOGENEOUS = {
    "Adadelta": "its accumulated updates carry the weights' units, not the gradient's",
    "ASGD": "its rate decays with the product of lr and its own constants",
    "Rprop": "its step sizes have absolute bounds",
    "Adafactor": "its second moment is factored and its rate is relative to the weights' size",
    "LBFGS": "it mixes all parameters in one curvature estimate",
}


def register_optimizer(
    optimizer: type,
    *,
    degree: int,
    state: Mapping[str, int],
    decoupled_weight_decay: bool | None = None,
    trust_ratio: bool = False,
    **more: Any,
) -> None:
    """Registers how an optimizer class scales, so that `upscale` can continue it.

    `register_optimizer(Lion, degree=0, state={"exp_avg": 1}, decoupled_weight_decay=True)`

    `degree` is m if the update is proportional to the m-th power of the gradient. `state` gives the power of the
    gradient that each state tensor holds. State without an entry is copied if it is a number or a one-element tensor,
    and is an error otherwise. With `trust_ratio`, the update of a tensor is multiplied by the norm of its weights over
    that of the update, as in LAMB. Another optimizer that is not entrywise (Muon) needs `scaling=` and
    `entrywise=False`, one that is exact only after some steps (RAdam) `ready=`.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> class Sign(torch.optim.Optimizer):
        ...     def __init__(self, params, lr=0.01):
        ...         super().__init__(params, {"lr": lr})
        ...     @torch.no_grad()
        ...     def step(self):
        ...         for group in self.param_groups:
        ...             for parameter in group["params"]:
        ...                 parameter -= group["lr"] * parameter.grad.sign()
        >>> mupscale.register_optimizer(Sign, degree=0, state={})
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(narrow, wide, Sign(narrow.parameters()), call=lambda model: model(x))
        >>> sorted({group["lr"] for group in report.optimizer.param_groups})
        [0.005, 0.01]
    """
    if degree not in (0, 1):
        raise UserError(f"register_optimizer: degree must be 0 (Adam-like) or 1 (SGD-like), got {degree}")
    if trust_ratio:
        more = {"scaling": trust_ratio_scaling, "entrywise": False, **more}
    _REGISTRY[optimizer] = OptimizerRule(degree, dict(state), decoupled_weight_decay, **more)


def rule_of(optimizer: torch.optim.Optimizer) -> OptimizerRule:
    """The rule of exactly this class. A subclass may change the update, so it must be registered by itself."""
    kind = type(optimizer)
    if kind in _REGISTRY:
        return _REGISTRY[kind]
    raise _not_registered(f"{kind.__module__}.{kind.__qualname__}")


def registered_optimizer(class_path: str) -> type:
    """The registered class with this path, such as torch.optim.adamw.AdamW; nothing is imported to find it."""
    for kind in _REGISTRY:
        if f"{kind.__module__}.{kind.__qualname__}" == class_path:
            return kind
    raise _not_registered(class_path)


def _not_registered(class_path: str) -> UserError:
    name = class_path.rpartition(".")[2]
    if name in _NOT_HOMOGENEOUS and class_path.startswith("torch.optim."):
        known = ", ".join(sorted(k.__name__ for k in _REGISTRY))
        return UserError(
            f"{name} is not homogeneous in the gradient ({_NOT_HOMOGENEOUS[name]}), so no rescaling continues it "
            f"exactly. Train with one of {known}; the function upscale can leave it out (narrow_opt=None)"
        )
    return UserError(
        f"optimizer {class_path} is not registered. Say how it scales: "
        f"mupscale.register_optimizer({name}, degree=0 or 1, state={{'<name>': <power of the gradient>}})"
    )


def held_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Group, Any]]:
    """Every parameter of an optimizer, with its group."""
    return ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])


def groups_by_id(optimizer: torch.optim.Optimizer) -> dict[int, Group]:
    """The group of every parameter, by its identity."""
    return {id(parameter): group for group, parameter in held_parameters(optimizer)}


_ADAM = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_SGD = {"momentum_buffer": 1}
register_optimizer(torch.optim.SGD, degree=1, state=_SGD, own_count=_no_count, counts_steps=False)
register_optimizer(torch.optim.Adam, degree=0, state=_ADAM, own_count=_adam_own_count)
register_optimizer(torch.optim.AdamW, degree=0, state=_ADAM, decoupled_weight_decay=True, own_count=_adam_own_count)
register_optimizer(torch.optim.NAdam, degree=0, state=_ADAM)
register_optimizer(torch.optim.RAdam, degree=0, state=_ADAM, ready=_radam_ready)
register_optimizer(torch.optim.SparseAdam, degree=0, state=_ADAM)
register_optimizer(torch.optim.Adamax, degree=0, state={"exp_avg": 1, "exp_inf": 1}, own_count=_adamax_own_count)
# the momentum of RMSprop averages the normalised gradient, which has degree 0
_RMSPROP = {"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0}
register_optimizer(torch.optim.RMSprop, degree=0, state=_RMSPROP, own_count=_no_count)
register_optimizer(torch.optim.Adagrad, degree=0, state={"sum": 2}, own_count=_adagrad_own_count)
_MUON: dict[str, Any] = {"scaling": muon_scaling, "entrywise": False}
register_optimizer(torch.optim.Muon, degree=0, state={"momentum_buffer": 1}, decoupled_weight_decay=True, **_MUON)
