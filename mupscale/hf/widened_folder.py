"""A model folder grown into another one, a few rows of a tensor at a time, without ever holding the model.

Memory holds a few chunks of `CHUNK_BYTES`, whatever the size of a tensor. Where a method or noise needs a tensor at
once, it holds that one, and for noise its draw in float32 beside it.
"""

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from mupscale.atomic import whole_folder
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError, refuse_unless_whole
from mupscale.hf.continuing import growth_record, written
from mupscale.hf.depth import Counts, How, deepened, grown_config, hints_at_depth
from mupscale.hf.family import Family, on_meta
from mupscale.hf.folder import (
    CONFIG_FILE,
    GROWTH_FILE,
    INDEX_FILE,
    ModelFolder,
    NewFile,
    StoredTensor,
    as_bytes,
    index_text,
    read_folder,
    split_into_files,
    stored_tensors,
)
from mupscale.hf.forward_pass import Call, largest_difference
from mupscale.hf.names import GrowingTensor, growing_tensors
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.grow import write_alone
from mupscale.methods.noise import Constants, Noise, save_constants
from mupscale.text_tables import Watch, notes_by_layer, size_of, unwatched
from mupscale.widening.growth import Layout, source_index
from mupscale.widening.plan_text import Plan
from mupscale.widening.write import widen_

CHUNK_BYTES = 2 * 2**20
"""Of a wide tensor, computed and written at once: it stays in a core's cache, so that writing takes half as long."""

Progress = Callable[[int], None]
"""Called with the number of bytes that were written or checked since the last call."""


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


