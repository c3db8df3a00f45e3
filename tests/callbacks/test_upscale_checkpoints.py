"""Checkpoints around a swap: each resumes into the same run, and a finished one can start another run."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from tiers import slow_except
from tiny_modules import ADAMW, SCHEDULES, SGD, InUnits, gpt2, mlp, resnet, rows
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from training_runs import Checkpoints, assert_identical, fit, gap, rates, state

import mupscale
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.models.base import Growable
from mupscale.models.checkpoint import Size, optimizer_names
from mupscale.models.mlp import MLP

noisy = partial(UpscaleCallback, 12, noise=mupscale.AdditiveNoise(0.1))
deeper = partial(UpscaleCallback, 12, None, layers=4, noise=None)
completep = partial(gpt2, base_layers=2, optimizer=ADAMW)


def ema() -> Callback:
    return EMAWeightAveraging(decay=0.8)


RESUMABLE: dict[str, tuple[Callable[..., Growable], Callable[[], list[Callback]], dict[str, Any]]] = {
    "mlp": (mlp, lambda: [noisy(24)], {}),
    "resnet18": (
        partial(resnet, optimizer=SGD, lr_scheduler=SCHEDULES["SequentialLR"]),
        lambda: [noisy(4)],
        {},
    ),
    "gpt2": (
        partial(gpt2, optimizer=ADAMW, lr_scheduler=SCHEDULES["LambdaLR"]),
        lambda: [noisy(24)],
        {"gradient_clip_val": 0.05},
    ),
    "ema": (partial(mlp, optimizer=SGD), lambda: [noisy(24), ema()], {}),
    "accumulation": (mlp, lambda: [noisy(24)], {"accumulate_grad_batches": 2}),
    "bf16-true": (mlp, lambda: [noisy(24)], {"precision": "bf16-true"}),
    "plateau": (
        partial(mlp, lr_scheduler=SCHEDULES["ReduceLROnPlateau"]),
        lambda: [noisy(24), ExactResume()],
        {"precision": "64-true"},
    ),
    "fractions": (
        partial(mlp, width=12),
        lambda: [
            UpscaleCallback(5, 20, noise=mupscale.AdditiveNoise(0.1, centred=True)),
            UpscaleCallback(12, 30, noise=mupscale.AdditiveNoise(0.1, centred=True)),
            ema(),
        ],
        {},
    ),
    "units": (InUnits, lambda: [UpscaleCallback(12, 16, noise=None), ema()], {}),
    "deeper": (completep, lambda: [deeper()], {}),
    "interleave": (partial(completep, lr_scheduler=SCHEDULES["LambdaLR"]), lambda: [deeper(depth="interleave")], {}),
    "random": (completep, lambda: [deeper(depth="random")], {}),
    "stack, wider, with noise": (partial(mlp, layers=2), lambda: [noisy(16, layers=4, depth="stack")], {}),
    "new copies reset": (
        partial(mlp, layers=2),
        lambda: [deeper(transfer_state="reset_new_copies", rewarm_steps=4)],
        {},
    ),
    "deeper resnet18": (
        partial(resnet, optimizer=SGD),
        lambda: [UpscaleCallback(12, layers=[2, 3, 2, 2], noise=None)],
        {},
    ),
}
KEPT = ("ema", "accumulation", "plateau", "fractions", "units", "stack, wider, with noise", "new copies reset")


@pytest.mark.parametrize("case", slow_except(RESUMABLE, "mlp", kept=KEPT))
def test_every_checkpoint_resumes_into_the_run_that_was_interrupted(case: str, tmp_path: Path) -> None:
    make, callbacks, settings = RESUMABLE[case]
    settings = {"precision": "32-true", "steps": 20} | settings
    whole = fit(make(), tmp_path, *callbacks(), Checkpoints(tmp_path), enable_checkpointing=True, **settings)
    per_step = settings.get("accumulate_grad_batches", 1)
    assert len(whole.losses) == 20 * per_step
    for name in ("step=10", "step=12", "pre-upscale-12", "step=13", "step=17"):  # the first at the end of an epoch
        path = tmp_path / f"{name}.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        there = Size(*(checkpoint["hyper_parameters"][key] for key in Size._fields))
        assert (there == whole.module.size) == (name in ("step=13", "step=17"))
        module = make(**there.arguments) if name == "step=17" else make()  # as LightningCLI makes it, and as configured
        resumed = fit(module, tmp_path / "again", *callbacks(), ckpt=path, **settings)
        assert resumed.trainer.global_step == 20
        assert torch.equal(resumed.losses, whole.losses[checkpoint["global_step"] * per_step :])
        assert_identical(state(resumed), state(whole))
        assert rates(resumed) == rates(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("at_step", [0, 10, 17])
def test_the_checkpoint_before_a_swap_resumes_exactly(at_step: int, tmp_path: Path) -> None:
    """Validation, the end of an epoch, a plateau scheduler and early stopping come between the step and the swap."""
    make = partial(mlp, lr_scheduler=SCHEDULES["ReduceLROnPlateau"])
    settings: Any = {"steps": 30, "val_check_interval": 5}
    growth = partial(UpscaleCallback, at_step, 24, noise=mupscale.AdditiveNoise(0.1))

    def others() -> list[Callback]:
        return [ExactResume(), EMAWeightAveraging(decay=0.8), EarlyStopping("val/loss", patience=3, min_delta=-10)]

    whole = fit(make(), tmp_path, growth(), *others(), **settings)
    path = tmp_path / f"pre-upscale-{at_step}.ckpt"
    resumed = fit(make(), tmp_path, growth(), *others(), ckpt=path, **settings)
    assert torch.equal(resumed.losses, whole.losses[at_step:])
    assert_identical(state(resumed), state(whole))
    assert rates(resumed) == rates(whole)
    assert rates(whole)["net.layers.0.bias"] < 1e-2


def test_a_run_that_is_resumed_at_its_first_growth_checks_the_next_one_as_before(tmp_path: Path) -> None:
    """Every growth is checked before one is made: in between, rates and a schedule are those of no step."""
    make = partial(mlp, 4, optimizer=ADAMW, lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 12))

    def growths() -> list[Callback]:
        return [UpscaleCallback(4, 8), UpscaleCallback(7, 16)]

    whole = fit(make(), tmp_path, *growths(), Checkpoints(tmp_path), enable_checkpointing=True, steps=9)
    resumed = fit(make(), tmp_path / "again", *growths(), ckpt=tmp_path / "step=4.ckpt", steps=9)
    assert_identical(state(resumed), state(whole))


# --- a finished base model


@pytest.mark.slow
def test_init_from_a_finished_base(tmp_path: Path) -> None:
    base_path = tmp_path / "base.ckpt"
    schedule = SCHEDULES["CosineAnnealingLR"]
    make = partial(mlp, 4, optimizer=ADAMW, lr_scheduler=schedule)
    base = fit(make(), tmp_path, steps=15)
    base.trainer.save_checkpoint(base_path)

    def without_decay_of_vectors(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        vectors, others = [], []
        for parameter in parameters:
            (vectors if parameter.ndim == 1 else others).append(parameter)
        return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": others}], lr=2e-2)

    other = partial(mlp, 4, optimizer=without_decay_of_vectors, lr_scheduler=schedule, init_from=str(base_path))
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            seen.update(state(SimpleNamespace(trainer=trainer, module=pl_module)))
            seen.update(
                step=trainer.global_step, epoch=trainer.current_epoch, lr=trainer.optimizers[0].param_groups[0]["lr"]
            )

    narrow = fit(other(), tmp_path, Look(), steps=20)
    orders = [optimizer_names(run.module, run.trainer.optimizers[0]) for run in (narrow, base)]
    assert orders[0] != orders[1]
    assert (seen.pop("step"), seen.pop("epoch"), seen.pop("lr")) == (0, 0, 2e-2)
    assert_identical(seen, state(base))
    wide = fit(other(), tmp_path, UpscaleCallback(0, 8, noise=None), steps=20)
    assert gap(narrow, wide) < 1e-9
    assert narrow.steps == list(range(1, 21))

    # resuming overrides it, and does not need it
    whole = fit(
        other(), tmp_path, UpscaleCallback(8, 8, noise=None), Checkpoints(tmp_path), steps=20, enable_checkpointing=True
    )
    pre = torch.load(tmp_path / "pre-upscale-8.ckpt", weights_only=True)
    assert pre["hyper_parameters"]["init_from"] is None
    base_path.unlink()
    for step in (6, 8, 12):
        resumed = fit(
            other(), tmp_path, UpscaleCallback(8, 8, noise=None), ckpt=tmp_path / f"step={step}.ckpt", steps=20
        )
        assert torch.equal(resumed.losses, whole.losses[step:])
        assert_identical(state(resumed), state(whole))
    assert MLP.load_from_checkpoint(tmp_path / "step=12.ckpt").width == 8


def test_checkpoints_on_another_machine_are_left_to_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = mlp()
    policy = RunCheckpoint(dirpath="memory://checkpoints", every_n_train_steps=2, save_top_k=1)
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=5, callbacks=[policy], accelerator="cpu", **settings)
    trainer.fit(module, DataLoader(TensorDataset(*rows(module, 64, torch.float32)), 8))
    there = fsspec.filesystem("memory").ls("/checkpoints", detail=False)
    assert [name.rpartition("-")[2] for name in there] == ["step=5.ckpt"]
    assert not list(tmp_path.iterdir())
