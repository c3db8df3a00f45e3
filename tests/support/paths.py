"""Where things are, and what is in a folder."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The checkout."""

SUPPORT = Path(__file__).parent
"""What tests share, and the programs that they start."""


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
