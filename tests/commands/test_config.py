"""Plain configurations: what counts as the same settings."""

from typing import Any

import pytest

from mupscale.commands.config import refuse_difference
from mupscale.errors import UserError


def settings(noise: str) -> dict[str, Any]:
    return {"config": {"callbacks": [{"class_path": noise, "init_args": {"std": 0.1}}]}, "trials": 4}


def test_equal_settings_pass_and_a_missing_key_counts_as_null() -> None:
    there, here = settings("mupscale.AdditiveNoise"), settings("mupscale.AdditiveNoise")
    here["config"]["callbacks"][0]["init_args"]["centred"] = None
    refuse_difference(there, here, "--out s")
    here["config"]["callbacks"][0]["init_args"]["centred"] = False
    with pytest.raises(UserError, match=r"callbacks.0.init_args.centred is None there and False here"):
        refuse_difference(there, here, "--out s")


def test_what_differs_is_named() -> None:
    there, here = settings("mupscale.AdditiveNoise"), settings("mupscale.SignalNoise")
    with pytest.raises(UserError, match=r"^--out s: callbacks.0.class_path is 'mupscale.AdditiveNoise' there"):
        refuse_difference(there, here, "--out s")
