"""Rows of tokens that are one sequence each, which saves transformers a look at the values of their positions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local

from torch import Tensor
from transformers import masking_utils

_inside = local()  # fits that take their steps together run in threads


@contextmanager
def whole_rows() -> Iterator[None]:
    """Models that run inside do not look for several sequences in a row of tokens.

    Without attention mask transformers reads from the positions whether there are several. On a GPU it waits for them,
    on the meta device it fails, and in a CUDA graph it makes a mask, with which attention is slower.
    """
    if masking_utils.find_packed_sequence_indices is not _sequences:
        masking_utils.find_packed_sequence_indices = _sequences
    before = getattr(_inside, "rows", False)
    _inside.rows = True
    try:
        yield
    finally:
        _inside.rows = before


_original: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices


def _sequences(position_ids: Tensor) -> Tensor | None:
    return None if getattr(_inside, "rows", False) else _original(position_ids)
