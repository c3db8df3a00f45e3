"""Sweeps of scripts without figures, and without a check of every value: each takes a second."""

import pytest


@pytest.fixture(autouse=True)
def _plain_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.commands.lab.sweep.draw_sweep", lambda *_: [])
    monkeypatch.setattr("mupscale.commands.lab.space.refuse_invalid", lambda *_: None)
