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
import stat
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupscale.datamodules.mapped_tokens import MappedTokens, Vocabulary
from mupscale.errors import UserError, as_user_errors

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
DOCUMENTS_SAMPLED = 16
FILES_SAMPLED = 64
"""Documents of a file, and files, whose last tokens are compared."""
MOST_INDEX_BYTES = 2**28
"""Indices of at most so many bytes together are read whole at the start."""
LONGEST_METADATA = 2**16

PROGRESS, PREPARED = "progress.json", "preparation.json"
"""What `prepare` writes: the state of an unfinished folder, and what a finished one holds."""

STAGE = re.compile(r"(?P<task>.*\d{5})(?:_(?P<stage>unshuffled)|_\d{5}_(?P<shuffled>(?:doc|chunk)_shuffled))\.ds$")
"""What the tokenizer calls the file of a task before it shuffles the documents, after that, and after the chunks."""


@dataclass(frozen=True)
class Listing:
    """The files of datatrove in a folder and below it: their sizes and times of change, by their path in the folder."""

    folder: Path
    files: dict[str, tuple[int, int]]
    links: list[str]
    """Links to files of datatrove, and to folders."""

    @cached_property
    def version(self) -> Hashable:
        """Changes with every file."""
        digest = hashlib.sha256()
        for name, (size, changed) in sorted(self.files.items()):
            digest.update(os.fsencode(name) + f"\0{size}\0{changed}\0".encode())
        return str(self.folder.resolve()), digest.hexdigest()


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
    """None of a file without tokens."""
    tokenizer: str | None
    """None without metadata."""


