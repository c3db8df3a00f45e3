"""Checkpoints on disk: the newest one of a run that can be read. Loads torch only when it reads one."""

import zipfile
from pathlib import Path
from typing import Any

from mupscale.commands.sharded_checkpoints import check_sharded
from mupscale.errors import UserError


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint with the most steps and its content; one that a crash cut off does not count."""
    best: tuple[tuple[int, float], Path | None, dict[str, Any]] = (-1, 0.0), None, {}
    for path in folder.rglob("*.ckpt"):
        checkpoint = readable(path)
        if checkpoint is not None:
            age = checkpoint["global_step"], path.stat().st_mtime
            if age > best[0] and not path.is_symlink():  # last.ckpt points to another one in the folder
                best = age, path, checkpoint
    return best[1:]


def readable(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint, its tensors mapped and not read; None if it is not whole."""
    import torch

    file = path / "meta.pt" if path.is_dir() else path  # a sharded checkpoint is a folder
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch raises many kinds
        return None
    if not isinstance(checkpoint, dict) or "global_step" not in checkpoint:
        return None
    return checkpoint if "optimizer_states" in {*checkpoint, *sharded(path)} else None


def checked(path: Path) -> dict[str, Any]:
    """The content of a checkpoint that a user names, its tensors mapped; UserError if it holds more than data."""
    import torch

    if path.is_dir():
        check_sharded(path)
    file = path / "meta.pt" if path.is_dir() else path
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch raises many kinds
        raise UserError(
            f"{file} is damaged, is not a checkpoint, or holds more than data ({type(error).__name__}); "
            "nothing of it was loaded"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a checkpoint")
    return content


def sharded(path: Path) -> set[str]:
    """The keys that a sharded checkpoint keeps outside of meta.pt; its .metadata is written last."""
    return {"optimizer_states"} if (path / ".metadata").is_file() else set()
