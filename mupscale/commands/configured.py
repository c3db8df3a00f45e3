"""A configuration without a run: its values, model, data and trainer, and its scheduled upscales."""

from collections.abc import Mapping
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch import LightningDataModule, Trainer

from mupscale.base_shapes import apply_mup
from mupscale.callbacks.upscale import UpscaleCallback, is_smaller
from mupscale.commands.cli import CLI, callbacks_in, parsed
from mupscale.commands.config import Config
from mupscale.commands.own_optimizers import made_for
from mupscale.data_files import LOADER
from mupscale.methods import Duplication, GrowthMethod
from mupscale.models.arguments import refuse_absolute_rates, refuse_bad_hyperparameters
from mupscale.models.base import Growable, doubled, has_own_optimizers
from mupscale.models.checkpoint import Size
from mupscale.widening.layers import Depth
from mupscale.widening.plan_text import Plan


def configured(
    command: str, arguments: list[str], description: str | None
) -> tuple[Growable, LightningDataModule, Trainer]:
    """The model, the data and the trainer of a configuration (`--config FILE`, and overrides)."""
    texts = {"prog": f"python -m mupscale {command}", "description": description}
    cli = parsed(arguments, run=False, parser_kwargs=texts)
    return cli.model, cli.datamodule, cli.trainer


def described(arguments: list[str], command: str) -> tuple[Config, CLI]:
    """The whole configuration of a command line with all defaults, and the objects that were made of it.

    They are made so that a class that refuses its arguments does so now.
    """
    cli = parsed(arguments, run=False, parser_kwargs={"prog": f"python -m mupscale {command}"})
    text = cli.parser.dump(cli.config, skip_none=False, skip_validation=True)  # it was validated as it was parsed
    return yaml.load(text, LOADER), cli


def first_batches(module: Growable, data: LightningDataModule, count: int) -> list[Any]:
    """The first training batches. Raises a UserError if the data module refuses the model."""
    data.prepare_data()
    data.setup("fit")
    refuse_model = getattr(data, "refuse_model", None)
    if refuse_model is not None:
        refuse_model(module.hparams)
    return list(islice(iter(data.train_dataloader()), count))


def upscales(trainer: Trainer) -> list[UpscaleCallback]:
    """The upscales that a configuration schedules, in order."""
    return sorted(callbacks_in(trainer, UpscaleCallback), key=lambda callback: callback.at_step)


def refuse_growths(module: Growable, trainer: Trainer) -> None:
    """Raises a UserError for a scheduled upscale that `fit` refuses to plan."""
    before = module.size
    for callback in upscales(trainer):
        after = callback.size_after(before)
        if is_smaller(before, after):
            callback.planned(module, before)
        before = after


class Growth(NamedTuple):
    """An upscale that a configuration schedules: its sizes, its method, its plan, and how layers are added.

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
    net = module.network(*module.size, meta=True)
    made = made_for(module, net) if has_own_optimizers(module) else None
    if made is not None:
        for optimizer in made.optimizers:
            refuse_bad_hyperparameters(optimizer, trainer)
        return
    optimizer = module.optimizer_callable(net.parameters())
    refuse_bad_hyperparameters(optimizer, trainer)
    apply_mup(optimizer)
    if module.lr_scheduler_callable is not None:
        refuse_absolute_rates(module.lr_scheduler_callable(optimizer))


def growths(module: Growable, trainer: Trainer, data: LightningDataModule) -> list[Growth]:
    """The scheduled upscales, in order; without any, a doubling.

    What makes new layers add nothing is found with the first batch, as in `fit`, where their class does not declare it.
    UserError for what `fit` refuses of the schedule, the noise and the optimizer.
    """
    scheduled = upscales(trainer)
    sizes = [module.size]
    for callback in scheduled:
        callback.refuse_step(trainer)
        callback.refuse_smaller(sizes[-1])
        sizes.append(callback.size_after(sizes[-1]))
    with torch.random.fork_rng(devices=[]):
        refuse_optimizers(module, trainer)
    if scheduled:
        found = []
        for (before, after), callback in zip(pairwise(sizes), scheduled, strict=True):
            if callback.undeclared(module, before):
                callback.probe(module, before, first_batches(module, data, 1)[0])
            depth = callback.depth if before.layers != after.layers else None
            plan = callback.planned(module, before)
            found.append(Growth(before, after, callback.method, plan, depth, callback.residual))
        return found
    before, after, method = module.size, module.size._replace(width=doubled(module.width)), Duplication()
    plan = method.plan(module.network(*before, meta=True), module.network(*after, meta=True))
    return [Growth(before, after, method, plan, None, {})]
