"""Lets runs on the CPU save as those on a GPU do: in the background, and here on a slow disk."""

import threading
import time
from typing import Any

import pytest

from mupscale.models import checkpoint_files
from mupscale.models.checkpoint_files import CheckpointFiles


def save_in_background(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """`seconds`: how long a thread waits before it writes a checkpoint."""
    save = CheckpointFiles._save

    def slow_save(self: CheckpointFiles, *arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        save(self, *arguments)

    patch.setattr(CheckpointFiles, "_save", slow_save)
    patch.setattr(checkpoint_files, "pays_in_background", lambda trainer: True)
