"""Starts each Python process of a node in a test, and those of commands that connect to it.

The file that NODE_DEFECT names says what is wrong with the node: `blind FOLDER`, which it does not see, or `version`:
its mupscale is an old one.
"""

import importlib.metadata
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


def pretend(defect: str, folder: str) -> None:
    if defect == "version":
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.0.9" if name == "mupscale" else version(name)
    elif defect == "blind":

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event in ("open", "os.chdir") and str(arguments[0]).startswith(folder):
                raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))

        sys.addaudithook(hook)


path = Path(os.environ.get("NODE_DEFECT", "/nonexistent"))
if path.exists():
    pretend(*path.read_text().split(maxsplit=1))