@dataclass
class FolderWriter:
    """Writes wide tensors into files, and checks these; `upscale` of the library has the same three settings."""

    tensors: dict[str, GrowingTensor]
    method: GrowthMethod
    noise: Noise | None = None
    seed: int = 0
    constants: Constants = field(default_factory=dict)
    """σ̄ of the parameters that were made at once, 0 where they got no noise."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the tensors that were made at once."""

    def is_noisy(self, tensor: GrowingTensor) -> bool:
        is_copied = tensor.parameter is not None and tensor.entry.is_copied
        return self.noise is not None and is_copied and self.noise.applies(tensor.entry)

    def by_rows(self, tensor: GrowingTensor) -> bool:
        """Whether rows of a tensor can be widened without the others; buffers are duplicated by every method."""
        axes, is_buffer = tensor.entry.axes, tensor.parameter is None
        is_plain = (is_buffer or self.method.widens_by_rows) and not any(axis.shares for axis in axes)
        return bool(axes) and is_plain and not self.is_noisy(tensor)

    @torch.no_grad()
    def wide_tensor(self, tensor: GrowingTensor) -> Tensor:
        """The wide tensor at once, with its noise, whose σ̄ is kept."""
        entry = tensor.entry
        with tensor.source.path.open("rb") as stream:
            source = _read(stream, tensor.source, torch.empty(tensor.source.shape, dtype=tensor.source.dtype))
        target = torch.empty(entry.wide_shape, dtype=source.dtype)
        if tensor.parameter is None:
            widen_(target, source, entry)
        else:
            constant = write_alone(target, source, entry, self.method, self.noise, self.seed)
            self.constants[entry.name] = constant
        return target

    def write(self, files: Sequence[NewFile], progress: Progress) -> None:
        """Writes the wide files, and reads each one again while the next one is written. All are on disk at the end.

        Every byte is compared with what the narrow files make; tensors with noise, which nothing but a second draw
        could make again, with the checksum of what was written. UserError for a difference.
        """
        with _one_thread(), ThreadPoolExecutor(1) as pool:
            checks = []
            for file in files:
                with file.path.open("xb") as stream:
                    stream.write(file.header)
                    for place in file.tensors:
                        self._append(stream, self.tensors[place.name], progress)
                checks.append(pool.submit(self.check, file, progress))
            for check in checks:
                check.result()

    def _append(self, stream: BinaryIO, tensor: GrowingTensor, progress: Progress) -> None:
        if self.by_rows(tensor):
            for rows in wide_rows(tensor):
                progress(stream.write(as_bytes(rows)))
            return
        target = self.wide_tensor(tensor)
        progress(stream.write(as_bytes(target)))
        self.checksums[tensor.name] = zlib.crc32(as_bytes(target))

    def check(self, file: NewFile, progress: Progress) -> None:
        """Puts a file on disk and reads it again, with safetensors' own check of its header; else a UserError."""
        damage = "the disk may be damaged"
        if stored_tensors(file.path) != sorted(file.tensors, key=lambda tensor: tensor.offset):
            raise UserError(f"{file.path.name} does not hold the tensors that were written; {damage}")
        with file.path.open("rb") as stream:
            os.fsync(stream.fileno())
            for place in file.tensors:
                stream.seek(place.offset)
                if place.name in self.checksums:
                    checksum = 0
                    for chunk in stored_chunks(place):
                        checksum = zlib.crc32(chunk, checksum)
                        progress(len(chunk))
                    same = checksum == self.checksums[place.name]
                else:
                    same, found = True, bytearray()
                    for rows in wide_rows(self.tensors[place.name], again=True):
                        if len(found) != rows.nbytes:
                            found = bytearray(rows.nbytes)
                        is_whole = stream.readinto(found) == rows.nbytes
                        # a bytearray compares memory, a memoryview its elements
                        same = same and is_whole and found == as_bytes(rows)
                        progress(rows.nbytes)
                if not same:
                    raise UserError(f"{file.path.name}: {place.name!r} is not what was written; {damage}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch from splitting an operation: writing and checking have a thread each, and need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


MOST_SHARD_BYTES = 5 * 10**9
"""Of a file of weights, as transformers splits them."""

SPARE_BYTES = 16 * 2**20
"""For folders, file systems' own records, and what else is written beside the weights."""

HEADROOM = 1.5
"""Memory that loading two models needs, in units of their weights in float32."""

BYTES = "bytes written and checked"
"""What `watch` gets while files are written; every byte counts twice."""


@dataclass(frozen=True)
class FolderReport:
    """What `upscale_folder` wrote, and what it checked."""

    out: Path
    plan: Plan
    noise: Constants
    centred: bool
    narrow_bytes: int
    wide_bytes: int
    seconds: float
    checks: tuple[str, ...]
    """What was compared, and what was not."""
    notes: tuple[str, ...]

    def save_noise(self, path: str | Path) -> None:
        """Writes the noise constants to a JSON file that `RecordedNoise` reads."""
        save_constants(self.noise, path, self.centred)

    def __str__(self) -> str:
        lines = [
            f"upscaled {size_of(self.narrow_bytes)} → {size_of(self.wide_bytes)} of weights in {self.seconds:.1f} s"
        ]
        lines += [f"checked: {check}" for check in self.checks]
        return "\n".join([*lines, *(f"note: {note}" for note in notes_by_layer(self.notes))])


@dataclass(frozen=True)
class _Job:
    """Everything that is known before anything is written."""

    folder: ModelFolder
    config: PretrainedConfig
    plan: Plan
    unused: list[str]
    writer: FolderWriter
    record: dict[str, Any]


def upscale_folder(
    folder: str | Path,
    factor: float,
    out: str | Path,
    *,
    layers: Counts | None = None,
    depth: How = "identity",
    noise: Noise | None = None,
    seed: int = 0,
    method: GrowthMethod | None = None,
    keep_heads: bool | None = None,
    only: Literal["feed_forward"] | None = None,
    fields: dict[str, float] | None = None,
    call: Call | None = None,
    watch: Watch = unwatched,
) -> FolderReport:
    """Writes a wider or deeper folder of a narrow one, tensor by tensor. `out` is there whole, or not at all.

    The arguments are those of `upscale`. Memory holds a part of one tensor at a time; with noise, or with a method that
    needs it, one tensor. `watch(words, done, total)` is called while the growth of the family is found, and then while
    files are written.
    """
    start = time.perf_counter()
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise UserError(f"--out {out} exists; name another folder, or delete it")
    narrow = read_folder(Path(folder))
    if out.resolve().is_relative_to(narrow.path.resolve()):
        raise UserError(f"--out {out} lies inside the folder that is read; name another one")
    sizes: dict[str, Any] = {"keep_heads": keep_heads, "only": only, "fields": dict(fields or {})}
    method = Duplication() if method is None else method
    family = Family(narrow.model_class, call, watch)
    job = _prepared(narrow, family, factor, layers, depth, sizes, method, noise, seed)
    with whole_folder(out) as partial:
        rows = [(name, each.source.dtype, each.entry.wide_shape) for name, each in job.writer.tensors.items()]
        files = split_into_files(partial, rows, MOST_SHARD_BYTES)
        _refuse_full_disk(out, job, files)
        total = sum(tensor.size for file in files for tensor in file.tensors)
        job.writer.write(files, _counted(watch, BYTES, 2 * total))
        _write_companions(partial, job, files)
        checks = _checked_text(job), _check_outputs(partial, job, call)
    notes = [f"{name} is not part of the model, and stays behind" for name in job.unused]
    constants = {name: job.writer.constants.get(name, 0.0) for name in job.plan.parameters}
    centred = job.writer.noise is not None and job.writer.noise.centred
    seconds = time.perf_counter() - start
    return FolderReport(
        out, job.plan, constants, centred, narrow.size, total, seconds, checks, (*notes, *job.plan.notes)
    )


def _counted(watch: Watch, words: str, total: int) -> Progress:
    """Adds up what is done, and passes it on. Files are checked by another thread than that which writes them."""
    lock, done = threading.Lock(), 0

    def count(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            watch(words, done, total)

    return count


def _prepared(
    folder: ModelFolder,
    family: Family,
    factor: float,
    layers: Counts | None,
    depth: How,
    sizes: dict[str, Any],
    method: GrowthMethod,
    noise: Noise | None,
    seed: int,
) -> _Job:
    """Finds out how everything grows. UserError for all that does not."""
    config, deepenings, is_wider = grown_config(family, folder.config, factor, layers, depth, **sizes)
    refuse_unless_whole("seed", seed, least=None)
    _refuse_method(method)
    narrow, wide = on_meta(folder.model_class, folder.config), on_meta(folder.model_class, config)
    found = family.found_between(narrow, wide) if is_wider else None
    if deepenings:
        config = deepened(config, deepenings)
        wide = on_meta(folder.model_class, config)
    plan = method.plan(narrow, wide, hints=hints_at_depth(narrow, wide, deepenings, found))
    method.check(plan)
    noise = method.choose_noise(noise, plan, narrow)
    growing, unused = growing_tensors(folder.tensors, plan, narrow, wide)
    refuse_unlike_twins(growing)
    by_field = {each.field: {"depth": each.how, "sources": list(each.sources)} for each in deepenings}
    growth = {"factor": factor, **sizes, "layers": by_field}
    settings = {"growth": growth, "method": type(method).__name__, "seed": seed}
    record = growth_record(plan, narrow, wide, method, settings)
    writer = FolderWriter({tensor.name: tensor for tensor in growing}, method, noise, seed)
    return _Job(folder, config, plan, unused, writer, record)


def _refuse_method(method: GrowthMethod) -> None:
    name = type(method).__name__
    if method.needs_batches:
        raise UserError(f"{name} learns from data, which a folder does not have. Use it in a run")
    if type(method).edit_ is not GrowthMethod.edit_:
        raise UserError(
            f"{name} changes weights across layers, and a folder is widened tensor by tensor. "
            "Load the model and use mupscale.hf.upscale"
        )


def _refuse_full_disk(out: Path, job: _Job, files: list[NewFile]) -> None:
    needed = sum(file.size for file in files) + SPARE_BYTES
    needed += sum(path.stat().st_size for path in job.folder.companions()) + len(written(job.record))
    left = shutil.disk_usage(out.parent).free
    if needed > left:
        raise UserError(
            f"--out {out}: the wide model needs {needed / 1e9:.1f} GB, and the disk has {left / 1e9:.1f} GB left. "
            "Make space, or name a folder on another disk"
        )


def _write_companions(partial: Path, job: _Job, files: list[NewFile]) -> None:
    if len(files) > 1:
        (partial / INDEX_FILE).write_text(index_text(files))
    for path in job.folder.companions():
        shutil.copyfile(path, partial / path.name)  # the content alone: nothing there can be executed
    record = {**job.record, "noise": {name: value for name, value in job.writer.constants.items() if value != 0.0}}
    (partial / GROWTH_FILE).write_text(written(record))
    _write_config(partial, job)


def _write_config(partial: Path, job: _Job) -> None:
    """The narrow file with the values that differ; where that does not give the wide configuration, a new file."""
    before, after = job.folder.config.to_dict(), job.config.to_dict()
    path = partial / CONFIG_FILE
    path.write_text(json.dumps(_changed(job.folder.settings, before, after), indent=2) + "\n")
    found = AutoConfig.from_pretrained(partial, local_files_only=True).to_dict()
    if {**found, "_name_or_path": ""} != {**after, "_name_or_path": ""}:
        job.config.name_or_path = ""  # of the narrow folder
        job.config.save_pretrained(partial)


def _changed(settings: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    answer = dict(settings)
    for key, value in after.items():
        if key in before and before[key] == value:
            continue
        inner = settings.get(key)
        if isinstance(inner, dict) and isinstance(value, dict) and isinstance(before.get(key), dict):
            answer[key] = _changed(inner, before[key], value)
        else:
            answer[key] = value
    return answer


def _checked_text(job: _Job) -> str:
    tensors, at_once = job.writer.tensors, job.writer.checksums
    layers = len({_layer(name) for name in tensors})
    filled = [name for name, tensor in tensors.items() if tensor.entry.fill is not None]
    exact = len(tensors) - len({*at_once, *filled})
    text = f"{exact} tensors of {layers} layers are, byte by byte, the narrow ones duplicated"
    if filled:
        text += f"; {len(filled)} make new layers add nothing"
    if at_once:
        text += f"; {len(at_once)} that were made at once (noise, or the method) are what was written"
    return text


def _layer(name: str) -> str:
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def _check_outputs(partial: Path, job: _Job, call: Call | None) -> str:
    """Compares the outputs of both folders, where that is possible. UserError for a difference that is not meant."""
    shapes = [tensor.shape for tensor in job.folder.tensors.values()]
    shapes += [tensor.entry.wide_shape for tensor in job.writer.tensors.values()]
    count = sum(torch.Size(shape).numel() for shape in shapes)
    if count * 4 * HEADROOM >= free_bytes(torch.device("cpu")):
        return f"outputs were not compared: both models in float32 ({count * 4 / 1e9:.0f} GB) do not fit into memory"
    found = largest_difference(job.folder.path, partial, job.folder.model_class, call)
    if isinstance(found, str):
        return f"outputs were not compared: {found}"
    reason = _changes_outputs(job)
    if reason is not None:
        return f"outputs of both models differ by {100 * found:.3g} %: {reason} changes them"
    tolerance = _tolerance(job)
    if not found <= tolerance:
        raise UserError(
            f"the outputs of the wide model differ from the narrow one's by {found:.1e} (at most {tolerance:.0e} "
            f"expected): this {job.folder.config.model_type} model does not grow exactly, and nothing was written"
        )
    return f"outputs of both models differ by {found:.1e} in float32"


def _changes_outputs(job: _Job) -> str | None:
    """What is meant to change the outputs; None if nothing is."""
    noise, method = job.writer.noise, job.writer.method
    if noise is not None and not noise.centred:
        return "noise that is not centred (`--noise auto` does not)"
    if not method.claim(job.plan, on_meta(job.folder.model_class, job.folder.config), ()).function:
        return type(method).__name__
    return None if job.plan.keeps_function else "a copy of a layer"


def _tolerance(job: _Job) -> float:
    """Float32 rounding; where weights were divided by a factor that is no power of two, that of their format."""
    worst = 1e-4
    for tensor in job.writer.tensors.values():
        weight, dtype = tensor.entry.scale.weight, tensor.source.dtype
        dyadic = float(weight).hex().startswith("0x1.0000000000000p")
        centred = job.writer.is_noisy(tensor)  # copies of an input no longer cancel to the last bit
        if dtype.is_floating_point and (centred or not dyadic):
            worst = max(worst, 16 * torch.finfo(dtype).eps)
    return worst
