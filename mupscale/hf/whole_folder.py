"""Writing a folder so that it is there whole, or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mupscale.atomic import sync_folder
from mupscale.errors import UserError


def partial_folder(out: Path) -> Path:
    """Where `whole_folder` collects the files."""
    return out.with_name(f".{out.name}.partial")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yields an empty hidden folder beside `out`, which becomes `out` at the end; if the block fails, it is deleted.

    A process that is killed leaves the hidden folder and its lock behind. The next one for the same `out` deletes both.
    UserError if `out` exists, or if a living process is writing it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.with_name(f".{out.name}.lock"), out):
        if out.exists() or out.is_symlink():
            raise UserError(f"--out {out} exists; name another folder, or delete it")
        partial = partial_folder(out)
        _remove(partial)
        try:
            partial.mkdir()
            yield partial
            sync_folder(partial)
            partial.rename(out)
            sync_folder(out.parent)
        finally:
            _remove(partial)


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _locked(path: Path, out: Path) -> Iterator[None]:
    """Holds a lock that ends with this process; the file of the lock is deleted at the end."""
    file = _lock(path, out)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _lock(path: Path, out: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise UserError(f"another process is writing --out {out}; wait for it, or name another folder") from error
        # the process that held it before may have deleted it in between
        if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
            return file
        os.close(file)
