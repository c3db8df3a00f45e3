"""How much memory a command line takes at its peak, in a process of its own.

python peak_memory.py '["upscale", …]' '["upscale", …]' false

runs the first to import everything, and writes the bytes of the second, beyond those before it, as its last line.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

from paths import SUPPORT
from programs import run_program

from mupscale.__main__ import main


def peak_bytes(first: list[str], measured: list[str], *, as_if_full: bool = False) -> int:
    """The bytes that `measured` takes at its peak. A process that has run other tests would count their free blocks.

    With `as_if_full` model folders are not loaded to compare them, as on a machine where they do not fit into memory.
    """
    run = run_program(SUPPORT / "peak_memory.py", *map(json.dumps, (first, measured, as_if_full)))
    return int(run.stdout.splitlines()[-1])


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


M_MMAP_THRESHOLD = -3
"""Of the C library's mallopt."""

if __name__ == "__main__":
    # what is larger goes back to the system as soon as it is free, and does not count by chance
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    first, measured, as_if_full = map(json.loads, sys.argv[1:])
    if as_if_full:
        from mupscale.hf import widened_folder

        widened_folder.free_bytes = lambda device: 0
    main(first)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    main(measured)
    print(resident("VmHWM") - before)
