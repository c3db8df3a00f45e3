"""SIGTERM ends a command with exit code 143 and a message how to continue. Does not import torch."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    """Raises Terminated or KeyboardInterrupt if a signal has asked this process to end."""
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
