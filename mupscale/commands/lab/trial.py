"""The configuration of a trial: what all trials have in common, and whether `fit` refuses the values of a sweep."""

import json
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.cli import CLI, parsed
from mupscale.commands.config import Config, Point, at, brief, callback_key, temporary_file
from mupscale.commands.configured import refuse_growths
from mupscale.commands.lab.space import Axis
from mupscale.commands.pattern import Pattern
from mupscale.errors import UserError
from mupscale.models.hf import SAVED


def for_trials(config: Config) -> Config:
    """A configuration as every trial has it: on one device, without a progress bar, one checkpoint at a time."""
    answer = deepcopy(config)
    trainer = answer["trainer"]
    if trainer["devices"] == "auto":
        trainer["devices"] = 1
    one = len(trainer["devices"]) == 1 if isinstance(trainer["devices"], list) else trainer["devices"] in (1, "1")
    if not one or trainer["num_nodes"] != 1:
        raise UserError(
            f"trainer.devices = {trainer['devices']}, trainer.num_nodes = {trainer['num_nodes']}: "
            "a trial runs on one device; leave both out, and give --workers N to make N trials at a time"
        )
    if trainer["fast_dev_run"] or trainer["barebones"] or trainer["enable_checkpointing"] is False:
        raise UserError(
            "trainer.fast_dev_run, trainer.barebones, trainer.enable_checkpointing: "
            "a trial must be able to log and to resume"
        )
    trainer["logger"] = False  # each run gets its own
    trainer["enable_progress_bar"] = False
    if not isinstance(trainer["callbacks"], list | None):
        trainer["callbacks"] = [trainer["callbacks"]]
    answer["checkpoint"]["dirpath"] = None  # each run has its own
    answer["checkpoint"]["save_top_k"] = min(1, abs(answer["checkpoint"]["save_top_k"]))
    return answer


class Tried:
    """Configurations that were tried already. Those that differ in numbers alone are not parsed again."""

    def __init__(self) -> None:
        self._patterns: list[Pattern] = []
        self._models: set[str] = set()

    def refuse(self, config: Config, growing: bool) -> None:
        """Raises a UserError if `fit` would refuse a configuration; with `growing`, if it would refuse its growth."""
        cli = self._made(config)
        model = json.dumps(config["model"], sort_keys=True)
        if model not in self._models:
            with torch.random.fork_rng(devices=[]):
                cli.model.network(cli.model.width, meta=True)
            self._models.add(model)
        if growing:
            refuse_growths(cli.model, cli.trainer)

    def _made(self, config: Config) -> CLI:
        """The model, data and trainer of a configuration."""
        for pattern in self._patterns:
            if pattern.changes(config) is not None:
                try:
                    return parsed([], run=False, pattern=pattern, plain=config)
                except (UserError, TypeError, KeyError):
                    break  # the message of the parser names the key
        pattern = Pattern(is_checked=True)
        with temporary_file(config) as file:
            cli = parsed(["--config", file], run=False, pattern=pattern, plain=config)
        self._patterns.append(pattern)
        return cli


def refuse_invalid(config: Config, axes: list[Axis], where: str, tried: Tried | None = None) -> None:
    """UserError, starting with `where`, if `fit` would refuse the configuration with one of the axes' values.

    Each value is tried by itself. Those of an upscale are tried a second time in a trial of the sweep, whose growth is
    planned: whether a width or a method fits depends on the other axes.

    `tried` is what was tried for other sweeps of the same experiment.
    """
    tried = Tried() if tried is None else tried
    grown = [axis for axis in axes if _changes_growth(axis.key)]
    first = {axis.key: samples(axis)[0] for axis in axes}
    points = [(axis, value, {axis.key: value}, axes == grown == [axis]) for axis in axes for value in samples(axis)]
    if len(axes) > 1:
        points += [(axis, value, {**first, axis.key: value}, True) for axis in grown for value in samples(axis)]
    for axis, value, point, growing in points:
        try:
            changed = at(config, point)
        except UserError as error:
            raise UserError(f"{where} {error}") from error
        try:
            tried.refuse(changed, growing)
        except UserError as error:
            raise UserError(f"{where} {axis.key}={brief(value)}: {error}") from error


def _changes_growth(key: str) -> bool:
    callback, rest = callback_key(key)
    of_growth = ("method", "noise", "width", "layers", "depth")
    return callback == UpscaleCallback.__name__ and "".join(rest[:1]) in of_growth


def samples(axis: Axis) -> list[Any]:
    """Values of an axis that stand for all: of fractions the ends."""
    if axis.bounds is not None:
        return list(axis.bounds)
    if axis.values and all(isinstance(value, float) for value in axis.values):
        return sorted({min(axis.values), max(axis.values)})
    return list(axis.values)


def folder_name(cell: int, point: Point, names: dict[str, str]) -> str:
    """The name of a trial's folder, which TensorBoard shows: its number and its values."""
    values = ",".join(f"{names[key]}={brief(value)}" for key, value in point.items())
    plain = re.sub(r"[^\w.,=+-]+", "-", values)
    return f"{cell:03d}_{plain}"[:120]


def drop_checkpoints(folder: Path) -> None:
    """Deletes the checkpoints of a finished run: the disk space of a sweep must not grow with its trials."""
    for name in ("checkpoints", SAVED):
        shutil.rmtree(folder / name, ignore_errors=True)
