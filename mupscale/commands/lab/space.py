"""What a sweep varies: axes over values of a configuration, and the points of their grid, or of Optuna's draws.

And the configuration that its trials have in common, and whether `fit` would refuse the values of an axis.
"""

import json
import math
import re
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.cli import CLI, refuse_growths, run_cli
from mupscale.commands.config import Config, Point, apply_point, brief, callback_key, number_in
from mupscale.commands.configured import refuse_optimizers
from mupscale.data_files import DECIMAL, yaml_of
from mupscale.errors import UserError, prefix_errors

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

_RANGE = re.compile(r"(?:^|[\s,\[])([-+\d._eE]+(?::[-+\d._eE]+)+)(?=$|[\s,\]])")
"""Numbers with colons between them, in a list. Between quotation marks they are a text, such as a duration."""

MOST_LEVELS = 1000
"""How many values of one key a grid may have: each is a run."""


@dataclass(frozen=True)
class SweptAxis:
    """A key and its possible values: a list of them, or a range between two bounds, evenly by ratio."""

    key: str
    values: tuple[Any, ...] = ()
    bounds: tuple[float, float] | None = None

    @property
    def is_whole(self) -> bool:
        return self.bounds is not None and all(isinstance(bound, int) for bound in self.bounds)

    def description(self) -> dict[str, Any]:
        if self.bounds:
            return {"key": self.key, "bounds": list(self.bounds)}
        return {"key": self.key, "values": list(self.values)}


@dataclass(frozen=True)
class Settings:
    """What a sweep runs. Two sweeps are the same if their settings are equal."""

    config: Config
    axes: list[SweptAxis]
    sampler: Literal["grid", "random", "tpe"]
    trials: int
    seeds: list[int]
    metric: str

    def description(self) -> dict[str, Any]:
        """The settings as plain values, as JSON returns them."""
        values = {
            "sweep": [axis.description() for axis in self.axes],
            "sampler": self.sampler,
            "trials": self.trials,
            "seeds": self.seeds,
            "metric": self.metric,
            "config": self.config,
        }
        return json.loads(json.dumps(values))


@dataclass(frozen=True)
class TrialResult:
    """A finished trial: a point of the search space, and the mean metric of its runs; infinite if one diverged."""

    cell: int
    point: Point
    value: float
    values: list[float]
    seconds: float
    runs: list[Path]
    """The folders of the runs that it made, one for each value."""


def parse_axis(text: str) -> SweptAxis:
    """The axis of a text.

    The text is `KEY=V1,V2,…` (values), `KEY=LOW:HIGH:N` (N values, evenly by ratio) or `KEY=LOW:HIGH` (a range to draw
    from).
    """
    where = f"--sweep {text}"
    key, equals, listed = text.partition("=")
    if not equals:
        raise UserError(f"{where}: give KEY=VALUE,VALUE,…, such as model.optimizer.lr=0.01,0.02")
    if not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"{where}: {key!r} is not a key of a configuration, such as model.optimizer.lr")
    if key == "seed_everything":
        raise UserError(f"{where}: seeds are not an axis, because their mean decides; give --seeds, or the key seeds")
    span = re.fullmatch(r"([^,:\[\]]+):([^,:\[\]]+)(?::(\d+))?", listed)
    if span:
        return _spanned(where, key, *span.groups())
    if found := _RANGE.search(listed):
        raise UserError(
            f"{where}: {found[1]} is not a value; a range LOW:HIGH:N has no other values beside it, and a text has "
            f"quotation marks: '{found[1]}'"
        )
    try:
        values = tuple(map(number_in, yaml_of(f"[{listed}]", DECIMAL)))  # 1e-3 is a number, 2026-01-31 a text
    except yaml.YAMLError as error:
        raise UserError(f"{where}: the values cannot be read; separate them by commas") from error
    if not values:
        raise UserError(f"{where}: the grid is empty, give at least one value for {key}")
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise UserError(f"{where}: values must be finite; remove those that are not")
    if any(value in values[:index] for index, value in enumerate(values)):
        raise UserError(f"{where}: a value is given twice")
    return SweptAxis(key, values)


def _spanned(where: str, key: str, low: str, high: str, count: str | None) -> SweptAxis:
    try:
        ends = number_in(yaml_of(low, DECIMAL)), number_in(yaml_of(high, DECIMAL))
    except yaml.YAMLError as error:
        raise UserError(f"{where}: the range cannot be read; give LOW:HIGH:N, or values in a list") from error
    if not all(isinstance(end, int | float) and end > 0 for end in ends) or not ends[0] < ends[1] < math.inf:
        raise UserError(f"{where}: a range LOW:HIGH needs 0 < LOW < HIGH, finite, because it is even by ratio")
    if count is None:
        return SweptAxis(key, bounds=ends)
    if not 2 <= int(count) <= MOST_LEVELS:
        raise UserError(f"{where}: LOW:HIGH:N needs at least 2 values, and at most {MOST_LEVELS}, got {count}")
    ratio = (ends[1] / ends[0]) ** (1 / (int(count) - 1))
    values = [float(f"{ends[0] * ratio**index:.6g}") for index in range(int(count))]
    whole = all(isinstance(end, int) for end in ends)  # 2:16:4 may be layers
    return SweptAxis(key, tuple(int(value) if whole and value.is_integer() else value for value in values))


