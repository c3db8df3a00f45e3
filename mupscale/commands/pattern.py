"""Configurations that differ in a few plain values: the first is parsed, the others are derived from it."""

from copy import deepcopy
from typing import Any

import yaml

from mupscale.commands.config import Config, differences
from mupscale.data_files import LOADER

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: the same text, many times as fast."""

_PLAIN = (bool, int, float, str, type(None))


class Pattern:
    """The parsed configuration of the first of many similar runs.

    Parsing takes most of the start-up time of a run. If another configuration differs only in numbers and texts, they
    are inserted without parsing.
    """

    def __init__(self, *, is_checked: bool = False) -> None:
        """
        Args:
            is_checked: Whether values may be wrong: numbers are compared with the types of their arguments, and a text
                is parsed, because it may name a class.
        """
        self.is_checked = is_checked
        self.first_text = ""
        """The config.yaml of the first run, once it is written."""
        self._plain: Config | None = None
        self._parsed: Any = None
        self._saved: Config = {}

    def note(self, parsed: Any, plain: Config) -> bool:
        """Keeps what was parsed of a configuration, if this is the first one; whether it is."""
        is_first = self._plain is None
        if is_first:
            self._plain, self._parsed = plain, deepcopy(parsed)
        return is_first

    def changes(self, plain: Config) -> dict[str, Any] | None:
        """The values that another configuration has, by their keys; None if it must be parsed itself."""
        if self._plain is None:
            return None
        answer = {}
        for key, there, here in differences(self._plain, plain):
            parts = key.split(".")
            # another class has other arguments, and a text may stand for something that is not a text
            is_plain = parts[-1] != "class_path" and _value_at(_section(self._parsed), parts) == there
            if not is_plain or not isinstance(here, _PLAIN) or not _is_alike(there, here):
                return None
            if self.is_checked and not isinstance(here, int | float):
                return None
            answer[key] = float(here) if isinstance(there, float) and here is not None else here
        return answer

    def fits(self, plain: Config) -> bool:
        """Whether another configuration differs in values of the same kinds: 1 batch is not 1.0, which means all."""
        return self.changes(plain) is not None and _are_of_one_kind(self._plain, plain)

    def parsed(self, changes: dict[str, Any]) -> Any:
        answer = deepcopy(self._parsed)
        for key, value in changes.items():
            _put(_section(answer), key.split("."), value)
        return answer

    def text(self, changes: dict[str, Any]) -> tuple[str, Config]:
        """Its config.yaml: the text, and what that says."""
        if not self._saved:
            self._saved = yaml.load(self.first_text, LOADER)
        answer = deepcopy(self._saved)
        for key, value in changes.items():
            _put(answer, key.split("."), value)
        header = "".join(line for line in self.first_text.splitlines(keepends=True) if line.startswith("#"))
        return header + yaml.dump(answer, sort_keys=False, Dumper=_DUMPER), answer


class Patterns:
    """Those of all runs that one process makes, one after another: the stages of an experiment are often alike."""

    def __init__(self) -> None:
        self._known: list[Pattern] = []

    def like(self, plain: Config) -> Pattern:
        """The pattern of a configuration: a new one if it is like none before it."""
        self._known = [pattern for pattern in self._known if pattern.first_text]  # the others never came to run
        for pattern in self._known:
            if pattern.fits(plain):
                return pattern
        self._known.append(Pattern())
        return self._known[-1]


def _section(parsed: Any) -> Any:
    """The part of a subcommand, or all of what was parsed without one."""
    command = parsed.get("subcommand")
    return parsed[command] if command else parsed


def _is_alike(there: Any, here: Any) -> bool:
    """Whether one value can take the place of another without a look at its type."""
    if not isinstance(there, _PLAIN):
        return False
    if isinstance(there, float):
        return isinstance(here, int | float) and not isinstance(here, bool)
    return type(there) is type(here) or (there is None and isinstance(here, str)) or (here is None)


def _are_of_one_kind(there: Any, here: Any) -> bool:
    """Whether all values of two configurations have the same types, where both have one."""
    if isinstance(there, dict) and isinstance(here, dict):
        return all(_are_of_one_kind(there.get(name), here.get(name)) for name in {**there, **here})
    if isinstance(there, list) and isinstance(here, list):
        return len(there) == len(here) and all(map(_are_of_one_kind, there, here))
    return there is None or here is None or type(there) is type(here)


def _value_at(node: Any, parts: list[str]) -> Any:
    """The value at a key; `...`, which is no value, inside of a tuple, where none can be put."""
    for part in parts:
        if isinstance(node, tuple):
            return ...
        node = node[int(part)] if isinstance(node, list) else node.get(part)
    return node


def _put(node: Any, parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        node = node[int(part)] if isinstance(node, list) else node[part]
    if isinstance(node, list):
        node[int(parts[-1])] = value
    else:
        node[parts[-1]] = value
