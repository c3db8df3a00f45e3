"""Runs of small modules inside `Trainer.fit`, what they leave behind, and comparisons of two of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from tiny_modules import rows
from torch import Tensor

from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.base import Growable
from mupscale.models.checkpoint import optimizer_names

BATCHES = 10
"""Batches of an epoch."""


class Record(Callback):
    """The loss of every batch and the step after it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(pl_module.train_loss))
        self.steps.append(trainer.global_step)


class Losses(Callback):
    """The losses of every batch, as the optimizers see them."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self.values.append(float(loss.detach()))


class BeforeStep(Callback):
    """Does something before a step; steps are counted from 0."""

    def __init__(self, step: int, function: Callable[[Trainer], Any]) -> None:
        self.step, self.function = step, function

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.function(trainer)


class Frozen(Callback):
    """Freezes the first layer, until a step; with None for ever."""

    def __init__(self, until: int | None = None) -> None:
        self.until = until

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.net.layers[0].requires_grad_(self.until is not None and trainer.global_step >= self.until)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.until:
            pl_module.net.layers[0].requires_grad_(True)


class AtEnds(Callback):
    """Does something at the end of every batch."""

    def __init__(self, function: Callable[[Trainer, Any], Any]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.function(trainer, pl_module)


def fit(*arguments: Any, **settings: Any) -> Any:
    """Trains as `fit_outside` says; the answer holds the trainer, the module, the losses and the steps."""
    with fit_outside(*arguments, **settings) as (trainer, named, answer):
        trainer.fit(**named)
    return answer


@contextmanager
def fit_outside(
    module: Growable, folder: Path, *callbacks: Callback, ckpt: Path | None = None, steps: int = 50, **settings: Any
) -> Iterator[tuple[Trainer, dict[str, Any], Any]]:
    """The trainer of a fit that is made inside of the context, the arguments of the fit, and what it answers."""
    seed_everything(1, verbose=False)
    settings = {"precision": "64-true", "max_steps": steps, "num_sanity_val_steps": 0} | settings
    dtype = torch.float64 if settings["precision"] == "64-true" else torch.float32
    record = Record()
    callbacks = (*callbacks, record)
    trainer = quiet_trainer(default_root_dir=folder, callbacks=list(callbacks), log_every_n_steps=1, **settings)
    train, val = rows(module, 8 * BATCHES, dtype), rows(module, 16, dtype)
    validation = ResidentLoader(val, 8, shuffle=False) if is_overridden("validation_step", module) else None
    loader = ResidentLoader(train, 8, shuffle=True, drop_last=True)
    arguments = {"model": module, "train_dataloaders": loader, "val_dataloaders": validation, "ckpt_path": ckpt}
    answer = SimpleNamespace(trainer=trainer, module=module)
    yield trainer, arguments, answer
    answer.losses, answer.steps = torch.tensor(record.losses, dtype=torch.float64), record.steps


def state(run: Any) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, by name."""
    answer = {name: tensor.clone() for name, tensor in run.module.state_dict().items()}
    for optimizer in run.trainer.optimizers:
        names = optimizer_names(run.module, optimizer)
        for index, tensors in optimizer.state_dict()["state"].items():
            answer |= {f"{names[index]} {key}": torch.as_tensor(value).clone() for key, value in tensors.items()}
    return answer


def assert_identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Two `state`s are equal to the bit."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def gap(one: Any, other: Any) -> float:
    """The largest difference of two runs' losses at any step."""
    assert one.steps == other.steps
    return float((one.losses - other.losses).abs().max())


def rates(run: Any) -> dict[str, float]:
    """The learning rate of every parameter."""
    (optimizer,) = run.trainer.optimizers
    names = iter(optimizer_names(run.module, optimizer))
    return {next(names): group["lr"] for group in optimizer.param_groups for _ in group["params"]}


class Checkpoints(ModelCheckpoint):
    """One of every step, `step=N.ckpt`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "{step}", every_n_train_steps=1, save_top_k=-1)


def quiet_trainer(**settings: Any) -> Trainer:
    """A trainer on the CPU that logs, saves and shows nothing but what the settings say."""
    parts = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return Trainer(**{"accelerator": "cpu", "devices": 1, **dict.fromkeys(parts, False), **settings})
