"""What a sweep varies: axes over values of a configuration, and the points of their grid."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from mupscale.commands.config import Config, Point, brief, number_in
from mupscale.data_files import DECIMAL, yaml_of
from mupscale.errors import UserError

_NUMBER = r"[-+]?[\d.][\d._eE+-]*"

RANGE_IN_LIST = re.compile(rf"(?:^|[\s,\[])({_NUMBER}(?::{_NUMBER})+)(?=$|[\s,\]])")
"""Numbers with colons between them. YAML 1.1 would read whole ones as a number to the base 60: 1:30 is 90."""

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
        raise UserError(
            f"--sweep {text}: give KEY=VALUE,VALUE,… with a key of the configuration, "
            "such as model.optimizer.lr=0.01,0.02"
        )
    return axis_of(key, listed, f"--sweep {text}")


def axis_of(key: str, listed: str | list[Any], where: str) -> Axis:
    """The axis of a key and its values: a list, or a text as in `KEY=…`. Messages start with `where`."""
    if not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"{where}: {key!r} is not a key of a configuration, such as model.optimizer.lr")
    if key == "seed_everything":
        raise UserError(f"{where}: seeds are not an axis, because their mean decides; give --seeds {listed}")
    if isinstance(listed, str):
        span = re.fullmatch(r"([^,:\[\]]+):([^,:\[\]]+)(?::(\d+))?", listed)
        if span:
            return _spanned(where, key, *span.groups())
        if span := RANGE_IN_LIST.search(listed):
            raise UserError(
                f"{where}: {span[1]} is not a value. A range LOW:HIGH:N has no other values beside it; quote it if it "
                f"is a text: '{span[1]}'"
            )
        try:
            listed = _read(f"[{listed}]")
        except yaml.YAMLError as error:
            raise UserError(f"{where}: the values cannot be read; separate them by commas") from error
    elif spans := [value for value in listed if isinstance(value, str) and RANGE_IN_LIST.fullmatch(value)]:
        raise UserError(f"{where}: {spans[0]} is not a value. A range LOW:HIGH:N stands alone, without a list")
    values = tuple(number_in(value) for value in listed)
    if not values:
        raise UserError(f"{where}: the grid is empty, give at least one value for {key}")
    _refuse_non_finite(where, values)
    if any(value in values[:index] for index, value in enumerate(values)):
        raise UserError(f"{where}: a value is given twice")
    return Axis(key, values)


def _spanned(where: str, key: str, low: str, high: str, count: str | None) -> Axis:
    try:
        ends = number_in(_read(low)), number_in(_read(high))
    except yaml.YAMLError as error:
        raise UserError(f"{where}: the range cannot be read; give LOW:HIGH:N, or values in a list") from error
    if not all(isinstance(end, int | float) and end > 0 for end in ends) or not ends[0] < ends[1]:
        raise UserError(f"{where}: a range LOW:HIGH needs 0 < LOW < HIGH, because it is even by ratio")
    _refuse_non_finite(where, ends)
    if count is None:
        return Axis(key, bounds=ends)
    if not 2 <= int(count) <= MOST_LEVELS:
        raise UserError(f"{where}: LOW:HIGH:N needs at least 2 values, and at most {MOST_LEVELS}, got {count}")
    ratio = (ends[1] / ends[0]) ** (1 / (int(count) - 1))
    values = [float(f"{ends[0] * ratio**index:.6g}") for index in range(int(count))]
    whole = all(isinstance(end, int) for end in ends)  # 2:16:4 may be layers
    return Axis(key, tuple(int(value) if whole and value.is_integer() else value for value in values))


def _read(text: str) -> Any:
    """A value as in the file of an experiment: 1e-3 is a number, 2026-01-31 and 010 are texts."""
    return yaml_of(text, DECIMAL)


def _refuse_non_finite(where: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where}: values must be finite, got {value}; remove it")


def refuse_seeds(where: str, seeds: list[int]) -> None:
    """Raises a UserError for duplicate seeds, or seeds that no generator accepts."""
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
