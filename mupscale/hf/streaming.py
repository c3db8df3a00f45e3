"""Tensors widened from the files of a narrow model into those of a wide one, a few rows at a time.

Memory holds a few chunks of `CHUNK_BYTES`, whatever the size of a tensor. Where a method or noise needs a tensor at
once, it holds that one, and for noise its draw in float32 beside it.
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mupscale.errors import UserError
from mupscale.hf.folder import (
    NewFile,
    StoredTensor,
    as_bytes,
    read_into,
    stored_tensors,
    write_all,
)
from mupscale.hf.names import GrowingTensor
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.noise import Constants, Noise, add_noise_
from mupscale.widening.axes import Layout, Piece, narrow_length, wide_length
from mupscale.widening.growth import Growth

CHUNK_BYTES = 2 * 2**20
"""Of a wide tensor, computed and written at once: it stays in a core's cache, so that writing takes half as long."""

IN_FLIGHT = 3
"""Chunks that wait to be written, at most."""

Progress = Callable[[int], None]
"""Called with the number of bytes that were written or checked since the last call."""


@dataclass(frozen=True)
class Widening:
    """How the weights are made: `upscale` of the library has the same three."""

    method: GrowthMethod
    noise: Noise | None = None
    seed: int = 0

    def is_noisy(self, tensor: GrowingTensor) -> bool:
        is_copied = tensor.parameter is not None and tensor.entry.is_copied
        return self.noise is not None and is_copied and self.noise.applies(tensor.entry)

    def by_rows(self, tensor: GrowingTensor) -> bool:
        """Whether rows of a tensor can be widened without the others."""
        axes = tensor.entry.axes
        is_plain = self.method.widens_by_rows and bool(axes) and not any(axis.shares for axis in axes)
        return is_plain and not self.is_noisy(tensor)

    def widen_(self, target: Tensor, source: Tensor, tensor: GrowingTensor, entry: Growth) -> None:
        """Writes the widened rows into `target`; buffers are duplicated by every method."""
        if entry.fill is not None:
            target.fill_(entry.fill)
        elif tensor.parameter is None:
            GrowthMethod.widen_(self.method, target, source, entry)
        else:
            self.method.widen_(target, source, entry)


@dataclass
class Written:
    """What was written, for the check."""

    constants: Constants = field(default_factory=dict)
    """σ̄ of the parameters that were made at once, 0 where they got no noise."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the tensors that were made at once."""


class RowChunk(NamedTuple):
    """Some consecutive rows of a narrow tensor, and where their copies go."""

    start: int
    layout: Layout
    """Of the first axis, from the rows to their copies."""
    places: tuple[tuple[int, int, int], ...]
    """(row of the wide tensor, row among the copies, number of rows)."""


