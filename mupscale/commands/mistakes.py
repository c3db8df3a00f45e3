"""Which exceptions are about the user's input, by where they were raised, and their line. Imports no library.

Options and files hold values that only torch, Lightning, transformers or another library can judge. What such a
library raises, called by mupscale alone, is about such a value. What the user's own code raises, and what is raised
after the first step of a training, keeps its traceback; so does a bug of mupscale itself.
"""

import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import FrameType

from mupscale.commands.full_disk import unnamed
from mupscale.errors import UserError

LIBRARIES = sys.stdlib_module_names | {
    "datasets", "fsspec", "huggingface_hub", "jinja2", "jsonargparse", "lightning", "lightning_fabric",
    "lightning_utilities", "matplotlib", "mup", "numpy", "optuna", "PIL", "pyarrow", "ray", "requests", "s3fs",
    "safetensors", "sklearn", "tensorboard", "tokenizers", "torch", "torchmetrics",
    "torchvision", "tqdm", "transformers", "yaml",
}  # fmt: skip
"""What mupscale calls; everything else that is on the stack is the user's own."""

OF_OPTIONS = ("torch.optim.lr_scheduler",)
"""Modules whose errors are about options even after many steps: a schedule may advance only once an epoch."""

SECTIONS = {
    "torch.optim.lr_scheduler": "model.lr_scheduler",
    "torch.optim": "model.optimizer",
    "torch.utils.data": "data",
    "torch.nn": "model and data",
    "transformers": "model",
    "lightning": "trainer",
}
"""The sections of a configuration, by the modules that judge their values."""

RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector"
"""What restores a checkpoint before the first step; an error below it is about what the checkpoint holds."""

IN_TRAINING = "raised in training, after its first step"
"""The note of an exception that is not about the input, as far as anybody can tell."""

TRACEBACK = "MUPSCALE_TRACEBACK"
"""The environment variable that keeps tracebacks."""

LONGEST = 600
"""Characters of a library's message."""

NO_MEMORY = re.compile(
    r"out of memory|(can't|cannot|unable to|failed to) allocate|not enough memory|storage size calculation overflow"
    r"|numel: integer multiplication overflow|array is too big|maximum supported dimension",
    re.IGNORECASE,
)


def keeps_tracebacks() -> bool:
    """Whether the user wants to see where errors are raised."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def line_about(error: BaseException) -> str | None:
    """What to print of an exception that is about the user's input, in one line; None for every other one."""
    problem = unnamed(error)
    if problem is None and isinstance(error, UserError):
        problem = str(error)
    if problem is not None:
        return _in_a_line(problem)
    text = _in_a_line(str(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = _module(frames[-1]) if frames else ""
    if IN_TRAINING in getattr(error, "__notes__", ()) and module not in OF_OPTIONS:
        return None
    if isinstance(error, MemoryError) or NO_MEMORY.search(text):
        return f"this does not fit into memory; choose smaller sizes ({text[:200] or type(error).__name__})"
    if isinstance(error, OSError) and error.errno is not None:
        return _of_system(error)
    is_restoring = RESTORING in map(_module, frames)
    if not (_is_library(module) or is_restoring) or any(_users(frames[1:])):
        return None
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} …"
    about = "the checkpoint cannot be restored" if is_restoring else _section(module)
    said = f"{about}: {text.rstrip('.')}" if about else text.rstrip(".")
    return f"{said} ({type(error).__name__} in {module}; {TRACEBACK}=1 shows where)"


def _section(module: str) -> str:
    """The section of a configuration whose values a module judges."""
    return next((section for prefix, section in SECTIONS.items() if module.startswith(prefix)), "")


def _of_system(error: OSError) -> str:
    reason = (error.strerror or type(error).__name__).lower()
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _users(frames: list[FrameType]) -> Iterator[FrameType]:
    """The frames of the user's own code."""
    for frame in frames:
        name = _module(frame)
        if not _is_library(name) and name.partition(".")[0] != "mupscale":
            yield frame


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _in_a_line(text: str) -> str:
    return " ".join(part for line in text.splitlines() if (part := line.strip()))
