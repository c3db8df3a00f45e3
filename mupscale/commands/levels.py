"""Numbers of a configuration that make no sense, NaN or infinite or negative, refused before anything is made of it."""

import math
from collections.abc import Iterator
from typing import Any

from mupscale.errors import UserError

NEVER_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "betas")
"""Arguments of optimizers that must be at least 0."""


def refuse_levels(config: Any) -> None:
    """UserError for what `model.optimizer`, `model.lr_scheduler` or `trainer.gradient_clip_val` cannot be."""
    arguments = _plain(config.get("model")).get("init_args") or {}
    for section in ("optimizer", "lr_scheduler"):
        made = arguments.get(section)
        given = (made.get("init_args") or {}) if isinstance(made, dict) else {}
        for key, value in _numbers(f"model.{section}", given):
            name = key.split(".")[2]
            at_least_0 = section == "optimizer" and name in NEVER_NEGATIVE
            if not math.isfinite(value) or (at_least_0 and value < 0):
                raise UserError(f"{key} must be a finite number{' of at least 0' * at_least_0}, got {value}")
    clip = _plain(config.get("trainer")).get("gradient_clip_val")
    if clip is not None and not (math.isfinite(clip) and clip >= 0):
        raise UserError(f"trainer.gradient_clip_val must be a finite number of at least 0, got {clip}")


def _plain(section: Any) -> dict[str, Any]:
    return section.as_dict() if hasattr(section, "as_dict") else section or {}


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number inside a value, with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(f"{key}.{index}", inner)
    elif isinstance(value, float | int):
        yield key, value
