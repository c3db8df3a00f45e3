"""The process of a command: its imports, the signals that end it, and its output. Imports no library itself."""

import errno
import gc
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, TextIO, cast

from mupscale.text_tables import Paint, Style, folded

# --- imports


@contextmanager
def without_collections() -> Iterator[None]:
    """Switches the garbage collector off: imports make millions of objects that stay, and a fifth of their time would
    be spent on looking through them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def loaded(name: str) -> ModuleType:
    """The module of a name. The first time, collections skip what was imported from then on."""
    if name in sys.modules:
        return sys.modules[name]
    with without_collections():
        answer = import_module(name)
    gc.freeze()
    return answer


# --- signals

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports of a process that SIGTERM ended."""


class Terminated(BaseException):
    """SIGTERM has asked this process to end; the message, if there is one, is how to continue."""


@contextmanager
def on_sigterm(handle: Callable[[], None]) -> Iterator[None]:
    """Calls `handle` in the main thread when SIGTERM comes; a forked process dies of the signal, as by default.

    Leaves a process alone that ignores the signal, and a thread that cannot set a handler.
    """
    owner = os.getpid()

    def handler(number: int, _: Any) -> None:
        if os.getpid() == owner:
            handle()
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_now() -> None:
    raise Terminated


@contextmanager
def interruptions() -> Iterator[list[int]]:
    """A list of the signals that have asked this process to end.

    They do not raise an exception, which would lose a process that is just being started, or break a call of a library
    that waits.
    """
    seen: list[int] = []

    def note(number: int, _: Any) -> None:
        seen.append(number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_for(seen: list[int]) -> None:
    if seen:
        raise Terminated if signal.SIGTERM in seen else KeyboardInterrupt


@contextmanager
def on_sigterm_in_a_thread(leave: Callable[[], None]) -> Iterator[None]:
    """Calls `leave` in another thread when SIGTERM comes, also while the main thread waits for other processes.

    Python runs signal handlers only between two of its own instructions. A process that waits in a collective
    operation for a process that has ended would never run one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: _close_wakeup(writer))

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                leave()

    threading.Thread(target=watch, daemon=True, name="sigterm").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # which ends the thread


def _close_wakeup(writer: int) -> None:
    """In a forked process: its signals are not those of its parent, which reads the pipe."""
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, writer):
        signal.set_wakeup_fd(current)


# --- output

CODES: dict[Style, str] = {"heading": "1", "good": "32", "bad": "31"}
"""Of the terminal: bold, green, red."""


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
    before = sys.stdout, sys.stderr
    for stream in filter(None, before):
        if getattr(stream, "errors", None) in ("strict", "backslashreplace") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with open(os.devnull, "w") if None in before else nullcontext() as nowhere:  # a stream that was closed is None
        output, errors = (Output(stream or nowhere) for stream in before)
        sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, errors)
        try:
            yield output
        finally:
            output.flush()
            errors.flush()
            sys.stdout, sys.stderr = before


FIRST, IN_A_LOG = 2.0, 30.0
"""Seconds before a bar is shown on a terminal, because short work needs none; and between two lines of a log."""


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows what is done, how many of them, and of how many, on a bar."""
    from tqdm import tqdm

    times = {"delay": FIRST} if sys.stderr.isatty() else {"delay": IN_A_LOG, "mininterval": IN_A_LOG}
    with tqdm(leave=False, **times) as bar:

        def show_progress(words: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_description(words, refresh=False)
            bar.update(done - bar.n)

        yield show_progress
