"""Buffers that are not saved stay the wide model's own; the others are duplicated."""

import math

import pytest
import torch
from bad_input import snapshot
from torch import Tensor, nn

import mupscale
from mupscale.errors import UserError
from mupscale.methods.grow import grow
from mupscale.widening.write import parameters_on_meta


class Scaled(nn.Module):
    """Its embedding is multiplied by a constant of the width, which is a buffer that is not saved."""

    def __init__(self, width: int, *, grows: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.readout = nn.Embedding(7, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.register_buffer("scale", torch.tensor(math.sqrt(width)), persistent=False)
        self.register_buffer("mask", torch.arange(3.0), persistent=False)
        if grows:
            self.register_buffer("frequencies", torch.linspace(1, 2, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.embed(x) * self.scale) + self.mask


UNITS = {"embed.weight": 2**-0.5}


def test_a_buffer_that_is_not_saved_stays_that_of_the_wide_model():
    narrow, wide = Scaled(4, grows=True), Scaled(8, grows=True)
    narrow.norm.running_mean.copy_(torch.arange(4.0))
    report = mupscale.upscale(narrow, wide, hints=mupscale.Hints(rescale=UNITS))
    assert wide.scale == torch.tensor(math.sqrt(8))
    assert torch.equal(wide.frequencies, torch.linspace(1, 2, 8))
    assert torch.equal(wide.norm.running_mean, torch.arange(4.0).repeat_interleave(2))
    notes = [note for note in report.notes if "buffer" in note]
    assert len(notes) == 2
    assert notes[0].startswith("frequencies: this buffer (4,) → (8,) is not saved with the model, and the wide one is")
    assert notes[1] == (
        "scale: this buffer is not saved with the model, and differs between the two; the wide model keeps its own"
    )
    assert "kept" in next(line for line in str(report.plan).splitlines() if line.startswith("frequencies"))


def test_a_buffer_that_is_saved_under_another_name_is_duplicated():
    models = [Scaled(4), Scaled(8)]
    for model, width in zip(models, (4, 8), strict=True):
        model.register_buffer("unsaved", torch.full((width,), float(width)), persistent=False)
        model.twin = nn.Module()
        model.twin.register_buffer("saved", model.unsaved)
    mupscale.upscale(*models)
    assert torch.equal(models[1].twin.saved, torch.full((8,), 4.0))


def test_on_the_meta_device_a_growing_buffer_needs_a_rebuilt_model():
    narrow = Scaled(4, grows=True)
    with torch.device("meta"):
        wide = Scaled(8, grows=True)
    before = snapshot(narrow, wide)
    with pytest.raises(UserError, match=r"buffer 'frequencies' \(4,\) → \(8,\) is not saved with the model") as refusal:
        mupscale.upscale(narrow, wide, consume=True)
    assert "\n" not in str(refusal.value)
    assert snapshot(narrow, wide) == before
    report = grow(narrow, wide, rebuild=lambda: Scaled(8, grows=True))
    assert torch.equal(wide.frequencies, torch.linspace(1, 2, 8))
    assert wide.scale == torch.tensor(math.sqrt(8))
    assert not any("buffer" in note for note in report.notes)


def test_on_the_meta_device_the_narrow_value_is_taken_and_noted():
    narrow = Scaled(4)
    with torch.device("meta"):
        wide = Scaled(8)
    report = mupscale.upscale(narrow, wide)
    assert wide.scale == 2
    assert torch.equal(wide.mask, narrow.mask)
    assert [note.partition(":")[0] for note in report.notes if "meta device" in note] == ["scale", "mask"]


def test_a_rebuilt_model_has_no_memory_for_its_parameters_and_draws_nothing():
    with parameters_on_meta():
        model = Scaled(8)
        tied = nn.Linear(8, 7)
        tied.weight = model.embed.weight
    assert all(parameter.is_meta for parameter in model.parameters())
    assert tied.weight is model.embed.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not any(parameter.is_meta for parameter in Scaled(8).parameters())
    state = torch.get_rng_state()
    mupscale.upscale(narrow := Scaled(4), wide := Scaled(8))
    torch.set_rng_state(state)
    grow(narrow, wide, rebuild=lambda: (torch.rand(3), Scaled(8))[1])
    assert torch.equal(torch.get_rng_state(), state)
