"""The options of a command. A mistake is one line, before any work; for a typo it names the nearest options."""

import argparse
import difflib
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from mupscale.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """Raises a UserError of one line where argparse would print its usage and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
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


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The nearest of the names, as the end of a message; nothing where none is near."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)
    return f". Did you mean {' or '.join(near)}?" if near else ""


def _whole_number(text: str) -> int:
    """A number that counts something; ValueError for one that no sequence is as long as."""
    number = int(text)
    if abs(number) > sys.maxsize:
        raise ValueError(text)
    return number


def refuse_output(option: str, path: Path, inputs: dict[str, Path]) -> None:
    """Raises a UserError if `path`, given by `option`, cannot be written, or is one of the `inputs`. Writes nothing."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file in it")
    for what, used in inputs.items():
        if path.resolve() == used.resolve() or (path.exists() and used.exists() and path.samefile(used)):
            raise UserError(f"{option} {path} is {what} itself; name another file")
    refuse_folder(option, path)


def refuse_new_folder(option: str, folder: Path) -> None:
    """Raises a UserError if `folder`, given by `option`, exists, or cannot be made. Writes nothing."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{option} {folder} exists; name another folder, or delete it")
    refuse_folder(option, folder)


def refuse_output_folder(option: str, folder: Path) -> None:
    """Raises a UserError if `folder`, given by `option`, is a file, or cannot be made or written to. Writes nothing."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder} is not a folder; name a folder")
    refuse_folder(option, folder / "file")


def refuse_folder(option: str, path: Path) -> None:
    """Raises a UserError if `path` cannot be made; a file is made in the nearest folder above it and deleted."""
    folder = next(each for each in path.absolute().parents if each.exists() or each.is_symlink())
    if not folder.is_dir():
        raise UserError(f"{option}: {folder} is not a folder; name one, or name another file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written to ({error.strerror}); name another folder") from error
