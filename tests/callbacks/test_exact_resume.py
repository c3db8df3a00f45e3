"""What `self.log` logs in a resumed run is what the uninterrupted run logs."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric
from training_runs import Checkpoints, fit

from mupscale.callbacks.exact_resume import ExactResume
from mupscale.models.mlp import MLP


class Rows(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


class Talkative(MLP):
    """Logs values and metric objects, one of them at the end of an epoch only."""

    def __init__(self, width: int, base_width: int = 4, inputs: int = 6, outputs: int = 3) -> None:
        super().__init__(width, base_width, inputs, outputs)
        self.means, self.largest = MeanMetric(), MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=True, on_epoch=True)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx=sum)
        self.log("least", loss, on_step=False, on_epoch=True, reduce_fx="min")
        self.means(loss.detach())
        self.largest.update(loss.detach())
        self.log("object", self.means, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("largest", self.largest)


def logged(folder: Path, *callbacks: Any, **settings: Any) -> list[tuple[int | None, dict[str, float]]]:
    logger = Rows()
    settings = {"limit_train_batches": 4, "limit_val_batches": 0, "steps": 11, "logger": logger} | settings
    fit(Talkative(8), folder, ExactResume(), *callbacks, **settings)
    return logger.rows


def test_means_over_an_epoch_cover_the_batches_before_the_resume(tmp_path: Path) -> None:
    every = logged(tmp_path, Checkpoints(tmp_path), enable_checkpointing=True)
    assert [step for step, row in every if "mean_epoch" in row] == [3, 7, 10]
    for step in (3, 5, 8):  # in the first epoch, in a later one, and at the end of that
        rows = logged(tmp_path, ckpt=tmp_path / f"step={step}.ckpt")
        assert rows == [(at, row) for at, row in every if at is not None and at >= step - 1]
