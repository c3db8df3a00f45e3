"""What a sweep varies: axes over the values of a configuration, and a configuration with other values."""

import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import yaml

Config = dict[str, Any]
"""A whole configuration, as plain dictionaries and lists, with every default written out."""

Point = dict[str, Any]
"""A value for every axis, by its key."""


@dataclass(frozen=True)
class Axis:
    """A key and what it may be: the values listed, or all between two bounds, evenly by ratio."""

    key: str
    values: tuple[Any, ...] = ()
    bounds: tuple[float, float] | None = None

    @property
    def is_whole(self) -> bool:
        return self.bounds is not None and all(isinstance(bound, int) for bound in self.bounds)

    def description(self) -> dict[str, Any]:
        return (
            {"key": self.key, "bounds": list(self.bounds)}
            if self.bounds
            else {"key": self.key, "values": list(self.values)}
        )


def parsed_axis(text: str) -> Axis:
    """The axis of `KEY=V1,V2,…` (values), `KEY=LOW:HIGH:N` (N values, evenly by ratio) or `KEY=LOW:HIGH` (a range to
    draw from).
    """
    key, equals, listed = text.partition("=")
    if not equals:
        raise ValueError(
            f"--sweep {text}: give KEY=VALUE,VALUE,… with a key of the configuration, such as "
            "model.optimizer.lr=0.01,0.02"
        )
    return axis_of(key, listed, f"--sweep {text}")


def axis_of(key: str, listed: str | list[Any], where: str) -> Axis:
    """The axis of a key and its values: a list, or a text as in `KEY=…`. `where` is how messages name it."""
    if not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ValueError(f"{where}: {key!r} is no key of a configuration, such as model.optimizer.lr")
    if key == "seed_everything":
        raise ValueError(f"{where}: seeds are no axis, their mean decides: --seeds {listed}")
    span = re.fullmatch(r"([^,:\[\]]+):([^,:\[\]]+)(?::(\d+))?", listed) if isinstance(listed, str) else None
    if span:
        return _spanned(where, key, *span.groups())
    try:
        values = tuple(
            _number(value) for value in (yaml.safe_load(f"[{listed}]") if isinstance(listed, str) else listed)
        )
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: its values cannot be read, separate them by commas") from error
    if not values:
        raise ValueError(f"{where}: the grid is empty, give at least one value for {key}")
    if any(value in values[:index] for index, value in enumerate(values)):
        raise ValueError(f"{where}: a value is there twice")
    return Axis(key, values)


def _spanned(where: str, key: str, low: str, high: str, count: str | None) -> Axis:
    ends = _number(yaml.safe_load(low)), _number(yaml.safe_load(high))
    if not all(isinstance(end, int | float) and end > 0 for end in ends) or not ends[0] < ends[1]:
        raise ValueError(f"{where}: a range LOW:HIGH has 0 < LOW < HIGH, because it is drawn by ratio")
    if count is None:
        return Axis(key, bounds=ends)
    if int(count) < 2:
        raise ValueError(f"{where}: LOW:HIGH:N has at least 2 values, got {count}")
    ratio = (ends[1] / ends[0]) ** (1 / (int(count) - 1))
    values = [float(f"{ends[0] * ratio**index:.6g}") for index in range(int(count))]
    whole = all(isinstance(end, int) for end in ends)  # 2:16:4 may be layers
    return Axis(key, tuple(int(value) if whole and value.is_integer() else value for value in values))


def _number(value: Any) -> Any:
    """YAML's 1e-3 is a text; here it is a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def grid(axes: list[Axis]) -> Iterator[Point]:
    """Every combination of the axes' values, the last axis fastest."""
    if not axes:
        yield {}
        return
    for value in axes[0].values:
        for rest in grid(axes[1:]):
            yield {axes[0].key: value, **rest}


def labels(axes: list[Axis]) -> dict[str, str]:
    """The shortest end of each key that tells it from the others: `lr`, `noise.std`."""
    answer = {}
    for axis in axes:
        parts = axis.key.split(".")
        others = ["." + other.key for other in axes if other.key != axis.key]
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        answer[axis.key] = next(
            (end for end in ends if not any(other.endswith(f".{end}") for other in others)), axis.key
        )
    return answer


def shown(value: Any) -> str:
    """A value in a few characters; a class as `SGD(lr=0.1)`."""
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{name}={shown(item)}" for name, item in value.get("init_args", {}).items())
        return f"{class_name(value)}({arguments})"
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def told(point: Point, names: dict[str, str]) -> str:
    """A point in words: `lr=0.01, std=0.5`."""
    return ", ".join(f"{names[key]}={shown(value)}" for key, value in point.items())


def at(config: Config, point: Point) -> Config:
    """A copy of a configuration with a point's values in it."""
    answer = deepcopy(config)
    for key, value in point.items():
        for node, last in places(answer, key):
            node[last] = value
    return answer


def places(config: Config, key: str) -> list[tuple[Config, str]]:
    """Where a key's value stands: the dictionaries that hold it, and its name there.

    A key goes from the top of the configuration (`model.optimizer.lr`; `init_args` may be left out), or starts with the
    class of a callback in `trainer.callbacks` (`UpscaleCallback.noise.std`) and then means every callback of that
    class.
    """
    first, rest = callback_key(key)
    if first in config:
        return [_descend(config, key.split("."), key)]
    found = callbacks_of(config, first)
    if not found or not rest or rest[0] == "class_path":
        classes = sorted({class_name(callback) for callback in config["trainer"]["callbacks"] or []})
        raise ValueError(
            f"{key}: there is no {first!r}; a key starts with one of {', '.join(config)}, "
            f"or with a class in trainer.callbacks: {', '.join(classes) or 'there is none'}"
        )
    return [_descend(callback, rest, key) for callback in found]


def callback_key(key: str) -> tuple[str, list[str]]:
    """The class of a callback and where in its arguments a key points; `init_args` may be left out."""
    first, *rest = key.split(".")
    return first, rest[1:] if rest[:1] == ["init_args"] else rest


def callbacks_of(config: Config, name: str) -> list[Config]:
    """The callbacks of a class, by its short name."""
    return [callback for callback in config["trainer"]["callbacks"] or [] if class_name(callback) == name]


def class_name(described: Config) -> str:
    return str(described["class_path"]).rpartition(".")[2]


def _descend(node: Any, parts: list[str], key: str) -> tuple[Config, str]:
    for index, part in enumerate(parts):
        if isinstance(node, dict) and "class_path" in node and part not in ("class_path", "init_args"):
            node = node.setdefault("init_args", {})
        if not isinstance(node, dict):
            there = ".".join(key.split(".")[: len(key.split(".")) - len(parts) + index])
            raise ValueError(
                f"{key}: {there} is {node!r} in the configuration, which has no {part!r}; give it a value there first"
            )
        if index == len(parts) - 1:
            return node, part
        if part not in node:
            raise ValueError(f"{key}: there is no {part!r}; there are {', '.join(node)}")
        node = node[part]
    raise AssertionError(key)
