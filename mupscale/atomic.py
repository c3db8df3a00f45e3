"""Files that are there whole or not at all."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its place in the end, at once; nothing of it stays if writing it fails.

    Its name is this process's own, so that several may write one file, and the last of them wins.
    """
    new = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
