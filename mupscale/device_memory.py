"""How much memory a device has left."""

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: on a GPU by this process, on the CPU without swapping, as Linux estimates it."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    table = Path("/proc/meminfo")
    for line in table.read_text().splitlines() if table.is_file() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
