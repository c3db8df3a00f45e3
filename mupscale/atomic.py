"""Writing files and folders so that a reader finds the old content or the new one, never a part of it; and locks.

Nothing here writes through a link.
"""

import errno
import os
import platform
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mupscale.errors import UserError


def open_to_write(path: Path, flags: int = 0, folder: int | None = None) -> int:
    """Opens a file for writing, never through a link: a UserError, if it is a link, a device or a pipe.

    Every file that a command writes is opened here, because the folder may be a stranger's: a link in it would lead the
    command to a file elsewhere. `folder` is the descriptor of the file's folder, if that is open already.
    """
    name: str | Path = path if folder is None else path.name
    try:
        # a pipe that nobody reads is an error, instead of a wait
        file = os.open(name, os.O_NOFOLLOW | os.O_NONBLOCK | (flags or os.O_WRONLY), 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise UserError(f"{path} is a link; delete it, or name another folder") from error
        if error.errno == errno.ENXIO:
            raise UserError(f"{path} is not a file; delete it, or name another one") from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UserError(f"{path} is not a file; delete it, or name another one")
    return file


def append_to(path: Path) -> BinaryIO:
    """Opens a file to write at its end, as `open_to_write` does."""
    return os.fdopen(open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


def truncate(path: Path, size: int) -> None:
    """Cuts a file to its first `size` bytes, opened as by `open_to_write`."""
    file = open_to_write(path)
    try:
        os.ftruncate(file, size)
    finally:
        os.close(file)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a stream for the new content of a file, which takes the place of the old one, or of a link, at the end.

    Several processes may write `path` at a time; the last one wins.
    """
    with _replacing(path, f".{path.name}.{platform.node()}.{os.getpid()}", durable=False) as stream:
        yield stream


@contextmanager
def durably(path: Path) -> Iterator[BinaryIO]:
    """Yields a stream for the new content of a file, which is whole even if the machine loses power.

    The content is on disk once the block is over. Only one process at a time may write `path`. A process that is killed
    leaves `partial(path)` behind, and the next call overwrites it.
    """
    with _replacing(path, partial(path).name, durable=True) as stream:
        yield stream


@contextmanager
def _replacing(path: Path, name: str, *, durable: bool) -> Iterator[BinaryIO]:
    """Yields a stream for a new file `name` in the folder of `path`, which becomes `path` at the end."""
    # its descriptor: whatever takes the folder's name meanwhile, all is done in one folder
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _refuse_special(path, folder)
        _unlink(name, folder)  # a link, or a file that a killed process has left
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(open_to_write(path.with_name(name), flags, folder), "wb") as stream:
                yield stream
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            _unlink(name, folder)
        if durable:
            os.fsync(folder)
    finally:
        os.close(folder)


def _refuse_special(path: Path, folder: int) -> None:
    """Raises a UserError if a name is that of a device or a pipe, which a file must not replace."""
    try:
        mode = os.lstat(path.name, dir_fd=folder).st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise UserError(f"{path} is not a file; delete it, or name another one")


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def write_text(path: Path, text: str) -> None:
    """Replaces the content of a file by `text`, whole even if this process is killed."""
    with replacing(path) as stream:
        stream.write(text.encode())


def write_durably(path: Path, content: bytes) -> None:
    """Replaces the content of a file by `content`, as `durably` does."""
    with durably(path) as stream:
        stream.write(content)


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
        file = open_to_write(path, os.O_RDWR | os.O_CREAT)
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
def locked_output(out: Path) -> Iterator[None]:
    """Holds a lock beside `out`, whose folder is made; a UserError if another process is writing it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    in_use = f"another process is writing --out {out}; wait for it, or give another name"
    with locked(out.with_name(f".{out.name}.lock"), in_use):
        yield


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yields an empty hidden folder beside `out`, which becomes `out` at the end; if the block fails, it is deleted.

    A process that is killed leaves the hidden folder and its lock behind. The next one for the same `out` deletes both.
    UserError if `out` exists, or if a living process is writing it.
    """
    with locked_output(out):
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
    """Returns the folders that `mkdir(parents=True)` would make: this one and those above that do not exist."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not made, or another process has put something there
            folder.rmdir()
