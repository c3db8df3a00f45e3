"""Whether a file of torch.save is what was written: torch stores a CRC-32 of every part, and does not compare it."""

import zipfile
from pathlib import Path
from typing import BinaryIO


def damage_in(file: Path | BinaryIO) -> str | None:
    """What is wrong with a file of torch.save, or None; nothing is known of a file in its format before version 1.6.

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
