"""Where documents come from: local files, or FineWeb-Edu as a stream. Both can continue from any position."""

import gzip
import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from io import BufferedIOBase
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mupscale.data_files import json_of, what_is_wrong
from mupscale.errors import UserError, needs_extra, one_line

REPOSITORY = "HuggingFaceFW/fineweb-edu"
SEPARATOR = "<|endoftext|>"
BATCH = 2**20
"""Characters of text in a batch of documents, about."""

UNREAD = (".xz", ".zst", ".bz2", ".lz4", ".zip", ".7z", ".tar", ".tgz")
"""Endings of compressed files and archives that are not read."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Position = Any
"""Where a source continues after a batch, as plain JSON values; None is the beginning."""


class Unusable(UserError):
    """The source cannot be prepared until the user changes it or the options."""


class Source(ABC):
    """Documents to prepare, in a fixed order."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options that determine the documents, under the names of the command's options."""

    def resolve(self, recorded: dict[str, Any] | None) -> dict[str, Any]:
        """Fixes what must not change, such as a revision; a continued preparation passes what it `recorded`."""
        return {}

    @abstractmethod
    def documents(self, position: Position) -> Iterator[str]:
        """Documents from a position on, empty ones included."""

    @abstractmethod
    def position(self) -> Position:
        """Position after the last document read."""

    def progress(self, position: Position) -> tuple[int, int]:
        """The bytes before a position and the bytes in all; zeros of a source that does not know them."""
        return 0, 0

    def batches(self, position: Position) -> Generator[tuple[list[str], Position], None, None]:
        """Documents from a position on that are not empty, each batch with the position after it."""
        batch: list[str] = []
        size = 0
        for document in self.documents(position):
            if document.strip():
                batch.append(document)
                size += len(document)
            if size >= BATCH:
                yield batch, self.position()
                batch, size = [], 0
        if batch:
            yield batch, self.position()


