"""Imports without the garbage collector."""

import gc
import sys
from pathlib import Path

import pytest

from mupscale.commands.loading import loaded, without_collections


def test_the_collector_is_off_and_then_as_before() -> None:
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_switches_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError):
        loaded("no_such_module")
    assert gc.isenabled()


def test_what_a_module_makes_is_set_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import gc\nlists = [[] for _ in range(1000)]\noff = not gc.isenabled()\n"
    (tmp_path / "made_of_lists.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = gc.get_freeze_count()
    module = loaded("made_of_lists")
    try:
        assert module.off
        frozen = gc.get_freeze_count()
        assert frozen >= before + 1000
        kept = [[] for _ in range(1000)]
        assert loaded("made_of_lists") is module
        assert gc.get_freeze_count() < frozen + len(kept)
    finally:
        del sys.modules["made_of_lists"]
