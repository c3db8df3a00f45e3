"""Tensors in nested structures."""

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import torch

from mupscale.checks.recording import leaves_of, map_leaves, unknown_kinds


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any = None
    late: Any = field(init=False, repr=False, compare=False)


@dataclass
class Node:
    value: int
    parent: Any = None


class Opaque:
    pass


def test_leaves_in_dataclasses_and_dictionaries() -> None:
    structure = [Pair(1, {"a": Pair([2, 3])}), UserDict(b=(4,))]
    assert [leaf for leaf in leaves_of(structure) if leaf is not None] == [1, 2, 3, 4]
    node = Node(1)
    node.parent = {"self": [node]}
    assert list(leaves_of(node)) == [1]


def test_mapped_structures_are_new_ones() -> None:
    structure = [Pair(1, {"a": Pair([2, 3])}), UserDict(b=(4,))]
    mapped = map_leaves(lambda leaf: leaf if leaf is None else 10 * leaf, structure)
    assert mapped == [Pair(10, {"a": Pair([20, 30])}), UserDict(b=(40,))]
    assert structure == [Pair(1, {"a": Pair([2, 3])}), UserDict(b=(4,))]


def test_unknown_kinds() -> None:
    assert unknown_kinds({"x": torch.ones(2), "y": [Opaque(), None, "text", 1.5, Pair(Opaque())]}) == ["Opaque"]
