"""Writing files and folders so that a reader finds the old content or the new one, never a part of it; and locks."""

import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mupscale.errors import UserError


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yields a temporary file beside `path`, which replaces it at the end; unique to the process, unless given."""
    new = temporary or path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces the content of a file by `text`, whole even if this process is killed."""
    with replacing(path) as new:
        new.write_text(text)


def write_durably(path: Path, content: bytes) -> None:
    """Replaces the content of a file by `content`, as `durably` does."""
    with durably(path) as stream:
        stream.write(content)


@contextmanager
def durably(path: Path) -> Iterator[BinaryIO]:
    """Yields a stream for the new content of a file, which is whole even if the machine loses power.

    The content is on disk once the block is over. Only one process at a time may write `path`. A process that is killed
    leaves `partial(path)` behind, and the next call overwrites it.
    """
    with replacing(path, partial(path)) as new, new.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Returns once the names in a folder are on disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def partial(path: Path) -> Path:
    """The temporary file of `durably`, or folder of `whole_folder`."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def locked(path: Path, in_use: str) -> Iterator[None]:
    """Holds a lock that ends with this process; a UserError with the message `in_use` if another process holds it."""
    import fcntl  # only Unix has it, and training does not need it

    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise UserError(in_use) from error
        # the process that held it before may have deleted it in between: then this lock is void
        if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
            break
        os.close(file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yields an empty hidden folder beside `out`, which becomes `out` at the end; if the block fails, it is deleted.

    A process that is killed leaves the hidden folder and its lock behind. The next one for the same `out` deletes both.
    UserError if `out` exists, or if a living process is writing it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    in_use = f"another process is writing --out {out}; wait for it, or name another folder"
    with locked(out.with_name(f".{out.name}.lock"), in_use):
        if out.exists() or out.is_symlink():
            raise UserError(f"--out {out} exists; name another folder, or delete it")
        unfinished = partial(out)
        delete(unfinished)
        try:
            unfinished.mkdir()
            yield unfinished
            sync_folder(unfinished)
            unfinished.rename(out)
            sync_folder(out.parent)
        finally:
            delete(unfinished)


def delete(path: Path) -> None:
    """Deletes a file, a link or a folder with all that is in it, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def missing_folders(folder: Path) -> list[Path]:
    """What of a folder, and of those that it is in, does not exist: what `mkdir(parents=True)` makes."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not made, or another process has put something there
            folder.rmdir()
