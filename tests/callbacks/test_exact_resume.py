"""What `self.log` logs of a step or an epoch in whose end a checkpoint was written is logged in the resumed run."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from training_runs import fit

from mupscale.callbacks.exact_resume import ExactResume, rng_state, set_rng_state
from mupscale.models.mlp import MLP


class Rows(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


class Talkative(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("of_step", loss, on_step=True, on_epoch=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("of_epoch", float(self.current_epoch))


def logged(folder: Path, *callbacks: Any, **settings: Any) -> list[tuple[int | None, dict[str, float]]]:
    logger = Rows()
    settings = {"limit_train_batches": 4, "limit_val_batches": 0, "steps": 11, "logger": logger} | settings
    fit(Talkative(8, 4, inputs=6, outputs=3), folder, ExactResume(), *callbacks, **settings)
    return logger.rows


def test_all_global_generators_continue() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]

    draw()  # a second normal number is kept for the next draw
    state = rng_state(torch.device("cpu"))
    wanted = draw()
    draw()
    set_rng_state(state, torch.device("cpu"))
    assert draw() == wanted


def test_what_was_to_be_logged_after_a_checkpoint_is_logged(tmp_path: Path) -> None:
    at_steps = ModelCheckpoint(tmp_path / "of_step", "{step}", every_n_train_steps=1, save_top_k=-1)
    at_epochs = ModelCheckpoint(tmp_path / "of_epoch", "{step}", save_on_train_epoch_end=True, save_top_k=-1)
    every = logged(tmp_path, at_steps, at_epochs, enable_checkpointing=True)
    assert [step for step, row in every if "of_epoch" in row] == [3, 7, 10]
    assert [step for step, row in every if "of_step" in row] == list(range(11))
    for name, steps in (("of_step", (3, 5, 8)), ("of_epoch", (4, 8))):
        for step in steps:
            begin = next(index for index, (at, row) in enumerate(every) if at == step - 1 and name in row)
            assert logged(tmp_path, ckpt=tmp_path / name / f"step={step}.ckpt") == every[begin:], (name, step)


class MovesTeacher(MLP):
    """Moves an average of its weights after each step, in a hook that Lightning calls after those of callbacks."""

    teacher: Tensor

    def __init__(self) -> None:
        super().__init__(8, 4, inputs=6, outputs=3)
        self.register_buffer("teacher", torch.zeros(2))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = next(self.parameters()).detach().sum()
        self.teacher.copy_(torch.stack([self.teacher[0] + 1, self.teacher[1].lerp(weights, 0.5)]))


def test_a_checkpoint_holds_what_the_hook_of_the_module_did_after_its_step(tmp_path: Path) -> None:
    def train(*callbacks: Any, **settings: Any) -> MovesTeacher:
        module = MovesTeacher()
        fit(module, tmp_path, ExactResume(), *callbacks, limit_val_batches=0, steps=6, **settings)
        assert "on_train_batch_end" not in vars(module)
        return module

    every_step = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    wanted = train(every_step, enable_checkpointing=True).teacher
    assert wanted[0] == 6
    for step in (2, 5):
        assert torch.equal(train(ckpt=tmp_path / f"step={step}.ckpt").teacher, wanted)
