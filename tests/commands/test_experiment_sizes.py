"""Sizes of an experiment's file: widths, or widths with layers."""

from typing import Any

import pytest
from lightning.pytorch import Trainer

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.cli import refuse_growths
from mupscale.commands.lab.file import growing, of_width
from mupscale.commands.lab.quick import divided, widths_in
from mupscale.commands.widths import Growth, folder_name, growth_of, in_proportion, width_number
from mupscale.errors import UserError
from mupscale.models.mlp import MLP, ResidualBlock

SHALLOW, DEEP = {"width": 64, "layers": 2}, {"width": 128, "layers": 8, "depth": "stack"}


def test_a_growth_of_width_and_layers() -> None:
    growth = growth_of("target", [SHALLOW, DEEP])
    assert (str(growth), growth.name) == ("64 with 2 layers → 128 with 8 layers", "64-2l-128-8l")
    assert growth.factors == [2, 4]
    assert growth_of("target", [SHALLOW, {"width": 64, "layers": 4}]).factors == [1, 2]
    assert growth_of("target", [[8, 4], [16, 8]]).factors == [2]


def test_the_configuration_of_a_growth() -> None:
    grown = growing(Growth(SHALLOW, DEEP), 7, {"class_path": "AdditiveNoise"})
    (swap,) = grown["trainer"]["callbacks+"]
    assert swap["init_args"] == {"at_step": 7, **DEEP, "noise": {"class_path": "AdditiveNoise"}}
    assert grown["model"]["init_args"] == SHALLOW
    assert of_width(DEEP)["model"]["init_args"] == {"width": 128, "layers": 8}
    assert of_width(32)["model"]["init_args"] == {"width": 32}


def test_layers_that_declare_nothing_are_left_to_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is refused before any run for what cannot be planned; what makes new layers add nothing is found later."""
    monkeypatch.delattr(ResidualBlock, "residual_outputs")
    swap = UpscaleCallback(1, layers=4)
    trainer, model = Trainer(callbacks=[swap], logger=False), MLP(8, base_width=4, layers=2)
    refuse_growths(model, trainer)
    swap.depth = "three"  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"does not fit .*2 layers.*three"):
        refuse_growths(model, trainer)


def test_sizes_in_proportion() -> None:
    assert in_proportion({"width": 96, "layers": 4}, SHALLOW, {"width": 32, "layers": 1}) == {"width": 48, "layers": 2}
    assert in_proportion({"width": 96, "layers": 3}, SHALLOW, {"width": 32, "layers": 1}) is None
    assert in_proportion(96, SHALLOW, SHALLOW) is None
    assert (width_number(SHALLOW), folder_name(SHALLOW)) == (128, "64-2l")


def test_a_quick_experiment_divides_widths_and_keeps_layers() -> None:
    assert widths_in([[32, 64], [SHALLOW, DEEP]]) == [32, 64, 64, 128]
    assert divided(DEEP, 4) == {"width": 32, "layers": 8, "depth": "stack"}


@pytest.mark.parametrize(
    "pair",
    [[SHALLOW, 128], [{"width": 64}, DEEP], [{**SHALLOW, "depth": "stack"}, DEEP], [SHALLOW, {**DEEP, "layers": 0}]],
)
def test_sizes_that_are_none(pair: Any) -> None:
    with pytest.raises(UserError, match="target: give two widths, before and after"):
        growth_of("target", pair)


@pytest.mark.parametrize("after", [{"width": 64, "layers": 3}, {"width": 32, "layers": 4}, SHALLOW])
def test_layers_grow_by_a_whole_factor(after: Any) -> None:
    with pytest.raises(UserError, match="target: the size after must be a multiple of the one before, got 64 with 2"):
        growth_of("target", [SHALLOW, after])
