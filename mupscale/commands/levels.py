"""Checks the numbers of a configuration: NaN, infinite or negative values are refused before anything is built."""

import math
from collections.abc import Iterator
from typing import Any

from mupscale.errors import UserError, refuse_unless_level

NEVER_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "betas")
"""Arguments of optimizers that must be at least 0."""

LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "log_every_n_steps": 0, "devices": -1}
"""Options of the trainer that Lightning does not check, and the least value that it can run with."""


def refuse_values_for_sections(config: Any) -> None:
    """Raises a UserError for a section of a configuration that is a value, such as `trainer: 3`."""
    for section in ("trainer", "loop", "checkpoint"):
        if not hasattr(config[section], "get"):
            raise UserError(f"{section}: wanted options by name, got {config[section]}")


def refuse_levels(config: Any) -> None:
    """Raises a UserError for invalid numbers in the optimizer, the schedule, the trainer's options or the seed."""
    arguments = _plain(config.get("model")).get("init_args") or {}
    for section in ("optimizer", "lr_scheduler"):
        made = arguments.get(section)
        given = (made.get("init_args") or {}) if isinstance(made, dict) else {}
        for key, value in _numbers(f"model.{section}", given):
            name = key.split(".")[2]
            at_least_0 = section == "optimizer" and name in NEVER_NEGATIVE
            if not math.isfinite(value) or (at_least_0 and value < 0):
                raise UserError(f"{key} must be a finite number{' of at least 0' * at_least_0}, got {value}")
    seed = config.get("seed_everything")
    if seed is not None and not isinstance(seed, bool) and not 0 <= seed < 2**32:
        raise UserError(f"seed_everything must be a whole number from 0 to {2**32 - 1}, got {seed}")
    trainer = _plain(config.get("trainer"))
    for key, least in LEAST.items():
        given = trainer.get(key)
        number = int(given) if isinstance(given, str) and given.removeprefix("-").isdecimal() else given
        if isinstance(number, int | float) and number < least:
            raise UserError(f"trainer.{key} must be at least {least:g}, got {given}")
    if isinstance(trainer.get("val_check_interval"), int | float) and trainer["val_check_interval"] <= 0:
        raise UserError(f"trainer.val_check_interval must be above 0, got {trainer['val_check_interval']}")
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, dict) and (optimizer.get("init_args") or {}).get("lr", 0.0) is None:
        raise UserError("model.optimizer.lr must be a finite number of at least 0, got null")
    clip = trainer.get("gradient_clip_val")
    if clip is not None:
        refuse_unless_level("trainer.gradient_clip_val", clip)


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
