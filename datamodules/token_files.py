"""Token files of datatrove, read as they are: any number of them, in a folder and below it.

Its DocumentTokenizer and DocumentTokenizerMerger, and `python -m mupscale prepare`, write for each file NAME.ds,
little-endian:

    NAME.ds             uint16 or uint32: the documents one after another
    NAME.ds.index       uint64: where in NAME.ds each document ends, in tokens. Written after the tokens
    NAME.ds.metadata    text: TOKENIZER|BYTES OF A TOKEN, the number of tokens, the same for people. Optional
    NAME.ds.loss        which tokens are predicted. Optional, and refused here

Beside 000_NAME.ds, 001_NAME.ds, … the merger writes NAME.ds.metadata with the number of tokens of all of them.

The files come in the order of their paths. Documents of the folders `val` and `validation` are held out; where neither
is there, the last documents of each file are, see `_cut`.
"""

import hashlib
import os
import re
import resource
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupscale.errors import UserError

SPLITS = ("train", "val")
TOKENS, ENDS, METADATA, LOSS = ".ds", ".ds.index", ".ds.metadata", ".ds.loss"
COMPRESSED = re.compile(r"\.ds\.(gz|zst|xz|bz2|lz4|zip)$")
HELD_OUT_FOLDERS = ("val", "validation")
HELD_OUT_SHARE = 100
"""One token of so many is held out, where no folder is."""
END = np.dtype("<u8")
TOKEN_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

READERS = 16
"""Threads that open files; on a network file system each waits for an answer most of the time."""
SAMPLES, SAMPLE_TOKENS = 256, 2**14
"""Places of a split, and tokens at each, that are compared with the vocabulary at the start."""
MOST_MAPS = 1024
"""Files of a split that are mapped at the same time, if the process may open eight times as many: a map keeps its file
open, and the tables of the pages that were read."""
MOST_INDEX_BYTES = 2**28
"""Indices of at most so many bytes together are read whole at the start."""
LONGEST_METADATA = 2**16

PROGRESS, PREPARED = "progress.json", "preparation.json"
"""What `prepare` writes: the state of an unfinished folder, and what a finished one holds."""

STAGE = re.compile(r"(?P<task>.*\d{5})(?:_(?P<stage>unshuffled)|_\d{5}_(?P<shuffled>(?:doc|chunk)_shuffled))\.ds$")
"""What the tokenizer calls the file of a task before it shuffles the documents, after that, and after the chunks."""


