"""Writes token files: the .ds files of one split, which can be continued after an interruption."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mupscale.atomic import append_to, truncate, write_durably
from mupscale.datamodules.token_files import END, ENDS, METADATA, TOKEN_TYPES, TOKENS
from mupscale.errors import UserError

TOKEN = TOKEN_TYPES[2]
LARGEST_VOCABULARY = 2**16  # what TOKEN can count


class TokenWriter:
    """Appends documents to 00000.ds, 00001.ds, … in a folder; a file that has reached `file_tokens` is followed by the
    next.

    `flush` makes durable what was appended; `counts` holds the tokens and documents of every file. A new writer with
    these counts as `committed` cuts the files back to them and continues there. So the files depend on the documents
    alone, not on interruptions. `finish` writes the metadata.
    """

    def __init__(self, folder: Path, file_tokens: int, committed: Sequence[tuple[int, int]] = ()) -> None:
        self.folder, self.file_tokens = folder, file_tokens
        self.counts = [(tokens, documents) for tokens, documents in committed]
        self._open: tuple[BinaryIO, BinaryIO] | None = None
        folder.mkdir(exist_ok=True)
        kept: list[Path] = []
        for number, (tokens, documents) in enumerate(self.counts):
            sizes = tokens * TOKEN.itemsize, documents * END.itemsize
            for path, size in zip(self._paths(number), sizes, strict=True):
                found = path.stat().st_size if path.is_file() else 0
                if found < size:
                    raise UserError(f"{path} has {found} bytes of {size}: delete the folder and prepare it again")
                truncate(path, size)
                kept.append(path)
        for path in {*folder.glob("*.ds*")}.difference(kept):
            path.unlink()

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.counts)

    @property
    def documents(self) -> int:
        return sum(documents for _, documents in self.counts)

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends documents whose tokens stand one after another in `tokens`; the i-th has `lengths[i]` of them."""
        ends = lengths.cumsum()
        first = 0
        while first < len(lengths):
            if not self.counts or self.counts[-1][0] >= self.file_tokens:
                self.flush()
                self.counts.append((0, 0))
            held, documents = self.counts[-1]
            begin = int(ends[first - 1]) if first else 0
            # the document that fills the file is its last
            room = self.file_tokens - held
            last = min(first + int(np.searchsorted(ends[first:] - begin, room)) + 1, len(lengths))
            end = int(ends[last - 1])
            if self._open is None:
                token_path, end_path = self._paths(len(self.counts) - 1)
                self._open = append_to(token_path), append_to(end_path)
            self._open[0].write(tokens[begin:end].astype(TOKEN, copy=False).tobytes())
            self._open[1].write((ends[first:last] - begin + held).astype(END).tobytes())
            self.counts[-1] = held + end - begin, documents + last - first
            first = last

    def flush(self) -> None:
        for stream in self._open or ():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        self._open = None

    def finish(self, tokenizer: str) -> None:
        """Writes the metadata of every file, with the name of the tokenizer."""
        self.flush()
        for number, (tokens, _) in enumerate(self.counts):
            path = self.folder / f"{number:05d}{METADATA}"
            write_durably(path, f"{tokenizer}|{TOKEN.itemsize}\n{tokens}\n{tokens / 1e6:.2f} M tokens".encode())

    def _paths(self, number: int) -> tuple[Path, Path]:
        return self.folder / f"{number:05d}{TOKENS}", self.folder / f"{number:05d}{ENDS}"
