"""Data that the data modules of one process hold together: read once, however many of them there are."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

_held: dict[Hashable, tuple[weakref.ref[Any], ...]] = {}
_verified: set[Hashable] = set()


def shared(key: Hashable, read: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The objects that `read` returns, or those that it returned for this key, as long as somebody holds them.

    The key must name all that the objects depend on. Nobody may write to them.
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
    """Which files these are, and in which version: place, size and time of the last change."""
    answer = []
    for file in files:
        status = file.stat()
        answer.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return tuple(answer)


def _forget_freed() -> None:
    for key, references in list(_held.items()):
        if all(reference() is None for reference in references):
            del _held[key]
