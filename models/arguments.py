"""Checks of the arguments of models: widths, counts, optimizers and schedules."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from mupscale._torch import inner_schedulers
from mupscale.errors import UserError, refuse_unless_level, refuse_unless_whole
from mupscale.widening.state import refuse_bad_levels


def refuse_bad_width(key: str, width: Any) -> None:
    widths = width if isinstance(width, list | tuple) else [width]
    for each in widths or [None]:
        if isinstance(each, bool) or not isinstance(each, Integral) or each < 1:
            raise UserError(f"{key} must be a whole number of at least 1, or a list of them; got {width!r}")


def refuse_bad_counts(**counts: Any) -> None:
    for key, count in counts.items():
        refuse_unless_whole(f"model.{key}", count)


def refuse_bad_hyperparameters(optimizer: Optimizer, trainer: Trainer | None) -> None:
    """Raises a UserError for hyperparameters that are NaN or infinite, and for a clip that is, or that would ascend."""
    try:
        refuse_bad_levels(optimizer)
    except UserError as error:
        raise UserError(f"model.optimizer: {error}") from error
    if trainer is not None and trainer.gradient_clip_val is not None:
        refuse_unless_level("trainer.gradient_clip_val", trainer.gradient_clip_val)


def refuse_absolute_rates(scheduler: Any) -> None:
    """Raises a UserError for a schedule with absolute learning rates, which would erase muP scaling."""
    for part in inner_schedulers(scheduler):
        refuse_absolute_rates(part)
    for attribute in ("eta_min", "max_lrs", "min_lrs"):
        value = getattr(scheduler, attribute, 0)
        if any(float(rate) != 0 for rate in (value if isinstance(value, Sequence) else [value])):
            raise UserError(
                f"model.lr_scheduler: {type(scheduler).__name__} has an absolute rate ({attribute.removesuffix('s')} = "
                f"{value}), which erases muP scaling. Use a schedule relative to each group's base rate: LambdaLR, "
                "LinearLR, CosineAnnealingLR with eta_min = 0, or a SequentialLR of these"
            )
    if type(scheduler).__name__ in ("OneCycleLR", "CyclicLR", "SWALR"):
        raise UserError(
            f"model.lr_scheduler: {type(scheduler).__name__} sets absolute rates (max_lr, swa_lr), which erases muP "
            "scaling"
        )
