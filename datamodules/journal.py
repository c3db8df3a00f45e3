"""The progress of a preparation, stored on disk, and a lock so that only one process continues it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from mupscale.atomic import partial, write_durably
from mupscale.data_files import json_of, refuse_links
from mupscale.datamodules.shards import INDEX, SPLITS, TOKENIZER
from mupscale.errors import UserError

JOURNAL, LOCK = "progress.json", ".lock"


@dataclass
class Journal:
    """The state of an unfinished folder. Files are truncated to this state."""

    preparation: dict[str, Any]
    """The arguments, and what was settled when the preparation began."""
    tokenizer: dict[str, Any] | None = None
    """How the vocabulary was made; None until its file is written."""
    position: Any = None
    """Where the source continues."""
    complete: bool = False
    """Whether all documents are written."""
    shards: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    """The tokens and documents of each shard."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        path = folder / JOURNAL
        if path.exists():
            try:
                journal = cls(**json_of(path.read_bytes()))
                journal.refuse_other_types()
                return journal
            except (ValueError, TypeError) as error:
                raise UserError(f"{path} is damaged ({error}): delete the folder and prepare it again") from error
        own = (LOCK, partial(path).name)  # a process that ended before it wrote its first journal leaves them
        other = sorted(entry.name for entry in folder.iterdir() if entry.name not in own)
        if other:
            raise UserError(
                f"--out {folder} has other files ({', '.join(other[:5])}): name a new folder, or an empty one"
            )
        return None

    def refuse_other_types(self) -> None:
        """ValueError if a part is of another type than `write` writes."""
        known = isinstance(self.preparation, dict) and isinstance(self.tokenizer, dict | None)
        if not known or not isinstance(self.shards, dict) or set(self.shards) != set(SPLITS):
            raise ValueError("its preparation, tokenizer or shards are not those of a preparation")
        for counts in self.shards.values():
            for pair in counts if isinstance(counts, list) else [counts]:
                if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) is int and n >= 0 for n in pair):
                    raise ValueError(f"a shard has {pair!r}, wanted the numbers of its tokens and documents")

    def write(self, folder: Path) -> None:
        write_durably(folder / JOURNAL, json.dumps(asdict(self)).encode())


def refuse_other(folder: Path, recorded: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises a UserError if an argument differs from the one that the folder was begun with."""
    for name, value in json.loads(json.dumps(asked)).items():
        if recorded.get(name) != value:
            raise UserError(
                f"--out {folder} was prepared with {name} = {recorded.get(name)}, this command has {name} = {value}: "
                "name another folder, or delete that one"
            )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder, and locks it against other processes that prepare.

    At the end the folder and its parents are removed if they are empty and were made here.
    """
    import fcntl  # only Unix has it, and training does not need it

    lock = folder / LOCK
    refuse_links(folder, LOCK, TOKENIZER, *(path.name for path in folder.glob("*-*.*")))
    made = [path for path in (folder, *folder.parents) if not path.exists() or (path / JOURNAL).exists()]
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"--out {folder} is a file: name a folder") from None
        try:
            stream = lock.open("a")
        except FileNotFoundError:
            continue  # another process failed meanwhile and removed the folder
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise UserError(f"--out {folder} is being prepared by another process") from None
        if lock.exists() and os.path.samestat(os.fstat(stream.fileno()), lock.stat()):
            break
        stream.close()  # another process finished meanwhile and removed this file: its lock is void
    try:
        yield
    finally:
        lock.unlink()
        for path in made:
            with suppress(OSError):  # not empty
                path.rmdir()
        stream.close()


def remove(folder: Path) -> None:
    """Removes what a preparation writes."""
    paths: list[Path] = []
    for split in SPLITS:
        paths += [*folder.glob(f"{split}-*.tokens"), *folder.glob(f"{split}-*.documents")]
    for name in (JOURNAL, TOKENIZER, INDEX):
        paths += [folder / name, partial(folder / name)]
    for path in paths:
        path.unlink(missing_ok=True)
