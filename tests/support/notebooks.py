"""Runs a notebook in a kernel of this Python, and compares or stores what it prints and draws.

python tests/support/notebooks.py examples/growing.ipynb     # stores its outputs anew
"""

import copy
import re
import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets import default


class KernelOfThisPython(AsyncKernelManager):
    """Kernels that are installed for the user or the machine are not looked at."""

    @default("kernel_spec_manager")
    def _without_installed_kernels(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook with the outputs of a run in `folder`."""
    fresh = copy.deepcopy(notebook)
    client = NotebookClient(
        fresh,
        kernel_manager_class=KernelOfThisPython,
        record_timing=False,
        coalesce_streams=True,
        timeout=600,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    fresh.metadata = notebook.metadata  # without the version of this Python
    return fresh


def printed(notebook: NotebookNode) -> str:
    """All that it prints, with every number below 1e-9 as 0: it is rounding, and another machine rounds otherwise."""
    texts = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    return re.sub(r"\b\d(\.\d+)?e-(09|[1-9]\d)\b", "0", "".join(texts))


def pictures(notebook: NotebookNode) -> list[str]:
    """The PNG pictures that it draws, in base 64."""
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [each["image/png"] for each in data if "image/png" in each]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(executed(read(Path(name)), Path(name).parent), name)
