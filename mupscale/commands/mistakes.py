"""Which exceptions are about the user's input, by where they were raised, and their line. Imports no library.

Options and files hold values that only torch, Lightning, transformers or another library can judge. What such a
library raises, called by mupscale alone, is about such a value. What the user's own code raises, and what is raised
after the first step of a training, keeps its traceback; so does a bug of mupscale itself.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from mupscale.errors import UserError

PROBLEMS = {
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file has reached the largest size allowed",
}
"""What the system reports of a write that does not fit, in words."""

ROOM = 64 * 2**20
"""Bytes. Where a write failed for an unknown reason, a file system with less left counts as full."""


class DiskFull(UserError):
    """A file could not be written because a disk is full; the message names the file system and how to continue."""


def full_disk(error: BaseException, places: Sequence[Path] = ()) -> str | None:
    """The problem and its file system, in words, if a write failed for want of space; None for any other error.

    The system names the file only if it could not be opened; otherwise the one of the folders `places`, or TMPDIR, with
    the least space left is meant, or the first of `places` if a quota, which does not show, is used up.
    """
    fullest = min([*places, Path(os.environ.get("TMPDIR", "/tmp"))], key=free)
    for each in chain(error):
        if isinstance(each, OSError) and each.errno in PROBLEMS:
            named = each.filename2 or each.filename  # the target of a copy is the second
            guess = places[0] if places and each.errno == errno.EDQUOT else fullest
            path = Path(named) if isinstance(named, str | os.PathLike) else guess
            return f"{PROBLEMS[each.errno]} on the file system at {_mount(path)} ({path})"
    if any(_is_hidden(each) for each in chain(error)) and free(fullest) < ROOM:
        return f"{PROBLEMS[errno.ENOSPC]} on the file system at {_mount(fullest)} ({fullest})"
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it was raised from or while handling."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def free(path: Path) -> int:
    """The bytes that this user may still write to the file system of a path; 0 if no more files may be made."""
    try:
        found = os.statvfs(_mount(path))
    except OSError:
        return sys.maxsize
    return 0 if found.f_files and not found.f_favail else found.f_bavail * found.f_frsize


def _mount(path: Path) -> Path:
    """Where the file system of a path, which need not exist, is mounted."""
    return next(folder for folder in (path.resolve(), *path.resolve().parents) if os.path.ismount(folder))


def _is_hidden(error: BaseException) -> bool:
    """Whether torch could not write a file, which it reports without the reason."""
    if "torch" not in sys.modules:
        return False
    from mupscale._torch import is_failed_write

    return is_failed_write(error)


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
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def line_about(error: BaseException) -> str | None:
    """What to print of an exception that is about the user's input, in one line; None for every other one."""
    problem = None if any(isinstance(each, DiskFull) for each in chain(error)) else full_disk(error, [Path()])
    if problem is not None:
        return f"{problem}. Make space there, then run the same command again"
    if isinstance(error, UserError):
        return _in_a_line(str(error))
    text = _in_a_line(str(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = _module(frames[-1]) if frames else ""
    if IN_TRAINING in getattr(error, "__notes__", ()) and module not in OF_OPTIONS:
        return None
    if isinstance(error, MemoryError) or NO_MEMORY.search(text):
        return f"this does not fit into memory; choose smaller sizes ({text[:200] or type(error).__name__})"
    if isinstance(error, OSError) and error.errno is not None:
        reason = (error.strerror or type(error).__name__).lower()
        return reason if error.filename is None else f"{error.filename}: {reason}"
    is_restoring = RESTORING in map(_module, frames)
    modules = [_module(frame) for frame in frames[1:]]
    is_users = any(not _is_library(each) and each.partition(".")[0] != "mupscale" for each in modules)
    if is_users or not (_is_library(module) or is_restoring):
        return None
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} …"
    section = next((section for prefix, section in SECTIONS.items() if module.startswith(prefix)), "")
    about = "the checkpoint cannot be restored" if is_restoring else section
    said = f"{about}: {text.rstrip('.')}" if about else text.rstrip(".")
    return f"{said} ({type(error).__name__} in {module}; {TRACEBACK}=1 shows where)"


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _in_a_line(text: str) -> str:
    return " ".join(part for line in text.splitlines() if (part := line.strip()))
