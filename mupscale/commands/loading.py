"""Imports of large libraries, without Python's garbage collector."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType


@contextmanager
def without_collections() -> Iterator[None]:
    """Switches the garbage collector off: imports make millions of objects that stay, and a fifth of their time would
    be spent on looking through them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def loaded(name: str) -> ModuleType:
    """The module of a name. The first time, collections skip what was imported from then on."""
    if name in sys.modules:
        return sys.modules[name]
    with without_collections():
        answer = import_module(name)
    gc.freeze()
    return answer
