"""Damage in checkpoints, and sharded ones (folders, of FSDP2) checked before torch unpickles parts of them.

torch.distributed.checkpoint unpickles `.metadata` without restrictions, and so it does with every value in the shards
that is not a tensor. `check_sharded` reads both without making any object that they name, and refuses what a checkpoint
does not need.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mupscale.errors import UserError


def damage_in(file: Path | BinaryIO) -> str | None:
    """What is wrong with a file of torch.save (since version 1.6), or None; reads all of it, a gigabyte a second."""
    if not zipfile.is_zipfile(file):
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            part = archive.testzip()
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        return str(error)
    return None if part is None else f"the checksum of {part} does not match"


def data_in(file: Path, *, mapped: bool = False) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`, on the CPU. Raises a UserError if it holds something else, or code."""
    import torch

    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(file))
    except Exception as error:  # torch raises many exception types
        raise UserError(
            f"{file} is not a checkpoint, or is damaged, or holds more than data ({type(error).__name__}); nothing of "
            "it was loaded"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a checkpoint")
    return content


METADATA = ".metadata"
"""The file that says which values are where in the shards."""

META = "meta.pt"
"""The file with what is not in the shards. It is written last: a folder without it was never finished."""

PLAIN = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
"""Classes of torch.distributed.checkpoint.metadata whose objects are attributes by name."""

MADE_BY_ARGUMENTS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""What is called with numbers or texts. None of them does anything but make a value."""


def check_sharded(folder: Path) -> None:
    """Raises a UserError if torch would run code from this checkpoint, or read files outside of its folder."""
    _inside(folder, META)
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
        raise UserError(f"{file} is damaged, or not the metadata of a checkpoint ({_line(error)})") from error


def _read(file: Path) -> Iterator[Item]:
    with _inside(file.parent, file.name).open("rb") as stream:
        metadata = Metadata(stream, file).load()
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
        shard = _inside(file.parent, place["relative_path"])
        if place.get("transform_descriptors"):
            raise UserError(f"{file} asks for transformations of {shard.name}, which mupscale does not write")
        name, offset, length = index.__dict__["fqn"], place["offset"], place["length"]
        if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
            raise UserError(f"{file} has {name} at {offset!r}, {length!r} bytes, wanted whole numbers")
        yield Item(name, type(kinds[name]) is STAND_INS["TensorStorageMetadata"], shard, offset, length)


def _check_value(item: Item) -> None:
    import torch

    try:
        torch.load(item.content(), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many exception types
        raise UserError(f"{item.shard} has {item.name} with more than data in it; it is not loaded") from error


def _inside(folder: Path, name: str) -> Path:
    """The file of this name in the folder; raises a UserError if it is elsewhere."""
    if type(name) is not str or os.path.basename(name) != name or name in ("", ".", ".."):
        raise UserError(f"{folder / METADATA} names a file outside of its folder: {name!r}")
    if (folder / name).resolve().parent != folder.resolve():
        raise UserError(f"{folder / name} is a link to a file outside of its folder; it is not read")
    return folder / name


class _Frozen(type):
    """Classes whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError("a pickle sets attributes of a class")


class _Plain(metaclass=_Frozen):
    """Stands for an object of torch: holds its attributes, and does nothing with them."""

    def __init__(self) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str and not key.startswith("__") for key in state):
            raise pickle.UnpicklingError("a pickle sets more than attributes of an object")
        self.__dict__.update(state)


class _Properties(_Plain):
    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise pickle.UnpicklingError("a pickle sets more than the properties of a tensor")


class _Value(metaclass=_Frozen):
    """Stands for a value that is made by arguments, such as torch.Size; they are not looked at."""

    __slots__ = ()

    def __new__(cls, *arguments: Any) -> "_Value":
        for argument in arguments:
            items = argument if type(argument) is tuple else (argument,)
            if not all(type(item) in (int, str) for item in items):
                raise pickle.UnpicklingError("a pickle makes a value from more than numbers and texts")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("a pickle changes a value")


STAND_INS: dict[str, type] = {name: _Frozen(name, (_Plain,), {}) for name in (*PLAIN, "_StorageInfo", "StorageMeta")}


class Metadata(pickle.Unpickler):
    """Reads the metadata of a checkpoint without importing or making anything that it names."""

    def __init__(self, stream: Any, file: Path) -> None:
        super().__init__(stream)
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        import torch

        home = "torch.distributed.checkpoint"
        if module == f"{home}.metadata" and name in (*PLAIN, "StorageMeta"):
            return STAND_INS[name]
        if (module, name) == (f"{home}.filesystem", "_StorageInfo"):
            return STAND_INS[name]
        if (module, name) == (f"{home}.metadata", "TensorProperties"):
            return _Properties
        if (module, name) in MADE_BY_ARGUMENTS:
            return _Value
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return f"torch.{name}"
        raise UserError(f"{self.file} names {module}.{name}, which no checkpoint needs; nothing of it was loaded")


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
