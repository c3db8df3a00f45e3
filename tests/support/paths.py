"""Where things are."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The checkout."""

SUPPORT = Path(__file__).parent
"""What tests share, and the programs that they start."""
