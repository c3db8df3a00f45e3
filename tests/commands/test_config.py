"""Plain configurations: what counts as the same settings."""

from typing import Any

import pytest

from mupscale.commands.config import refuse_difference
from mupscale.errors import UserError


def settings(noise: str) -> dict[str, Any]:
    return {"config": {"callbacks": [{"class_path": noise, "init_args": {"std": 0.1}}]}, "trials": 4}


def test_noise_by_its_old_name_is_the_same_noise() -> None:
    """Sweeps and experiments that version 0.1 began go on."""
    refuse_difference(settings("mupscale.noise.AdditiveNoise"), settings("mupscale.AdditiveNoise"), "--out s")


def test_a_number_that_was_recorded_as_a_text_is_the_same_number() -> None:
    """Experiments whose files say 1e-3 go on."""
    refuse_difference({"sweep_1": {"lr": ["1e-3"]}}, {"sweep_1": {"lr": [0.001]}}, "--out s")
    with pytest.raises(UserError, match=r"lr.0 is '1e-3' there and 0.002 here"):
        refuse_difference({"sweep_1": {"lr": ["1e-3"]}}, {"sweep_1": {"lr": [0.002]}}, "--out s")


def test_an_argument_that_came_later_is_its_default() -> None:
    """Sweeps that began before noise could be centred go on, with plain noise only."""
    before, plain, centred, recorded = (settings("mupscale.AdditiveNoise") for _ in range(4))
    for later, value in ((plain, False), (recorded, None), (centred, True)):
        later["config"]["callbacks"][0]["init_args"]["centred"] = value
    refuse_difference(before, plain, "--out s")
    refuse_difference(before, recorded, "--out s")
    with pytest.raises(UserError, match=r"callbacks.0.init_args.centred is False there and True here"):
        refuse_difference(before, centred, "--out s")


def test_what_differs_is_named() -> None:
    there, here = settings("mupscale.noise.AdditiveNoise"), settings("mupscale.SignalNoise")
    with pytest.raises(UserError, match=r"^--out s: callbacks.0.class_path is 'mupscale.noise.AdditiveNoise' there"):
        refuse_difference(there, here, "--out s")
