"""A model folder grown into another one, a few rows of a tensor at a time, without ever holding the model.

Memory holds a few chunks of `CHUNK_BYTES`, whatever the size of a tensor. Where a method or noise needs a tensor at
once, it holds that one, and for noise its draw in float32 beside it.
"""

import json
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from mupscale.atomic import whole_folder
from mupscale.checks.comparison import planned_layouts
from mupscale.device_memory import free_bytes
from mupscale.errors import UserError, refuse_unless_whole
from mupscale.hf.config import HIDDEN
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
    read_json,
    split_into_files,
    stored_tensors,
)
from mupscale.hf.forward_pass import Call, largest_difference
from mupscale.hf.inputs import field as config_field
from mupscale.hf.names import GrowingTensor, MadeTensor, growing_tensors
from mupscale.hf.recipes import EntryRun, pieces, stretches
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.noise import NO_NOISE, Constants, Noise, NoiseOrAuto, save_constants
from mupscale.methods.tensors import grow_tensors, is_noisy
from mupscale.text_tables import Watch, notes_by_layer, size_of, unwatched
from mupscale.widening.growth import Growth, Layout, source_index
from mupscale.widening.hints import some_names
from mupscale.widening.plan_text import Plan

CHUNK_BYTES = 2 * 2**20
"""Bytes of a wide tensor computed and written at once: they stay in a core's cache, which halves the time."""

Progress = Callable[[int], None]
"""Called with the number of bytes that were written or checked since the last call."""


def row_chunks(layout: Layout, most: int) -> Iterator[slice]:
    """Cuts the first axis of a tensor into at most so many wide rows, whose narrow rows follow each other."""
    index = source_index(layout).numpy()
    start = 0
    while start < len(index):
        part = index[start : start + max(most, 1)]
        earlier = np.flatnonzero(part < part[0])  # the next copy of a long block begins
        end = start + int(earlier[0] if len(earlier) else len(part))
        yield slice(start, end)
        start = end


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


def read_run(run: EntryRun, *, again: bool = False) -> Tensor:
    """The stored entries of a run."""
    stored = replace(run.source, shape=(math.prod(run.source.shape),))
    found = torch.empty((run.count - 1) * run.stride + run.length, dtype=stored.dtype)
    with stored.path.open("rb") as stream:
        _read(stream, stored, found, run.start, again=again)
    return stretches(replace(run, start=0), found)


