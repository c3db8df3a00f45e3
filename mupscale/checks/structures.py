"""Tensors in nested structures of any kind: lists, dictionaries, dataclasses."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from mupscale._torch import tree_leaves, tree_map

_SIMPLE = (Tensor, int, float, complex, str, bytes, type(None))


def leaves_of(values: Any, around: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What a structure holds at any depth. Objects of an unknown kind are leaves.

    `around` has the identities of the objects that contain it: one may contain itself.
    """
    for leaf in tree_leaves(values):
        if id(leaf) in around:
            continue
        if isinstance(leaf, UserDict):
            yield from leaves_of(leaf.data, around | {id(leaf)})
        elif _is_instance_of_a_dataclass(leaf):
            yield from leaves_of([getattr(leaf, each.name, None) for each in fields(leaf)], around | {id(leaf)})
        else:
            yield leaf


def map_leaves(function: Callable[[Any], Any], values: Any) -> Any:
    """The same structure with what the function makes of each leaf; `values` is not changed."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, UserDict):
            answer = copy.copy(leaf)
            answer.data = map_leaves(function, leaf.data)
            return answer
        if not _is_instance_of_a_dataclass(leaf):
            return function(leaf)
        answer = copy.copy(leaf)
        for each in fields(leaf):
            if hasattr(leaf, each.name):
                object.__setattr__(answer, each.name, map_leaves(function, getattr(leaf, each.name)))
        return answer

    return tree_map(mapped, values)


def unknown_kinds(values: Any) -> list[str]:
    """The classes of leaves that are neither tensors nor simple values, and so may hold tensors."""
    return sorted({type(leaf).__name__ for leaf in leaves_of(values) if not isinstance(leaf, _SIMPLE)})


def _is_instance_of_a_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
