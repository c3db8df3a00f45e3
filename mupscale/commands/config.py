"""A whole configuration as plain values: where its keys stand, and classes and callbacks by short name."""

import math
from copy import deepcopy
from typing import Any

from mupscale.errors import UserError

Config = dict[str, Any]
"""A whole configuration, as plain dictionaries and lists, with every default written out."""

Point = dict[str, Any]
"""A value for every axis, by its key: what one trial changes in a configuration."""


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
        raise UserError(
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
            raise UserError(
                f"{key}: {there} is {node!r} in the configuration, which has no {part!r}; give it a value there first"
            )
        if index == len(parts) - 1:
            return node, part
        if part not in node:
            raise UserError(f"{key}: there is no {part!r}; there are {', '.join(node)}")
        node = node[part]
    raise AssertionError(key)


def brief(value: Any) -> str:
    """A value in a few characters; a class as `SGD(lr=0.1)`."""
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{name}={brief(item)}" for name, item in value.get("init_args", {}).items())
        return f"{class_name(value)}({arguments})"
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
