"""Who works on what in a shared folder: leases that end with their process, and one lock for the folder."""

import fcntl
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RENEWED = 10.0
"""Seconds between two signs of life of a process."""

LAPSED = 60.0
"""Seconds without a sign of life after which a process on another machine is taken for dead, if its lock is gone, too.
"""


class Lease:
    """The right to run a trial, for as long as this process lives and does not release it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(f"{platform.node()} {os.getpid()}")
        self._file.flush()
        self._released = threading.Event()
        threading.Thread(target=self._renew, args=(path,), daemon=True).start()

    def release(self) -> None:
        self._released.set()
        self._file.close()

    def _renew(self, path: Path) -> None:
        while not self._released.wait(RENEWED):
            os.utime(path)


def lapsed(path: Path) -> bool:
    """Whether the process that held a lease is dead."""
    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read().partition(" ")[0] == platform.node():
                return True
            # another machine's lock may not be seen here, but its signs of life are; by the clock of the file system
            probe = path.with_suffix(".probe")
            probe.touch()
            return probe.stat().st_mtime - path.stat().st_mtime > LAPSED
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone among the processes that work in this folder."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
