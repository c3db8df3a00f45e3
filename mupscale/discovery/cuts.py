"""Where a model cuts its axes into sections: the lengths in its calls of `split`, and the ends of its slices."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mupscale.widening.axes import Layout, Piece

Cut = tuple[int, ...]
"""The lengths of the sections of an axis."""

PairedCut = tuple[tuple[int, int], ...]
"""The lengths of the sections in the narrow and in the wide model."""

_SPLITS: tuple[Callable[..., Any], ...] = (
    torch.split,
    torch.chunk,
    torch.tensor_split,
    torch.split_with_sizes,
    Tensor.split,
    Tensor.chunk,
    Tensor.tensor_split,
    Tensor.split_with_sizes,
)
_MOST = 24
"""Layouts of one axis."""


def cuts_of(func: Callable[..., Any], args: Sequence[Any], result: Any) -> Iterator[Cut]:
    """The sections into which one operation cuts an axis; nothing for most operations."""
    if func in _SPLITS and args and isinstance(args[0], Tensor):
        parts = [part for part in result if isinstance(part, Tensor)]
        for axis, size in enumerate(args[0].shape):
            lengths = tuple(part.shape[axis] for part in parts if part.shape[axis])
            if len(lengths) > 1 and sum(lengths) == size:
                yield lengths
                return
    elif func is Tensor.__getitem__:
        yield from _ends(args[0], args[1])


def _ends(tensor: Tensor, index: Any) -> Iterator[Cut]:
    rows = index if isinstance(index, tuple) else (index,)
    if any(isinstance(row, Tensor) or row is None for row in rows):
        return
    if Ellipsis in rows:
        place = rows.index(Ellipsis)
        rest = tensor.ndim - len(rows) + 1
        rows = (*rows[:place], *[slice(None)] * rest, *rows[place + 1 :])
    for size, row in zip(tensor.shape, rows, strict=False):
        if isinstance(row, slice):
            start, stop, step = row.indices(size)
            lengths = tuple(length for length in (start, stop - start, size - stop) if length > 0)
            if step == 1 and len(lengths) > 1 and sum(lengths) == size:
                yield lengths


def paired(narrow: Sequence[Cut], wide: Sequence[Cut]) -> list[PairedCut]:
    """The cuts of two models side by side, each once; none if the models do not cut alike."""
    if [len(cut) for cut in narrow] != [len(cut) for cut in wide]:
        return []
    return list(dict.fromkeys(tuple(zip(a, b, strict=True)) for a, b in zip(narrow, wide, strict=True)))


def layouts_of(cuts: Sequence[PairedCut], narrow: int, wide: int, depth: int = 2) -> list[Layout]:
    """The layouts of an axis that is cut in one of these ways, its sections perhaps cut again, up to `depth` times."""
    found = (_as_layout(cut) for cut in _cut_again(cuts, narrow, wide, depth) if _grows(cut))
    return list(islice(dict.fromkeys(found), _MOST))


def _cut_again(cuts: Sequence[PairedCut], narrow: int, wide: int, depth: int) -> Iterator[PairedCut]:
    for cut in cuts:
        if (sum(n for n, _ in cut), sum(w for _, w in cut)) != (narrow, wide):
            continue
        yield cut
        for place, (n, w) in enumerate(cut) if depth else ():
            for inner in _cut_again(cuts, n, w, depth - 1):
                yield (*cut[:place], *inner, *cut[place + 1 :])


def _grows(cut: PairedCut) -> bool:
    return all(w % n == 0 for n, w in cut)


def _as_layout(cut: PairedCut) -> Layout:
    return tuple(Piece(n, n, w // n) for n, w in cut)
