"""The curves of a run: what a point of them is the mean of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_modules import mlp, rows
from training_runs import TREESPEC_WARNING

from mupscale.callbacks.curves import Curves
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader

pytestmark = pytest.mark.filterwarnings(TREESPEC_WARNING)


class Losses(Callback):
    """The loss of every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(pl_module.train_loss))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_point_is_the_mean_since_the_last(accumulate: int, tmp_path: Path) -> None:
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=11,
        log_every_n_steps=4,
        accumulate_grad_batches=accumulate,
        logger=TensorBoardLogger(tmp_path),
        callbacks=[Curves(), losses, UpscaleCallback(6, 16)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = mlp()
    loader = ResidentLoader(rows(module, 8 * 8, torch.float32), 8, shuffle=False)
    trainer.fit(module, loader, loader)
    events = EventAccumulator(trainer.log_dir)
    events.Reload()
    size = 4 * accumulate
    means = [sum(losses.seen[at : at + size]) / size for at in (0, size)]
    assert len(set(losses.seen[:size])) > 1
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (3, pytest.approx(means[0])),
        (7, pytest.approx(means[1])),
    ]


class Plain(Logger):
    """What Lightning asks of a logger, and no more: no `experiment`."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @property
    def name(self) -> str:
        return "plain"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.losses += [metrics["train/loss"]] if "train/loss" in metrics else []


def test_a_logger_of_ones_own_needs_no_experiment(tmp_path: Path) -> None:
    logger = Plain()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        log_every_n_steps=1,
        logger=logger,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        callbacks=[Curves(), UpscaleCallback(3, 16), ModelCheckpoint(every_n_train_steps=2)],
        enable_model_summary=False,
    )
    module = mlp()
    loader = ResidentLoader(rows(module, 8 * 8, torch.float32), 8, shuffle=False)
    trainer.fit(module, loader, loader)
    assert len(logger.losses) == 4
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["epoch=0-step=4.ckpt", "pre-upscale-3.ckpt"]
