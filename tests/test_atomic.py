"""A file that is replaced holds the old content or the new one."""

import ast
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_line import small
from paths import ROOT
from program_server import CORE_ONLY
from programs import run_program

from mupscale.atomic import (
    append_to,
    durably,
    locked,
    open_to_write,
    partial,
    replacing,
    truncate,
    whole_folder,
    write_durably,
    write_text,
)
from mupscale.errors import UserError


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with replacing(path) as stream:
        stream.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as stream:
            stream.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    for text in ("old, and longer", "new"):
        write_text(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.json"
    write_durably(path, b"old")
    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            write_durably(path, b"new, and longer")
    assert path.read_bytes() == b"old"
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_durable_file_is_on_disk_before_it_is_in_place_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.json"
    write_durably(path, b"old")
    synced: list[tuple[str, bytes]] = []

    def note(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.read_bytes()))

    monkeypatch.setattr(os, "fsync", note)
    partial(path).write_bytes(b"left by a process that was killed, and longer")
    write_durably(path, b"new")
    assert synced == [(str(partial(path)), b"old"), (str(tmp_path), b"new")]
    assert list(tmp_path.iterdir()) == [path]


def use(context: Any) -> None:
    with context:
        pass


WRITERS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "write_text": (lambda path: write_text(path, "new"), True),
    "write_durably": (lambda path: write_durably(path, b"new"), True),
    "append_to": (lambda path: append_to(path).close(), False),
    "truncate": (lambda path: truncate(path, 0), False),
    "locked": (lambda path: use(locked(path, "in use")), False),
    "whole_folder": (lambda path: use(whole_folder(path)), False),
    "open_to_write": (lambda path: os.close(open_to_write(path)), False),
}
"""What writes a file, and whether it takes the place of a link; the others refuse one."""

TEMPORARY: dict[str, Callable[[Path], Path]] = {
    "the file": lambda path: path,
    "its partial file": partial,
    "its temporary file": lambda path: path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}"),
    "its lock": lambda path: path.with_name(f".{path.name}.lock"),
}


@pytest.mark.parametrize("name", TEMPORARY)
@pytest.mark.parametrize("kind", WRITERS)
def test_nothing_is_written_through_a_link(kind: str, name: str, tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "theirs"
    precious.write_text("precious")
    folder.mkdir()
    path = folder / "run.lock"
    link = TEMPORARY[name](path)
    if kind in ("append_to", "truncate", "open_to_write") and link != path:
        path.write_text("")
    link.symlink_to(precious)
    write, replaces = WRITERS[kind]
    refusals: list[str] = []
    try:
        write(path)
    except UserError as error:
        refusals.append(str(error))
    if refusals:
        assert not replaces
        assert f"{link} is a link; delete it" in refusals[0] or f"--out {path} exists" in refusals[0]
    else:
        assert not path.is_symlink()
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("kind", WRITERS)
def test_nothing_is_written_into_a_pipe(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    os.mkfifo(path)
    write, _ = WRITERS[kind]
    with pytest.raises(UserError, match=r"is not a file|exists"):
        write(path)
    assert path.is_fifo()


def test_a_link_to_the_folder_that_a_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    write_durably(tmp_path / "runs" / "run.json", b"new")
    assert (tmp_path / "scratch" / "run.json").read_bytes() == b"new"


def test_a_folder_that_is_replaced_by_a_link_meanwhile_gets_nothing(tmp_path: Path) -> None:
    folder, moved, other = tmp_path / "folder", tmp_path / "moved", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    with durably(folder / "run.json") as stream:
        stream.write(b"new")
        folder.rename(moved)
        folder.symlink_to(other)
    assert (moved / "run.json").read_bytes() == b"new"
    assert list(other.iterdir()) == []


PACKAGES = ("mupscale", "callbacks", "models", "datamodules")

OWN_FOLDER = {
    "mupscale/commands/process.py",
    "mupscale/hf/widened_folder.py",
}
"""What writes to a folder that it has just made, or to /dev/null."""


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """The calls of `name(...)` and `something.name(...)` in all modules: the file, the name and the call."""
    found = []
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found.append((str(path.relative_to(ROOT)), name, node))
    return found


def test_files_are_opened_to_write_in_one_place() -> None:
    """`replacing` and its like do it; "xb" never follows a link."""
    found = set()
    for name, call, node in calls():
        values = [each.value for each in node.args if isinstance(each, ast.Constant)]
        opens = call == "open" and any(value in ("w", "wb", "a", "ab", "r+b", "w+", "a+") for value in values)
        writes = call in ("write_text", "write_bytes") and isinstance(node.func, ast.Attribute)
        if opens or writes:
            found.add(name)
    assert found == OWN_FOLDER


def test_every_text_is_utf_8_whatever_the_locale_is() -> None:
    found = []
    for name, call, node in calls():
        is_text = call in ("read_text", "write_text") and isinstance(node.func, ast.Attribute)
        if is_text and not any(isinstance(each, ast.Constant) and each.value == "utf-8" for each in node.args):
            found.append(f"{name}:{node.lineno}")
    assert found == []


@pytest.mark.slow
def test_a_run_under_an_ascii_locale(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", max_steps=1, limit_val_batches=0)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run_program("-m", "mupscale", "fit", "--config", config, variables=ascii_only | CORE_ONLY, cwd=tmp_path)
    assert (tmp_path / "runs/default/version_0/result.json").is_file()