def row_chunks(layout: Layout, most: int, *, alike: bool = False) -> Iterator[RowChunk]:
    """Cuts the first axis of a tensor into chunks of about `most` wide rows.

    Copies of a long block lie apart in the wide tensor; short blocks are collected with all of their copies. Where
    copies are `alike`, which is where this axis has no scale, a long block is made once and goes to several places.
    """
    most = max(most, 1)
    pending: list[Piece] = []
    begins = starts = narrow = wide = 0

    def collected() -> Iterator[RowChunk]:
        if pending:
            rows = wide_length(tuple(pending))
            yield RowChunk(begins, tuple(pending), ((starts, 0, rows),))
            pending.clear()

    for piece in layout:
        copies = piece.block * piece.factor
        if copies > most:
            yield from collected()
            made = 1 if alike else piece.factor
            step = max(most // made, 1)
            for block in range(0, piece.length, piece.block):
                for row in range(0, piece.block, step):
                    count = min(step, piece.block - row)
                    first = wide + block * piece.factor + row
                    places = tuple(
                        (first + copy * piece.block, copy % made * count, count) for copy in range(piece.factor)
                    )
                    yield RowChunk(narrow + block + row, (Piece(count, count, made),), places)
        else:
            step = most // copies * piece.block
            for row in range(0, piece.length, step):
                count = min(step, piece.length - row)
                if wide_length(tuple(pending)) + count * piece.factor > most:
                    yield from collected()
                if not pending:
                    begins, starts = narrow + row, wide + row * piece.factor
                pending.append(Piece(count, piece.block, piece.factor))
        narrow += piece.length
        wide += piece.length * piece.factor
    yield from collected()


class Buffers:
    """Memory that is used again and again: a new tensor of some megabytes costs as much as filling it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; `give` takes it back."""
        size = torch.Size(shape).numel() * dtype.itemsize
        for index, memory in enumerate(self._free):
            if memory.numel() >= size:
                return self._free.pop(index)[:size].view(dtype).view(shape)
        return torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8)[:size].view(dtype).view(shape)

    def give(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() <= 2 * CHUNK_BYTES and len(self._free) < IN_FLIGHT + 3:
            self._free.append(torch.empty(0, dtype=torch.uint8).set_(storage))


class Streamer:
    """Reads narrow tensors and makes wide rows of them. A context manager, which closes the files."""

    def __init__(self, widening: Widening) -> None:
        self.widening = widening
        self.buffers = Buffers()
        self._files: dict[Path, BinaryIO] = {}
        self._closing = ExitStack()

    def __enter__(self) -> "Streamer":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def rows(self, stored: StoredTensor, start: int, count: int) -> Tensor:
        """Some rows of a tensor on disk."""
        target = self.buffers.take((count, *stored.shape[1:]), stored.dtype)
        read_into(self._file(stored.path), stored.offset + start * stored.row_size, target)
        return target

    def whole(self, stored: StoredTensor) -> Tensor:
        target = torch.empty(stored.shape, dtype=stored.dtype)
        read_into(self._file(stored.path), stored.offset, target)
        return target

    @torch.no_grad()
    def wide_rows(self, tensor: GrowingTensor, *, again: bool = False) -> Iterator[tuple[RowChunk, Tensor]]:
        """The wide tensor in chunks; `buffers.give` takes them back. `again`: its entries are known to be finite."""
        entry, stored = tensor.entry, tensor.source
        row_size = torch.Size(entry.wide_shape[1:]).numel() * stored.dtype.itemsize
        alike = all(scale == 1.0 for scale in entry.by_piece("weight")[0])
        for chunk in row_chunks(entry.layouts[0], CHUNK_BYTES // max(row_size, 1), alike=alike):
            count = narrow_length(chunk.layout)
            source = self.rows(stored, chunk.start, count)
            if not again:
                refuse_non_finite(source, stored.name)
            shape = (wide_length(chunk.layout), *entry.wide_shape[1:])
            target = self.buffers.take(shape, stored.dtype)
            part = replace(
                entry,
                narrow_shape=tuple(source.shape),
                wide_shape=shape,
                axes=(entry.axes[0]._replace(pieces=chunk.layout), *entry.axes[1:]),
            )
            self.widening.widen_(target, source, tensor, part)
            self.buffers.give(source)
            yield chunk, target

    @torch.no_grad()
    def wide_tensor(self, tensor: GrowingTensor) -> tuple[Tensor, float | list[object]]:
        """The wide tensor at once, with its noise, and the σ̄ of that."""
        source = self.whole(tensor.source)
        refuse_non_finite(source, tensor.name)
        target = torch.empty(tensor.entry.wide_shape, dtype=source.dtype)
        self.widening.widen_(target, source, tensor, tensor.entry)
        constant: float | list[object] = 0.0
        if self.widening.is_noisy(tensor):
            assert self.widening.noise is not None
            constant = add_noise_(target, tensor.entry, self.widening.noise, source, self.widening.seed)
            if not bool(torch.isfinite(target).all()):
                raise UserError(
                    f"noise: on {tensor.name!r} it is too large for {target.dtype}, whose largest number is "
                    f"{torch.finfo(target.dtype).max:g}. Give a lower level"
                )
        return target, constant

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = self._closing.enter_context(path.open("rb", buffering=0))
        return self._files[path]


def write_wide(
    files: Sequence[NewFile], tensors: dict[str, GrowingTensor], widening: Widening, progress: Progress
) -> Written:
    """Writes the wide files, and reads each one again while the next one is written. All are on disk at the end.

    Every byte is compared with what the narrow files make; tensors with noise, which nothing but a second draw could
    make again, with the checksum of what was written. UserError for a difference.
    """
    written = Written()
    with _one_thread(), Streamer(widening) as streamer, ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(1) as last:
        finished: list[Future[None]] = []
        for file in files:
            stream: BinaryIO = file.path.open("xb", buffering=0)
            with stream:
                write_all(stream, 0, file.header)
                for place in file.tensors:
                    tensor = tensors[place.name]
                    if widening.by_rows(tensor):
                        _write_by_rows(stream, place, tensor, streamer, writer, progress)
                    else:
                        _write_at_once(stream, place, tensor, streamer, written, progress)
            finished.append(last.submit(check_file, file, tensors, widening, written, progress))
            for future in finished:
                if future.done():
                    future.result()
        for future in finished:
            future.result()
    return written


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch from splitting an operation: writing and reading have threads of their own, and need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_at_once(
    stream: BinaryIO,
    place: StoredTensor,
    tensor: GrowingTensor,
    streamer: Streamer,
    written: Written,
    progress: Progress,
) -> None:
    target, constant = streamer.wide_tensor(tensor)
    content = as_bytes(target)
    write_all(stream, place.offset, content)
    written.checksums[place.name] = zlib.crc32(content)
    if tensor.parameter is not None:
        written.constants[tensor.entry.name] = constant
    progress(place.size)


def _write_by_rows(
    stream: BinaryIO,
    place: StoredTensor,
    tensor: GrowingTensor,
    streamer: Streamer,
    writer: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    waiting: deque[tuple[Future[int], Tensor]] = deque()

    def written() -> None:
        future, rows = waiting.popleft()
        progress(future.result())
        streamer.buffers.give(rows)

    try:
        for chunk, rows in streamer.wide_rows(tensor):
            waiting.append((writer.submit(_write_rows, stream, place, chunk, rows), rows))
            while len(waiting) >= IN_FLIGHT or sum(each.nbytes for _, each in waiting) > IN_FLIGHT * CHUNK_BYTES:
                written()
        while waiting:
            written()
    finally:
        for future, _ in waiting:
            future.cancel() or future.exception()


def _write_rows(stream: BinaryIO, place: StoredTensor, chunk: RowChunk, rows: Tensor) -> int:
    """Writes some rows to all of their places; the number of bytes."""
    for row, start, count in chunk.places:
        write_all(stream, place.offset + row * place.row_size, as_bytes(rows[start : start + count]))
    return sum(count for _, _, count in chunk.places) * place.row_size


def check_file(
    file: NewFile, tensors: dict[str, GrowingTensor], widening: Widening, written: Written, progress: Progress
) -> None:
    """Puts a file on disk and reads it again, with safetensors' own check of its header. UserError for a difference."""
    with file.path.open("rb") as stream:
        os.fsync(stream.fileno())
    damage = "the disk may be damaged"
    found = {tensor.name: tensor for tensor in stored_tensors(file.path)}
    if found != {tensor.name: tensor for tensor in file.tensors}:
        raise UserError(f"{file.path.name} does not hold the tensors that were written; {damage}")
    with Streamer(widening) as streamer:
        for place in file.tensors:
            if place.name in written.checksums:
                same = _checksum(place, streamer, progress) == written.checksums[place.name]
            else:
                same = _same_rows(place, tensors[place.name], streamer, progress)
            if not same:
                raise UserError(f"{file.path.name}: {place.name!r} is not what was written; {damage}")


def _same_rows(place: StoredTensor, tensor: GrowingTensor, streamer: Streamer, progress: Progress) -> bool:
    same = True
    for chunk, rows in streamer.wide_rows(tensor, again=True):
        for row, start, count in chunk.places:
            found = streamer.rows(place, row, count)
            same = same and same_bytes(found, rows[start : start + count])
            progress(found.nbytes)
            streamer.buffers.give(found)
        streamer.buffers.give(rows)
    return same


def _checksum(place: StoredTensor, streamer: Streamer, progress: Progress) -> int:
    answer = 0
    rows_at_once = max(CHUNK_BYTES // max(place.row_size, 1), 1)
    rows = place.shape[0] if place.shape else 1
    flat = replace(place, shape=(rows, *place.shape[1:]))
    for start in range(0, rows, rows_at_once):
        found = streamer.rows(flat, start, min(rows_at_once, rows - start))
        answer = zlib.crc32(as_bytes(found), answer)
        progress(found.nbytes)
        streamer.buffers.give(found)
    return answer


def refuse_unlike_twins(tensors: Sequence[GrowingTensor]) -> None:
    """Raises a UserError if a folder has a tied parameter twice with different values: it is unclear which counts."""
    first: dict[str, StoredTensor] = {}
    with Streamer(Widening(Duplication())) as streamer:
        for tensor in tensors:
            stored = tensor.source
            twin = first.setdefault(tensor.entry.name, stored)
            rows_at_once = max(CHUNK_BYTES // max(stored.row_size, 1), 1)
            same = (twin.shape, twin.dtype) == (stored.shape, stored.dtype)
            for start in range(0, stored.shape[0] if twin is not stored and stored.shape else 0, rows_at_once):
                count = min(rows_at_once, stored.shape[0] - start)
                rows = [streamer.rows(each, start, count) for each in (twin, stored)] if same else []
                same = same and same_bytes(*rows)
                for each in rows:
                    streamer.buffers.give(each)
            if not same:
                raise UserError(
                    f"{twin.name!r} and {stored.name!r} are one parameter by the configuration (tie_word_embeddings), "
                    "but differ in the folder. Correct config.json, or save the model again"
                )


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors of one shape hold the same bytes."""
    a, b = (np.frombuffer(as_bytes(each), dtype=np.uint8) for each in (one, other))
    even = a.size // 8 * 8
    # eight bytes at a time are ten times as fast
    words = np.array_equal(a[:even].view(np.int64), b[:even].view(np.int64))
    return words and np.array_equal(a[even:], b[even:])


def refuse_non_finite(tensor: Tensor, name: str) -> None:
    if not tensor.numel() or not tensor.is_floating_point():
        return
    if not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):
        raise UserError(f"{name!r} has NaN or infinite entries; take an earlier checkpoint")
