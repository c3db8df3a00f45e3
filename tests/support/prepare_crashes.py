"""A preparation killed at every operation on files that it makes, and run again: `prepare_crashes.py TEXT FOLDER`.

Prints the number of operations, or fails. A process of its own, because it forks before each run, and threads do not
survive that.
"""

import hashlib
import itertools
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy  # noqa: F401  once, before the forks
import tokenizers  # noqa: F401
from programs import run_in_fork

from mupscale.datamodules import documents, preparation
from mupscale.datamodules.preparation import prepare

OPERATIONS = ("fsync", "replace", "unlink", "truncate", "rmdir")


def main(text: Path, folder: Path, every: int) -> None:
    documents.BATCH = 1000
    preparation.COMMIT_SECONDS = 0.0
    expected, operations = folder / "expected", folder / "operations"
    assert run(text, expected, killed_at=None, count=operations) == 0
    total = int(operations.read_text())
    reference = contents(expected)
    choose = random.Random(0)
    for killed_at in range(0, total, every):
        out = folder / str(killed_at)
        assert run(text, out, killed_at=killed_at) == -signal.SIGKILL
        if killed_at % 3 == 0:  # once more, on the way to the end
            run(text, out, killed_at=choose.randrange(total - killed_at + 1))
        assert run(text, out, killed_at=None) == 0, f"killed at {killed_at}: it does not go on"
        assert contents(out) == reference, f"killed at {killed_at}: other bytes"
        shutil.rmtree(out)
    print(total)


def run(text: Path, out: Path, *, killed_at: int | None, count: Path | None = None) -> int:
    """The exit status, or minus the signal, of a process that prepares `out` and is killed at an operation."""

    def work() -> None:
        counter = itertools.count()
        os.fsync = lambda _: None  # what is written outlives a process without it
        for name in OPERATIONS:
            setattr(os, name, deadly(getattr(os, name), counter, killed_at))
        prepare(documents.TextFiles([text]), out, vocabulary=270, val_fraction=0.2, file_tokens=1500)
        if count is not None:
            count.write_text(str(next(counter)))

    return run_in_fork(work, text.parent / "log.txt")


def deadly(operation: Callable, counter: itertools.count, killed_at: int | None) -> Callable:
    def counted(*arguments, **options):
        if next(counter) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **options)

    return counted


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
