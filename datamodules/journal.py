"""What a preparation has done so far, on disk, and the right to go on with it, which one process has at a time."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from mupscale.atomic import partial, write_durably
from mupscale.datamodules.shards import INDEX, SPLITS, TOKENIZER
from mupscale.errors import UserError

JOURNAL, LOCK = "progress.json", ".lock"


@dataclass
class Journal:
    """The state of an unfinished folder. Whatever its files hold beyond it was not done."""

    preparation: dict[str, Any]
    """The arguments, and what was settled when it began."""
    tokenizer: dict[str, Any] | None = None
    """How the vocabulary was made, once its file is there."""
    position: Any = None
    """Where the source goes on."""
    complete: bool = False
    """Whether nothing is left to be read."""
    shards: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    """The tokens and documents of each shard."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        path = folder / JOURNAL
        if path.exists():
            try:
                return cls(**json.loads(path.read_bytes()))
            except (ValueError, TypeError) as error:
                raise UserError(f"{path} is damaged ({error}): delete the folder and prepare it anew") from error
        # of a process that ended before it had begun
        own = (LOCK, partial(path).name)
        other = sorted(entry.name for entry in folder.iterdir() if entry.name not in own)
        if other:
            raise UserError(
                f"--out {folder} has other files ({', '.join(other[:5])}): name a new folder, or an empty one"
            )
        return None

    def write(self, folder: Path) -> None:
        write_durably(folder / JOURNAL, json.dumps(asdict(self)).encode())


def refuse_other(folder: Path, recorded: dict[str, Any], asked: dict[str, Any]) -> None:
    """A UserError names an argument that is not the one with which the folder was begun."""
    for name, value in json.loads(json.dumps(asked)).items():
        if recorded.get(name) != value:
            raise UserError(
                f"--out {folder} was prepared with {name} = {recorded.get(name)}, this command has {name} = {value}:"
                " name another folder, or delete that one"
            )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps every other process from preparing it. What was made and is empty in the end goes."""
    import fcntl  # of Unix alone, and whoever only trains needs it not

    lock = folder / LOCK
    made = [path for path in (folder, *folder.parents) if not path.exists() or (path / JOURNAL).exists()]
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"--out {folder} is a file: name a folder") from None
        try:
            stream = lock.open("a")
        except FileNotFoundError:
            continue  # one that failed has taken the folder away meanwhile
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise UserError(f"--out {folder} is being prepared by another process") from None
        if lock.exists() and os.path.samestat(os.fstat(stream.fileno()), lock.stat()):
            break
        stream.close()  # one that has finished has taken the file away meanwhile: who holds that one holds nothing
    try:
        yield
    finally:
        lock.unlink()
        for path in made:
            with suppress(OSError):  # it is not empty
                path.rmdir()
        stream.close()


def remove(folder: Path) -> None:
    """Removes what a preparation writes."""
    files = [folder / name for name in (JOURNAL, TOKENIZER, INDEX)]
    shards = [path for split in SPLITS for kind in ("tokens", "documents") for path in folder.glob(f"{split}-*.{kind}")]
    for path in (*shards, *files, *map(partial, files)):
        path.unlink(missing_ok=True)
