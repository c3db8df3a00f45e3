"""A configuration without a run: its values, model, data and trainer, its scheduled growths, its optimizers."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import nn
from torch.optim import Optimizer

from mupscale.callbacks.growth_schedule import refuse_shared_rates
from mupscale.callbacks.upscale import swaps_of
from mupscale.commands.cli import refuse_optimizer, run_cli
from mupscale.commands.growth_plans import check_growth, plan_growth, undeclared_lists
from mupscale.errors import UserError, prefix_errors
from mupscale.methods import Duplication, GrowthMethod
from mupscale.models._lightning import optimizers_of, schedulers_of
from mupscale.models.base import Growable, doubled, has_own_optimizers, refuse_bad_hyperparameters
from mupscale.models.checkpoint import Size
from mupscale.widening.layers import Depth
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import OptimizerTransfer, refuse_uneven_groups


def configured(
    command: str, arguments: list[str], description: str | None
) -> tuple[Growable, LightningDataModule, Trainer]:
    """The model, the data and the trainer of a configuration (`--config FILE`, and overrides)."""
    texts = {"prog": f"python -m mupscale {command}", "description": description}
    cli = run_cli(arguments, parser_kwargs=texts)
    return cli.model, cli.datamodule, cli.trainer


def first_batches(module: Growable, data: LightningDataModule, count: int) -> list[Any]:
    """The first training batches. Raises a UserError if the data module refuses the model."""
    data.prepare_data()
    data.setup("fit")
    refuse_model = getattr(data, "refuse_model", None)
    if refuse_model is not None:
        refuse_model(module.hparams)
    return list(islice(iter(data.train_dataloader()), count))


class ConfiguredGrowth(NamedTuple):
    """A growth that a configuration schedules: its sizes, its method, its plan, and how layers are added.

    `residual` has what makes new layers add nothing, where their class does not declare it.
    """

    before: Size
    after: Size
    method: GrowthMethod
    plan: Plan
    depth: Depth | None
    residual: Mapping[str, float]


def refuse_optimizers(module: Growable, trainer: Trainer) -> None:
    """Raises a UserError for optimizers, and a schedule of the configuration, that `fit` refuses."""
    made = made_for(module, module.network(*module.size, meta=True)) if has_own_optimizers(module) else None
    if made is None:
        refuse_optimizer(module, trainer)
    for optimizer in made.optimizers if made is not None else ():
        refuse_bad_hyperparameters(optimizer, trainer)


def growths(module: Growable, trainer: Trainer, data: LightningDataModule) -> list[ConfiguredGrowth]:
    """The scheduled growths, in order; without any, a doubling.

    What makes new layers add nothing is found with the first batch, as in `fit`, where their class does not declare it.
    UserError for what `fit` refuses of the schedule, the noise and the optimizer.
    """
    scheduled = swaps_of(trainer)
    sizes = [module.size]
    for callback in scheduled:
        callback.refuse_step(trainer)
        sizes.append(callback.size_after(sizes[-1]))
    with torch.random.fork_rng(devices=[]):
        refuse_optimizers(module, trainer)
    if scheduled:
        found = []
        for (before, after), callback in zip(pairwise(sizes), scheduled, strict=True):
            residual: Mapping[str, float] = {}
            plan = plan_growth(callback, module, before)
            with torch.random.fork_rng(devices=[]):
                narrow, wide = (module.network(*size, meta=True) for size in (before, after))
            if undeclared_lists(narrow, wide, callback.depth):
                batch = first_batches(module, data, 1)[0]
                with prefix_errors(f"UpscaleCallback.{callback.recipe}"):
                    residual = check_growth(module, before, after, batch, callback.depth)[0].residual
                plan = plan_growth(callback, module, before, residual)
            depth = callback.depth if before.layers != after.layers else None
            found.append(ConfiguredGrowth(before, after, callback.method, plan, depth, residual))
        return found
    before, after, method = module.size, module.size._replace(width=doubled(module.width)), Duplication()
    plan = method.plan(module.network(*before, meta=True), module.network(*after, meta=True))
    return [ConfiguredGrowth(before, after, method, plan, None, {})]


class Made(NamedTuple):
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
    with prefix_errors(f"{type(module).__name__}.configure_optimizers"):
        for before, after in zip(made.optimizers, grown.optimizers, strict=False):
            continued = OptimizerTransfer(plan, narrow, before, wide, method.rates).groups()
            refuse_uneven_groups(continued, wide, after)
    refuse_shared_rates(module, narrow, made.schedulers, plan, method.rates)


def optimizers_of_copies(
    module: Growable, net: nn.Module, *, several: bool
) -> Callable[[list[nn.Parameter]], Any] | None:
    """A function that makes the optimizers of `net` for the parameters of a copy of it; None if it cannot be made.

    Without `several`, it makes one only.
    """
    first = made_for(module, net)
    if first is None or (len(first.optimizers) > 1 and not several):
        return None

    def optimizers(params: list[nn.Parameter]) -> Any:
        given = {id(own): parameter for own, parameter in zip(net.parameters(), params, strict=True)}
        made = made_for(module, deepcopy(net, given))
        assert made is not None
        return begin_rates(made.optimizers) if len(made.optimizers) > 1 else begin_rates(made.optimizers)[0]

    return optimizers


def begin_rates(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Gives the groups the rates that their schedules start from: a schedule may begin with a rate of zero."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group.get("initial_lr", group["lr"])
    return optimizers
