"""What a module's own `configure_optimizers` makes, outside of a run: refused if it cannot continue after a growth."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.callbacks.upscale import rate_factors
from mupscale.errors import UserError
from mupscale.methods import GrowthMethod
from mupscale.models._lightning import optimizers_of, schedulers_of
from mupscale.models.base import Growable
from mupscale.schedules import refuse_one_rate_for_all
from mupscale.widening.groups import continued_groups, refuse_uneven_groups
from mupscale.widening.plan_text import Plan


class Made(NamedTuple):
    """The optimizers and schedules of a network."""

    optimizers: list[Optimizer]
    schedulers: list[Any]


def made_for(module: Growable, net: nn.Module) -> Made | None:
    """What `configure_optimizers` makes for a network; None if it needs a run, or trains more than the network."""
    before = module.net
    module.net = net
    try:
        answer = module.configure_optimizers()
        made = Made(optimizers_of(answer), schedulers_of(answer))
    except UserError:
        raise
    except Exception:  # a user's code, such as one that asks the trainer for the number of steps
        return None
    finally:
        module.net = before
    known = {id(parameter) for parameter in net.parameters()}
    held = {id(parameter) for each in made.optimizers for group in each.param_groups for parameter in group["params"]}
    return made if made.optimizers and held <= known else None


def refuse_own_rates(module: Growable, narrow: nn.Module, wide: nn.Module, plan: Plan, method: GrowthMethod) -> None:
    """Raises a UserError if the optimizers or schedules cannot continue after a growth."""
    made, grown = made_for(module, narrow), made_for(module, wide)
    if made is None or grown is None:
        return
    try:
        for before, after in zip(made.optimizers, grown.optimizers, strict=False):
            continued = continued_groups(plan, narrow, before, wide, method.mup_rates)
            refuse_uneven_groups(continued, wide, after)
        for scheduler in made.schedulers:
            refuse_one_rate_for_all(scheduler, rate_factors(plan, narrow, scheduler.optimizer, method))
    except UserError as error:
        raise UserError(f"{type(module).__name__}.{error}") from error


def moved_optimizers(module: Growable, net: nn.Module, *, several: bool) -> Callable[[list[nn.Parameter]], Any] | None:
    """A function that makes the optimizers of `net` for the parameters of a copy of it; None if it cannot be made.

    Without `several`, it makes one only.
    """
    first = made_for(module, net)
    if first is None or (len(first.optimizers) > 1 and not several):
        return None

    def optimizers(params: list[nn.Parameter]) -> Any:
        made = made_for(module, net)
        assert made is not None
        twins = {id(own): twin for own, twin in zip(net.parameters(), params, strict=True)}
        for optimizer in made.optimizers:
            _move_(optimizer, twins)
        return made.optimizers if len(made.optimizers) > 1 else made.optimizers[0]

    return optimizers


def _move_(optimizer: Optimizer, twins: dict[int, nn.Parameter]) -> None:
    """Lets an optimizer train other parameters, with its first state."""
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, values in state.items():
        twin = twins[id(parameter)]
        optimizer.state[twin] = {key: _as(twin, value) for key, value in values.items()}
    for group in optimizer.param_groups:
        group["params"] = [twins[id(parameter)] for parameter in group["params"]]
        group["lr"] = group.get("initial_lr", group["lr"])  # a schedule may begin with a rate of zero


def _as(parameter: Tensor, value: Any) -> Any:
    """A value of an optimizer's state, in the precision of its parameter if it has its shape."""
    is_like = isinstance(value, Tensor) and value.shape == parameter.shape
    return value.to(parameter.dtype) if is_like else value
