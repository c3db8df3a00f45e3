"""Tokens on disk: shards of whole documents, an index with their checksums, one memory-mapped array over all shards.

A prepared folder holds, for each split S (train, val) and shard number N, little-endian:

    S-N.tokens       uint16: the documents of the shard one after another, each with the end-of-text token as its last
    S-N.documents    uint64: where in the shard each document begins
    tokenizer.tiktoken    a line for each token but end-of-text: its bytes in base64, and its number
    index.json       version, vocabulary, counts, checksums, sources. Written last: a folder without it is unfinished
"""

import hashlib
import mmap
import os
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np

from mupscale.data_files import json_of
from mupscale.datamodules.shared import version_of
from mupscale.errors import UserError

VERSION = 1
INDEX = "index.json"
TOKENIZER = "tokenizer.tiktoken"
SPLITS = ("train", "val")
TOKEN, START = np.dtype("<u2"), np.dtype("<u8")
LARGEST_VOCABULARY = 2**16  # what TOKEN can count
MOST_MAPS = 1024
"""Files of a split that are mapped at the same time, if the process may open eight times as many: a map keeps its file
open, and the tables of the pages that were read."""


@dataclass(frozen=True)
class Index:
    """The content of a prepared folder. Every file exists in its full length; `verify` compares the checksums, too."""

    folder: Path
    content: dict[str, Any]
    token: ClassVar[np.dtype[Any]] = TOKEN

    @property
    def vocabulary(self) -> int:
        return self.content["vocabulary"]

    def count(self, split: str) -> int:
        """The number of tokens of a split."""
        return self.content[split]["tokens"]

    def version(self) -> Hashable:
        """Changes with every file of the folder."""
        return version_of(self.folder / name for name in (INDEX, *self.files()))

    def refuse_vocabulary(self, vocabulary: "Vocabulary") -> None:
        """Raises a UserError if the vocabulary of a model does not include all tokens."""
        key, size = vocabulary
        if size < self.vocabulary:
            raise UserError(
                f"{key} = {size}: the tokens of {self.folder} are of a vocabulary of "
                f"{self.vocabulary}; set {key}: {self.vocabulary}, or more"
            )

    def files(self) -> dict[str, tuple[int, str]]:
        """The size in bytes and the sha256 of every file but the index."""
        entries = [self.content["tokenizer"]]
        for split in SPLITS:
            for shard in self.content[split]["shards"]:
                entries += [shard["tokens"], shard["documents"]]
        return {entry["file"]: (entry["bytes"], entry["sha256"]) for entry in entries}

    def verify(self) -> None:
        """Reads every byte; raises a UserError if a file is damaged, or has tokens beyond the vocabulary."""
        files = self.files()
        with ThreadPoolExecutor(usable_cores()) as pool:
            digests = pool.map(sha256, (self.folder / name for name in files))
        for (name, (_, expected)), found in zip(files.items(), digests, strict=True):
            if found != expected:
                raise UserError(
                    f"{self.folder / name} is damaged: its sha256 is {found}, {INDEX} says {expected}. "
                    "Prepare the folder again"
                )
        for split in SPLITS:
            for shard in self.content[split]["shards"]:
                refuse_unknown_tokens(self.folder / shard["tokens"]["file"], self.vocabulary)

    def tokens(self, split: str) -> "MappedTokens":
        return MappedTokens([self.folder / shard["tokens"]["file"] for shard in self.content[split]["shards"]])


