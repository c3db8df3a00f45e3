"""Data that all data modules of one process share: it is read once."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

_held: dict[Hashable, tuple[weakref.ref[Any], ...]] = {}
_verified: set[Hashable] = set()


def shared(key: Hashable, read: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The objects that `read` returns, or those that it returned for this key before, while they are still in use.

    The key must contain everything that the objects depend on. They must not be modified.
    """
    held = tuple(reference() for reference in _held.get(key, ()))
    if held and all(thing is not None for thing in held):
        return held
    made = read()
    if held:
        # a loader may hold a part of them still
        made = tuple(new if old is None else old for old, new in zip(held, made, strict=True))
    _forget_freed()
    _held[key] = tuple(weakref.ref(thing) for thing in made)
    return made


def once(key: Hashable, verify: Callable[[], None]) -> None:
    """Calls `verify`, unless a call for this key has succeeded before."""
    if key not in _verified:
        verify()
        _verified.add(key)


def version_of(files: Iterable[Path]) -> tuple[Hashable, ...]:
    """Identifies files and their version by path, size and modification time."""
    answer = []
    for file in files:
        status = file.stat()
        answer.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return tuple(answer)


def _forget_freed() -> None:
    for key, references in list(_held.items()):
        if all(reference() is None for reference in references):
            del _held[key]
