"""A configured model without a run: what `plan` and `verify` look at."""

from itertools import pairwise
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.cli import parsed
from mupscale.models.base import WidthScalable, doubled
from mupscale.models.checkpoint import Width


def configured(
    command: str, arguments: list[str], description: str | None
) -> tuple[WidthScalable, LightningDataModule, Trainer]:
    """The model, the data and the trainer of a configuration (`--config FILE`, and overrides)."""
    cli = parsed(
        arguments, run=False, parser_kwargs={"prog": f"python -m mupscale {command}", "description": description}
    )
    return cli.model, cli.datamodule, cli.trainer


def growths(module: WidthScalable, trainer: Trainer) -> list[tuple[Width, Width]]:
    """The upscales that the configuration schedules, in order; without any, a doubling."""
    given: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks = sorted((c for c in given if isinstance(c, UpscaleCallback)), key=lambda c: c.at_step)
    widths = [module.width, *(callback.width for callback in callbacks)]
    if len(widths) == 1:
        widths.append(doubled(module.width))
    return list(pairwise(widths))
