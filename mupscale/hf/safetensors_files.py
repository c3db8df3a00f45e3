"""Safetensors files, read and written a part of a tensor at a time.

A file is eight bytes with the length of its header, the header in JSON, and the bytes of all tensors. The safetensors
library checks a header, and maps files into memory; mapped pages count as resident memory, so the bytes are read here.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mupscale.data_files import json_of
from mupscale.errors import UserError, needs_extra

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The formats that a tensor may have; eight-bit floating point, which needs scales beside it, is none of them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

LENGTH_BYTES = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk."""

    name: str
    path: Path
    offset: int
    """The position of its first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_size(self) -> int:
        """The bytes of one entry of the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def stored_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of a file, in the order of their bytes. UserError if the file is none, or a damaged one."""
    with needs_extra("hf"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="pt") as file:  # it compares all offsets with the length of the file
            file.keys()
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            header = json_of(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a safetensors file, or is damaged ({' '.join(str(error).split())}). Get it again"
        ) from error
    header.pop("__metadata__", None)
    found = []
    for name, row in header.items():
        if row["dtype"] not in DTYPES:
            raise UserError(
                f"{path}: {name!r} has the format {row['dtype']}, which cannot be widened. "
                "Take the model in floating point of at least 16 bits"
            )
        start = LENGTH_BYTES + length + row["data_offsets"][0]
        found.append(StoredTensor(name, path, start, DTYPES[row["dtype"]], tuple(row["shape"])))
    return sorted(found, key=lambda tensor: tensor.offset)


@dataclass(frozen=True)
class NewFile:
    """A file that is to be written: its tensors know their places already."""

    path: Path
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.size for tensor in self.tensors)


def new_file(path: Path, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> NewFile:
    """The file that holds tensors of these names, formats and shapes, the widest formats first for alignment."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed: list[StoredTensor] = []
    at = 0
    for name, dtype, shape in sorted(tensors, key=lambda row: -row[1].itemsize):
        tensor = StoredTensor(name, path, at, dtype, shape)
        rows[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + tensor.size]}
        placed.append(tensor)
        at += tensor.size
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    moved = [
        StoredTensor(tensor.name, path, len(header) + tensor.offset, tensor.dtype, tensor.shape) for tensor in placed
    ]
    return NewFile(path, header, tuple(moved))


def split_into_files(
    folder: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], most_bytes: int
) -> list[NewFile]:
    """Files of at most `most_bytes` of tensors each (a larger tensor has its own), named as transformers names them."""
    parts: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    filled = 0
    for row in tensors:
        size = math.prod(row[2]) * row[1].itemsize
        if parts[-1] and filled + size > most_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += size
    if len(parts) == 1:
        return [new_file(folder / SINGLE_FILE, parts[0])]
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return [new_file(folder / name, part) for name, part in zip(names, parts, strict=True)]


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def index_text(files: Sequence[NewFile]) -> str:
    """The content of the index of several files."""
    weight_map = {tensor.name: file.path.name for file in files for tensor in file.tensors}
    total = sum(tensor.size for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def read_into(stream: BinaryIO, offset: int, target: Tensor) -> None:
    """Fills a contiguous tensor with the bytes of a file from `offset` on."""
    view = as_bytes(target)
    stream.seek(offset)
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise UserError(f"{stream.name} ends before its tensors do; get it again")
        view = view[count:]


def write_all(stream: BinaryIO, offset: int, content: memoryview | bytes) -> None:
    """Writes all bytes from `offset` on."""
    view = memoryview(content)
    stream.seek(offset)
    while view:
        view = view[stream.write(view) :]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