class ModelVocabulary(NamedTuple):
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
        most_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_maps = MOST_MAPS if most_open == resource.RLIM_INFINITY else max(min(MOST_MAPS, most_open // 8), 1)

    def __len__(self) -> int:
        return self._begins[-1]

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

    def refuse_beyond(self, vocabulary: ModelVocabulary, start: int, found: np.ndarray) -> None:
        """Raises a UserError for the first of the tokens `found`, read from `start` on, beyond the vocabulary."""
        if found.max(initial=0) < vocabulary.size:
            return
        offset = int((found >= vocabulary.size).argmax())
        number = bisect_right(self._ends, start + offset)
        place = self._spans[number][0] + start + offset - self._begins[number]
        raise UserError(
            f"data_dir: {self._files[number]} has the token {found[offset]} at place {place}, beyond {vocabulary.key} "
            f"= {vocabulary.size}: set {vocabulary.key} to the vocabulary of the tokenizer"
        )

    def _mapped(self, number: int) -> np.ndarray:
        begin, end = self._spans[number]
        try:
            # read-only: the system refuses writable maps of files that are larger than its memory
            tokens = np.memmap(self._files[number], self.token, "r", begin * self.token.itemsize, (end - begin,))
        except ValueError as error:
            raise UserError(f"{self._files[number]} became shorter after the run began") from error
        return tokens.view(np.ndarray)  # whose parts are made faster


class Span(NamedTuple):
    """Tokens of a file that belong to one split: those from `begin` to `end`."""

    name: str
    begin: int
    end: int


class TokenFile(NamedTuple):
    """A file that was checked: its length fits its index and its metadata."""

    name: str
    tokens: int
    token_bytes: int | None
    """The size of a token; None for a file without tokens."""
    tokenizer: str | None
    """The name of the tokenizer; None without metadata."""


class TokenFolder:
    """The files of datatrove in a folder and below it. Their lengths are checked at the first use, all by `verify`."""

    def __init__(self, folder: Path) -> None:
        """Lists the files; there are none if there is no such folder."""
        self.folder = folder
        found: list[tuple[str, int, int]] = []
        pending = [""] if folder.is_dir() else []
        while pending:
            inside = pending.pop()
            with os.scandir(folder / inside) as entries:
                for entry in entries:
                    name = inside + entry.name
                    is_ours = entry.name.endswith((TOKENS, ENDS, METADATA, LOSS)) or COMPRESSED.search(entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{name}/")
                    elif entry.is_symlink() and (is_ours or entry.is_dir()):
                        raise UserError(f"{entry.path} is a link: copy the files into the folder, or use hard links")
                    elif is_ours and not entry.is_file():
                        raise UserError(f"{entry.path} is not a file")
                    elif is_ours:
                        found.append((name, entry.stat().st_size, entry.stat().st_mtime_ns))
        self.sizes = {name: size for name, size, _ in found}
        """The bytes of each file, by its path in the folder."""
        self.version: Hashable = str(folder.resolve()), tuple(sorted(found))
        """Changes with every file."""

    @cached_property
    def files(self) -> list[TokenFile]:
        """The token files by the order of their paths; raises a UserError for one that does not fit the others."""
        if (self.folder / PROGRESS).exists() and not (self.folder / PREPARED).exists():
            raise UserError(f"{self.folder} is not finished: run the same prepare command again")
        if not self.sizes:
            raise UserError(f"{self.folder} has no token files: write them by prepare, or name a folder with .ds files")
        _refuse_other_kinds(self)
        names = sorted(name for name in self.sizes if name.endswith(TOKENS))
        with ThreadPoolExecutor(READERS) as pool:
            files = list(pool.map(lambda name: _check_file(self, name), names))
        _refuse_incomplete(self, files)
        if not any(file.tokens for file in files):
            raise UserError(f"{self.folder} has {len(files)} token files without any token")
        _refuse_mixture(self.folder, "bytes of a token", ((file.token_bytes, file) for file in files))
        _refuse_mixture(self.folder, "tokenizer", ((file.tokenizer, file) for file in files))
        return files

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        return _split(self.folder, [file for file in self.files if file.tokens])

    @property
    def token(self) -> np.dtype[Any]:
        return TOKEN_TYPES[next(file.token_bytes for file in self.files if file.token_bytes)]

    @property
    def tokenizer(self) -> str | None:
        """The name that datatrove wrote into the metadata."""
        return next((file.tokenizer for file in self.files if file.tokens and file.tokenizer is not None), None)

    def count(self, split: str) -> int:
        """The number of tokens of a split."""
        return sum(span.end - span.begin for span in self.spans[split])

    def tokens(self, split: str) -> MappedTokens:
        spans = self.spans[split]
        files = [self.folder / span.name for span in spans]
        return MappedTokens(files, [(span.begin, span.end) for span in spans], self.token)

    def order(self, split: str) -> str:
        """Stands for the files of a split, in their order: for their names, and the number of tokens of each."""
        digest = hashlib.sha256()
        for span in self.spans[split]:
            digest.update(os.fsencode(span.name) + f"\0{span.begin}\0{span.end}\0".encode())
        return digest.hexdigest()[:16]

    def verify(self) -> None:
        """Raises a UserError for an index that does not ascend. Skipped if all indices exceed MOST_INDEX_BYTES."""
        if sum(size for name, size in self.sizes.items() if name.endswith(ENDS)) > MOST_INDEX_BYTES:
            return

        def check(file: TokenFile) -> None:
            path = f"{self.folder / file.name}.index"
            ends = np.fromfile(path, END)
            descents = np.flatnonzero(ends[1:] < ends[:-1])
            if len(descents):
                raise UserError(f"{path} is damaged: document {descents[0] + 1} ends before it begins. Copy it again")

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(check, self.files))

    def refuse_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        for split, (place, largest) in self._largest_sampled.items():
            self.tokens(split).refuse_beyond(vocabulary, place, np.array([largest]))

    @cached_property
    def _largest_sampled(self) -> dict[str, tuple[int, int]]:
        """The place and the number of the largest token of a sample of each split; the sample of a small one is all."""
        answer = {}
        for split in SPLITS:
            tokens = self.tokens(split)
            found = []
            for begin in range(0, len(tokens), max(SAMPLE_TOKENS, -(-len(tokens) // SAMPLES))):
                sample = np.empty(min(len(tokens) - begin, SAMPLE_TOKENS), self.token)
                tokens.read(begin, sample)
                found.append((int(sample.max()), begin + int(sample.argmax())))
            largest, place = max(found)
            answer[split] = place, largest
        return answer

    def summary(self) -> str:
        """One line about the folder."""
        train, val = (f"{self.count(split):,}" for split in SPLITS)
        tokenizer = f", tokenizer {self.tokenizer}" if self.tokenizer is not None else ""
        return (
            f"{self.folder}: {train} tokens to train on, {val} held out, in {len(self.files):,} token files{tokenizer}"
        )


def _refuse_other_kinds(folder: TokenFolder) -> None:
    stages: dict[str, tuple[str, str]] = {}
    for name, size in sorted(folder.sizes.items()):
        path = folder.folder / name
        if COMPRESSED.search(name):
            raise UserError(f"{path} is compressed and cannot be mapped: unpack it, and delete this file")
        if name.endswith(LOSS):
            raise UserError(
                f"{path} has a mask of the tokens to predict, and FineWeb predicts all tokens: tokenise with "
                f"save_loss_metadata=False, or delete the {LOSS} files to train on all tokens"
            )
        if name.endswith(ENDS) and name.removesuffix(".index") not in folder.sizes:
            raise UserError(f"{path.with_suffix('')} is missing, and its index is there")
        stage = STAGE.match(name)
        if stage is None or not size:
            continue
        reached = stage["stage"] or stage["shuffled"]
        other, first = stages.setdefault(stage["task"], (reached, name))
        if reached != other:
            raise UserError(
                f"{path} has the documents of {first}: the task was interrupted. Run the pipeline again; or, if it has "
                "finished, delete the unshuffled file and its index"
            )


def _check_file(folder: TokenFolder, name: str) -> TokenFile:
    """Describes a file; raises a UserError if its length does not fit its index and its metadata."""
    path, size = folder.folder / name, folder.sizes[name]
    index_size = folder.sizes.get(f"{name}.index")
    if index_size is None:
        raise UserError(
            f"there is no {path}.index, which datatrove writes after the tokens: copy it, or tokenise again"
        )
    if index_size % END.itemsize:
        raise UserError(f"{path}.index has {index_size} bytes, not a multiple of {END.itemsize}: it is cut short")
    indexed = int(np.memmap(f"{path}.index", END, "r")[-1]) if index_size else 0
    tokenizer: str | None = None
    token_bytes: int | None = None
    if f"{name}.metadata" in folder.sizes:
        tokenizer, token_bytes, tokens = _metadata(path)
        if tokens != indexed:
            raise UserError(
                f"{path}.index does not fit: its last document ends at token {indexed}, {name}.metadata says "
                f"{tokens} tokens. Copy the files again, or tokenise again"
            )
    of = f"of {token_bytes} bytes" if token_bytes is not None else "of 2 or 4 bytes"
    if token_bytes is None:
        token_bytes = size // indexed if indexed else 0
    if size != indexed * token_bytes or (size and token_bytes not in TOKEN_TYPES):
        raise UserError(
            f"{path} has {size} bytes, its index says {indexed} tokens {of}: the file is cut short or "
            "compressed, or the index is of another file. Copy both again, or tokenise again"
        )
    return TokenFile(name, indexed, token_bytes if size else None, tokenizer)


def _metadata(path: Path) -> tuple[str, int | None, int]:
    """The tokenizer, the bytes of a token (None in old versions), and the number of tokens that metadata say."""
    with open(f"{path}.metadata", "rb", buffering=0) as stream:
        lines = (stream.read(LONGEST_METADATA) or b"").decode(errors="replace").splitlines()
    try:
        first, tokens = lines[0], int(lines[1])
    except (IndexError, ValueError):
        raise UserError(
            f"{path}.metadata is damaged: its lines are {lines[:2]}, wanted TOKENIZER|BYTES and the number of tokens"
        ) from None
    tokenizer, _, token_bytes = first.rpartition("|")
    if not tokenizer or not token_bytes.isdecimal():
        return first, None, tokens
    if int(token_bytes) not in TOKEN_TYPES:
        raise UserError(f"{path}.metadata says tokens of {token_bytes} bytes, wanted 2 or 4")
    return tokenizer, int(token_bytes), tokens


def _refuse_incomplete(folder: TokenFolder, files: Sequence[TokenFile]) -> None:
    tokens = {file.name: file.tokens for file in files}
    for name in folder.sizes:
        merged = name.removesuffix(".metadata")
        if not name.endswith(METADATA) or merged in tokens:
            continue
        place, slash, base = merged.rpartition("/")
        part = re.compile(rf"{re.escape(place + slash)}(.*/)?\d{{3,}}_{re.escape(base)}")
        found = [count for file, count in tokens.items() if part.fullmatch(file)]
        total = _metadata(folder.folder / merged)[2]
        if sum(found) != total:
            raise UserError(
                f"{folder.folder / name} says {total} tokens, the {len(found)} files NUMBER_{base} have {sum(found)}: "
                "copy those that are missing, or delete this file"
            )


def _refuse_mixture(folder: Path, what: str, values: Iterable[tuple[Any, TokenFile]]) -> None:
    """UserError for files with different values, by which it calls two of them; None is no value."""
    by_value: dict[Any, str] = {}
    for value, file in values:
        if value is not None and file.tokens:
            by_value.setdefault(value, file.name)
    if len(by_value) > 1:
        (one, first), (other, second), *_ = by_value.items()
        raise UserError(
            f"{folder} mixes files of two tokenizers: {what} {one} in {first}, {other} in {second}. Give them folders "
            "of their own; if one tokenizer has two names, make the first lines of their .metadata agree"
        )


def _split(folder: Path, files: Sequence[TokenFile]) -> dict[str, list[Span]]:
    """The tokens of each split; raises a UserError if no documents can be held out."""
    held_out = {file.name for file in files if file.name.partition("/")[0] in HELD_OUT_FOLDERS}
    spans: dict[str, list[Span]] = {split: [] for split in SPLITS}
    room = 0  # tokens that may still be held out, times HELD_OUT_SHARE
    for file in files:
        cut = 0 if file.name in held_out else file.tokens
        if not held_out:
            room += file.tokens
            cut = _cut(folder / file.name, file.tokens, room // HELD_OUT_SHARE)
            room -= (file.tokens - cut) * HELD_OUT_SHARE
        for split, begin, end in (("train", 0, cut), ("val", cut, file.tokens)):
            if begin < end:
                spans[split].append(Span(file.name, begin, end))
    if not spans["train"]:
        raise UserError(f"{folder} has token files in {HELD_OUT_FOLDERS[0]} alone, and none to train on")
    if not spans["val"]:
        raise UserError(
            f"{folder} has too few documents to hold one of {HELD_OUT_SHARE} out: move some .ds files, with their "
            f".index and .metadata, to {folder / HELD_OUT_FOLDERS[0]}"
        )
    return spans


def _cut(path: Path, tokens: int, room: int) -> int:
    """Where a file's held-out documents begin: its last documents, as many as have at most `room` tokens together.

    `room` is a hundredth of the tokens so far, less those held out so far. So small files share it: of files with one
    document each, every hundredth is held out.
    """
    if not room:
        return tokens
    if room >= tokens:
        return 0
    ends = np.memmap(f"{path}.index", END, "r")  # of which a search reads a few pages
    return min(int(ends[np.searchsorted(ends, END.type(tokens - room))]), tokens)