@dataclass(frozen=True, eq=False)
class TokenFolder:
    """The token files of a folder. Their lengths are checked; `verify` checks the indices, too."""

    folder: Path
    token: np.dtype[Any]
    tokenizer: str | None
    """The name that datatrove wrote into the metadata."""
    files: int
    index_bytes: int
    spans: dict[str, list[Span]]
    version: Hashable
    """Changes with every file of the folder."""

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
        if self.index_bytes > MOST_INDEX_BYTES:
            return
        names = {span.name for spans in self.spans.values() for span in spans}
        with ThreadPoolExecutor(READERS) as pool:
            for name, place in zip(names, pool.map(self._first_descent, names), strict=True):
                if place is not None:
                    raise UserError(
                        f"{self.folder / name}.index is damaged: document {place} ends before it begins. "
                        "Tokenise the file again, or copy the index again"
                    )

    def _first_descent(self, name: str) -> int | None:
        """The number of the first document that ends before it begins."""
        ends = np.fromfile(f"{self.folder / name}.index", END)
        descents = np.flatnonzero(ends[1:] < ends[:-1])
        return int(descents[0]) + 1 if len(descents) else None

    def refuse_vocabulary(self, vocabulary: Vocabulary) -> None:
        for split, (place, largest) in self._largest_sampled.items():
            self.tokens(split).refuse_beyond(vocabulary, place, np.array([largest]))

    @cached_property
    def _largest_sampled(self) -> dict[str, tuple[int, int]]:
        """The place and the number of the largest token of a sample of each split; the sample of a small one is all."""
        answer = {}
        for split in SPLITS:
            tokens = self.tokens(split)
            samples = min(SAMPLES, -(-len(tokens) // SAMPLE_TOKENS))
            found = []
            for number in range(samples):
                begin, end = (edge * len(tokens) // samples for edge in (number, number + 1))
                out = np.empty(min(end - begin, SAMPLE_TOKENS), self.token)
                tokens.read(begin, out)
                found.append((int(out.max()), begin + int(out.argmax())))
            largest, place = max(found)
            answer[split] = place, largest
        return answer

    @cached_property
    def end_of_text(self) -> int | None:
        """The token that ends each document of a sample, as the index has documents; None if they end differently."""
        spans = [span for spans in self.spans.values() for span in spans]
        found: set[int] = set()
        for span in spans[:: -(-len(spans) // FILES_SAMPLED)]:
            path = self.folder / span.name
            ends = np.unique(np.fromfile(f"{path}.index", END, DOCUMENTS_SAMPLED))
            tokens = np.memmap(path, self.token, "r")
            found.update(int(tokens[end - 1]) for end in ends.tolist() if 0 < end <= len(tokens))
        return found.pop() if len(found) == 1 else None

    def summary(self) -> str:
        """One line about the folder."""
        train, val = (f"{self.count(split):,}" for split in SPLITS)
        ends = "the documents of a sample end with different tokens"
        if self.end_of_text is not None:
            ends = f"documents end with the token {self.end_of_text}"
        tokenizer = f", tokenizer {self.tokenizer}" if self.tokenizer is not None else ""
        return (
            f"{self.folder}: {train} tokens to train on, {val} held out, in {self.files:,} token files"
            f"{tokenizer}; {ends}"
        )


def list_files(folder: Path) -> Listing:
    """The files of datatrove in a folder and below it; none if there is no such folder."""
    files: dict[str, tuple[int, int]] = {}
    links: list[str] = []
    pending = [""] if folder.is_dir() else []
    with as_user_errors(OSError):
        while pending:
            inside = pending.pop()
            with os.scandir(folder / inside) as entries:
                for entry in entries:
                    name = inside + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{name}/")
                    elif entry.name.endswith((TOKENS, ENDS, METADATA, LOSS)) or COMPRESSED.search(entry.name):
                        status = entry.stat()
                        if not stat.S_ISREG(status.st_mode):
                            raise UserError(f"{folder / name} is not a file")
                        files[name] = status.st_size, status.st_mtime_ns
                        if entry.is_symlink():
                            links.append(name)
                    elif entry.is_symlink() and entry.is_dir():
                        links.append(name)
    return Listing(folder, files, links)


def read_token_folder(listing: Listing) -> TokenFolder:
    """The token files of a listing; raises a UserError for one that does not fit its index or metadata."""
    folder = listing.folder
    if (folder / PROGRESS).exists() and not (folder / PREPARED).exists():
        raise UserError(
            f"{folder} is not finished: run the same `python -m mupscale prepare` command again to continue"
        )
    if not listing.files:
        raise UserError(
            f"{folder} has no token files: write them by `python -m mupscale prepare`, or name a folder with .ds files "
            "of datatrove"
        )
    _refuse_other_kinds(listing)
    names = sorted(name for name in listing.files if name.endswith(TOKENS))
    with ThreadPoolExecutor(READERS) as pool, as_user_errors(OSError):
        files = list(pool.map(lambda name: _checked(listing, name), names))
        _refuse_incomplete(listing, files)
        filled = [file for file in files if file.tokens]
        if not filled:
            raise UserError(f"{folder} has {len(files)} token files without any token")
        for what in ("token_bytes", "tokenizer"):
            _refuse_mixture(folder, filled, what)
        spans = _split(folder, filled)
    return TokenFolder(
        folder,
        TOKEN_TYPES[filled[0].token_bytes or 2],
        next((file.tokenizer for file in filled if file.tokenizer is not None), None),
        len(files),
        sum(size for name, (size, _) in listing.files.items() if name.endswith(ENDS)),
        spans,
        listing.version,
    )


def _refuse_other_kinds(listing: Listing) -> None:
    folder = listing.folder
    for name in listing.links:
        raise UserError(f"{folder / name} is a link: copy the files into the folder, or use hard links (`cp -al`)")
    stages: dict[str, tuple[str, str]] = {}
    for name, (size, _) in sorted(listing.files.items()):
        if COMPRESSED.search(name):
            raise UserError(f"{folder / name} is compressed and cannot be mapped: unpack it, and delete this file")
        if name.endswith(LOSS):
            raise UserError(
                f"{folder / name} has a mask of the tokens to predict, and FineWeb predicts all tokens: tokenise with "
                f"save_loss_metadata=False, or delete the {LOSS} files to train on all tokens"
            )
        if name.endswith(ENDS) and name.removesuffix(".index") not in listing.files:
            raise UserError(f"{folder / name.removesuffix('.index')} is missing, and its index is there")
        stage = STAGE.match(name)
        if stage is None or not size:
            continue
        reached = stage["stage"] or stage["shuffled"]
        other, first = stages.setdefault(stage["task"], (reached, name))
        if reached != other:
            raise UserError(
                f"{folder / name} has the documents of {first}: the task was interrupted. Run the pipeline again; or, "
                "if it has finished, delete the unshuffled file and its index"
            )


def _checked(listing: Listing, name: str) -> TokenFile:
    """What is known of a file; raises a UserError if its length does not fit its index and its metadata."""
    path, size = listing.folder / name, listing.files[name][0]
    index_size, _ = listing.files.get(f"{name}.index", (None, None))
    if index_size is None:
        raise UserError(
            f"there is no {path}.index, which datatrove writes after the tokens: copy it, or run the pipeline again "
            "(with save_index=True)"
        )
    if index_size % END.itemsize:
        raise UserError(f"{path}.index has {index_size} bytes, not a multiple of {END.itemsize}: it is cut short")
    indexed = int(np.memmap(f"{path}.index", END, "r")[-1]) if index_size else 0
    tokenizer: str | None = None
    token_bytes: int | None = None
    if f"{name}.metadata" in listing.files:
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


def _refuse_incomplete(listing: Listing, files: Sequence[TokenFile]) -> None:
    tokens = {file.name: file.tokens for file in files}
    for name in listing.files:
        merged = name.removesuffix(".metadata")
        if not name.endswith(METADATA) or merged in tokens:
            continue
        place, slash, base = merged.rpartition("/")
        part = re.compile(rf"{re.escape(place + slash)}(.*/)?\d{{3,}}_{re.escape(base)}")
        found = [count for file, count in tokens.items() if part.fullmatch(file)]
        total = _metadata(listing.folder / merged)[2]
        if sum(found) != total:
            raise UserError(
                f"{listing.folder / name} says {total} tokens, the {len(found)} files NUMBER_{base} have {sum(found)}: "
                "copy those that are missing, or delete this file"
            )


def _refuse_mixture(folder: Path, files: Iterable[TokenFile], what: str) -> None:
    by_value: dict[Any, str] = {}
    for file in files:
        value = getattr(file, what)
        if value is not None:
            by_value.setdefault(value, file.name)
    if len(by_value) > 1:
        (one, first), (other, second), *_ = by_value.items()
        words = "tokenizer" if what == "tokenizer" else "bytes of a token"
        raise UserError(
            f"{folder} mixes files of two tokenizers: {words} {one} in {first}, {other} in {second}. Give them folders "
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
