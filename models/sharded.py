"""Sharded checkpoints (folders of torch's distributed checkpoint), read and written tensor by tensor in one process.

torch.distributed.checkpoint unpickles `.metadata` without restrictions, and so it does with every value in the shards
that is not a tensor. `check_sharded` reads both without making any object that they name, and refuses what a checkpoint
does not need.
"""

import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mupscale._torch import place_in_shard
from mupscale.data_files import META, METADATA, damage_in, data_in, inside
from mupscale.errors import UserError, one_line

Keys = tuple[str | int, ...]
"""The keys that lead to a value: ("optimizer_0", "state", "net.layers.0.weight", "exp_avg")."""

WEIGHTS = "state_dict"
"""The first key of weights and buffers; that of the i-th optimizer is `optimizer_i`."""


def is_sharded_checkpoint(path: Path) -> bool:
    return path.is_dir() and (path / METADATA).is_file()


def outline(folder: Path) -> dict[str, Any]:
    """A sharded checkpoint as a file would hold it, weights on the meta device, whose damage is not found."""
    check_sharded(folder)
    metadata = FileSystemReader(folder).read_metadata()
    answer: dict[str, Any] = {**_rest(folder), WEIGHTS: {}}
    for name, kind in metadata.state_dict_metadata.items():
        first, _, rest = name.partition(".")
        if first == WEIGHTS and isinstance(kind, TensorStorageMetadata):
            answer[WEIGHTS][rest] = torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
    return answer


def _rest(folder: Path) -> dict[str, Any]:
    if not (folder / META).is_file():
        raise UserError(f"{folder} was never finished: it has no {META}; use another checkpoint")
    return data_in(folder / META)


