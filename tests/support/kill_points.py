"""Numbers what a process does to some folders on disk, and kills the process at one of these points.

Between two changes of the disk it makes no difference when a process is killed: nothing outlives it but its files.
"""

import _io
import builtins
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WRITING = os.O_WRONLY | os.O_RDWR


class Point(NamedTuple):
    """The `index`-th operation of the main thread, or of all `others` together; `half`: after half of its bytes.

    Other threads are numbered apart, because their operations come at another moment in every run.
    """

    thread: str
    index: int
    half: bool = False


class Operation(NamedTuple):
    """What happens at a point; one that `writes` can be killed in the middle."""

    what: str
    path: str
    writes: bool = False


class Watch:
    """Records the operations of this process on `folders`, and kills it at a point.

    watch = Watch([folder], killed_at=Point("main", 7))
    watch.start()
    """

    def __init__(self, folders: list[Path], killed_at: Point | None = None) -> None:
        self.folders = [str(folder) for folder in folders]
        self.killed_at = killed_at
        self.operations: dict[str, list[Operation]] = {"main": [], "others": []}
        self.process: int | None = None

    def reach(self, what: str, path: str, write_half: Callable[[], object] | None = None) -> None:
        """Notes an operation that is about to happen, and does not return if this is where the process is killed."""
        if os.getpid() != self.process:  # one that this process started
            return
        thread = "main" if threading.current_thread() is threading.main_thread() else "others"
        index = len(self.operations[thread])
        self.operations[thread].append(Operation(what, path, write_half is not None))
        if self.killed_at is not None and self.killed_at[:2] == (thread, index):
            self.killing(self.operations[thread][index])
            if self.killed_at.half and write_half is not None:
                write_half()
            os.kill(self.process, signal.SIGKILL)

    def killing(self, operation: Operation) -> None:
        """Called just before this process is killed at an operation."""

    def stop(self) -> None:
        self.process = None

    def start(self) -> None:
        """Replaces the functions of Python and torch that change files, for the rest of this process."""
        self.process = os.getpid()
        for name in ("unlink", "remove", "rmdir"):
            self._replace(name, lambda path, **options: location(path, options.get("dir_fd")), needs=True)
        self._replace("mkdir", lambda path, mode=0o777, **options: location(path, options.get("dir_fd")), needs=False)
        for name in ("rename", "replace"):
            self._replace(name, lambda old, new, **options: location(new, options.get("dst_dir_fd")))
        for name in ("symlink", "link"):
            self._replace(name, lambda old, new, *flags, **options: location(new, None), needs=False)
        for name in ("truncate", "ftruncate"):
            self._replace(name, lambda path, length: location(path, None))
        # what was written outlives a process without it
        os.fsync = lambda file: self._note("fsync", location(file, None))
        os.open = self._opening(os.open)
        os.write = self._writing(os.write)
        os.sendfile = self._sending(os.sendfile)
        if "torch" in sys.modules:
            sys.modules["torch"].save = self._saving(sys.modules["torch"].save)  # type: ignore[attr-defined]
        builtins.open = io.open = _io.open = self._opened  # type: ignore[assignment]

    def _note(self, what: str, path: str | None, write_half: Callable[[], object] | None = None) -> None:
        if path is not None and any(path.startswith(folder) for folder in self.folders):
            self.reach(what, path, write_half)

    def _replace(self, name: str, path_of: Callable[..., str | None], *, needs: bool | None = None) -> None:
        """`needs`: whether the path must exist for the operation to change anything, or must not."""
        function = getattr(os, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            path = path_of(*arguments, **options)
            if path is not None and needs in (None, os.path.lexists(path)):
                self._note(name, path)
            return function(*arguments, **options)

        setattr(os, name, counted)

    def _opening(self, function: Callable[..., int]) -> Callable[..., int]:
        def counted(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            place = location(path, dir_fd)
            if flags & WRITING and place is not None and (flags & os.O_TRUNC or not os.path.exists(place)):
                self._note("open", place)
            return function(path, flags, mode, dir_fd=dir_fd)

        return counted

    def _writing(self, function: Callable[..., int]) -> Callable[..., int]:
        def counted(file: int, content: Any) -> int:
            self._note("write", location(file, None), lambda: function(file, half(content)))
            return function(file, content)

        return counted

    def _sending(self, function: Callable[..., int]) -> Callable[..., int]:
        def counted(out: int, source: int, offset: int, count: int) -> int:
            size = max(0, min(count, os.fstat(source).st_size - offset))
            if size:
                self._note("write", location(out, None), lambda: function(out, source, offset, size // 2))
            return function(out, source, offset, count)

        return counted

    def _saving(self, function: Callable[..., None]) -> Callable[..., None]:
        """torch.save to a path writes in C++; it counts as one operation."""

        def counted(content: Any, file: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(file, str | os.PathLike):

                def write_half() -> None:
                    memory = io.BytesIO()
                    function(content, memory, *arguments, **options)
                    self.stop()
                    Path(file).write_bytes(half(memory.getvalue()))
                    self.process = os.getpid()

                self._note("write", location(file, None), write_half)
            function(content, file, *arguments, **options)

        return counted

    def _opened(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """`open`, with its writes counted when they reach the disk."""
        place = location(file, None)
        writes = not set(mode).isdisjoint("wax+")
        if not writes or place is None or not any(place.startswith(folder) for folder in self.folders):
            return OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int) and opener is None and ("w" in mode or not os.path.exists(place)):
            self._note("open", place)
        raw = CountedFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.note = self._note
        if buffering == 0:
            return raw
        stream = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return stream
        text = io.TextIOWrapper(stream, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text


OPEN = builtins.open


class CountedFile(io.FileIO):
    """A file whose every write is noted first."""

    note: Callable[..., None]

    def write(self, content: Any) -> int:
        write = super().write
        self.note("write", location(self.fileno(), None), lambda: write(half(content)))
        return write(content)


def half(content: Any) -> bytes:
    """The first half of some bytes."""
    everything = bytes(content)
    return everything[: len(everything) // 2]


def location(path: Any, folder: int | None) -> str | None:
    """The absolute path of a file that is named, or open; None if it has none, as a pipe."""
    if isinstance(path, int):
        name = os.readlink(f"/proc/self/fd/{path}")
        return name if name.startswith("/") else None
    base = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.normpath(os.path.join(base, os.fsdecode(path)))
