"""The options of UpscaleCallback: when it swaps, how often, and what becomes of learning rates and optimizer state."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from tiers import slow_except
from tiny_modules import ADAMW, OPTIMIZERS, SCHEDULES, mlp
from training_runs import BeforeStep, Frozen, fit, gap, rates

import mupscale
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.errors import UserError


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("until", [None, 20])
def test_frozen_parameters_stay_frozen(until: int | None, tmp_path: Path) -> None:
    """Also if they are trained later: before, at and after the upscale."""
    narrow = fit(mlp(), tmp_path, Frozen(until), EMAWeightAveraging(decay=0.8))
    wide = fit(mlp(), tmp_path, Frozen(until), EMAWeightAveraging(decay=0.8), UpscaleCallback(20, 24, noise=None))
    assert gap(narrow, wide) < 1e-9
    assert gap(narrow, fit(mlp(), tmp_path, EMAWeightAveraging(decay=0.8))) > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode at the start of training")
def test_what_is_frozen_before_the_fit_is_frozen_in_a_resumed_one(tmp_path: Path) -> None:
    """Also if the checkpoint is wider than the network that was frozen, which is made in float32."""

    def run(**settings: Any) -> Any:
        module = mlp()
        module.configure_model()
        module.net.layers[0].requires_grad_(False).eval()
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
        return fit(module, tmp_path, UpscaleCallback(12, 24, noise=None), saver, ExactResume(), steps=30, **settings)

    whole = run(enable_checkpointing=True)
    layer = whole.module.net.layers[0]
    for step in (10, 20):
        resumed = run(enable_checkpointing=True, ckpt=tmp_path / f"step={step}.ckpt")
        again = resumed.module.net.layers[0]
        assert again.weight.shape == layer.weight.shape
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in layer.parameters()]
        assert not any(part.training for part in (layer, again))
        assert torch.equal(resumed.losses, whole.losses[step:])


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "betas": ("adamw", {"betas": (0.5, 0.9)}),
    "decay": ("adamw", {"weight_decay": 1.0}),
    "eps": ("adamw", {"eps": 0.1}),
    "no decay": ("sgd", {"weight_decay": 0.0}),
    "momentum": ("sgd", {"momentum": 0.5, "nesterov": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", slow_except(CHANGES, kept=["betas", "momentum"]))
def test_hyperparameters_that_changed_during_the_run_continue(change: str, tmp_path: Path) -> None:
    optimizer, settings = CHANGES[change]
    make = partial(mlp, optimizer=OPTIMIZERS[optimizer])

    def change(trainer: Trainer) -> None:
        for group in trainer.optimizers[0].param_groups:
            group.update(settings)

    changed = BeforeStep(10, change)
    narrow = fit(make(), tmp_path, changed, steps=40)
    wide = fit(
        make(), tmp_path, changed, UpscaleCallback(20, 24, noise=None), UpscaleCallback(30, 40, noise=None), steps=40
    )
    assert gap(narrow, wide) < 1e-9
    assert gap(narrow, fit(make(), tmp_path, steps=40)) > 1e-3
    same = mupscale.methods.Net2Net(hyperparameters="same")
    kept = fit(make(), tmp_path, changed, UpscaleCallback(20, 16, method=same, noise=None), steps=25)
    assert all(group[key] == settings[key] for group in kept.trainer.optimizers[0].param_groups for key in settings)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", slow_except([None, *SCHEDULES], kept=["SequentialLR"]))
def test_lr_is_a_new_base_constant(schedule: str | None, tmp_path: Path) -> None:
    """Rates are those of a run that had this constant from the start; also for a later swap, and after a resume."""
    constants = [4e-2, 1e-2, 3e-2]
    make = [
        partial(mlp, optimizer=partial(ADAMW, lr=lr), lr_scheduler=schedule and SCHEDULES[schedule]) for lr in constants
    ]
    growth = [
        partial(UpscaleCallback, 12, 16, lr=constants[1], noise=None),
        partial(UpscaleCallback, 30, 48, lr=constants[2], noise=None),
    ]
    once = fit(make[0](), tmp_path, growth[0](), steps=50)
    assert rates(once) == pytest.approx(rates(fit(make[1](16), tmp_path)), rel=1e-12)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
    twice = fit(make[0](), tmp_path, growth[0](), growth[1](), saver, ExactResume(), enable_checkpointing=True)
    assert rates(twice) == pytest.approx(rates(fit(make[2](48), tmp_path)), rel=1e-12)
    resumed = fit(make[0](), tmp_path, growth[0](), growth[1](), ExactResume(), ckpt=tmp_path / "step=20.ckpt")
    assert rates(resumed) == rates(twice)
    assert torch.equal(resumed.losses, twice.losses[20:])
    # a swap without lr keeps that of the one before
    kept = fit(make[0](), tmp_path, growth[0](), UpscaleCallback(30, 48, noise=None))
    assert rates(kept) == pytest.approx(rates(fit(make[1](48), tmp_path)), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", slow_except(SCHEDULES, kept=["SequentialLR", "ReduceLROnPlateau"]))
def test_restart_schedule(schedule: str, tmp_path: Path) -> None:
    make = partial(mlp, optimizer=ADAMW, lr_scheduler=SCHEDULES[schedule])
    for lr in (None, 3e-2):
        restarted = fit(make(), tmp_path, UpscaleCallback(20, 24, restart_schedule=True, lr=lr, noise=None), steps=45)
        expected = rates(fit(make(24, optimizer=partial(ADAMW, lr=lr or 1e-2)), tmp_path, steps=25))
        assert rates(restarted) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", slow_except(OPTIMIZERS, "adamw", kept=[]))
def test_a_warm_up_of_new_copies_is_resumed(optimizer: str, tmp_path: Path) -> None:
    """In the middle of it, to the bit; and it slows the new copies down."""

    def swap(rewarm_steps: int = 20) -> UpscaleCallback:
        return UpscaleCallback(10, 16, transfer_state="reset_new_copies", rewarm_steps=rewarm_steps, noise=None)

    make = partial(mlp, optimizer=OPTIMIZERS[optimizer])
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=15, save_top_k=-1)
    whole = fit(make(), tmp_path, swap(), saver, ExactResume(), enable_checkpointing=True, steps=40)
    resumed = fit(make(), tmp_path, swap(), ExactResume(), ckpt=tmp_path / "step=15.ckpt", steps=40)
    assert torch.equal(resumed.losses, whole.losses[15:])
    without = fit(make(), tmp_path, swap(0), steps=40)
    assert torch.equal(without.losses[:11], whole.losses[:11])
    assert gap(without, whole) > 1e-6


def test_an_optimizer_that_cannot_start_anew_in_part_is_refused_before_training(tmp_path: Path) -> None:
    swap = UpscaleCallback(10, 16, transfer_state="reset_new_copies", noise=None)
    with pytest.raises(UserError, match="it is not known how NAdam depends on its step count"):
        fit(mlp(optimizer=torch.optim.NAdam), tmp_path, swap)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_transfer_of_state_the_optimizer_starts_anew(tmp_path: Path) -> None:
    for optimizer in OPTIMIZERS.values():
        narrow = fit(mlp(optimizer=optimizer), tmp_path, steps=40)
        wide = fit(
            mlp(optimizer=optimizer), tmp_path, UpscaleCallback(20, 24, transfer_state="reset", noise=None), steps=40
        )
        assert torch.equal(narrow.losses[:20], wide.losses[:20])
        assert float((narrow.losses - wide.losses)[20].abs()) < 1e-12
        assert gap(narrow, wide) > 1e-3
        steps = {int(state["step"]) for state in wide.trainer.optimizers[0].state.values() if "step" in state}
        assert steps <= {20}