def read_index(folder: Path) -> Index:
    """The index of a prepared folder; raises a UserError that names a file that is missing or has another size."""
    path = folder / INDEX
    if not path.is_file():
        if any(folder.glob("*.tokens")):
            raise UserError(
                f"{folder} is not finished: run the same `python -m mupscale prepare` command again to continue"
            )
        raise UserError(
            f"there is no {path}: prepare the folder by `python -m mupscale prepare`, or name one with .ds files of "
            "datatrove"
        )
    try:
        index = Index(folder, json_of(path.read_bytes()))
        version = index.content["version"]
        files = index.files() if version == VERSION else {}
        if version == VERSION:
            _refuse_other_counts(index)
        if version == VERSION and not 0 < int(index.vocabulary) <= LARGEST_VOCABULARY:
            raise ValueError(f"a vocabulary of {index.vocabulary}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged, or is not the index of a prepared folder ({error!r})") from error
    if version != VERSION:
        raise UserError(
            f"{path} is of version {version}, this mupscale reads version {VERSION}: "
            "delete the folder and prepare it again"
        )
    for name, (size, _) in files.items():
        file = inside(folder, name)
        if not file.is_file():
            raise UserError(f"{file} is missing: delete the folder and prepare it again")
        if file.stat().st_size != size:
            raise UserError(
                f"{file} has {file.stat().st_size} bytes, {INDEX} says {size}: delete the folder and prepare it again"
            )
    return index


def _refuse_other_counts(index: Index) -> None:
    """ValueError if the counts in an index are no numbers, or not those of its files."""
    for split in SPLITS:
        shards = index.content[split]["shards"]
        if not isinstance(shards, list) or not shards:
            raise ValueError(f"{split} has no shards")
        counts = [shard["tokens"]["count"] for shard in shards]
        sizes = [shard["tokens"]["bytes"] for shard in shards]
        if not all(type(number) is int and number >= 0 for number in (*counts, *sizes)):
            raise ValueError(f"{split} has shards of {counts} tokens")
        if sizes != [count * TOKEN.itemsize for count in counts] or index.content[split]["tokens"] != sum(counts):
            raise ValueError(f"{split} has {index.content[split]['tokens']!r} tokens in shards of {counts}")


def inside(folder: Path, name: str) -> Path:
    """The file of this name in the folder; raises a UserError that names one that lies elsewhere, also by a link."""
    if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:
        raise UserError(f"{folder / INDEX} names a file outside of its folder: {name!r}; it is not read")
    if (folder / name).resolve().parent != folder.resolve():
        raise UserError(f"{folder / name} is a link to a file outside of its folder; copy the file into it")
    return folder / name


def refuse_unknown_tokens(file: Path, vocabulary: int) -> None:
    """Raises a UserError if a file has tokens beyond the vocabulary. Costs a tenth of a checksum."""
    if not file.stat().st_size:
        return
    largest = int(np.memmap(file, TOKEN, "r").max())
    if largest >= vocabulary:
        raise UserError(
            f"{file} has the token {largest}, beyond the vocabulary of {vocabulary} in {INDEX}: "
            "delete the folder and prepare it again"
        )


class Vocabulary(NamedTuple):
    """The vocabulary size of a model, and the key of the configuration that sets it."""

    key: str
    size: int


