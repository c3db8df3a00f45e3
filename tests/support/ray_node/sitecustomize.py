"""Starts each Python process of a node in a test, and those of commands that connect to it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import core_only

core_only.HIDDEN = {"transformers", "sklearn", "scipy", "timm"}  # torchmetrics imports them, which takes seconds
core_only.hide()


class NoFigures(ModuleType):
    """In the place of `mupscale.commands.figures`: draws nothing, which saves seconds."""

    def __getattr__(self, name: str) -> Callable[..., list[Path]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: []


if "WITHOUT_FIGURES" in os.environ:
    sys.modules["mupscale.commands.figures"] = NoFigures("mupscale.commands.figures")
