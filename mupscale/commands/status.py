"""A line on stderr that says how far long work is."""

import sys
import time
from types import TracebackType

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
        """Removes the line from a terminal."""
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
