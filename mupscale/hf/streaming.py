"""Tensors widened from the files of a narrow model into those of a wide one, a few rows at a time.

Memory holds a few chunks of `CHUNK_BYTES`, whatever the size of a tensor. Where a method or noise needs a tensor at
once, it holds that one, and for noise its draw in float32 beside it.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from mupscale.errors import UserError
from mupscale.hf.folder import NewFile, StoredTensor, as_bytes, stored_tensors
from mupscale.hf.names import GrowingTensor
from mupscale.methods import GrowthMethod
from mupscale.methods.noise import Constants, Noise, add_noise_
from mupscale.widening.growth import Layout, source_index
from mupscale.widening.write import widen_

CHUNK_BYTES = 2 * 2**20
"""Of a wide tensor, computed and written at once: it stays in a core's cache, so that writing takes half as long."""

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
        """Whether rows of a tensor can be widened without the others; buffers are duplicated by every method."""
        axes, is_buffer = tensor.entry.axes, tensor.parameter is None
        is_plain = (is_buffer or self.method.widens_by_rows) and not any(axis.shares for axis in axes)
        return bool(axes) and is_plain and not self.is_noisy(tensor)


@dataclass
class Written:
    """What was written, for the check."""

    constants: Constants = field(default_factory=dict)
    """σ̄ of the parameters that were made at once, 0 where they got no noise."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the tensors that were made at once."""


def row_chunks(layout: Layout, most: int) -> Iterator[tuple[slice, slice]]:
    """Cuts the first axis of a tensor: at most so many wide rows, and the narrow rows that they are copies of."""
    index = source_index(layout).numpy()
    start = 0
    while start < len(index):
        part = index[start : start + max(most, 1)]
        earlier = np.flatnonzero(part < part[0])  # the next copy of a long block begins
        part = part[: earlier[0]] if len(earlier) else part
        yield slice(start, start + len(part)), slice(int(part[0]), int(part.max()) + 1)
        start += len(part)


def _read(stream: BinaryIO, stored: StoredTensor, target: Tensor, start: int = 0, *, again: bool = False) -> Tensor:
    """Fills `target` with rows of a tensor on disk.

    Raises a UserError if they are not there, or are not finite, which is not looked at `again`.
    """
    stream.seek(stored.offset + start * stored.row_size)
    if stream.readinto(as_bytes(target)) != target.nbytes:  # type: ignore[attr-defined]
        raise UserError(f"{stored.path} ends before its tensors do; get it again")
    is_checked = not again and target.numel() > 0 and target.is_floating_point()
    if is_checked and not torch.stack(target.aminmax()).isfinite().all():
        raise UserError(f"{stored.name!r} has NaN or infinite entries; take an earlier checkpoint")
    return target


