"""Removes what a run has written, if a mistake ends it before its first batch."""

import shutil
from contextlib import suppress
from pathlib import Path


class Leftovers:
    """The files that appear in a run's folder from `watch` on. `remove` deletes them, and folders made for them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._before: set[Path] = set()
        self._missing: list[Path] = []

    def watch(self, folder: Path) -> None:
        self._folder = folder
        self._before = set(folder.rglob("*")) if folder.is_dir() else set()
        self._missing = [path for path in (folder, *folder.parents) if not path.exists()]

    def remove(self) -> None:
        if self._folder is None:
            return
        if self._folder in self._missing:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            for path in set(self._folder.rglob("*")) - self._before:
                if path.is_file() or path.is_symlink():
                    path.unlink(missing_ok=True)
        for path in self._missing:
            with suppress(OSError):  # it was not made, or another process has put something there
                path.rmdir()