def seeds_of(text: str) -> list[int]:
    """The seeds of `--seeds 0,1,2`."""
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds {text}: give whole numbers, separated by commas") from error
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text}: a seed is given twice")
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise UserError(f"--seeds {text}: a seed is not from 0 to {2**32 - 1}")
    return seeds


def grid(axes: list[SweptAxis]) -> Iterator[Point]:
    """Every combination of the axes' values, the last axis fastest."""
    if not axes:
        yield {}
        return
    for value in axes[0].values:
        for rest in grid(axes[1:]):
            yield {axes[0].key: value, **rest}


def point_text(point: Point, names: dict[str, str]) -> str:
    """A point in words: `lr=0.01, std=0.5`."""
    return ", ".join(f"{names[key]}={brief(value)}" for key, value in point.items())


# --- points that Optuna draws

Parameters = dict[str, Any]
"""A point as Optuna has it: with all digits, and lists and dictionaries as text."""


def new_study(sampler: Literal["random", "tpe"]) -> "Study":
    """A study in memory. It draws the same points whenever it is asked, and told results, in the same order."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if sampler == "random":
        return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True))


def distribution(axis: SweptAxis) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.bounds is None:
        return CategoricalDistribution([encode_value(value) for value in axis.values])
    low, high = axis.bounds
    return IntDistribution(int(low), int(high), log=True) if axis.is_whole else FloatDistribution(low, high, log=True)


def encode_value(value: Any) -> Any:
    """A value of an axis in a form that Optuna accepts: lists and dictionaries as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def point_of(axes: list[SweptAxis], parameters: Parameters) -> Point:
    """The point of these parameters. Raises a KeyError or a StopIteration if they are not of these axes."""

    def decode(axis: SweptAxis, stored: Any) -> Any:
        if axis.bounds is None:
            return next(value for value in axis.values if encode_value(value) == stored)
        return stored if axis.is_whole else float(f"{stored:.6g}")

    return {axis.key: decode(axis, parameters[axis.key]) for axis in axes}


# --- configurations of trials


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
    if trainer["fast_dev_run"]:
        raise UserError("trainer.fast_dev_run: a trial must be able to log and to resume")
    trainer["logger"] = False  # each run gets its own
    trainer["enable_progress_bar"] = False
    if not isinstance(trainer["callbacks"], list | None):
        trainer["callbacks"] = [trainer["callbacks"]]
    answer["checkpoint"]["dirpath"] = None  # each run has its own
    answer["checkpoint"]["save_top_k"] = min(1, abs(answer["checkpoint"]["save_top_k"]))
    return answer


def refuse_invalid(cli: CLI, config: Config, axes: list[SweptAxis]) -> None:
    """Raises a UserError if `fit` would refuse the configuration, or one of the axes' values; `cli` was made of it.

    Each value is tried by itself. Those of an upscale are tried a second time in a trial of the sweep, whose growth is
    planned: whether a width or a method fits depends on the other axes.
    """
    grown = [axis for axis in axes if _changes_growth(axis.key)]
    if not grown:
        refuse_growths(cli.model, cli.trainer)
    if not axes:
        refuse_optimizers(cli.model, cli.trainer)
    first = {axis.key: samples(axis)[0] for axis in axes}
    points = [(axis, value, {axis.key: value}, axes == grown == [axis]) for axis in axes for value in samples(axis)]
    if len(axes) > 1:
        points += [(axis, value, {**first, axis.key: value}, True) for axis in grown for value in samples(axis)]
    for axis, value, point, growing in points:
        try:
            changed = apply_point(config, point)
        except UserError as error:
            raise UserError(f"--sweep {error}") from error
        with prefix_errors(f"--sweep {axis.key}={brief(value)}"):
            tried = run_cli(changed)
            refuse_optimizers(tried.model, tried.trainer)
            if growing:
                refuse_growths(tried.model, tried.trainer)


def _changes_growth(key: str) -> bool:
    callback, rest = callback_key(key)
    of_growth = ("method", "noise", "width", "layers", "depth")
    return key in ("model.width", "model.layers") or (
        callback == UpscaleCallback.__name__ and "".join(rest[:1]) in of_growth
    )


def samples(axis: SweptAxis) -> list[Any]:
    """Values of an axis that stand for all: of fractions the ends."""
    if axis.bounds is not None:
        return list(axis.bounds)
    if axis.values and all(isinstance(value, float) for value in axis.values):
        return sorted({min(axis.values), max(axis.values)})
    return list(axis.values)
