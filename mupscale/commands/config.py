"""A whole configuration as plain values: finds keys, names classes, compares two, derives one from another."""

import math
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mupscale.data_files import json_of
from mupscale.errors import UserError

Config = dict[str, Any]
"""A whole configuration, as plain dictionaries and lists, with every default written out."""

Point = dict[str, Any]
"""A value for every axis, by its key: what one trial changes in a configuration."""

MOST_DIFFERENCES = 4
"""How many differences a message lists."""


# --- keys


def at(config: Config, point: Point) -> Config:
    answer = deepcopy(config)
    for key, value in point.items():
        for node, last in places(answer, key):
            node[last] = value
    return answer


def places(config: Config, key: str) -> list[tuple[Config, str]]:
    """The dictionaries that hold the value of a key, each with the value's name in it.

    A key starts at the top of the configuration (`model.optimizer.lr`; `init_args` may be left out), or with the class
    of a callback in `trainer.callbacks` (`UpscaleCallback.noise.std`), and then means every callback of that class.
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
    """The class of a callback, and the parts of the key inside its arguments; `init_args` may be left out."""
    first, *rest = key.split(".")
    return first, rest[1:] if rest[:1] == ["init_args"] else rest


def callbacks_of(config: Config, name: str) -> list[Config]:
    return [callback for callback in config["trainer"]["callbacks"] or [] if class_name(callback) == name]


def class_name(described: Config) -> str:
    return str(described["class_path"]).rpartition(".")[2]


def _descend(node: Any, parts: list[str], key: str) -> tuple[Config, str]:
    for index, part in enumerate(parts):
        if isinstance(node, dict) and "class_path" in node and part not in ("class_path", "init_args"):
            node = node.setdefault("init_args", {})
        if not isinstance(node, dict):
            reached = key.removesuffix("." + ".".join(parts[index:]))
            raise UserError(
                f"{key}: {reached} is {node!r} in the configuration, which has no {part!r}; give it a value there first"
            )
        if index == len(parts) - 1:
            return node, part
        if part not in node:
            raise UserError(f"{key}: there is no {part!r}; there are {', '.join(node)}")
        node = node[part]
    raise AssertionError(key)


# --- text and files


def brief(value: Any) -> str:
    """A value in a few characters; a class as `SGD(lr=0.1)`."""
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{name}={brief(item)}" for name, item in value.get("init_args", {}).items())
        return f"{class_name(value)}({arguments})"
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def labels(keys: Sequence[str]) -> dict[str, str]:
    """The shortest end of each key that no other key has: `lr`, `noise.std`."""
    return {key: _label(key, [other for other in keys if other != key]) for key in keys}


def _label(key: str, others: list[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        end = ".".join(parts[-count:])
        if not any(f".{other}".endswith(f".{end}") for other in others):
            return end
    return key


@contextmanager
def temporary_file(config: Config) -> Iterator[str]:
    """The path of a YAML file with a configuration, which is deleted in the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        yield str(path)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file that a command wrote. Raises a UserError if it is damaged."""
    try:
        content = json_of(path.read_text())
        if not isinstance(content, dict) or not content:
            raise UserError(f"it holds {content!r}")
        return content
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run the same command again") from error


# --- two configurations


def refuse_difference(there: dict[str, Any], here: dict[str, Any], what: str) -> None:
    """Raises a UserError with the settings that differ, if any do; it starts with `what`."""
    found = differences(there, here)
    if not found:
        return
    listed = [f"{key.removeprefix('config.')} is {a!r} there and {b!r} here" for key, a, b in found[:MOST_DIFFERENCES]]
    if len(found) > MOST_DIFFERENCES:
        listed.append(f"and {len(found) - MOST_DIFFERENCES} more")
    raise UserError(f"{what}: {'; '.join(listed)}. Choose another folder with --out, or delete that one")


def differences(there: Any, here: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """The keys under which two nested values differ, each with both values."""
    found: list[tuple[str, Any, Any]] = []
    if isinstance(there, dict) and isinstance(here, dict):
        for name in {**there, **here}:
            found += differences(there.get(name), here.get(name), f"{key}.{name}".removeprefix("."))
        return found
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, (a, b) in enumerate(zip(there, here, strict=True)):
            found += differences(a, b, f"{key}.{index}")
        return found
    return [] if there == here else [(key, there, here)]


def number_in(value: Any) -> Any:
    """A value; a text such as 1e-3 as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# --- similar configurations: the first is parsed, which takes most of the start-up time of a run

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: the same text, many times as fast."""

Keys = tuple[Any, ...]
"""The keys and the places in lists that lead to a value."""


class Parsed(NamedTuple):
    """A configuration of `fit`: as it was given, as it was parsed, and its config.yaml: the text, and what it says."""

    plain: Config
    config: Any
    text: str
    saved: Config


known: deque[Parsed] = deque(maxlen=16)
"""What this process has parsed last, and may derive others from."""


def derive(plain: Config) -> Parsed | None:
    """What parsing a configuration would give; None if it must be parsed."""
    for first in known:
        changes = changes_from(first, plain)
        if changes is not None:
            config, saved = deepcopy(first.config), deepcopy(first.saved)
            for path, value in changes.items():
                _put(config["fit"], path, value)
                _put(saved, path, value)
            header = "".join(line for line in first.text.splitlines(keepends=True) if line.startswith("#"))
            return Parsed(plain, config, header + yaml.dump(saved, sort_keys=False, Dumper=_DUMPER), saved)
    return None


def changes_from(first: Parsed, plain: Config) -> dict[Keys, Any] | None:
    """The values that another configuration has, by their paths; None if one of them must be parsed.

    Types are compared as well: 1 batch is not 1.0, which means all.
    """
    before, after = dict(_leaves(first.plain)), dict(_leaves(plain))
    if before.keys() != after.keys():
        return None
    answer = {}
    for path, value in after.items():
        if type(value) is not type(before[path]):
            return None
        if value == before[path]:
            continue
        # another class has other arguments, and a text may stand for something that is not a text
        is_plain = isinstance(value, bool | int | float | str) and path[-1] != "class_path"
        if not is_plain or _value_at(first.config["fit"], path) != before[path]:
            return None
        answer[path] = value
    return answer


def _leaves(node: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if not isinstance(node, dict | list) or not node:
        yield path, node
        return
    for key, item in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(item, (*path, key))


def _value_at(node: Any, path: Keys) -> Any:
    """The value at a path; `...`, which is no value, inside of a tuple, where none can be put."""
    for part in path:
        if isinstance(node, tuple):
            return ...
        node = node[part] if isinstance(node, list) else node.get(part)
    return node


def _put(node: Any, path: Keys, value: Any) -> None:
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
