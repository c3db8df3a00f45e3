"""A fit with FastLoop is the fit without it: weights, optimizer state, counters, curves, checkpoints, and the order of
hooks.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loop_cases import CASES
from observed_fits import Case, assert_equal, assert_same_run, fit, spy
from tiers import slow_except
from tiny_modules import SCHEDULES, mlp, rows

import mupscale
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.fast_loop import FastLoop, LeanEpochLoop
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader

pytestmark = pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`:UserWarning")


FAST = (
    "epochs",
    "plateau",
    "upscale",
    "self.log",
    "a ragged batch",
    "no length",
    "accumulation",
    "manual optimization",
)


KEPT = (
    "bf16-mixed", "schedule by epoch", "clipping", "validation across epochs", "ema", "early stopping", "a DataLoader",
    "accumulation from the second epoch", "on_train_batch_start",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(CASES, *FAST, kept=KEPT))
def test_nothing_is_different(name: str, own_batches: list[int], tmp_path: Path) -> None:
    case, runs = CASES[name], []
    for kind, extra in (("lightning", []), ("fast", [FastLoop()])):
        saver = ModelCheckpoint(tmp_path / kind / "every", "{step}-{epoch}", every_n_train_steps=4, save_top_k=-1)
        watching = spy()
        own_batches.clear()
        with pytest.warns(UserWarning, match=case.warns) if case.warns else nullcontext():
            run = fit(case, tmp_path / kind, *extra, watching, saver)
        run.seen, run.own = watching.seen, len(own_batches)
        runs.append(run)
    theirs, ours = runs
    assert len(theirs.seen) > 30
    assert len(list(theirs.folder.rglob("*.ckpt"))) > 1
    assert_same_run(ours, theirs)
    assert ours.seen == theirs.seen
    assert isinstance(ours.trainer.fit_loop.epoch_loop, LeanEpochLoop)
    assert ours.own == case.own


# --- resuming


@pytest.mark.slow
@pytest.mark.parametrize(("interrupted", "resumed"), [(False, True), (True, False)])
def test_checkpoints_of_either_loop_are_resumed_by_either(interrupted: bool, resumed: bool, tmp_path: Path) -> None:
    growth = partial(UpscaleCallback, 13, 24, noise=mupscale.AdditiveNoise(0.1))
    case = Case(
        partial(mlp, lr_scheduler=SCHEDULES["CosineAnnealingLR"]),
        callbacks=lambda: [growth(), ExactResume()],
        settings={"val_check_interval": 4},
    )
    whole = fit(case, tmp_path / "whole")
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(case, tmp_path / "interrupted", saver, *[FastLoop()] * interrupted)
    for step in (8, 10, 13):  # at a validation, at an epoch's end, and at the swap
        again = fit(case, tmp_path / f"resumed {step}", *[FastLoop()] * resumed, ckpt=tmp_path / f"step={step}.ckpt")
        mine, other = (torch.load(run.folder / "end.ckpt", weights_only=True) for run in (again, whole))
        assert_equal(mine, other, str(step))


def test_two_fits_of_one_trainer(own_batches: list[int], tmp_path: Path) -> None:
    runs = []
    for name, extra in (("lightning", []), ("fast", [FastLoop()])):
        run = fit(Case(settings={"max_steps": -1, "max_epochs": 2}), tmp_path / name, *extra)
        run.trainer.fit_loop.max_epochs = 4
        own_batches.clear()
        run.trainer.fit(run.module, run.loader, ResidentLoader(rows(run.module, 16, torch.float32), 8, shuffle=False))
        run.trainer.save_checkpoint(run.folder / "end.ckpt")
        runs.append(run)
    assert_same_run(runs[1], runs[0])
    assert runs[1].trainer.global_step == 40
    assert not own_batches


def test_tf32_is_asked_for(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for tf32, expected in ((False, before), (True, "high")):
            fit(Case(settings={"max_steps": 1}), tmp_path / str(tf32), FastLoop(tf32=tf32))
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
