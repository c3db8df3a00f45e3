"""Checks that a command can write its output files, before it starts to work."""

import tempfile
from pathlib import Path

from mupscale.errors import UserError


def refuse_output(option: str, path: Path, inputs: dict[str, Path]) -> None:
    """Raises a UserError if `path`, given by `option`, cannot be written, or is one of the `inputs`. Writes nothing."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file in it")
    for what, used in inputs.items():
        if path.resolve() == used.resolve() or (path.exists() and used.exists() and path.samefile(used)):
            raise UserError(f"{option} {path} is {what} itself; name another file")
    refuse_folder(option, path)


def refuse_new_folder(option: str, folder: Path) -> None:
    """Raises a UserError if `folder`, given by `option`, exists, or cannot be made. Writes nothing."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{option} {folder} exists; name another folder, or delete it")
    refuse_folder(option, folder)


def refuse_output_folder(option: str, folder: Path) -> None:
    """Raises a UserError if `folder`, given by `option`, is a file, or cannot be made or written to. Writes nothing."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{option} {folder} is not a folder; name a folder")
    refuse_folder(option, folder / "file")


def refuse_folder(option: str, path: Path) -> None:
    """Raises a UserError if `path` cannot be made; a file is made in the nearest folder above it and deleted."""
    folder = next(each for each in path.absolute().parents if each.exists() or each.is_symlink())
    if not folder.is_dir():
        raise UserError(f"{option}: {folder} is not a folder; name one, or name another file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be written to ({error.strerror}); name another folder") from error
