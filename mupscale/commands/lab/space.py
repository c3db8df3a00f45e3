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
from mupscale.commands.cli import parsed, refuse_growths, refuse_optimizer
from mupscale.commands.config import Config, Point, at, brief, callback_key, number_in
from mupscale.data_files import DECIMAL, yaml_of
from mupscale.errors import UserError, prefix_errors

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_RANGE = re.compile(r"(?:^|[\s,\[])([-+\d._eE]+(?::[-+\d._eE]+)+)(?=$|[\s,\]])")
"""Numbers with colons between them, in a list. Between quotation marks they are a text, such as a duration."""

MOST_LEVELS = 1000
"""How many values of one key a grid may have: each is a run."""


@dataclass(frozen=True)
class Axis:
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
    axes: list[Axis]
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
class Outcome:
    """A finished trial: a point of the search space, and the mean metric of its runs; infinite if one diverged."""

    cell: int
    point: Point
    value: float
    values: list[float]
    seconds: float
    runs: list[Path]
    """The folders of the runs that it made, one for each value."""


def parsed_axis(text: str) -> Axis:
    """The axis of a text.

    The text is `KEY=V1,V2,…` (values), `KEY=LOW:HIGH:N` (N values, evenly by ratio) or `KEY=LOW:HIGH` (a range to draw
    from).
    """
    key, equals, listed = text.partition("=")
    if not equals:
        raise UserError(f"--sweep {text}: give KEY=VALUE,VALUE,…, such as model.optimizer.lr=0.01,0.02")
    return axis_of(key, listed, f"--sweep {text}")


def axis_of(key: str, listed: str | list[Any], where: str) -> Axis:
    """The axis of a key and its values: a list, or a text as in `KEY=…`. Messages start with `where`."""
    if not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"{where}: {key!r} is not a key of a configuration, such as model.optimizer.lr")
    if key == "seed_everything":
        raise UserError(f"{where}: seeds are not an axis, because their mean decides; give --seeds, or the key seeds")
    if isinstance(listed, str):
        span = re.fullmatch(r"([^,:\[\]]+):([^,:\[\]]+)(?::(\d+))?", listed)
        if span:
            return _spanned(where, key, *span.groups())
    for text in [listed] if isinstance(listed, str) else [value for value in listed if isinstance(value, str)]:
        if found := _RANGE.search(text):
            raise UserError(
                f"{where}: {found[1]} is not a value; a range LOW:HIGH:N has no other values beside it, and a text "
                f"in --sweep has quotation marks: '{found[1]}'"
            )
    if isinstance(listed, str):
        try:
            listed = yaml_of(f"[{listed}]", DECIMAL)  # 1e-3 is a number, 2026-01-31 and 010 are texts
        except yaml.YAMLError as error:
            raise UserError(f"{where}: the values cannot be read; separate them by commas") from error
    values = tuple(number_in(value) for value in listed)
    if not values:
        raise UserError(f"{where}: the grid is empty, give at least one value for {key}")
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise UserError(f"{where}: values must be finite; remove those that are not")
    if any(value in values[:index] for index, value in enumerate(values)):
        raise UserError(f"{where}: a value is given twice")
    return Axis(key, values)


def _spanned(where: str, key: str, low: str, high: str, count: str | None) -> Axis:
    try:
        ends = number_in(yaml_of(low, DECIMAL)), number_in(yaml_of(high, DECIMAL))
    except yaml.YAMLError as error:
        raise UserError(f"{where}: the range cannot be read; give LOW:HIGH:N, or values in a list") from error
    if not all(isinstance(end, int | float) and end > 0 for end in ends) or not ends[0] < ends[1] < math.inf:
        raise UserError(f"{where}: a range LOW:HIGH needs 0 < LOW < HIGH, finite, because it is even by ratio")
    if count is None:
        return Axis(key, bounds=ends)
    if not 2 <= int(count) <= MOST_LEVELS:
        raise UserError(f"{where}: LOW:HIGH:N needs at least 2 values, and at most {MOST_LEVELS}, got {count}")
    ratio = (ends[1] / ends[0]) ** (1 / (int(count) - 1))
    values = [float(f"{ends[0] * ratio**index:.6g}") for index in range(int(count))]
    whole = all(isinstance(end, int) for end in ends)  # 2:16:4 may be layers
    return Axis(key, tuple(int(value) if whole and value.is_integer() else value for value in values))


def refuse_seeds(where: str, seeds: list[int]) -> None:
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{where}: a seed is given twice")
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise UserError(f"{where}: seeds are whole numbers from 0 to {2**32 - 1}")


def grid(axes: list[Axis]) -> Iterator[Point]:
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


def draw(
    axes: list[Axis], sampler: Literal["random", "tpe"], cell: int, before: list[tuple[Parameters, float | None]]
) -> Parameters:
    """The parameters of a cell, which seeds the draw, in a study of its own.

    `before` are the parameters of the trials before it, and their metrics; None if they are not known yet.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {axis.key: distribution(axis) for axis in axes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        chooser: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(cell)
        if sampler == "tpe":
            chooser = optuna.samplers.TPESampler(seed=cell, constant_liar=True)
        study = optuna.create_study(sampler=chooser)
        for parameters, value in before:
            state = optuna.trial.TrialState.RUNNING if value is None else optuna.trial.TrialState.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(state=state, value=value, params=parameters, distributions=distributions)
            )
        return study.ask(distributions).params


def distribution(axis: Axis) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.bounds is None:
        return CategoricalDistribution([encode(value) for value in axis.values])
    low, high = axis.bounds
    return IntDistribution(int(low), int(high), log=True) if axis.is_whole else FloatDistribution(low, high, log=True)


def encode(value: Any) -> Any:
    """A value of an axis in a form that Optuna accepts: lists and dictionaries as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def point_of(axes: list[Axis], parameters: Parameters) -> Point:
    """The point of these parameters. Raises a KeyError or a StopIteration if they are not of these axes."""

    def decode(axis: Axis, stored: Any) -> Any:
        if axis.bounds is None:
            return next(value for value in axis.values if encode(value) == stored)
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


def refuse_invalid(config: Config, axes: list[Axis], where: str) -> None:
    """UserError, starting with `where`, if `fit` would refuse the configuration with one of the axes' values.

    Each value is tried by itself. Those of an upscale are tried a second time in a trial of the sweep, whose growth is
    planned: whether a width or a method fits depends on the other axes.
    """
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
        with prefix_errors(f"{where} {axis.key}={brief(value)}"):
            cli = parsed(changed)
            refuse_optimizer(cli.model, cli.trainer)
            if growing:
                refuse_growths(cli.model, cli.trainer)


def _changes_growth(key: str) -> bool:
    callback, rest = callback_key(key)
    of_growth = ("method", "noise", "width", "layers", "depth")
    return key in ("model.width", "model.layers") or (
        callback == UpscaleCallback.__name__ and "".join(rest[:1]) in of_growth
    )


def samples(axis: Axis) -> list[Any]:
    """Values of an axis that stand for all: of fractions the ends."""
    if axis.bounds is not None:
        return list(axis.bounds)
    if axis.values and all(isinstance(value, float) for value in axis.values):
        return sorted({min(axis.values), max(axis.values)})
    return list(axis.values)
