"""How much memory a device has left."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: on a GPU by this process and its share of it, on the CPU as Linux estimates it."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - allocated
        share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + held, share - allocated)
    table = Path("/proc/meminfo")
    free = physical_memory() // 2
    for line in table.read_text("utf-8").splitlines() if table.is_file() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
    return min([free, *free_in_groups()])


def unreserved_bytes(device: torch.device) -> int:
    """What of a GPU neither torch nor another process holds: memory that torch holds may be needed in the next step."""
    free, total = torch.cuda.mem_get_info(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, share - torch.cuda.memory_reserved(device))


def free_in_groups(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What the control groups of this process leave it, as a container or a job does; cached files count as free."""
    names = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for line in groups.read_text("utf-8").splitlines() if groups.is_file() else ():
        _, kind, path = line.split(":", 2)
        if kind not in names:
            continue
        limit, used, cached = names[kind]
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):  # a group has no more than those that it is in
            place = root / kind / folder
            with suppress(OSError, ValueError):  # "max" is no limit
                most, now = (int((place / name).read_text("utf-8")) for name in (limit, used))
                statistics = dict(row.split() for row in (place / "memory.stat").read_text("utf-8").splitlines())
                yield most - now + int(statistics[cached])


def physical_memory() -> int:
    """The memory of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_of(model: nn.Module) -> int:
    """What the parameters and buffers of a model take, or would take if it is on the meta device."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
