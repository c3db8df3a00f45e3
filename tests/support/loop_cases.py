"""Fits that a training loop must get right: options of the trainer, callbacks, loaders, and modules unlike ours."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
)
from observed_fits import Case
from tiny_modules import SCHEDULES, SGD, gpt2, mlp, resnet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import default_collate as collated

import mupscale
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.mlp import MLP

# --- modules that do what ours do not


class Talkative(MLP):
    """Logs from every hook it can, and hands more than a loss to the end of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["twice"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


class ShortEpochs(MLP):
    """Ends every epoch after four batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class MovedBatches(MLP):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]


class EpochSchedule(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedules.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
        }


class NamedBatches(MLP):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])


class Plain(LightningModule):
    """Nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters())


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class TakesIterator(Plain):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Endless(IterableDataset):
    """A data set that does not know how long it is."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.tensors, strict=True)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_step >= self.step


CASES = {
    "steps": Case(),
    "epochs": Case(settings={"max_steps": -1, "max_epochs": 3}),
    "steps and epochs": Case(settings={"max_steps": 25, "max_epochs": 2}),
    "sgd": Case(partial(mlp, optimizer=SGD)),
    "resnet": Case(resnet, settings={"max_steps": 5}),
    "gpt2": Case(gpt2, settings={"max_steps": 8}),
    "bf16-mixed": Case(settings={"precision": "bf16-mixed"}),
    "schedule by step": Case(partial(mlp, lr_scheduler=SCHEDULES["SequentialLR"])),
    "schedule by epoch": Case(partial(EpochSchedule, 8, 4, 6, 3)),
    "plateau": Case(partial(mlp, lr_scheduler=SCHEDULES["ReduceLROnPlateau"]), settings={"max_steps": 45}),
    "clipping": Case(settings={"gradient_clip_val": 0.05}),
    "clipping by value": Case(settings={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "validation inside epochs": Case(settings={"val_check_interval": 3}),
    "validation across epochs": Case(settings={"val_check_interval": 7, "check_val_every_n_epoch": None}),
    "limited epochs": Case(settings={"limit_train_batches": 4}),
    "ema": Case(callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
    "upscale": Case(
        callbacks=lambda: [UpscaleCallback(13, 24, noise=mupscale.AdditiveNoise(0.1)), LearningRateMonitor("step")]
    ),
    "curves": Case(callbacks=lambda: [Curves()], settings={"val_check_interval": 4}),
    "early stopping": Case(
        callbacks=lambda: [EarlyStopping("val/loss", min_delta=10, patience=1)], settings={"max_steps": 60}
    ),
    "should_stop": Case(callbacks=lambda: [StopAt(13)]),
    "self.log": Case(partial(Talkative, 8, 4, 6, 3), capture=False),
    "a callback made of functions": Case(
        callbacks=lambda: [LambdaCallback(on_train_batch_end=lambda *_: torch.rand(1))]
    ),
    "nothing of ours": Case(Plain, capture=False),
    "a DataLoader": Case(loader=lambda parts: DataLoader(TensorDataset(*parts), 8, shuffle=True)),
    "a ragged batch": Case(loader=lambda parts: ResidentLoader(parts, 14, shuffle=True)),
    "no length": Case(loader=lambda parts: DataLoader(Endless(parts), 8)),
    "named batches": Case(
        partial(NamedBatches, 8, 4, 6, 3),
        loader=lambda parts: DataLoader([{"x": x, "y": y} for x, y in zip(*parts, strict=True)], 8),
        settings={"limit_val_batches": 0},
    ),
    "a batch that is None": Case(
        Plain,
        loader=lambda parts: DataLoader(
            TensorDataset(*parts), 8, collate_fn=lambda rows: collated(rows) if rows[0][1] else None
        ),
        warns="yielded None",
        capture=False,
    ),
    # these go through Lightning's own loop
    "accumulation": Case(settings={"accumulate_grad_batches": 2}, capture=False),
    "accumulation from the second epoch": Case(
        callbacks=lambda: [GradientAccumulationScheduler({1: 2})], capture=False
    ),
    "a profiler": Case(settings={"profiler": "simple"}, capture=False),
    "64-true": Case(partial(mlp, optimizer=SGD), settings={"precision": "64-true"}, capture=False),
    "on_train_batch_start": Case(partial(ShortEpochs, 8, 4, 6, 3), settings={"max_steps": 15}, capture=False),
    "on_after_batch_transfer": Case(partial(MovedBatches, 8, 4, 6, 3), capture=False),
    "manual optimization": Case(ByHand, warns="ModelCheckpoint with manual optimization", capture=False),
    "dataloader_iter": Case(TakesIterator, warns="Here be dragons", capture=False),
}
