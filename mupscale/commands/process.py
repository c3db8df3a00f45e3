"""The process of a command: its options, its imports, the signals that end it, and its output. Imports no library.

A mistake in an option is one line, before any work; for a typo it names the nearest options.
"""

import argparse
import difflib
import errno
import gc
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO, cast

from mupscale.errors import UserError
from mupscale.text_tables import Style, folded

# --- options


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
    above = path.absolute().parents or [path]  # there is none above /
    folder = next(each for each in above if each.exists() or each.is_symlink())
    if not folder.is_dir():
        raise UserError(f"{option}: {folder} is not a folder; name one, or name another file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written to ({error.strerror}); name another folder") from error


def command_line(*words: Any) -> str:
    """A command line of mupscale.

    >>> command_line("upscale", "my runs/last.ckpt", "--width", 64)
    "python -m mupscale upscale 'my runs/last.ckpt' --width 64"
    """
    return shlex.join(["python", "-m", "mupscale", *map(str, words)])


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

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""The signals, beside Ctrl-C, that ask a process to end: of a scheduler, and of a connection that was lost."""

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code that a shell reports of a process that SIGTERM ended."""


class Terminated(BaseException):
    """A signal of ENDING has asked this process to end; the message, if there is one, is how to continue."""


@contextmanager
def on_sigterm(handle: Callable[[], None]) -> Iterator[None]:
    """Calls `handle` in the main thread at a signal of ENDING; a forked process dies of the signal, as by default.

    A signal that the process ignores, as under nohup, stays ignored. A thread that cannot set a handler is left alone.
    """
    owner = os.getpid()

    def handler(number: int, _: Any) -> None:
        if os.getpid() == owner:
            handle()
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handling(ENDING, handler):
        yield


@contextmanager
def _handling(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Sets the handler of these signals, except of those that the process ignores; restores the old ones at the end."""
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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

    with _handling((signal.SIGINT, *ENDING), note):
        yield seen


def raise_for(seen: list[int]) -> None:
    if seen:
        raise KeyboardInterrupt if set(seen) == {signal.SIGINT} else Terminated


@contextmanager
def on_sigterm_in_a_thread(leave: Callable[[], None]) -> Iterator[None]:
    """Calls `leave` in another thread, and no other handler, at a signal of ENDING, whatever the main thread waits for.

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
            if number[0] in ENDING:
                leave()

    threading.Thread(target=watch, daemon=True, name="sigterm").start()
    try:
        with on_sigterm(lambda: None):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # which ends the thread


def _close_wakeup(writer: int) -> None:
    """Stops a forked process from writing its signals to the pipe that its parent reads."""
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, writer):
        signal.set_wakeup_fd(current)


# --- output

CODES: dict[Style, str] = {"heading": "1", "good": "32", "bad": "31"}
"""Escape codes of the terminal: bold, green, red."""


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


def show(answer: Any) -> None:
    """Prints a text, or what makes one by `text(columns, paint)`, so that it fits the terminal.

    For a pipe or a file, all of it as it is.
    """
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
    with (
        open(os.devnull, "w", encoding="utf-8") if None in before else nullcontext() as nowhere
    ):  # a stream that was closed is None
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
