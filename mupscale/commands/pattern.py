"""Configurations that differ in a few plain values: the first is parsed, the others are derived from it.

Parsing takes most of the start-up time of a run, and a sweep has many similar runs.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import yaml

from mupscale.commands.config import Config

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: the same text, many times as fast."""

Path = tuple[str | int, ...]
"""The keys and the places in lists that lead to a value."""


class Parsed(NamedTuple):
    """A configuration of `fit`: as it was given, as it was parsed, and its config.yaml: the text, and what it says."""

    plain: Config
    config: Any
    text: str
    saved: Config


known: list[Parsed] = []
"""What this process has parsed, and may derive others from."""


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


def changes_from(first: Parsed, plain: Config) -> dict[Path, Any] | None:
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


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if not isinstance(node, dict | list) or not node:
        yield path, node
        return
    for key, item in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(item, (*path, key))


def _value_at(node: Any, path: Path) -> Any:
    """The value at a path; `...`, which is no value, inside of a tuple, where none can be put."""
    for part in path:
        if isinstance(node, tuple):
            return ...
        node = node[part] if isinstance(node, list) else node.get(part)
    return node


def _put(node: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
