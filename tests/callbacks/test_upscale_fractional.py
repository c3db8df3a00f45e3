"""Growth by fractions, and in units, inside `Trainer.fit`: the curve goes on, and checkpoints start another run."""

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import slow_except
from tiny_modules import OPTIMIZERS, SCHEDULES, SGD, InUnits, mlp, resnet
from training_runs import fit, gap

from mupscale.__main__ import main
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.methods import Net2Net
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP


def gpt2(width: Any = 8, **kwargs: Any) -> GPT2:
    return GPT2(width, base_width=4, layers=2, head_dim=2, vocabulary=11, context=8, **kwargs)


MODELS: dict[str, Any] = {
    "mlp": (partial(mlp, 12), 20, 30),
    "mlp of unequal widths": (partial(mlp, [8, 4, 12]), [12, 4, 18], [20, 6, 18]),
    "resnet18": (resnet, 3, 5),
    # heads 4 → 6 → 15 and feed-forward units by 3/2; the stream stays, then doubles
    "gpt2": (gpt2, [8, 12, 48], [16, 30, 72]),
    "units": (InUnits, 16, 48),
}
"""Each with two widths that it grows to."""


@pytest.mark.parametrize(
    ("name", "optimizer"),
    slow_except(
        list(product(MODELS, OPTIMIZERS)),
        *[("mlp", "adamw"), ("units", "adamw")],
        kept=[("gpt2", "adamw"), ("mlp of unequal widths", "sgd"), ("units", "sgd")],
    ),
)
def test_the_curve_goes_on_as_if_nothing_had_happened(name: str, optimizer: str, tmp_path: Path) -> None:
    make, first, second = MODELS[name]
    make = partial(make, optimizer=OPTIMIZERS[optimizer], lr_scheduler=SCHEDULES["LambdaLR"])
    settings: Any = {"steps": 30, "gradient_clip_val": 0.05}
    narrow = fit(make(), tmp_path, **settings)
    wide = fit(
        make(), tmp_path, UpscaleCallback(5, first, noise=None), UpscaleCallback(15, second, noise=None), **settings
    )
    assert wide.module.width == second
    assert narrow.losses.std() > 0.01, "something must happen"
    assert gap(narrow, wide) < 1e-11
    if name == "units":
        assert wide.module.net.scale.item() == math.sqrt(48)  # computed in float64
        assert torch.equal(wide.module.net.units, torch.arange(48))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "optimizer"), [(None, "sgd"), (Net2Net(), "adamw")])
def test_init_from_a_network_that_grew_by_a_fraction(method: Any, optimizer: str, tmp_path: Path) -> None:
    """Which the entries' own rates must survive, through another growth too."""
    make = partial(mlp, optimizer=OPTIMIZERS[optimizer], lr_scheduler=SCHEDULES["CosineAnnealingLR"])
    settings: Any = {"gradient_clip_val": 0.05}
    paths = {width: tmp_path / f"{width}.ckpt" for width in (12, 20)}
    fit(make(12), tmp_path, steps=10, **settings).trainer.save_checkpoint(paths[12])
    swap = UpscaleCallback(5, 20, method=method, noise=None)
    fit(make(12), tmp_path, swap, steps=10, **settings).trainer.save_checkpoint(paths[20])
    narrow = fit(make(12, init_from=str(paths[12])), tmp_path, steps=20, **settings)
    wide = fit(make(20, init_from=str(paths[20])), tmp_path, UpscaleCallback(10, 30, noise=None), steps=20, **settings)
    assert gap(narrow, wide) < 1e-11
    assert narrow.losses.std() > 0.01


@pytest.mark.slow
def test_a_checkpoint_grows_offline_by_fractions(tmp_path: Path) -> None:
    make = partial(mlp, optimizer=SGD, lr_scheduler=SCHEDULES["CosineAnnealingLR"])
    fit(make(12), tmp_path, steps=10).trainer.save_checkpoint(tmp_path / "12.ckpt")
    for before, after in ((12, 20), (20, 30)):
        line = ["upscale", f"{tmp_path}/{before}.ckpt", "--width", str(after), "--noise", "none"]
        main([*line, "--out", f"{tmp_path}/{after}.ckpt"])
    for key in ("init_from", "ckpt"):
        runs = []
        for width in (12, 30):
            path = tmp_path / f"{width}.ckpt"
            runs.append(
                fit(make(width, init_from=str(path)), tmp_path, steps=20)
                if key == "init_from"
                else fit(make(width), tmp_path, ckpt=path, steps=20)
            )
        assert gap(*runs) < 1e-11


def test_a_fraction_that_is_not_possible_is_refused_before_training(tmp_path: Path) -> None:
    for module, width, words in (
        (gpt2(), 12, r"12: .*blocks.0.ln_1.* a whole factor, such as to 16"),
        (gpt2(), [8, 12], r"\[8, 12\]: .*one width, or three"),
    ):
        with pytest.raises(ValueError, match=f"UpscaleCallback.width = {words}"):
            fit(module, tmp_path, UpscaleCallback(5, width, noise=None), steps=10)
        assert module.trainer.global_step == 0
    with pytest.raises(ValueError, match=r"model.width of a GPT2 is one number, or three: .* got \[8, 8\]"):
        gpt2([8, 8])
    with pytest.raises(ValueError, match=r"model.width = \[8, 9, 32\] is not divisible by model.head_dim = 2"):
        gpt2([8, 9, 32])
    assert MLP(20, base_width=12).network(20).readout.multiplier == 12 / 20


def test_a_large_network_is_compared_at_a_size_that_can_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of width 8, which comes first, half a head of 16 would be left."""
    monkeypatch.setattr("mupscale.callbacks.growth_schedule.MOST_PARAMETERS", 0)
    module = GPT2(32, base_width=16, layers=1, head_dim=16, vocabulary=11, context=8)
    growth = UpscaleCallback(2, 64, noise=None)
    fit(module, tmp_path, growth, steps=4)
    assert module.width == 64
    assert growth.summary["loss_after"] == pytest.approx(growth.summary["loss_before"], rel=1e-5)
