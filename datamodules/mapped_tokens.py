"""Tokens of many files as one memory-mapped array."""

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupscale.errors import UserError

MOST_MAPS = 1024
"""Files of a split that are mapped at the same time, if the process may open eight times as many: a map keeps its file
open, and the tables of the pages that were read."""


class Vocabulary(NamedTuple):
    """The vocabulary size of a model, and the key of the configuration that sets it."""

    key: str
    size: int


class MappedTokens:
    """The tokens of several files as if they were one array: of each file, those from the begin to the end of its span.

    Tokens are read from disk when they are used, and are not kept in memory. A file is mapped when it is first read; at
    most MOST_MAPS files are mapped at the same time.
    """

    def __init__(self, files: Sequence[Path], spans: Sequence[tuple[int, int]], token: np.dtype[Any]) -> None:
        self.token = token
        self._files, self._spans = files, spans
        self._ends = list(accumulate(end - begin for begin, end in spans))
        self._begins = [0, *self._ends]
        self._maps: dict[int, np.ndarray] = {}
        self._most_maps = max(min(MOST_MAPS, most_open_files() // 8), 1)

    def __len__(self) -> int:
        return self._begins[-1]

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Where the tokens of each file begin, and these tokens, which cannot be written to."""
        for number in range(len(self._files)):
            yield self._begins[number], self._maps.get(number, self._mapped(number))

    def read(self, start: int, out: np.ndarray) -> None:
        """Fills `out`, of any integer type, with the tokens from `start` on, from several files if need be."""
        number = bisect_right(self._ends, start)
        offset = start - self._begins[number]
        filled = 0
        while filled < len(out):
            if number not in self._maps:
                while len(self._maps) >= self._most_maps:
                    del self._maps[next(iter(self._maps))]
                self._maps[number] = self._mapped(number)
            part = self._maps[number][offset : offset + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled, number, offset = filled + len(part), number + 1, 0

    def place(self, position: int) -> tuple[Path, int]:
        """The file of the token at `position`, and the place of the token in the file."""
        number = bisect_right(self._ends, position)
        return self._files[number], self._spans[number][0] + position - self._begins[number]

    def refuse_beyond(self, vocabulary: Vocabulary, start: int, found: np.ndarray) -> None:
        """Raises a UserError for the first of the tokens `found`, read from `start` on, beyond the vocabulary."""
        if not len(found) or found.max() < vocabulary.size:
            return
        offset = int((found >= vocabulary.size).argmax())
        file, place = self.place(start + offset)
        raise UserError(
            f"data_dir: {file} has the token {found[offset]} at place {place}, beyond {vocabulary.key} = "
            f"{vocabulary.size}: set {vocabulary.key} to the vocabulary of the tokenizer"
        )

    def _mapped(self, number: int) -> np.ndarray:
        begin, end = self._spans[number]
        if begin == end:
            return np.empty(0, self.token)
        # read-only: the system refuses writable maps of files that are larger than its memory
        descriptor = os.open(self._files[number], os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size < end * self.token.itemsize:
                raise UserError(f"{self._files[number]} became shorter after the run began")
            content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        return np.frombuffer(content, self.token, end - begin, begin * self.token.itemsize)


def most_open_files() -> int:
    """The number of files that this process may have open."""
    try:
        import resource
    except ModuleNotFoundError:  # only Unix has it
        return 512
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if most != resource.RLIM_INFINITY else 2**20
