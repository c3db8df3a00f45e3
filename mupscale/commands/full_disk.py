"""Names the file system of a full disk. Does not import torch."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mupscale.errors import UserError

PROBLEMS = {
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file has reached the largest size allowed",
}
"""What the system reports of a write that does not fit, in words."""

ROOM = 64 * 2**20
"""Bytes. Where a write failed for an unknown reason, a file system with less left counts as full."""


class DiskFull(UserError):
    """A file could not be written because a disk is full; the message names the file system and how to continue."""


def full_disk(error: BaseException, places: dict[str, Path]) -> str | None:
    """The problem and its file system, in words, if a write failed for want of space; None for any other error.

    `places` are the folders that may have been written to, with names that a user knows. The system names the file only
    if it could not be opened; otherwise the one of `places` with the least space left is meant.
    """
    for each in chain(error):
        if isinstance(each, OSError) and each.errno in PROBLEMS:
            named = each.filename2 or each.filename  # the target of a copy is the second
            path = named if isinstance(named, str | os.PathLike) else None
            return f"{PROBLEMS[each.errno]} {_on(Path(path) if path else None, places, each.errno)}"
    if any(_is_hidden(each) for each in chain(error)) and min(map(free, _all(places).values())) < ROOM:
        return f"{PROBLEMS[errno.ENOSPC]} {_on(None, places, errno.ENOSPC)}"
    return None


def unnamed(error: BaseException) -> str | None:
    """The line for a command that a full disk has ended; None if it was something else, or a line is there already."""
    if any(isinstance(each, DiskFull) for each in chain(error)):
        return None
    problem = full_disk(error, {"the working directory": Path()})
    return None if problem is None else f"{problem}. Make space there, then run the same command again"


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it was raised from or while handling."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def free(path: Path) -> int:
    """The bytes that this user may still write to the file system of a path; 0 if no more files may be made."""
    try:
        found = os.statvfs(_existing(path))
    except OSError:
        return sys.maxsize
    if found.f_files and not found.f_favail:
        return 0
    return found.f_bavail * found.f_frsize


def _on(named: Path | None, places: dict[str, Path], number: int) -> str:
    places = _all(places)
    if named is None:
        quota = number == errno.EDQUOT  # of which the file system does not say how much is left
        name = next(iter(places)) if quota else min(places, key=lambda name: free(places[name]))
        path = places[name]
        return f"on the file system at {_mount(path)}, where {name} is ({path})"
    temporary = _existing(named).is_relative_to(_existing(places["TMPDIR"]))
    others = [_existing(place) for name, place in places.items() if name != "TMPDIR"]
    inside = any(_existing(named).is_relative_to(place) for place in others)
    note = ", in TMPDIR" if temporary and not inside else ""
    return f"on the file system at {_mount(named)} ({named}{note})"


def _all(places: dict[str, Path]) -> dict[str, Path]:
    temporary = os.environ.get("TMPDIR")
    if temporary is None:
        try:
            temporary = tempfile.gettempdir()
        except OSError:  # it found none that it can write to
            temporary = "/tmp"
    return {**places, "TMPDIR": Path(temporary)}


def _existing(path: Path) -> Path:
    """A path, or the innermost folder around it that exists."""
    path = path.absolute()
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path(path.anchor)).resolve()


def _mount(path: Path) -> Path:
    path = _existing(path)
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))


def _is_hidden(error: BaseException) -> bool:
    """Whether torch could not write a file, which it reports without the reason."""
    if "torch" not in sys.modules:
        return False
    from mupscale._torch import is_failed_write

    return is_failed_write(error)
