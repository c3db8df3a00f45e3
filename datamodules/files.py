"""The files of a data set: reads only complete files, once in a process; downloads them completely or not at all."""

import hashlib
import socket
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mupscale.atomic import missing_folders, remove_empty
from mupscale.errors import UserError

TIMEOUT = 30.0
"""The timeout of a download in seconds; without one, urllib waits for ever."""

DOWNLOAD_ERRORS = (OSError, HTTPException, UserError)
"""What can go wrong in a download, a wrong checksum included."""

NOT_NPZ = (OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What np.load raises for another file; zipfile raises RuntimeError for an encrypted one."""

_held: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_verified: set[Hashable] = set()


def read_npz(file: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """The named arrays of an npz file; a UserError if it is damaged, lacks one, or has objects to unpickle."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return [arrays[name] for name in names]
    except NOT_NPZ as error:
        raise UserError(f"data_dir: {file} is not a whole npz file with arrays {', '.join(names)} ({error})") from error


def check_digest(file: Path, algorithm: str, published: str) -> None:
    """Raises a UserError if the file differs from the published one."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, algorithm).hexdigest()
    if found != published:
        raise UserError(f"cut short, damaged or another file: its {algorithm} is {found}, the published is {published}")


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A folder inside `folder`, which is made if it is missing. The caller moves finished files out of it; the rest is
    deleted, whatever happens.

    On one file system a move is atomic, so other processes see a whole file or none. Each process has a temporary
    folder of its own.
    """
    missing = missing_folders(folder)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder)
        except OSError as error:
            raise UserError(f"data_dir: {folder} lacks the data set, and cannot be written to ({error})") from error
        with temporary as path:
            yield Path(path)
    finally:
        remove_empty(missing)


@contextmanager
def fetched(archive: Path, url: str, algorithm: str, digest: str, otherwise: str = "") -> Iterator[Path]:
    """A temporary folder with a published archive: the one that lies in `archive`, or a download.

    Its digest is verified. If there is none to reach, a UserError says to save it as `archive`, or `otherwise`.
    """
    with temporary_folder(archive.parent) as temporary:
        copy = temporary / archive.name
        if archive.is_file():
            try:
                check_digest(archive, algorithm, digest)
            except UserError as error:
                raise UserError(f"data_dir: {archive} is {error}. Delete it, and mupscale downloads it") from error
            copy.symlink_to(archive.resolve())
        else:
            timeout = socket.getdefaulttimeout()
            socket.setdefaulttimeout(TIMEOUT)
            try:
                torch.hub.download_url_to_file(url, str(copy))
                check_digest(copy, algorithm, digest)
            except DOWNLOAD_ERRORS as error:
                raise UserError(
                    f"data_dir: {archive.parent} lacks the data set, and fetching {url} failed ({error}). "
                    f"Download it by hand and put it there as {archive.name}{otherwise}"
                ) from error
            finally:
                socket.setdefaulttimeout(timeout)
        yield temporary


def shared(key: Hashable, read: Callable[[], Any]) -> Any:
    """Returns what `read` makes, once for a key as long as anybody holds it; nobody may change it."""
    found = _held.get(key)
    if found is None:
        found = _held[key] = read()
    return found


def once(key: Hashable, verify: Callable[[], None]) -> None:
    """Calls `verify`, unless a call for this key has succeeded before."""
    if key not in _verified:
        verify()
        _verified.add(key)


def version_of(files: Iterable[Path]) -> tuple[Hashable, ...]:
    """Identifies files and their version by path, size and modification time."""
    answer = []
    for file in files:
        status = file.stat()
        answer.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return tuple(answer)