class ShardedCheckpoint:
    """A folder that a run under FSDP2 wrote, read value by value; UserError if it is damaged, or more than data."""

    def __init__(self, folder: Path) -> None:
        if not is_sharded_checkpoint(folder):
            raise UserError(f"{folder} is a folder, but not a sharded checkpoint: it has no {METADATA}")
        check_sharded(folder)
        problem = damage_in_shards(folder)
        if problem is not None:
            raise UserError(f"{folder} is damaged: {problem}")
        self.folder = folder
        self._metadata: Metadata = FileSystemReader(folder).read_metadata()
        paths = self._metadata.planner_data
        if not isinstance(paths, dict) or set(paths) != set(self._metadata.state_dict_metadata):
            raise UserError(f"{folder} is not a checkpoint of a run: its values have no keys")
        self._names: dict[Keys, str] = {tuple(path): name for name, path in paths.items()}
        self._places: dict[str, list[tuple[Any, Any]]] = {}
        for index, place in self._metadata.storage_data.items():
            self._places.setdefault(index.fqn, []).append((index.offset, place))
        for name, kind in self._metadata.state_dict_metadata.items():
            chunks = kind.chunks if isinstance(kind, TensorStorageMetadata) else [None]
            if len(self._places.get(name, [])) != len(chunks) or not _is_covered(kind):
                raise UserError(f"{folder} is damaged: {METADATA} does not have all of {name}")

    @cached_property
    def rest(self) -> dict[str, Any]:
        """What is not in the shards: counters, callbacks, schedules, arguments of the model."""
        return _rest(self.folder)

    @property
    def shards(self) -> int:
        """The number of files that hold tensors; one for each process that wrote them."""
        return max(1, len({place.relative_path for places in self._places.values() for _, place in places}))

    def paths(self, *start: str | int) -> Iterator[Keys]:
        return (path for path in self._names if path[: len(start)] == start)

    def kind(self, path: Keys) -> TensorStorageMetadata | None:
        """Shape, dtype and chunks of a tensor; None for other values."""
        kind = self._metadata.state_dict_metadata[self._names[path]]
        return kind if isinstance(kind, TensorStorageMetadata) else None

    def read(self, path: Keys) -> Any:
        """A value; a tensor whole, its chunks put together one after another."""
        name, kind = self._names[path], self.kind(path)
        if kind is None:
            ((_, place),) = self._places[name]
            return self._loaded(place)
        if len(kind.chunks) == 1:
            return self._loaded(self._places[name][0][1])
        whole = torch.empty(kind.size, dtype=kind.properties.dtype)
        for offsets, place in self._places[name]:
            chunk = self._loaded(place)
            spot = tuple(slice(start, start + size) for start, size in zip(offsets, chunk.shape, strict=True))
            whole[spot] = chunk
        return whole

    def read_small(self, path: Keys) -> Any:
        """A value; a tensor that is not a single number as an empty one on the meta device."""
        kind = self.kind(path)
        if kind is None or not kind.size:
            return self.read(path)
        return torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")

    def optimizers(self, read: Callable[[Keys], Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The names of the parameters of each optimizer, and its state by their numbers, as a file would hold it."""
        for number in range(len({path[0] for path in self._names} - {WEIGHTS})):
            groups: dict[int, dict[str, Any]] = {}
            for path in self.paths(f"optimizer_{number}", "param_groups"):
                groups.setdefault(int(path[2]), {})[str(path[3])] = self.read(path)
            ordered, names = [groups[index] for index in sorted(groups)], list[str]()
            for group in ordered:
                first = len(names)
                names += group["params"]
                group["params"] = list(range(first, len(names)))
            state: dict[int, dict[str, Any]] = {}
            for index, name in enumerate(names):
                for path in self.paths(f"optimizer_{number}", "state", name):  # a frozen parameter has none
                    state.setdefault(index, {})[str(path[3])] = read(path)
            yield names, {"state": state, "param_groups": ordered}

    def whole(self) -> dict[str, Any]:
        """The checkpoint as a file would hold it. Needs memory for all of it."""
        weights = {str(path[1]): self.read(path) for path in self.paths(WEIGHTS)}
        states = [state for _, state in self.optimizers(self.read)]
        return {**self.rest, WEIGHTS: weights, "optimizer_states": states}

    def _loaded(self, place: Any) -> Any:
        with (self.folder / place.relative_path).open("rb") as stream:
            stream.seek(place.offset)
            content = io.BytesIO(stream.read(place.length))
        return torch.load(content, map_location="cpu", weights_only=True)


def _is_covered(kind: Any) -> bool:
    """Whether the chunks of a tensor are as large as the tensor; true for other values."""
    if not isinstance(kind, TensorStorageMetadata):
        return True
    return sum(math.prod(chunk.sizes) for chunk in kind.chunks) == math.prod(kind.size)


class ShardWriter:
    """Writes a sharded checkpoint into an empty folder, value by value, as so many processes would have."""

    def __init__(self, folder: Path, shards: int) -> None:
        self._folder, self._closing = folder, ExitStack()
        self._shards = [f"__{rank}_0.distcp" for rank in range(shards)]
        self._streams: list[BinaryIO] = []
        self._metadata = Metadata(state_dict_metadata={}, planner_data={}, storage_data={}, version="1.0.0")

    def __enter__(self) -> Self:
        for name in self._shards:
            self._streams.append(self._closing.enter_context((self._folder / name).open("xb")))
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def add(self, path: Keys, value: Any) -> None:
        """Writes a value; of a tensor, every shard gets its share of the rows."""
        if not isinstance(value, Tensor):
            self._metadata.state_dict_metadata[_name(path)] = BytesStorageMetadata()
            self._save(path, None, None, value, 0)
            return
        count = len(value) if value.ndim else 1
        most = max(-(-count // len(self._shards)), 1)  # as torch.chunk, and as FSDP2 shards
        chunks = []
        for shard, start in enumerate(range(0, max(count, 1), most)):
            part = value[start : start + most] if value.ndim else value
            offsets = torch.Size([start, *[0] * (value.ndim - 1)] if value.ndim else [])
            chunks.append(ChunkStorageMetadata(offsets, part.shape))
            # a view would be saved with all that is in its memory
            is_view = part.untyped_storage().nbytes() > part.nbytes
            self._save(path, offsets, len(chunks) - 1, part.clone() if is_view else part, shard)
        kind = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)
        self._metadata.state_dict_metadata[_name(path)] = kind

    def finish(self, rest: dict[str, Any]) -> None:
        """Writes the metadata, and last of all what is not in the shards. All is on disk at the end."""
        for stream in self._streams:
            _sync(stream)
        with (self._folder / METADATA).open("xb") as stream:
            pickle.dump(self._metadata, stream)
            _sync(stream)
        with (self._folder / META).open("xb") as stream:
            torch.save(rest, stream)
            _sync(stream)

    def _save(self, path: Keys, offsets: Any, index: int | None, value: Any, shard: int) -> None:
        stream, start = self._streams[shard], self._streams[shard].tell()
        torch.save(value, stream)
        place = place_in_shard(self._shards[shard], start, stream.tell() - start)
        self._metadata.storage_data[MetadataIndex(_name(path), offsets, index)] = place
        self._metadata.planner_data[_name(path)] = path


def _name(path: Keys) -> str:
    return ".".join(map(str, path))


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


# --- what is checked before torch unpickles parts of one

PLAIN = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    "_StorageInfo",
)  # fmt: skip
"""Classes of torch whose objects are attributes by name."""

_HOME = "torch.distributed.checkpoint"

KNOWN = {
    *((f"{_HOME}.metadata", name) for name in (*PLAIN[:-1], "TensorProperties", "_MEM_FORMAT_ENCODING")),
    (f"{_HOME}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""All that metadata may name, dtypes aside. None of them does anything but make a value."""


def check_sharded(folder: Path) -> None:
    """Raises a UserError if torch would run code from this checkpoint, or read files outside of its folder."""
    inside(folder, META)
    files = [folder / METADATA, *folder.glob("__*.metadata")]  # torch falls back to those of single ranks
    for file in files:
        for item in _stored(file):
            if not item.is_tensor:
                _check_value(item)


def damage_in_shards(folder: Path, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with a sharded checkpoint, or None; of a `share` (rank, processes) only that part is read."""
    rank, processes = share
    try:
        for number, item in enumerate(_stored(folder / METADATA)):
            if number % processes != rank:
                continue
            if not item.shard.is_file():
                return f"its shard {item.shard.name} is missing"
            content = item.content()
            problem = damage_in(content) if zipfile.is_zipfile(content) else "it is cut off, or overwritten"
            if problem is not None:
                return f"{item.name} in {item.shard.name}: {problem}"
    except (UserError, OSError) as error:
        return str(error)
    return damage_in(folder / META)


def damage_at(path: Path) -> str | None:
    """What is wrong with a checkpoint, a file or a folder, by its checksums; None if nothing is.

    The processes of a run share the work of a folder. One that finds damage there raises a UserError: the others would
    otherwise resume from this checkpoint.
    """
    if not path.is_dir():
        return damage_in(path)
    share = share_of_process(os.environ)
    if _key(path) not in undamaged:
        problem = damage_in_shards(path, share)
        if problem is not None and share[1] > 1:
            raise UserError(f"{path} is damaged ({problem}); delete it to continue from the one before it")
        if problem is not None:
            return problem
        undamaged.add(_key(path))
    return None


undamaged: set[tuple[Path, int]] = set()
"""Sharded checkpoints in which this process has found no damage, by place and time of writing."""


def _key(folder: Path) -> tuple[Path, int]:
    metadata = folder / METADATA
    return folder.resolve(), metadata.stat().st_mtime_ns if metadata.is_file() else 0


def share_of_process(environment: Mapping[str, str]) -> tuple[int, int]:
    """The rank of this process and the number of processes, if torchrun or srun has started several; else (0, 1)."""
    for rank, processes in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if rank in environment and processes in environment:
            return int(environment[rank]), int(environment[processes])
    return 0, 1


@dataclass
class Item:
    """A value in a shard."""

    name: str
    is_tensor: bool
    shard: Path
    offset: int
    length: int

    def content(self) -> io.BytesIO:
        with self.shard.open("rb") as stream:
            stream.seek(self.offset)
            return io.BytesIO(stream.read(self.length))


def _stored(file: Path) -> list[Item]:
    """What a file of metadata says is in the shards beside it; raises a UserError if it says more than that."""
    try:
        return list(_read(file))
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises many exception types
        raise UserError(
            f"{file} is damaged, or not the metadata of a checkpoint ({type(error).__name__}: {one_line(error)})"
        ) from error


def _read(file: Path) -> Iterator[Item]:
    with inside(file.parent, file.name).open("rb") as stream:
        metadata = MetadataUnpickler(stream, file).load()
    if type(metadata) is not STAND_INS["Metadata"]:
        raise UserError(f"{file} is not the metadata of a checkpoint")
    kinds = metadata.__dict__["state_dict_metadata"]
    stored = metadata.__dict__["storage_data"]
    if type(kinds) is not dict or type(stored) is not dict:
        raise UserError(f"{file} is not the metadata of a checkpoint")
    for index, info in stored.items():
        if type(index) is not STAND_INS["MetadataIndex"] or type(info) is not STAND_INS["_StorageInfo"]:
            raise UserError(f"{file} is not the metadata of a checkpoint")
        place = info.__dict__
        shard = inside(file.parent, place["relative_path"])
        if place.get("transform_descriptors"):
            raise UserError(f"{file} asks for transformations of {shard.name}, which mupscale does not write")
        name, offset, length = index.__dict__["fqn"], place["offset"], place["length"]
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            raise UserError(f"{file} has {name} at {offset!r}, {length!r} bytes, wanted whole numbers")
        yield Item(name, type(kinds[name]) is STAND_INS["TensorStorageMetadata"], shard, offset, length)


def _check_value(item: Item) -> None:
    try:
        torch.load(item.content(), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many exception types
        raise UserError(f"{item.shard} has {item.name} with more than data in it; it is not loaded") from error


class _StandIn:
    """Stands for an object that metadata names: holds its attributes, and does nothing with them."""

    def __new__(cls, *arguments: Any) -> Self:
        items = [item for each in arguments for item in (each if type(each) is tuple else (each,))]
        if (items and cls.__name__ in PLAIN) or not all(type(item) in (int, str) for item in items):
            raise pickle.UnpicklingError("a pickle makes a value from more than numbers and texts")
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        kind = type(self).__name__
        if kind == "TensorProperties" and type(state) is tuple and len(state) == 5:
            return
        is_plain = type(state) is dict and all(type(key) is str and not key.startswith("__") for key in state)
        if kind not in PLAIN or not is_plain:
            raise pickle.UnpicklingError("a pickle sets more than attributes of an object")
        self.__dict__.update(state)


STAND_INS: dict[str, type] = {name: type(name, (_StandIn,), {}) for _, name in KNOWN}


class MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of a checkpoint without importing or making anything that it names."""

    def __init__(self, stream: Any, file: Path) -> None:
        super().__init__(stream)
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return STAND_INS[name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return f"torch.{name}"
        raise UserError(f"{self.file} names {module}.{name}, which no checkpoint needs; nothing of it was loaded")
