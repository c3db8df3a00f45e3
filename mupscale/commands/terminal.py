"""What standard output can show: its width, if it is a terminal, and colours."""

import os
import shutil
import sys
from typing import Protocol

from mupscale.text_tables import Paint, Style, folded

CODES: dict[Style, str] = {"heading": "1", "good": "32", "bad": "31"}
"""Of the terminal: bold, green, red."""


class Described(Protocol):
    """What has a text for a terminal of a width."""

    def text(self, columns: int | None, paint: Paint) -> str: ...


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def columns() -> int | None:
    """The number of columns of the terminal; None for a pipe or a file, which lines of any length fit."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def paint(text: str, style: Style) -> str:
    """The text in its colour, where standard output is a terminal with colours and NO_COLOR does not forbid them."""
    if not is_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"\x1b[{CODES[style]}m{text}\x1b[0m"


def show(answer: Described | str) -> None:
    """Prints an answer so that it fits the terminal; for a pipe or a file, all of it as it is."""
    if isinstance(answer, str):
        text = "\n".join(folded(answer.splitlines(), columns()))
    else:
        text = answer.text(columns(), paint)
    print(text, flush=True)
