"""A configuration without a run: its plain values, its model, data and trainer, and the upscales that it schedules."""

from itertools import pairwise

import yaml
from lightning.pytorch import LightningDataModule, Trainer

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.cli import CLI, callbacks_in, parsed
from mupscale.commands.config import Config
from mupscale.models.base import WidthScalable, doubled
from mupscale.models.checkpoint import Width
from mupscale.widening.methods import Duplication, GrowthMethod


def configured(
    command: str, arguments: list[str], description: str | None
) -> tuple[WidthScalable, LightningDataModule, Trainer]:
    """The model, the data and the trainer of a configuration (`--config FILE`, and overrides)."""
    texts = {"prog": f"python -m mupscale {command}", "description": description}
    cli = parsed(arguments, run=False, parser_kwargs=texts)
    return cli.model, cli.datamodule, cli.trainer


def described(arguments: list[str], command: str) -> tuple[Config, CLI]:
    """The whole configuration of a command line with all defaults, and the objects that were made of it.

    They are made so that a class that refuses its arguments does so now.
    """
    cli = parsed(arguments, run=False, parser_kwargs={"prog": f"python -m mupscale {command}"})
    return yaml.safe_load(cli.parser.dump(cli.config, skip_none=False)), cli


def upscales(trainer: Trainer) -> list[UpscaleCallback]:
    """The upscales that a configuration schedules, in order."""
    return sorted(callbacks_in(trainer, UpscaleCallback), key=lambda callback: callback.at_step)


def growths(module: WidthScalable, trainer: Trainer) -> list[tuple[Width, Width, GrowthMethod]]:
    """The widths before and after each scheduled upscale, and its method, in order; without any, a doubling."""
    scheduled = upscales(trainer)
    if not scheduled:
        return [(module.width, doubled(module.width), Duplication())]
    widths = [module.width, *(callback.width for callback in scheduled)]
    return [
        (before, after, callback.method) for (before, after), callback in zip(pairwise(widths), scheduled, strict=True)
    ]
