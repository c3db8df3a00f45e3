"""Blocks of steps on a GPU, and checkpoints in the background: the files of a run are those of single steps."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from observed_fits import Hooked
from run_ends import differences, observed
from tiny_modules import SCHEDULES, rows

from mupscale.callbacks.captured_steps import CapturedSteps
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.run_defaults import default_callbacks
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.gpu


def run(folder: Path, *callbacks: Callback, **arguments: Any) -> int:
    """Trains 60 steps with the callbacks of the command line; returns how many steps had hooks."""
    seed_everything(1, verbose=False)
    module = MLP(32, 8, 6, 3, optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True), **arguments)
    saver = RunCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=7, save_top_k=-1, save_last="link")
    hooked: list[int] = []

    class Counted(Curves):
        needs_every_step = False

        def on_train_batch_end(self, *given: Any) -> None:
            hooked.append(1)
            super().on_train_batch_end(*given)

    Counted.__qualname__ = Curves.__qualname__  # under which its state is saved
    mine = [Counted(), saver, UpscaleCallback(33, 64, noise=None), CapturedSteps(cuda_graph=True), *callbacks]
    trainer = Trainer(
        accelerator="gpu", devices=1, max_steps=60, default_root_dir=folder, log_every_n_steps=12,
        num_sanity_val_steps=0, enable_model_summary=False, val_check_interval=10,
        logger=TensorBoardLogger(folder, name="", version=""), callbacks=[*default_callbacks(mine), *mine],
    )  # fmt: skip
    train, val = (tuple(part.cuda() for part in rows(module, count, torch.float32)) for count in (160, 16))
    trainer.fit(module, ResidentLoader(train, 8, shuffle=True, drop_last=True), ResidentLoader(val, 8, shuffle=False))
    assert trainer.strategy.checkpoint_io.in_background
    return len(hooked)


@pytest.mark.parametrize("schedule", [None, "CosineAnnealingLR"])
def test_blocks_leave_the_files_of_single_steps(schedule: str | None, tmp_path: Path) -> None:
    arguments = {} if schedule is None else {"lr_scheduler": SCHEDULES[schedule]}
    assert run(tmp_path / "run", Hooked(), **arguments) == 60
    expected = observed(tmp_path / "run")
    assert len([name for name in expected if name.startswith("checkpoints/step=")]) == 60 // 7 + 1
    shutil.move(tmp_path / "run", tmp_path / "single")
    assert run(tmp_path / "run", **arguments) < 40
    assert list(differences(observed(tmp_path / "run"), expected)) == []
