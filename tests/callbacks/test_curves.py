"""The curves of a run: what a point of them is the mean of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_modules import mlp, rows
from torch.utils.data import DataLoader
from training_runs import quiet_trainer

from mupscale.callbacks.curves import Curves
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.errors import UserError
from mupscale.models.mlp import MLP


class Losses(Callback):
    """The loss of every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(pl_module.train_loss))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_point_is_the_mean_since_the_last(accumulate: int, tmp_path: Path) -> None:
    losses = Losses()
    trainer = quiet_trainer(
        max_steps=11,
        log_every_n_steps=4,
        accumulate_grad_batches=accumulate,
        logger=TensorBoardLogger(tmp_path),
        callbacks=[Curves(), losses, UpscaleCallback(6, 16)],
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


class Masked(MLP):
    """Its loss looks at values: FLOPs cannot be counted."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.log("mine", loss)
        return loss if loss.item() < 1e6 else 0 * loss


def test_a_run_whose_flops_cannot_be_counted_has_the_other_curves(tmp_path: Path) -> None:
    losses = Losses()

    def fit(steps: int, checkpoint: Path | None = None) -> None:
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            log_every_n_steps=2,
            logger=TensorBoardLogger(tmp_path, name="", version=""),
            callbacks=[
                Curves(),
                losses,
                UpscaleCallback(2, 16),
                ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Masked(8, 4, inputs=6, outputs=3)
        loader = ResidentLoader(rows(module, 8 * 8, torch.float32), 8, shuffle=False)
        trainer.fit(module, loader, loader, ckpt_path=checkpoint)

    with pytest.warns(UserWarning, match="the run has no curves against FLOPs: the FLOPs of Masked") as warned:
        fit(6)
    assert len([each for each in warned if "FLOPs" in str(each.message)]) == 1
    fit(8, tmp_path / "checkpoints/epoch=0-step=6.ckpt")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 3, 5, 7]
    assert [event.step for event in events.Scalars("by_samples/train/loss")] == [16, 32, 48, 64]
    assert not [tag for tag in tags if "flops" in tag or "peak" in tag]
    assert "throughput/steps_per_second" in tags
    # what `loss` logs is that of the step, not of other calls: those around the growth, for example
    mine = {event.step: event.value for event in events.Scalars("mine")}
    assert [mine[step] for step in (1, 3)] == pytest.approx([losses.seen[step] for step in (1, 3)])


class ReturnsTensor(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("mine", loss)
        return loss


class ReturnsDict(MLP):
    """It has no `loss` that could be called apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)[0], "further": batch_idx}

    def loss(self, batch: Any) -> Any:
        return super().loss(batch), "further"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class StepsByHand(MLP):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return self.returned(loss)

    def returned(self, loss: torch.Tensor) -> Any:
        return {"loss": loss}


class SetsLoss(StepsByHand):
    def returned(self, loss: torch.Tensor) -> Any:
        self.train_loss = loss.detach()


class ReturnsNothing(StepsByHand):
    def returned(self, loss: torch.Tensor) -> Any:
        return None


class Skips(MLP):
    """Skips the first half of its steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch_idx >= 4 else None


def logged(kind: type[MLP], folder: Path, metric: str = "last_50%", **settings: Any) -> tuple[dict[int, float], float]:
    """The logged losses of a run of eight batches, and its metric in a sweep."""
    torch.manual_seed(0)
    judge = TrialMetric(metric)
    trainer = quiet_trainer(
        max_epochs=1, log_every_n_steps=2, logger=TensorBoardLogger(folder), callbacks=[Curves(), judge], **settings
    )
    module = kind(8, 4, inputs=6, outputs=3)
    loader = ResidentLoader(rows(module, 8 * 8, torch.float32), 8, shuffle=False)
    trainer.fit(module, loader, loader)
    events = EventAccumulator(trainer.log_dir)
    events.Reload()
    assert events.Scalars("width")
    has_loss = "train/loss" in events.Tags()["scalars"]
    return {each.step: each.value for each in (events.Scalars("train/loss") if has_loss else [])}, judge.value


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run has no curves against FLOPs")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_the_loss_of_an_own_training_step(tmp_path: Path) -> None:
    losses, metric = logged(MLP, tmp_path)
    assert len(losses) == 4
    for kind in (ReturnsTensor, ReturnsDict, StepsByHand, SetsLoss):
        assert logged(kind, tmp_path) == (losses, metric), kind
    assert logged(ReturnsTensor, tmp_path, accumulate_grad_batches=2) == logged(
        MLP, tmp_path, accumulate_grad_batches=2
    )
    with pytest.warns(UserWarning, match=r"Skips.training_step returned no loss since the last log: train/loss is not"):
        losses, metric = logged(Skips, tmp_path)
    assert list(losses) == [5, 7]
    assert metric == pytest.approx(sum(losses.values()) / 2)
    message = r"metric last_50%: ReturnsNothing.training_step returned no loss in the last 4 steps. Return the loss, or"
    with (
        pytest.warns(UserWarning, match="ReturnsNothing.training_step returned no loss since the last log"),
        pytest.raises(UserError, match=message),
    ):
        logged(ReturnsNothing, tmp_path)
    with pytest.warns(UserWarning, match="ReturnsNothing.training_step returned no loss since the last log"):
        losses, metric = logged(ReturnsNothing, tmp_path, "val/loss")
    assert losses == {}
    assert 0 < metric < 2


class OfAnyLength(MLP):
    """Every position of a sequence is a row."""

    def loss(self, batch: Any) -> torch.Tensor:
        return self(batch["inputs"]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def test_samples_and_flops_of_batches_of_several_lengths(tmp_path: Path) -> None:
    batches = [{"inputs": torch.ones(5, length, 6), "labels": torch.ones(5)} for length in (2, 4, 2, 8)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    curves = Curves()
    trainer = quiet_trainer(max_epochs=1, callbacks=[curves], default_root_dir=tmp_path)
    module = OfAnyLength(8, 4, inputs=6, outputs=3)
    trainer.fit(module, loader, loader)
    assert curves.spent == {"samples": 4 * 5, "flops": (2 + 4 + 2 + 8) / 2 * module.training_flops(batches[0])}
