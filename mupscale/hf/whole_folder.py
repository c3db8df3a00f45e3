"""Writing a folder so that it is there whole, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mupscale.atomic import locked, sync_folder
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
    in_use = f"another process is writing --out {out}; wait for it, or name another folder"
    with locked(out.with_name(f".{out.name}.lock"), in_use):
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
