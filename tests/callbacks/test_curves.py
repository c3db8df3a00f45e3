"""The curves of a run: what a point of them is the mean of; the first loss that is not finite, in every loop."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from observed_fits import capture_on_cpu
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_modules import mlp, rows
from torch import Tensor
from torch.utils.data import DataLoader
from training_runs import fit, quiet_trainer

from mupscale.callbacks.captured_steps import CapturedSteps
from mupscale.callbacks.curves import Curves, NonFiniteLoss, first_bad, samples_of
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.cuda_graph import step_kind
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
        callbacks=[Curves(), losses, UpscaleCallback(6, 16, noise=None)],
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
                UpscaleCallback(2, 16, noise=None),
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
    for kind in (ReturnsTensor, ReturnsDict, StepsByHand):
        assert logged(kind, tmp_path) == (losses, metric), kind
    assert logged(ReturnsTensor, tmp_path, accumulate_grad_batches=2) == logged(
        MLP, tmp_path, accumulate_grad_batches=2
    )
    with pytest.warns(UserWarning, match=r"Skips.training_step returned no loss since the last log: train/loss is not"):
        losses, metric = logged(Skips, tmp_path)
    assert list(losses) == [5, 7]
    assert metric == pytest.approx(sum(losses.values()) / 2)
    message = r"metric last_50%: ReturnsNothing.training_step returned no loss in the last 4 steps. Return the loss$"
    with pytest.raises(UserError, match=message):
        logged(ReturnsNothing, tmp_path)
    assert logged(ReturnsNothing, tmp_path, "val/loss")[0].keys() == logged(MLP, tmp_path)[0].keys()


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


class Counts(LightningModule):
    def batch_size(self, batch: Any) -> int:
        return len(batch.rows)


class HasNumber(LightningModule):
    batch_size = 32


def test_any_module_may_count_its_samples() -> None:
    assert samples_of(Counts(), SimpleNamespace(rows="abc")) == 3
    assert samples_of(HasNumber(), torch.ones(5, 2)) == 5


def test_the_first_bad_loss_is_found_with_its_place() -> None:
    assert first_bad([]) is None
    losses = [torch.tensor(loss) for loss in (1.0, 2.0, math.inf, math.nan)]
    assert first_bad([(step, 8 if step < 2 else 16, loss) for step, loss in enumerate(losses)]) == (2, 16, math.inf)
    assert first_bad([(0, None, losses[0])]) is None


class Replayed:
    """A captured step whose fifth replay has a loss that is not finite."""

    replays = 0

    def __init__(self, gradients: Any, optimizer: Any, batch: Any) -> None:
        self.kind = step_kind(batch, optimizer)

    def __call__(self, batch: Any) -> Tensor:
        Replayed.replays += 1
        return torch.tensor(math.nan if Replayed.replays == 5 else 1.0)


def test_it_is_found_in_captured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayed, "replays", 0)
    capture_on_cpu(monkeypatch, Replayed)
    callbacks = CapturedSteps(cuda_graph=True), Curves(stop_on_nan=True)
    with pytest.raises(NonFiniteLoss, match=r"nan at step 7 \(the first step is 0\), width 8"):
        fit(mlp(), tmp_path, *callbacks, steps=20, precision="32-true")
    assert Replayed.replays == 5  # three steps are not captured


class Poisoned(type(mlp())):  # type: ignore[misc]
    """A module whose loss at step 6 is infinite."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        is_bad = self._trainer is not None and self.trainer.global_step == 6 and loss.device.type != "meta"
        return loss * math.inf if is_bad else loss


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulating"])
@pytest.mark.parametrize(("swap", "width"), [(3, 16), (6, 16), (7, 8)])
def test_the_width_is_that_of_the_step(settings: dict[str, Any], swap: int, width: int, tmp_path: Path) -> None:
    module = Poisoned(8, base_width=4, inputs=6, outputs=3)
    with pytest.raises(NonFiniteLoss, match=rf"inf at step 6 \(the first step is 0\), width {width}"):
        fit(module, tmp_path, Curves(stop_on_nan=True), UpscaleCallback(swap, 16, noise=None), steps=20, **settings)


def test_a_run_that_does_not_log_looks_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.callbacks.curves._MOST_RECENT", 4)
    monkeypatch.setattr("mupscale.callbacks.curves.log_interval", lambda trainer: 0)
    module, curves = Poisoned(8, base_width=4, inputs=6, outputs=3), Curves()
    with pytest.warns(UserWarning, match="the training loss is inf at step 6") as caught:
        fit(module, tmp_path, curves, steps=20)
    assert len([each for each in caught if "training loss" in str(each.message)]) == 1
    assert len(curves._recent) < 4
