"""What standard output can show: its width, colours, letters, how far long work is; and what happens if it fails."""

import codecs
import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Protocol, TextIO, cast

from mupscale.text_tables import Paint, Style, folded

CODES: dict[Style, str] = {"heading": "1", "good": "32", "bad": "31"}
"""Of the terminal: bold, green, red."""


PLAIN = {"→": "->", "–": "-", "…": "...", "×": "x", "·": "*", "≤": "<=", "≥": ">=", "²": "^2", "μ": "u", "σ": "sigma"}
"""Signs, and what stands for them where the encoding has none."""


class Described(Protocol):
    """What has a text for a terminal of a width."""

    def text(self, columns: int | None, paint: Paint) -> str: ...


def is_terminal() -> bool:
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


class Output:
    """A stream that drops what nobody can read. A command goes on: a training must not end because `head` did.

    `problem` is why it could not be written, unless the reader has ended.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.problem: str | None = None

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno != errno.EPIPE:
            self.problem = self.problem or error.strerror
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())  # also for what is still in its buffer
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def lenient_output() -> Iterator[Output]:
    """Replaces standard output and standard error by streams that take every letter, and whose failure is no error."""
    codecs.register_error("mupscale", _spelled_out)
    before = sys.stdout, sys.stderr
    for stream in filter(None, before):
        if getattr(stream, "errors", None) in ("strict", "backslashreplace") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="mupscale")
    with open(os.devnull, "w") if None in before else nullcontext() as nowhere:  # a stream that was closed is None
        output, errors = (Output(stream or nowhere) for stream in before)
        sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, errors)
        try:
            yield output
        finally:
            output.flush()
            errors.flush()
            sys.stdout, sys.stderr = before


def _spelled_out(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


FIRST = 2.0
"""Seconds before anything is shown: short work needs no line."""

EVERY = {True: 0.2, False: 30.0}
"""Seconds between two lines, on a terminal, where one takes the place of the other, and elsewhere."""


class Status:
    """Shows what is done: on a terminal one line that is renewed and removed at the end, elsewhere a line now and then.

    with Status() as status:
        status("training", 3, 50)
    """

    def __init__(self) -> None:
        self._renewed = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._next = self._begin + FIRST
        self._width = 0

    def __enter__(self) -> "Status":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()

    def clear(self) -> None:
        if self._renewed and self._width:
            self._print("\r" + " " * self._width + "\r", end="")
            self._width = 0

    def __call__(self, words: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY[self._renewed]
        line = f"{words}: {done:,} of {total:,}, {now - self._begin:.0f} s"
        if self._renewed:
            self._print("\r" + line.ljust(self._width), end="")
            self._width = max(self._width, len(line))
        else:
            self._print(line, end="\n")

    def _print(self, text: str, end: str) -> None:
        print(text, end=end, file=sys.stderr, flush=True)
