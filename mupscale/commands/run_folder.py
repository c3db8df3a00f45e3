"""The folder of a run: its identity, and the lock by which one process at a time writes to it."""

import fcntl
import os
import platform
import uuid
from pathlib import Path
from typing import IO

from mupscale.errors import UserError

LOCK = "run.lock"
"""In the folder of a run: the identity of the run, and the machine and the number of the process that last wrote."""

_held: dict[Path, "Claim"] = {}


class Claim:
    """The right to write to a folder, until it is released or this process ends, however it ends.

    It is a POSIX lock, which a forked worker does not inherit: one that outlives its parent would keep it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises a UserError if another process has it."""
        self.folder = folder.absolute()
        self._made = _missing(self.folder)
        if self.folder in _held:
            raise Taken(f"{folder} is already in use by this process")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = open(self.folder / LOCK, "a+")  # noqa: SIM115
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = " ".join(_words(self._file)[1:]) or "another process"
            self._file.close()
            raise Taken(f"{folder} is in use: {owner} writes to it. Wait until that ends, or stop it") from error
        except OSError:
            pass  # a file system without locks
        self.identity = next(iter(_words(self._file)), None)
        _held[self.folder] = self

    def begin(self, identity: str | None = None) -> str:
        """Notes that this process writes to the folder, for the run of this identity, or else for a new one."""
        self.identity = identity or uuid.uuid4().hex
        self._file.truncate(0)
        self._file.write(f"{self.identity} process {os.getpid()} on {platform.node()}\n")
        self._file.flush()
        return self.identity

    def release(self) -> None:
        """Gives it back; folders that it made, and in which nothing else was written, are deleted."""
        if _held.pop(self.folder, None) is None:
            return
        lock = self.folder / LOCK
        if lock.exists() and (not lock.stat().st_size or (self._made and os.listdir(self.folder) == [LOCK])):
            lock.unlink()
        for folder in self._made:
            if folder.exists():
                if any(folder.iterdir()):
                    break
                folder.rmdir()
        self._file.close()


class Taken(UserError):
    """Another process writes to the folder."""


def identity_of(folder: Path) -> str | None:
    """The identity of the run in a folder; None if it has none, being of an older version."""
    if folder.absolute() in _held:
        return _held[folder.absolute()].identity  # closing another handle of the file would give the lock back
    try:
        with open(folder / LOCK) as file:
            return next(iter(_words(file)), None)
    except OSError:
        return None


def _words(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().split()


def _missing(folder: Path) -> list[Path]:
    """The folder and those around it that do not exist, from the inside."""
    return [each for each in (folder, *folder.parents) if not each.exists()]
