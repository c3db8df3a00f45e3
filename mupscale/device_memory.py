"""How much memory a device has left."""

import os
from pathlib import Path

import torch
from torch import nn


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: on a GPU by this process, on the CPU without swapping, as Linux estimates it.

    A process that is kept to a share of a GPU (`torch.cuda.set_per_process_memory_fraction`) has what is left of that.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - allocated
        share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + held, share - allocated)
    table = Path("/proc/meminfo")
    for line in table.read_text().splitlines() if table.is_file() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return physical_memory() // 2


def physical_memory() -> int:
    """The memory of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_of(model: nn.Module) -> int:
    """What the parameters and buffers of a model take, or would take if it is on the meta device."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
