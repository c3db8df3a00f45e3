"""A file that is replaced is the old one or the new one."""

from pathlib import Path

import pytest

from mupscale.atomic import replacing


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
