"""Fits whose every hook, checkpoint and curve is recorded, and comparisons of two of them to the bit."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from logged import curves
from run_ends import differences
from tiny_modules import mlp, rows
from torch import Tensor
from training_runs import quiet_trainer

from mupscale.callbacks import captured_steps
from mupscale.callbacks.captured_steps import CapturedSteps, refuse_capture
from mupscale.datamodules.resident import ResidentLoader


@dataclass(frozen=True)
class Case:
    """A fit.

    Args:
        warns: What Lightning warns of.
        capture: Whether its steps could be captured on a GPU.
    """

    module: Callable[[], LightningModule] = mlp
    callbacks: Callable[[], list[Callback]] = list
    settings: dict[str, Any] = field(default_factory=dict)
    loader: Callable[[tuple[Tensor, ...]], Any] | None = None
    warns: str = ""
    capture: bool = True


def resident(tensors: tuple[Tensor, ...]) -> ResidentLoader:
    return ResidentLoader(tensors, 8, shuffle=True, drop_last=True)


def fit(case: Case, folder: Path, *callbacks: Callback, ckpt: Path | None = None) -> Any:
    """Trains as the case says; the answer holds the trainer, the module, the folder and the loader."""
    seed_everything(1, verbose=False)
    settings = {"precision": "32-true", "max_steps": 25, "enable_checkpointing": True} | case.settings
    trainer = quiet_trainer(
        default_root_dir=folder,
        logger=TensorBoardLogger(folder, name="", version=""),
        callbacks=[*callbacks, *case.callbacks()],
        log_every_n_steps=3,
        num_sanity_val_steps=0,
        **settings,
    )
    module = case.module()
    train, val = rows(module, 80, torch.float32), rows(module, 16, torch.float32)
    loader = (case.loader or resident)(train)
    validation = ResidentLoader(val, 8, shuffle=False) if is_overridden("validation_step", module) else None
    trainer.fit(module, loader, validation, ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "end.ckpt")
    return SimpleNamespace(trainer=trainer, module=module, folder=folder, loader=loader)


def capture_on_cpu(patch: pytest.MonkeyPatch, step: type) -> None:
    """Lets CapturedSteps take the CPU for a GPU, whatever time blocks need, and `step` for a captured step."""
    setup = CapturedSteps.setup

    def on_gpu(self: CapturedSteps, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        setup(self, trainer, pl_module, stage)
        if self.cuda_graph and stage == "fit":
            refuse_capture(trainer)
            self._steps = captured_steps.Blocks(trainer)

    patch.setattr(captured_steps, "CapturedStep", step)
    patch.setattr(captured_steps, "SECONDS", math.inf)
    patch.setattr(CapturedSteps, "setup", on_gpu)


class Hooked(Callback):
    """Has a hook of every step, so that steps are taken one by one."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        pass


INSIDE = {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
"""Hooks within a step, which a captured step does not call."""


def spy(*, inside: bool = True) -> Any:
    """A callback that records every call of a hook: its arguments, and the counters and metrics at that time."""
    hooks = {hook for hook in dir(Callback) if hook.startswith("on_")} - (set() if inside else INSIDE)
    watching = type("Spy", (Callback,), {hook: recorder(hook) for hook in hooks})()
    watching.seen = []
    return watching


def recorder(hook: str) -> Callable[..., None]:
    def record(self: Any, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        loop, metrics = trainer.fit_loop, trainer.callback_metrics
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        counters = (
            trainer.global_step,
            trainer.current_epoch,
            loop.batch_idx,
            loop.total_batch_idx,
            trainer.is_last_batch,
            rates,
        )
        self.seen.append(
            (hook, pl_module._current_fx_name, counters, described(metrics), [described(part) for part in arguments])
        )

    return record


def described(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return tuple(thing.shape), thing.double().sum().item(), thing.flatten()[:4].tolist()
    if isinstance(thing, dict) and "loops" not in thing:  # that would be a checkpoint, which is compared by itself
        return {key: described(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [described(part) for part in thing]
    return thing if thing is None or isinstance(thing, int | float | str) else type(thing).__name__


COMPARED = (
    "loops",
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "epoch",
    "global_step",
    "current_model_state",
    "averaging_state",
)
"""Keys of a checkpoint."""


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Two checkpoints are the same to the bit."""
    mine, other = ({key: checkpoint.get(key) for key in COMPARED} for checkpoint in (ours, theirs))
    assert list(differences(mine, other, where)) == []


def assert_same_run(ours: Any, theirs: Any) -> None:
    """Two fits saved the same checkpoints and drew the same curves."""
    names = sorted(path.relative_to(theirs.folder) for path in theirs.folder.rglob("*.ckpt"))
    assert names == sorted(path.relative_to(ours.folder) for path in ours.folder.rglob("*.ckpt"))
    for name in names:
        mine, other = (torch.load(run.folder / name, weights_only=True) for run in (ours, theirs))
        assert_equal(mine, other, str(name))
    drawn, wanted = ({tag: sorted(points) for tag, points in curves(run.folder).items()} for run in (ours, theirs))
    assert drawn == wanted