class TextFiles(Source):
    """The documents of local files, in the order of the files, without empty documents.

    In a .parquet file, documents are the rows of the column `text`. In .jsonl, .ndjson and .json, they are the field
    `text` of one object per line. Any other file is plain UTF-8 text, in which a line that equals `separator` separates
    two documents. All except parquet may be compressed (.gz).
    """

    def __init__(self, files: Sequence[Path], separator: str = SEPARATOR) -> None:
        self.files, self.separator = files, separator
        for file in files:
            if not file.is_file():
                raise UserError(f"{file} is a folder: name its files" if file.is_dir() else f"there is no file {file}")
            if ending_of(file)[0] in UNREAD:
                raise UserError(f"{file}: unpack it first; of packed files, only text and JSON lines in .gz are read")
        if any(ending_of(file)[0] == ".parquet" for file in files):
            with needs_extra("data"):
                import pyarrow.parquet  # noqa: F401
        self._sizes = [file.stat().st_size for file in files]

    def __str__(self) -> str:
        names = [file.name for file in self.files]
        if len(names) >= 5:
            names = [*names[:3], f"… ({len(names)} files)"]
        return ", ".join(names)

    def options(self) -> dict[str, Any]:
        files = [
            {"name": file.name, "bytes": size, "sha256": sha256(file)}
            for file, size in zip(self.files, self._sizes, strict=True)
        ]
        return {"source": "text", "files": files, "separator": self.separator}

    def documents(self, position: Position) -> Iterator[str]:
        first, begin = position or (0, 0)
        for number in range(first, len(self.files)):
            for document, offset in self._documents(self.files[number], begin if number == first else 0):
                self._position = number, offset
                yield document
        self._position = len(self.files), 0

    def position(self) -> Position:
        return self._position

    def progress(self, position: Position) -> tuple[int, int]:
        number, offset = position or (0, 0)
        in_bytes = False
        if number < len(self.files):
            kind, compressed = ending_of(self.files[number])
            in_bytes = kind != ".parquet" and not compressed
        return sum(self._sizes[:number]) + (offset if in_bytes else 0), sum(self._sizes)

    def _documents(self, file: Path, offset: int) -> Iterator[tuple[str, int]]:
        """Documents from an offset on, each with the offset after it: rows of parquet, uncompressed bytes of others."""
        kind, compressed = ending_of(file)
        try:
            if kind == ".parquet":
                yield from _parquet_rows(file, offset)
                return
            with gzip.open(file) if compressed else file.open("rb") as stream:
                stream.seek(offset)
                if kind in (".jsonl", ".ndjson", ".json"):
                    found = _json_lines(stream)
                else:
                    found = _separated(stream, self.separator.encode())
                for document in found:
                    yield document, stream.tell()
        except (ValueError, EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the operating system; gzip and pyarrow set no errno for a damaged file
            raise Unusable(f"{file} cannot be read: {error}") from error


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def ending_of(file: Path) -> tuple[str, bool]:
    """The ending of a file in small letters, without .gz, and whether it has that."""
    name = file.name.lower()
    return Path(name.removesuffix(".gz")).suffix, name.endswith(".gz")


class FineWebEdu(Source):
    """The documents of a subset of FineWeb-Edu, streamed from the Hub, of the newest revision at the beginning."""

    def __init__(self, subset: str) -> None:
        self.subset = subset
        self._revision: str | None = None

    def __str__(self) -> str:
        return f"{REPOSITORY} {self.subset}"

    def options(self) -> dict[str, Any]:
        return {"source": REPOSITORY, "subset": self.subset}

    def resolve(self, recorded: dict[str, Any] | None) -> dict[str, Any]:
        with needs_extra("data"):
            from huggingface_hub import HfApi
        try:
            self._revision = recorded["revision"] if recorded else HfApi().dataset_info(REPOSITORY, timeout=30).sha
        except Exception as error:  # many exception types, as below
            raise out_of_reach(self.subset, error) from error
        return {"revision": self._revision}

    def documents(self, position: Position) -> Iterator[str]:
        with needs_extra("data"):
            from datasets import load_dataset

        try:
            stream = load_dataset(REPOSITORY, name=self.subset, revision=self._revision, split="train", streaming=True)
            self._stream = stream.select_columns(["text"])
            if position is not None:
                self._stream.load_state_dict(position)
            for row in self._stream:
                yield row["text"]
        except Exception as error:  # many exception types: from the Hub, the HTTP client and the operating system
            if isinstance(error, ValueError) and "BuilderConfig" in str(error):
                raise Unusable(
                    f"--subset {self.subset}: {REPOSITORY} has none such ({one_line(error, 200)})"
                ) from error
            raise out_of_reach(self.subset, error) from error

    def position(self) -> Position:
        return self._stream.state_dict()


def out_of_reach(subset: str, error: Exception) -> ConnectionError:
    """The error for a stream that fails: it says how to continue, and what to do without a network."""
    folder = f"sample/{subset.removeprefix('sample-')}" if subset.startswith("sample-") else f"data/{subset}"
    return ConnectionError(
        f"streaming {REPOSITORY} failed ({one_line(error, 200)}). If there is a network, run the same command again to "
        "continue. Without one, download parquet files elsewhere, from "
        f"https://huggingface.co/datasets/{REPOSITORY}/tree/main/{folder}, "
        "and give them to `python -m mupscale prepare text FILES…`"
    )


def _separated(stream: BufferedIOBase, separator: bytes) -> Iterator[str]:
    """The documents of a plain text from where the stream stands."""
    begin, lines = stream.tell(), []
    for line in chain(stream, [separator]):  # the end of the file ends the last one
        if line.rstrip(b"\r\n") != separator:
            lines.append(line)
            continue
        content = b"".join(lines).removesuffix(b"\n").removesuffix(b"\r")  # they end the last line before the separator
        if begin == 0:
            content = content.removeprefix(BYTE_ORDER_MARK)
        try:
            document = content.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"byte {begin + error.start} is not UTF-8") from error
        begin, lines = stream.tell(), []
        yield document


def _json_lines(stream: BufferedIOBase) -> Iterator[str]:
    """The documents of JSON lines from where the stream stands."""
    for line in stream:
        if not line.strip():
            continue
        try:
            text = json_of(line)["text"]
            # JSON can spell one half of a surrogate pair, which UTF-8 cannot
            text = text.encode(errors="replace").decode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            place, wrong = stream.tell() - len(line), what_is_wrong(error)
            raise UserError(f"the line at byte {place} is not a JSON object with a string `text` ({wrong})") from error
        yield text


def _parquet_rows(file: Path, row: int) -> Iterator[tuple[str, int]]:
    """The documents of a parquet file from a row on, each with the number of the next row."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as table:
        kinds = [str(field.type) for field in table.schema_arrow if field.name == "text"]
        if kinds not in (["string"], ["large_string"]):
            raise UserError(f"it needs a column `text` of strings, its columns are {table.schema_arrow.names}")
        skipped, first = row, 0  # of row groups that are done nothing is read
        while first < table.num_row_groups and (rows := table.metadata.row_group(first).num_rows) <= skipped:
            skipped, first = skipped - rows, first + 1
        batches = table.iter_batches(256, row_groups=list(range(first, table.num_row_groups)), columns=["text"])
        texts = chain.from_iterable(batch.column("text").to_pylist() for batch in batches)
        for number, text in enumerate(islice(texts, skipped, None), row + 1):
            yield text or "", number
