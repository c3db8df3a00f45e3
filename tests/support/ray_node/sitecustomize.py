"""Starts each Python process of a node in a test.

The file that NODE_DEFECT names says what is wrong with the node: `blind FOLDER`, which it does not see, or `version`:
its mupscale is an old one.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

import core_only

core_only.HIDDEN = {"transformers", "sklearn", "scipy", "timm"}  # torchmetrics imports them, which takes seconds
core_only.hide()


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
