"""The options of a command. A mistake is reported in one line; for a typo it names the nearest options."""

import argparse
import re
import sys
from typing import Any, Literal, NoReturn

from mupscale.commands._jsonargparse import did_you_mean
from mupscale.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """Raises a UserError of one line where argparse would print its usage and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, _whole_number)

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = did_you_mean(unknown[1], self._options()) if unknown else ""
        raise UserError(f"{message}{near or f'. {self.prog} --help lists the options'}")

    def own_and_other(self, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options of this command, and those that it passes on to `fit`. Raises a UserError for a typo."""
        options, others = self.parse_known_args(arguments)
        for other in others:
            unknown = re.match(r"--[\w-]+", other)
            near = did_you_mean(unknown[0], self._options(), cutoff=0.75) if unknown else ""
            if near:
                raise UserError(f"unrecognized option {other}{near}")
        return options, others

    def _options(self) -> list[str]:
        found = [option for action in self._actions for option in action.option_strings]
        for action in self._actions:
            for kind in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
                found += kind._options() if isinstance(kind, ArgumentParser) else []  # of `prepare text`, say
        return list(dict.fromkeys(found))


Size = int | Literal["auto", "off"]
"""The largest number of runs to train at once."""

STACK_HELP = """how many runs to train at once as one program, if they differ only in numbers (learning rate, weight
decay, noise, seed): auto (the default), as many as fit into memory; N, at most N; off, one after another"""


def stack_size(text: str) -> Size:
    """The value of --stack."""
    if text in ("auto", "off"):
        return text  # type: ignore[return-value]
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--stack {text}: give auto, off, or how many runs to train as one program")
    return int(text)


def _whole_number(text: str) -> int:
    """A number that counts something; ValueError for one that no sequence is as long as."""
    number = int(text)
    if abs(number) > sys.maxsize:
        raise ValueError(text)
    return number
