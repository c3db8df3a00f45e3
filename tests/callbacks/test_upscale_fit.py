"""A method that learns from data, inside a run: the run's own batches and random numbers stay as they were."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.seed import isolate_rng
from tiers import slow_except
from tiny_modules import MODELS, mlp, rows
from torch.utils.data import DataLoader, TensorDataset, default_collate
from training_runs import assert_identical, fit, quiet_trainer, state

import mupscale
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.errors import UserError


def learned(**settings: Any) -> mupscale.methods.LiGO:
    return mupscale.methods.LiGO(**{"steps": 15, "lr": 0.01} | settings)


class Seen(Callback):
    """The batches of a run, and its random numbers after each step."""

    def __init__(self) -> None:
        self.batches: list[float] = []
        self.numbers: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = batch[0] if isinstance(batch, list | tuple) else batch
        self.batches.append(float(first.double().sum()))
        with isolate_rng():  # the next ones stay the next ones
            self.numbers.append((torch.rand(()).item(), random.random(), np.random.rand()))


def jittered(samples: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """A batch with augmentation by all three kinds of random numbers."""
    inputs, labels = default_collate(samples)
    return [inputs + 1e-3 * (torch.rand(()) + random.random() + np.random.rand()), labels]


@pytest.mark.parametrize("model", slow_except(MODELS, "mlp", kept=["gpt2"]))
def test_a_learned_method_leaves_the_run_as_it_was(model: str, tmp_path: Path) -> None:
    make, width = MODELS[model]
    without, within = Seen(), Seen()
    fit(make(), tmp_path, without, UpscaleCallback(12, width, method=mupscale.methods.FPI(), noise=None), steps=25)
    swap = UpscaleCallback(12, width, method=learned(), noise=None)
    fit(make(), tmp_path, within, swap, steps=25)
    assert within.batches == without.batches
    assert within.numbers == without.numbers
    assert swap.summary["loss_after"] != swap.summary["loss_before"]
    assert abs(swap.summary["loss_after"] - swap.summary["loss_before"]) < 0.5


@pytest.mark.slow
def test_a_resumed_run_learns_the_same(tmp_path: Path) -> None:
    """From the checkpoint before the swap, from an earlier one, and from one after it; with an EMA."""
    swap = lambda: UpscaleCallback(12, 24, method=learned(), noise=None)  # noqa: E731
    parts = lambda: (swap(), EMAWeightAveraging(decay=0.9), ExactResume())  # noqa: E731
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    single = {"steps": 30, "precision": "32-true"}  # in which Lightning keeps averages
    whole = fit(mlp(), tmp_path, *parts(), saver, enable_checkpointing=True, **single)
    for name in ("pre-upscale-12.ckpt", "step=7.ckpt", "step=12.ckpt", "step=20.ckpt"):
        resumed = fit(mlp(), tmp_path / "again", *parts(), ckpt=tmp_path / name, **single)
        assert_identical(state(resumed), state(whole))


class Data(LightningDataModule):
    """Its hook makes a loader that shares a generator with the one before."""

    def __init__(self, loader: Callable[..., Any]) -> None:
        super().__init__()
        self.loader = loader
        self.generator = torch.Generator().manual_seed(5)

    def train_dataloader(self) -> Any:
        dataset = rows(mlp(), 80, torch.float32)
        if self.loader is DataLoader:
            return DataLoader(TensorDataset(*dataset), 8, shuffle=True, generator=self.generator, collate_fn=jittered)
        return ResidentLoader(dataset, 8, shuffle=True, drop_last=True)


@pytest.mark.parametrize(("loader", "passed"), [(DataLoader, True), (ResidentLoader, False)])
def test_loaders_of_any_kind(loader: Callable[..., Any], passed: bool, tmp_path: Path) -> None:
    def batches(method: Any) -> tuple[list[float], list[Any], torch.Tensor]:
        seed_everything(0, verbose=False)
        seen, data = Seen(), Data(loader)
        trainer = quiet_trainer(
            max_steps=25,
            default_root_dir=tmp_path,
            callbacks=[seen, UpscaleCallback(12, 24, method=method, noise=None)],
        )
        trainer.fit(mlp(), data.train_dataloader()) if passed else trainer.fit(mlp(), datamodule=data)
        return seen.batches, seen.numbers, data.generator.get_state()

    without, within = batches(mupscale.methods.FPI()), batches(learned())
    assert within[:2] == without[:2]
    assert torch.equal(within[2], without[2])


def test_several_loaders_are_refused_before_training(tmp_path: Path) -> None:
    class Both(type(mlp())):  # type: ignore[misc]
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch["a"]) + super().loss(batch["b"])

    loader = ResidentLoader(rows(mlp(), 16, torch.float32), 8, shuffle=True, drop_last=True)
    swap = UpscaleCallback(2, 24, method=learned(), noise=None)
    trainer = quiet_trainer(max_steps=4, default_root_dir=tmp_path, callbacks=[swap])
    module = Both(8, base_width=4, inputs=6, outputs=3)
    with pytest.raises(UserError, match=r"method = LiGO: the run has several training data loaders\. Give one"):
        trainer.fit(module, {"a": loader, "b": loader})
    assert trainer.global_step == 0
