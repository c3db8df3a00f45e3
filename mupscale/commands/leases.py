"""Which process works on what in a shared folder: leases that end with their process, and a lock for the folder.

These use fcntl and not the package filelock: a lease writes its owner into the file that it locks, which filelock does
not give access to, and on file systems without flock filelock falls back to a lock that outlives a killed process.
"""

import fcntl
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RENEWAL_SECONDS = 10.0
"""How often a process renews the time of change of its lease."""

LAPSE_SECONDS = 60.0
"""A process on another machine that has not renewed its lease for so long is dead, if its lock is gone as well."""


class Lease:
    """The right to make a run, for as long as this process lives and does not release it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(f"{platform.node()} {os.getpid()}")
        self._file.flush()
        self._released = threading.Event()
        # absolute, because jsonargparse changes the working directory for a moment while it reads a file
        threading.Thread(target=self._renew, args=(path.absolute(),), daemon=True).start()

    def release(self) -> None:
        self._released.set()
        self._file.close()

    def _renew(self, path: Path) -> None:
        while not self._released.wait(RENEWAL_SECONDS):
            os.utime(path)


def lapsed(path: Path) -> bool:
    """Whether no living process holds a lease."""
    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.read().partition(" ")[0] == platform.node():
                return True
            # This machine may not see a lock of another one, but it sees the renewals. Both times are of the clock of
            # the file system.
            probe = path.with_suffix(".probe")
            probe.touch()
            return probe.stat().st_mtime - path.stat().st_mtime > LAPSE_SECONDS
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps out all other processes that lock this folder; waits for them first."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
