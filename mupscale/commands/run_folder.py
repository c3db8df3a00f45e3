"""The folder of a run: what identifies it, the lock by which one process writes to it, and what a mistake left."""

import fcntl
import json
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mupscale.atomic import write_durably
from mupscale.data_files import json_of
from mupscale.errors import UserError

RUN = "run.json"
"""In the folder of a run: a JSON object with the identity of the run (`id`), which its checkpoints have too, and its
length (`steps`, `steps_per_epoch`)."""

RESULT = "result.json"
"""In the folder of a run that has ended: its numbers."""

LOCK = "run.lock"
"""In a folder that a run writes to: the machine and the number of the process that last wrote. It may be deleted."""

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
        self._file: IO[str] = open(self.folder / LOCK, "a+", errors="replace")  # noqa: SIM115
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise Taken(f"{folder} is in use: {owner} writes to it. Wait until that ends, or stop it") from error
        except OSError:
            pass  # a file system without locks
        _held[self.folder] = self

    def begin(self) -> None:
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}\n")
        self._file.flush()

    def release(self) -> None:
        """Gives it back; folders that it made, and in which nothing else was written, are deleted."""
        if _held.pop(self.folder, None) is None:
            return
        lock = self.folder / LOCK
        if self._made and self.folder.exists() and set(os.listdir(self.folder)) <= {LOCK, RUN}:
            (self.folder / RUN).unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        elif lock.exists() and not lock.stat().st_size:
            lock.unlink()
        _remove_empty(self._made)
        self._file.close()


class Taken(UserError):
    """Another process writes to the folder."""


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says of the run in a folder; empty if it is missing or damaged."""
    try:
        content = json_of((folder / RUN).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_run(folder: Path, **fields: Any) -> None:
    write_durably(folder / RUN, (json.dumps({**read_run(folder), **fields}, indent=1) + "\n").encode())


def _missing(folder: Path) -> list[Path]:
    return [each for each in (folder, *folder.parents) if not each.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not made, or another process has put something there
            folder.rmdir()


class Leftovers:
    """The files that appear in a run's folder from `watch` on. `remove` deletes them, and folders made for them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._before: set[Path] = set()
        self._missing: list[Path] = []

    def watch(self, folder: Path) -> None:
        self._folder = folder
        self._before = set(folder.rglob("*")) if folder.is_dir() else set()
        self._missing = _missing(folder)

    def remove(self) -> None:
        if self._folder is None:
            return
        if self._folder in self._missing:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            for path in set(self._folder.rglob("*")) - self._before:
                if path.is_file() or path.is_symlink():
                    path.unlink(missing_ok=True)
        _remove_empty(self._missing)