class MappedTokens:
    """The tokens of several files as if they were one array: all tokens of each file, or those of its span.

    Tokens are read from disk when they are used, and are not kept in memory. A file is mapped when it is first read; at
    most MOST_MAPS files are mapped at the same time.
    """

    def __init__(
        self,
        files: Sequence[Path],
        spans: Sequence[tuple[int, int]] | None = None,
        token: np.dtype[Any] = TOKEN,
    ) -> None:
        if spans is None:
            spans = [(0, file.stat().st_size // token.itemsize) for file in files]
        self.token = token
        self._files, self._spans = files, spans
        self._ends = list(accumulate(end - begin for begin, end in spans))
        self._begins = [0, *self._ends]
        self._maps: dict[int, np.ndarray] = {}
        self._most_maps = max(min(MOST_MAPS, most_open_files() // 8), 1)

    def __len__(self) -> int:
        return self._begins[-1]

    def shards(self) -> Iterator[tuple[int, np.ndarray]]:
        """Where the tokens of each file begin, and these tokens, which cannot be written to."""
        for number in range(len(self._files)):
            yield self._begins[number], self._maps.get(number, self._mapped(number))

    def read(self, start: int, out: np.ndarray) -> None:
        """Fills `out`, of any integer type, with the tokens from `start` on, from several files if need be."""
        number = bisect_right(self._ends, start)
        offset = start - self._begins[number]
        filled = 0
        while filled < len(out):
            shard = self._maps.get(number)
            if shard is None:
                shard = self._map(number)
            part = shard[offset : offset + len(out) - filled]
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

    def _map(self, number: int) -> np.ndarray:
        while len(self._maps) >= self._most_maps:
            del self._maps[next(iter(self._maps))]
        self._maps[number] = self._mapped(number)
        return self._maps[number]

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


class ShardWriter:
    """Appends documents to the shards of a split; a shard that has reached `shard_tokens` is followed by the next.

    `close` makes durable what was appended; `counts` holds the tokens and documents of every shard. A new writer with
    these counts as `committed` cuts the files back to them and continues there. So the shards depend on the documents
    alone, not on interruptions.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, committed: Sequence[tuple[int, int]] = ()) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.counts = [(tokens, documents) for tokens, documents in committed]
        self._open: tuple[BinaryIO, BinaryIO] | None = None
        kept: list[Path] = []
        for number, (tokens, documents) in enumerate(self.counts):
            kept += self._cut_back(number, tokens, documents)
        for path in (*folder.glob(f"{split}-*.tokens"), *folder.glob(f"{split}-*.documents")):
            if path not in kept:
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
            if not self.counts or self.counts[-1][0] >= self.shard_tokens:
                self.close()
                self.counts.append((0, 0))
            held, documents = self.counts[-1]
            begin = int(ends[first - 1]) if first else 0
            # the document that fills the shard is its last
            room = self.shard_tokens - held
            last = min(first + int(np.searchsorted(ends[first:] - begin, room)) + 1, len(lengths))
            end = int(ends[last - 1])
            token_file, document_file = self._files()
            token_file.write(tokens[begin:end].astype(TOKEN, copy=False).tobytes())
            document_file.write((ends[first:last] - lengths[first:last] - begin + held).astype(START).tobytes())
            self.counts[-1] = held + end - begin, documents + last - first
            first = last

    def close(self) -> None:
        for stream in self._open or ():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        self._open = None

    def index(self) -> dict[str, Any]:
        """The part of the index about a finished split."""
        self.close()
        with ThreadPoolExecutor(usable_cores()) as pool:
            shards = list(pool.map(self._shard_entry, range(len(self.counts))))
        return {"tokens": self.tokens, "documents": self.documents, "shards": shards}

    def _shard_entry(self, number: int) -> dict[str, Any]:
        (tokens, documents), (token_path, document_path) = self.counts[number], self._paths(number)
        return {
            "tokens": {"count": tokens, **file_entry(token_path)},
            "documents": {"count": documents, **file_entry(document_path)},
        }

    def _paths(self, number: int) -> tuple[Path, Path]:
        name = f"{self.split}-{number:05d}"
        return self.folder / f"{name}.tokens", self.folder / f"{name}.documents"

    def _files(self) -> tuple[BinaryIO, BinaryIO]:
        if self._open is None:
            tokens, documents = self._paths(len(self.counts) - 1)
            self._open = tokens.open("ab"), documents.open("ab")
        return self._open

    def _cut_back(self, number: int, tokens: int, documents: int) -> tuple[Path, Path]:
        paths = self._paths(number)
        for path, size in zip(paths, (tokens * TOKEN.itemsize, documents * START.itemsize), strict=True):
            found = path.stat().st_size if path.is_file() else 0
            if found < size:
                raise UserError(
                    f"{path} has lost data: {found} bytes of {size}. Delete the folder and prepare it again"
                )
            os.truncate(path, size)
        return paths


def file_entry(path: Path) -> dict[str, Any]:
    """What the index says about a file."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def most_open_files() -> int:
    """The number of files that this process may have open."""
    try:
        import resource
    except ModuleNotFoundError:  # only Unix has it
        return 512
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if most != resource.RLIM_INFINITY else 2**20


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
