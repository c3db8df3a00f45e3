"""A file that is replaced holds the old content or the new one."""

import os
from pathlib import Path

import pytest

from mupscale.atomic import partial, replacing, write_durably, write_text


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with replacing(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as new:
            new.write_text("half")
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
