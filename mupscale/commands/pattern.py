"""Configurations that differ in a few plain values: the first is parsed, the others are derived from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from mupscale.commands.config import Config, differences
from mupscale.data_files import LOADER

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: the same text, many times as fast."""

_PLAIN = (bool, int, float, str, type(None))


class CommandLine(Protocol):
    """What was parsed, and the text of its config.yaml."""

    config: Any
    text: str


@dataclass
class Kept:
    """What is kept of a command line that has ended."""

    text: str
    config: Any = None


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
        self.first: CommandLine | None = None
        self._plain: Config = {}
        self._parsed: Any = None
        self._saved: Config = {}

    def note(self, cli: CommandLine, plain: Config) -> None:
        """Keeps what was parsed of a configuration, if this is the first one."""
        if self.first is None:
            self.first, self._plain, self._parsed = cli, plain, deepcopy(cli.config)

    def changes(self, plain: Config) -> dict[str, Any] | None:
        """The values that another configuration has, by their keys; None if it must be parsed itself."""
        if self.first is None:
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

    def end(self) -> None:
        """Keeps the text of the first command line, and not the network that it refers to."""
        if self.first is not None:
            self.first = Kept(self.first.text)

    def parsed(self, changes: dict[str, Any]) -> Any:
        """What a configuration with these changes would be, if it were parsed."""
        answer = deepcopy(self._parsed)
        for key, value in changes.items():
            _put(_section(answer), key.split("."), value)
        return answer

    def text(self, changes: dict[str, Any]) -> tuple[str, Config]:
        """Its config.yaml: the text, and what that says."""
        assert self.first is not None
        if not self._saved:
            self._saved = yaml.load(self.first.text, LOADER)
        answer = deepcopy(self._saved)
        for key, value in changes.items():
            _put(answer, key.split("."), value)
        header = "".join(line for line in self.first.text.splitlines(keepends=True) if line.startswith("#"))
        return header + yaml.dump(answer, sort_keys=False, Dumper=_DUMPER), answer


class Patterns:
    """Those of all runs that one process makes, one after another: the stages of an experiment are often alike."""

    def __init__(self) -> None:
        self._known: list[Pattern] = []

    @contextmanager
    def like(self, plain: Config) -> Iterator[Pattern]:
        """The pattern of a configuration, for the time in which it runs: a new one if it is like none before it."""
        known = next((pattern for pattern in self._known if pattern.fits(plain)), None)
        pattern = known or Pattern()
        try:
            yield pattern
        finally:
            pattern.end()
            if known is None and pattern.first is not None and pattern.first.text:
                self._known.append(pattern)


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
