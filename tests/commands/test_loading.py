"""Imports without the garbage collector."""

import gc

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