@dataclass
class FolderWriter:
    """Writes wide tensors into files, and checks these; `upscale` of the library has the same three settings."""

    tensors: dict[str, Any]
    """A GrowingTensor or MadeTensor by its name."""
    method: GrowthMethod
    noise: Noise | None = None
    seed: int = 0
    constants: Constants = field(default_factory=dict)
    """σ̄ of the parameters, 0 where they got no noise."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the tensors that were made at once."""

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())

    def write(self, files: Sequence[NewFile], progress: Progress) -> None:
        """Writes the wide files, and reads each one again while the next one is written. All are on disk at the end.

        Every byte is compared with what the narrow files make; tensors that were made at once, such as those with
        noise, which nothing but a second draw could make again, with the checksum of what was written. UserError for a
        difference.
        """
        with _one_thread(), ThreadPoolExecutor(1) as pool:
            checks = []
            for file in files:
                with file.path.open("xb") as stream:
                    stream.write(file.header)
                    for place in file.tensors:
                        self._append(stream, place.name, progress)
                checks.append(pool.submit(self.check, file, progress))
            for check in checks:
                check.result()

    def _append(self, stream: BinaryIO, name: str, progress: Progress) -> None:
        def append(part: Tensor, is_all: bool) -> None:
            progress(stream.write(as_bytes(part)))
            if is_all:
                self.checksums[name] = zlib.crc32(as_bytes(part))

        self.constants.update(self._make(self.tensors[name], append))

    def _make(self, tensor: Any, use: Callable[[Tensor, bool], None], *, again: bool = False) -> Constants:
        """Calls `use` with each part of the wide tensor, some rows or all of it; `again`, its source is known finite.

        Returns the constant of its noise.
        """
        if isinstance(tensor, MadeTensor):
            for run in pieces(tensor.runs, CHUNK_BYTES // tensor.dtype.itemsize):
                use(run.entries(partial(read_run, again=again)).to(tensor.dtype), False)
            return {}
        stored, memory = tensor.source, torch.empty(0, dtype=tensor.dtype)

        def read(entry: Growth, rows: slice | None) -> Tensor:
            nonlocal memory
            shape = stored.shape if rows is None else (rows.stop - rows.start, *stored.shape[1:])
            if memory.numel() < (count := torch.Size(shape).numel()):
                memory = torch.empty(count, dtype=stored.dtype)
            return _read(stream, stored, memory[:count].view(shape), 0 if rows is None else rows.start, again=again)

        def write(entry: Growth, by_rows: bool) -> Iterator[tuple[Tensor, slice | None]]:
            for part, rows in self._parts(tensor, by_rows=by_rows):
                yield part, rows
                use(part, rows is None)

        with stored.path.open("rb") as stream:
            return grow_tensors([tensor.entry], self.method, self.noise, read, write, self.seed)

    def _parts(self, tensor: GrowingTensor, *, by_rows: bool) -> Iterator[tuple[Tensor, slice | None]]:
        """Empty parts of the wide tensor: some rows at a time, in memory that is used again, or all at once."""
        entry, dtype = tensor.entry, tensor.dtype
        if not by_rows or not entry.axes or is_noisy(self.noise, entry):
            yield torch.empty(entry.wide_shape, dtype=dtype), None
            return
        most = max(CHUNK_BYTES // max(torch.Size(entry.wide_shape[1:]).numel() * dtype.itemsize, 1), 1)
        wide = torch.empty((min(most, entry.wide_shape[0]), *entry.wide_shape[1:]), dtype=dtype)
        for rows in row_chunks(entry.layouts[0], most):
            yield wide[: rows.stop - rows.start], rows

    def check(self, file: NewFile, progress: Progress) -> None:
        """Puts a file on disk and reads it again, with safetensors' own check of its header; else a UserError."""
        damage = "the disk may be damaged"
        if stored_tensors(file.path) != sorted(file.tensors, key=lambda tensor: tensor.offset):
            raise UserError(f"{file.path.name} does not hold the tensors that were written; {damage}")
        with file.path.open("rb") as stream:
            os.fsync(stream.fileno())
            for place in file.tensors:
                if not self._is_as_written(stream, place, progress):
                    raise UserError(f"{file.path.name}: {place.name!r} is not what was written; {damage}")

    def _is_as_written(self, stream: BinaryIO, place: StoredTensor, progress: Progress) -> bool:
        if place.name in self.checksums:
            checksum = 0
            for chunk in stored_chunks(place):
                checksum = zlib.crc32(chunk, checksum)
                progress(len(chunk))
            return checksum == self.checksums[place.name]
        is_same, found = True, bytearray()

        def compare(part: Tensor, _: bool) -> None:
            nonlocal is_same, found
            if len(found) != part.nbytes:
                found = bytearray(part.nbytes)
            is_whole = stream.readinto(found) == part.nbytes  # type: ignore[attr-defined]
            # a bytearray compares memory, a memoryview its elements
            is_same = is_same and is_whole and found == as_bytes(part)
            progress(part.nbytes)

        stream.seek(place.offset)
        self._make(self.tensors[place.name], compare, again=True)
        return is_same


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
"""The largest file of weights, as transformers splits them."""

SPARE_BYTES = 16 * 2**20
"""Room for folders, file systems' own records, and what else is written beside the weights."""

HEADROOM = 1.5
"""Memory that loading two models needs, in units of their weights in float32."""

BYTES = "bytes written and checked"
"""What `watch` gets while files are written; every byte counts twice."""


@dataclass(frozen=True)
class FolderReport:
    """What was written into a folder, and what was checked."""

    out: Path
    narrow_bytes: int
    wide_bytes: int
    seconds: float
    checks: tuple[str, ...]
    """What was compared, and what was not."""
    notes: tuple[str, ...]
    plan: Plan | None = None
    """Of a wider or deeper folder; None of one with more experts or tokens."""
    noise: Constants = field(default_factory=dict)
    centred: bool = False

    def save_noise(self, path: str | Path) -> None:
        """Writes the noise constants to a JSON file that `RecordedNoise` reads."""
        save_constants(self.noise, path, self.centred)

    def __str__(self) -> str:
        lines = [f"grown {size_of(self.narrow_bytes)} → {size_of(self.wide_bytes)} of weights in {self.seconds:.1f} s"]
        lines += [f"checked: {check}" for check in self.checks]
        return "\n".join([*lines, *(f"note: {note}" for note in notes_by_layer(self.notes))])


@dataclass(frozen=True)
class _Job:
    """Everything that is known before anything is written."""

    folder: ModelFolder
    config: PretrainedConfig
    plan: Plan
    writer: FolderWriter
    record: dict[str, Any]
    notes: tuple[str, ...]


def upscale_folder(
    folder: str | Path,
    factor: float,
    out: str | Path,
    *,
    layers: Counts | None = None,
    depth: How = "identity",
    noise: NoiseOrAuto = None,
    seed: int = 0,
    method: GrowthMethod | None = None,
    keep_heads: bool | None = None,
    only: Literal["feed_forward"] | None = None,
    fields: dict[str, float] | None = None,
    call: Call | None = None,
    unchecked: bool = False,
    watch: Watch = unwatched,
) -> FolderReport:
    """Writes a wider or deeper folder of a narrow one, tensor by tensor. `out` is there whole, or not at all.

    The arguments are those of `upscale`. Memory holds a part of one tensor at a time; with noise, or with a method that
    needs it, one tensor. A model with growing parameters on which no output depends is refused unless `unchecked`,
    because how these grow is a guess. `watch(words, done, total)` is called while the growth of the family is found,
    and then while files are written.
    """
    start, out = time.perf_counter(), Path(out)
    narrow = read_folder(Path(folder))
    _refuse_modules_with_weights(narrow)
    sizes: dict[str, Any] = {"keep_heads": keep_heads, "only": only, "fields": dict(fields or {})}
    method = Duplication() if method is None else method
    family = Family(narrow.model_class, call, watch)
    job = _prepared(narrow, family, factor, layers, depth, sizes, method, noise, seed, unchecked)
    with written_folder(narrow, out, job.config, job.writer, job.record, watch) as new:
        checks = _checked_text(job), _check_outputs(new, job, call)
    constants = {name: job.writer.constants.get(name, 0.0) for name in job.plan.parameters}
    centred = job.writer.noise is not None and job.writer.noise.centred
    seconds = time.perf_counter() - start
    return FolderReport(out, narrow.size, job.writer.size, seconds, checks, job.notes, job.plan, constants, centred)


@contextmanager
def written_folder(
    narrow: ModelFolder,
    out: Path,
    config: PretrainedConfig,
    writer: FolderWriter,
    record: dict[str, Any],
    watch: Watch = unwatched,
) -> Iterator[Path]:
    """Yields a folder with checked weights and what travels with them; it becomes `out` at the end, or is deleted."""
    if out.resolve().is_relative_to(narrow.path.resolve()):
        raise UserError(f"--out {out} lies inside the folder that is read; name another one")
    with whole_folder(out) as new:
        rows = [(name, each.dtype, each.shape) for name, each in writer.tensors.items()]
        files = split_into_files(new, rows, MOST_SHARD_BYTES)
        needed = sum(file.size for file in files) + SPARE_BYTES + len(written(record))
        needed += sum(path.stat().st_size for path in narrow.companions())
        left = shutil.disk_usage(new.parent).free
        if needed > left:
            raise UserError(
                f"--out {new.parent}: the wide model needs {needed / 1e9:.1f} GB, and the disk has {left / 1e9:.1f} GB "
                "left. Make space, or name a folder on another disk"
            )
        writer.write(files, _counted(watch, BYTES, 2 * writer.size))
        if len(files) > 1:
            (new / INDEX_FILE).write_text(index_text(files), "utf-8")
        for path in narrow.companions():
            shutil.copyfile(path, new / path.name)  # the content alone: nothing there can be executed
        for folder in narrow.subfolders()[0]:
            shutil.copytree(folder, new / folder.name, copy_function=shutil.copyfile)
        _write_pooling(new, narrow.config, config)
        noise = {name: value for name, value in writer.constants.items() if value != 0.0}
        (new / GROWTH_FILE).write_text(written({**record, "noise": noise}), "utf-8")
        _write_config(new, narrow, config)
        yield new


def left_behind(narrow: ModelFolder, unused: Sequence[str]) -> list[str]:
    """Notes on what of a folder does not travel."""
    notes = [f"{name} is not part of the model, and stays behind" for name in unused]
    return notes + [f"{path.name}/ holds weights, code or links, and stays behind" for path in narrow.subfolders()[1]]


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
    noise: NoiseOrAuto,
    seed: int,
    unchecked: bool,
) -> _Job:
    """Finds out how everything grows. UserError for all that does not."""
    config, deepenings, is_wider = grown_config(family, folder.config, factor, layers, depth, **sizes)
    refuse_unless_whole("seed", seed, least=None)
    _refuse_method(method)
    narrow, wide = on_meta(folder.model_class, folder.config), on_meta(folder.model_class, config)
    found = family.found_between(narrow, wide) if is_wider else None
    untested = found.untested if found is not None else ()
    if untested and not unchecked:
        raise UserError(
            f"what the call returns does not depend on {some_names(untested)}, so how they grow is a guess. To accept "
            "it, --unchecked (in Python unchecked=True); to test it, give mupscale.hf.upscale_folder a call that runs "
            "them"
        )
    if deepenings:
        config = deepened(config, deepenings)
        wide = on_meta(folder.model_class, config)
    plan = method.plan(narrow, wide, hints=hints_at_depth(narrow, wide, deepenings, found))
    method.check(plan)
    chosen, notes = method.choose_noise(noise, plan, narrow)
    growing, unused = growing_tensors(folder.tensors, plan, narrow, wide)
    refuse_unlike_twins(growing)
    config.architectures = [folder.model_class.__name__]  # which the folder may not name
    by_field = {each.field: {"depth": each.how, "sources": list(each.sources)} for each in deepenings}
    growth = {"factor": factor, **sizes, "layers": by_field}
    settings = {"growth": growth, "method": type(method).__name__, "seed": seed}
    record = growth_record(plan, narrow, wide, method, settings)
    writer = FolderWriter({tensor.name: tensor for tensor in growing}, method, chosen, seed)
    if chosen is None and not notes and method.leaves_copies_equal(plan):
        notes = [NO_NOISE]
    notes += left_behind(folder, unused)
    notes += [f"untested, because what the model returns does not depend on it: {name}" for name in untested]
    return _Job(folder, config, plan, writer, record, (*notes, *plan.notes))


def _refuse_method(method: GrowthMethod) -> None:
    name = type(method).__name__
    if method.needs_batches:
        raise UserError(f"{name} learns from data, which a folder does not have. Use it in a run")
    method.refuse_across_layers("a folder")


POOLING = "word_embedding_dimension"
"""The width of the model in the configuration of a module of sentence-transformers."""


def _write_pooling(new: Path, before: PretrainedConfig, after: PretrainedConfig) -> None:
    narrow, wide = (config_field(each, *HIDDEN) for each in (before, after))
    for path in new.glob(f"*/{CONFIG_FILE}"):
        settings = read_json(path)
        if settings.get(POOLING) == narrow:
            path.write_text(json.dumps({**settings, POOLING: wide}, indent=2) + "\n", "utf-8")


def _refuse_modules_with_weights(folder: ModelFolder) -> None:
    """Raises a UserError if sentence-transformers would run a layer of its own behind the model."""
    modules = folder.path / "modules.json"
    names = modules.read_text("utf-8") if modules.is_file() else ""
    for path in folder.subfolders()[1]:
        if f'"{path.name}"' in names:
            raise UserError(
                f"{path} holds a layer behind the model (modules.json), which reads its width, and is not grown. "
                "Delete it there in a copy of the folder, or grow the model without it"
            )


def _write_config(new: Path, narrow: ModelFolder, config: PretrainedConfig) -> None:
    """The narrow file with the values that differ; where that does not give the wide configuration, a new file."""
    before, after = narrow.config.to_dict(), config.to_dict()
    path = new / CONFIG_FILE
    if type(config) is type(narrow.config):
        path.write_text(json.dumps(_changed(narrow.settings, before, after), indent=2) + "\n", "utf-8")
        found = AutoConfig.from_pretrained(new, local_files_only=True).to_dict()
        if {**found, "_name_or_path": ""} == {**after, "_name_or_path": ""}:
            return
    config.name_or_path = ""  # of the narrow folder
    config.save_pretrained(new)


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
    filled = [name for name, tensor in tensors.items() if tensor.entry.fill is not None]
    exact = len(tensors) - len({*at_once, *filled})
    text = f"{exact} tensors are, byte by byte, the narrow ones duplicated"
    if filled:
        text += f"; {len(filled)} make new layers add nothing"
    if at_once:
        text += f"; {len(at_once)} that were made at once (noise, or the method) are what was written"
    return text


def _check_outputs(new: Path, job: _Job, call: Call | None) -> str:
    """Compares the outputs of both folders, where that is possible. UserError for a difference that is not meant."""
    reason = too_large(job.folder, job.writer)
    if reason is not None:
        return f"outputs were not compared: {reason}"
    planned = planned_layouts(job.plan.parameters.values())
    found = largest_difference(job.folder.path, new, job.folder.model_class, call, planned)
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


def too_large(narrow: ModelFolder, writer: FolderWriter) -> str | None:
    """Why outputs of two folders cannot be compared, if there is no memory for them."""
    count = sum(math.prod(tensor.shape) for tensor in (*narrow.tensors.values(), *writer.tensors.values()))
    if count * 4 * HEADROOM < free_bytes(torch.device("cpu")):
        return None
    return f"both models in float32 ({count * 4 / 1e9:.0f} GB) do not fit into memory"


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
        centred = is_noisy(job.writer.noise, tensor.entry)  # copies of an input no longer cancel to the last bit
        if dtype.is_floating_point and (centred or not dyadic):
            worst = max(worst, 16 * torch.finfo(dtype).eps)
    return worst
