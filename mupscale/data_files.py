"""Reads YAML, JSON and torch files as plain data; refuses what is nested too deep, expands without bounds, or runs."""

import json
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from mupscale.errors import UserError, prefix_errors

DEEPEST = 100
"""Levels of a YAML file. yaml's C library overflows the stack, and so ends the process, at some ten thousand."""

MOST_VALUES = 100_000
"""Values of a YAML file with its aliases written out: ten lines of aliases can stand for a billion values."""

MOST_DIGITS = 300
"""Digits of a whole number in a JSON file: a larger one is beyond all floating-point numbers."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader is ten times faster, but not every build of yaml has it."""

_WHOLE = re.compile(r"[-+]?(?:0|[1-9][\d_]*)$")
_REAL = re.compile(
    r"[-+]?(?:(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def _decimal_loader() -> Any:
    """A loader by which decimal numbers are numbers, and nothing else is."""
    loader = type("DecimalLoader", (LOADER,), {})
    others = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
    resolvers: dict[str | None, list[Any]] = {}
    for first, known in LOADER.yaml_implicit_resolvers.items():
        resolvers[first] = [resolver for resolver in known if resolver[0] not in others]
    loader.yaml_implicit_resolvers = resolvers  # type: ignore[attr-defined]
    loader.add_implicit_resolver("tag:yaml.org,2002:int", _WHOLE, list("-+0123456789"))  # type: ignore[attr-defined]
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _REAL, list("-+.0123456789"))  # type: ignore[attr-defined]
    return loader


DECIMAL = _decimal_loader()
"""Reads numbers as people write them. In YAML 1.1 1e-3 is a text, 1:30 is 90 (to the base 60), and 010 is 8."""


def yaml_of(text: str, loader_class: Any = LOADER) -> Any:
    """The content of a YAML text.

    Raises ValueError or YAMLError if it is not valid, would not fit into memory, or has a key twice.

    >>> yaml_of("model: {width: 8}")
    {'model': {'width': 8}}
    >>> yaml_of("[1e-3, 2:16:4]", DECIMAL)
    [0.001, '2:16:4']
    """
    refuse_endless(text)
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        refuse_keys_twice(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def read_yaml(path: Path, loader_class: Any = LOADER) -> Any:
    """The content of a YAML file. Raises a UserError if it cannot be read."""
    with prefix_errors(f"{path} is not YAML that can be read", OSError, ValueError, yaml.YAMLError):
        return yaml_of(read_text(path), loader_class)


def read_text(path: Path) -> str:
    """Returns the text of a file, as `read_bytes` reads it."""
    return read_bytes(path).decode("utf-8")


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file. Raises a UserError for a pipe or a device, whose end may never come."""
    refuse_endless_file(path)
    return path.read_bytes()


def refuse_endless_file(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is not a file")


@contextmanager
def interpreting(what: object) -> Iterator[None]:
    """Turns what is raised on using the content of a file as if it had the form that was wanted into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, yaml.YAMLError) as error:
        raise UserError(f"{what}: {what_is_wrong(error)}") from error


def what_is_wrong(error: Exception) -> str:
    """Why data does not have the form that was wanted, by the exception that was raised on reading it."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, ValueError | yaml.YAMLError):
        return " ".join(str(error).split())
    return "its values are of another kind"


def inside(folder: Path, name: Any) -> Path:
    """Returns a path below a folder, as a file in it names it.

    Raises a UserError if it lies elsewhere, also by a link, or is a pipe.
    """
    path = folder / name if isinstance(name, str) else folder
    if path == folder or not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{folder} refers to something outside of it, {name!r}, which is not read; replace a link by a copy"
        )
    refuse_endless_file(path)
    return path


def refuse_odd_name(path: Path) -> None:
    """Raises a UserError if the name of a path cannot be written as text."""
    try:
        str(path.resolve()).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{str(path)!a} is not a name in UTF-8; rename it") from error


def refuse_links(folder: Path, *names: str) -> None:
    """Raises a UserError if one of the files to write is a link: the command would write outside the folder."""
    for name in names:
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name} is a link; delete it, or name another folder")


def refuse_linked_folders(folder: Path) -> None:
    """Raises a UserError if a folder in this one is a link: what is written to it, or deleted in it, lies outside."""
    for place, folders, _ in os.walk(folder):
        refuse_links(Path(place), *folders)


def refuse_endless(text: str) -> None:
    """ValueError if a YAML text is nested too deep, refers to itself, or stands for too many values."""
    sizes: dict[str, int] = {}
    open_anchors: list[str | None] = []
    counts = [0]
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            open_anchors.append(event.anchor)
            counts.append(1)
            if len(counts) > DEEPEST:
                raise UserError(f"it is nested more than {DEEPEST} levels deep")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            size, anchor = counts.pop(), open_anchors.pop()
            counts[-1] += size
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in open_anchors:
                raise UserError(f"its alias *{event.anchor} refers to itself")
            counts[-1] += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
        if counts[-1] > MOST_VALUES:
            raise UserError(f"its aliases stand for more than {MOST_VALUES:,} values")


def refuse_keys_twice(node: yaml.Node, path: str = "") -> None:
    """ValueError if a mapping has a key twice: only the last value would count."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            refuse_keys_twice(item, path)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines and name != "<<":
            raise UserError(f"it has the key {path}{name} twice, in lines {lines[name]} and {line}")
        lines[name] = line
        refuse_keys_twice(value, f"{path}{name}.")


def json_of(text: str | bytes) -> Any:
    """The content of a JSON text. Raises ValueError if it is not valid, nested too deep, or has endless numbers."""
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


# --- files of torch

METADATA = ".metadata"
"""The file that says which values are where in the shards."""

META = "meta.pt"
"""The file with what is not in the shards. It is written last: a folder without it was never finished."""


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