@torch.no_grad()
def wide_rows(tensor: GrowingTensor, *, again: bool = False) -> Iterator[Tensor]:
    """The wide tensor, some rows at a time, in memory that is used again for the next ones."""
    entry, stored = tensor.entry, tensor.source
    most = max(CHUNK_BYTES // max(torch.Size(entry.wide_shape[1:]).numel() * stored.dtype.itemsize, 1), 1)
    narrow, wide = (
        torch.empty((min(most, shape[0]), *shape[1:]), dtype=stored.dtype) for shape in (stored.shape, entry.wide_shape)
    )
    with stored.path.open("rb") as stream:
        for rows, narrow_rows in row_chunks(entry.layouts[0], most):
            part = narrow[: narrow_rows.stop - narrow_rows.start]
            source = _read(stream, stored, part, narrow_rows.start, again=again)
            target = wide[: rows.stop - rows.start]
            if entry.fill is not None:
                target.fill_(entry.fill)
            else:
                widen_(target, source, entry, rows, narrow_rows.start)
            yield target


@torch.no_grad()
def wide_tensor(tensor: GrowingTensor, widening: Widening) -> tuple[Tensor, float | list[object]]:
    """The wide tensor at once, with its noise, and the σ̄ of that."""
    entry = tensor.entry
    with tensor.source.path.open("rb") as stream:
        source = _read(stream, tensor.source, torch.empty(tensor.source.shape, dtype=tensor.source.dtype))
    target = torch.empty(entry.wide_shape, dtype=source.dtype)
    if entry.fill is not None:
        target.fill_(entry.fill)
    elif tensor.parameter is None:
        widen_(target, source, entry)
    else:
        widening.method.widen_(target, source, entry)
    constant: float | list[object] = 0.0
    if widening.noise is not None and widening.is_noisy(tensor):
        constant = add_noise_(target, entry, widening.noise, source, widening.seed)
        if not bool(torch.isfinite(target).all()):
            raise UserError(
                f"noise: on {tensor.name!r} it is too large for {target.dtype}, whose largest number is "
                f"{torch.finfo(target.dtype).max:g}. Give a lower level"
            )
    return target, constant


def write_wide(
    files: Sequence[NewFile], tensors: dict[str, GrowingTensor], widening: Widening, progress: Progress
) -> Written:
    """Writes the wide files, and reads each one again while the next one is written. All are on disk at the end.

    Every byte is compared with what the narrow files make; tensors with noise, which nothing but a second draw could
    make again, with the checksum of what was written. UserError for a difference.
    """
    written = Written()
    with _one_thread(), ThreadPoolExecutor(1) as pool:
        checks = []
        for file in files:
            with file.path.open("xb") as stream:
                stream.write(file.header)
                for place in file.tensors:
                    _write(stream, tensors[place.name], widening, written, progress)
            checks.append(pool.submit(check_file, file, tensors, widening, written, progress))
        for check in checks:
            check.result()
    return written


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch from splitting an operation: writing and checking have a thread each, and need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write(stream: BinaryIO, tensor: GrowingTensor, widening: Widening, written: Written, progress: Progress) -> None:
    """Writes a wide tensor to the end of a file."""
    if widening.by_rows(tensor):
        for rows in wide_rows(tensor):
            progress(stream.write(as_bytes(rows)))
        return
    target, constant = wide_tensor(tensor, widening)
    progress(stream.write(as_bytes(target)))
    written.checksums[tensor.name] = zlib.crc32(as_bytes(target))
    if tensor.parameter is not None:
        written.constants[tensor.entry.name] = constant


def check_file(
    file: NewFile, tensors: dict[str, GrowingTensor], widening: Widening, written: Written, progress: Progress
) -> None:
    """Puts a file on disk and reads it again, with safetensors' own check of its header. UserError for a difference."""
    damage = "the disk may be damaged"
    if stored_tensors(file.path) != sorted(file.tensors, key=lambda tensor: tensor.offset):
        raise UserError(f"{file.path.name} does not hold the tensors that were written; {damage}")
    with file.path.open("rb") as stream:
        os.fsync(stream.fileno())
        for place in file.tensors:
            stream.seek(place.offset)
            if place.name in written.checksums:
                checksum = 0
                for chunk in stored_chunks(place):
                    checksum = zlib.crc32(chunk, checksum)
                    progress(len(chunk))
                same = checksum == written.checksums[place.name]
            else:
                same, found = True, bytearray()
                for rows in wide_rows(tensors[place.name], again=True):
                    if len(found) != rows.nbytes:
                        found = bytearray(rows.nbytes)
                    is_whole = stream.readinto(found) == rows.nbytes
                    # a bytearray compares memory, a memoryview its elements
                    same = same and is_whole and found == as_bytes(rows)
                    progress(rows.nbytes)
            if not same:
                raise UserError(f"{file.path.name}: {place.name!r} is not what was written; {damage}")


def stored_chunks(stored: StoredTensor) -> Iterator[bytes]:
    """The bytes of a tensor on disk, some at a time."""
    with stored.path.open("rb") as stream:
        stream.seek(stored.offset)
        for start in range(0, stored.size, CHUNK_BYTES):
            yield stream.read(min(CHUNK_BYTES, stored.size - start))


def refuse_unlike_twins(tensors: Sequence[GrowingTensor]) -> None:
    """Raises a UserError if a folder has a tied parameter twice with different values: it is unclear which counts."""
    first: dict[str, StoredTensor] = {}
    for tensor in tensors:
        stored, twin = tensor.source, first.setdefault(tensor.entry.name, tensor.source)
        alike = (twin.shape, twin.dtype) == (stored.shape, stored.dtype)
        pairs = zip(stored_chunks(twin), stored_chunks(stored), strict=True)
        if twin is not stored and not (alike and all(one == other for one, other in pairs)):
            raise UserError(
                f"{twin.name!r} and {stored.name!r} are one parameter by the configuration (tie_word_embeddings), "
                "but differ in the folder. Correct config.json, or save the model again"
            )
