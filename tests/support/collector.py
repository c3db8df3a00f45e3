"""When a program imports this first, its other imports take a quarter less time: the garbage collector is off.

The program calls `begin` after its imports. Nothing happens in a process of pytest, where such a program is a module.
"""

import gc
import sys

if "pytest" not in sys.modules:
    gc.disable()


def begin() -> None:
    """Switches the collector on. What was imported stays, so collections need not go through it, nor forks copy it."""
    gc.collect()
    gc.freeze()
    gc.enable()
