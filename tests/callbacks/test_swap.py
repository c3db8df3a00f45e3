"""What a swap measures: it leaves no trace in the run, and shows a growth that is not exact."""

import logging
import random
from pathlib import Path

import pytest
import torch
from tiny_modules import ADAMW
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import fit, gap

import mupscale
from mupscale.callbacks.growth_schedule import GrowthSchedule
from mupscale.callbacks.swap import RefusedSwap
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError
from mupscale.methods.noise import Noise
from mupscale.models.base import Growable


class Plain(Growable):
    def __init__(self, width: int = 8, base_width: int = 4) -> None:
        super().__init__(width, base_width, optimizer=ADAMW)

    def build(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), mupscale.Readout(width, 3))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class WithMemory(Plain):
    """Its loss depends on the losses before it: by a buffer, by attributes of several kinds, by Python's generator."""

    def __init__(self, width: int = 8, base_width: int = 4) -> None:
        super().__init__(width, base_width)
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.mean, self.calls, self.past = torch.zeros((), dtype=torch.float64), 0, [0.0]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits - self.centre, batch[1]) * (1 + random.random())
        loss = loss + self.mean + 0.1 * self.calls + self.past[-1]
        self.centre = 0.9 * self.centre + logits.detach().mean(0)
        self.mean += 0.1 * logits.detach().mean()
        self.calls += 1
        self.past.append(0.1 * float(logits.detach().mean()))
        return loss


def test_what_a_loss_remembers_is_not_changed_by_a_swap(tmp_path: Path) -> None:
    narrow, wide = (
        fit(WithMemory(), tmp_path, steps=8),
        fit(WithMemory(), tmp_path, UpscaleCallback(4, 16, noise=None), steps=8),
    )
    assert gap(narrow, wide) < 1e-12


class ScaledByWidth(Plain):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]) / self.width**0.5, batch[1])


def test_a_growth_that_is_not_exact_fails_at_the_first_batch(tmp_path: Path) -> None:
    module, growth = ScaledByWidth(), UpscaleCallback(2, 16, noise=None)
    words = r"UpscaleCallback.width = 16: the wide model does not compute and train as the narrow one: .* differs by"
    with pytest.raises(UserError, match=words):
        fit(module, tmp_path, growth, steps=3)
    assert module.global_step == 0


@pytest.mark.parametrize(
    ("noise", "growth"),
    [
        (None, "a growth without noise"),
        (mupscale.AdditiveNoise(0.1, centred=True), "a growth before its noise"),
        (mupscale.SignalNoise(0.1), "a growth before its noise"),
    ],
)
def test_a_growth_that_changes_the_loss_fails_at_the_swap(
    noise: Noise | None, growth: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrowthSchedule, "check", lambda schedule, swap, *_: setattr(swap, "chosen_noise", noise))
    words = rf"the loss of a batch changed from .* to .*, but {growth} keeps it.*The run before the growth is saved in"
    with pytest.raises(RefusedSwap, match=words):
        fit(ScaledByWidth(), tmp_path, UpscaleCallback(2, 16, noise), steps=3)


class Sampled(Plain):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.net[:2](batch[0])
        return F.cross_entropy(self.net[2](hidden + torch.randn_like(hidden)), batch[1])


def test_random_numbers_for_each_unit_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit(Sampled(), tmp_path, UpscaleCallback(2, 16, noise=None), steps=3)
    assert "the loss draws other random numbers at the new width" in caplog.text
