"""What a run leaves behind, and what differs in that of two runs, bit by bit."""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from logged import curves, table
from torch import Tensor

END = "the state in memory"
"""The name of a checkpoint that is written after a fit; a run that was finished when it was killed has none."""

CLOCKS = re.compile(
    r"/UpscaleCallback\[.*\]/seconds$|/Curves/events$|/mupscale_run/(id|folder)$|/progress/written($|/)"
)
"""What a clock decides, the names of event files, which hold the time and the process, the identity and the folder of a
run, and which other files there were when a checkpoint was written."""


def observed(folder: Path) -> dict[str, Any]:
    """The files in a folder by name, with what is in them; all event files of a folder are one."""
    answer: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.name.startswith("events.out.tfevents."):
            answer[str((path.parent / "events").relative_to(folder))] = path.parent
        else:
            answer[re.sub(r"\bresume-\w{8}\b", "resume-ID", str(path.relative_to(folder)))] = contents(path)
    return {name: curves(value) if isinstance(value, Path) else value for name, value in answer.items()}


def contents(path: Path) -> Any:
    """What is in a file, as far as it is compared: a lock or a checksum of a file need only be there."""
    if path.is_symlink():
        return f"a link to {os.readlink(path)}"
    if path.suffix == ".ckpt" and path.is_file():
        return loaded(path)
    if path.suffix == ".yaml":
        return path.read_text()
    return table(path.parent) if path.name == "metrics.csv" else None


def loaded(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        return f"unreadable: {type(error).__name__}"


def differences(ours: Any, theirs: Any, path: str = "", within: float = 0.0) -> Iterator[str]:
    """What differs in two values, in words; `within`: what fractions may differ by, relatively."""
    if CLOCKS.search(path):
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if path.endswith("/combined_loader/0"):
            ours, theirs = at_next_batch(ours), at_next_batch(theirs)
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            if key in ours and key in theirs:
                yield from differences(ours[key], theirs[key], f"{path}/{key}", within)
            elif key != END:
                yield f"{path}/{key} is {'missing' if key in theirs else 'left behind'}"
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"{path} has {len(ours)} entries instead of {len(theirs)}"
            return
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(our, their, f"{path}/{index}", within)
    elif not same(ours, theirs) and not (within and near(ours, theirs, within, path)):
        yield f"{path} is {shown(ours)} instead of {shown(theirs)}"


def at_next_batch(loader: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader; the end of an epoch is the beginning of the next one."""
    if "rows" in loader and loader["position"] == loader["rows"] // loader["batch_size"]:
        return {**loader, "epoch": loader["epoch"] + 1, "position": 0}
    return loader


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return type(one) is type(other) and bool(one == other)


def near(one: Any, other: Any, within: float, path: str) -> bool:
    """Whether two fractions, or two tensors of fractions by their largest entries, are equal up to rounding."""
    fractions = isinstance(one, float) or (isinstance(one, Tensor) and one.is_floating_point())
    if not fractions or type(one) is not type(other) or "/loops/" in path:
        return False
    ours, theirs = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    if "/events/" in path or any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in (one, other)):
        within = max(within, torch.finfo(torch.float32).eps)  # as all of TensorBoard's numbers
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= within * theirs.abs().max())


def shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)[-160:]
