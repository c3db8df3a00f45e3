"""Classes that the configurations of attack_variants.py name: models, a schedule, and data of every kind."""

from collections.abc import Iterator
from typing import Any

import torch
from interrupted import DropoutMLP
from lightning.pytorch import LightningDataModule
from tiny_modules import gpt2, mlp, resnet, rows
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.mlp import MLPNet

BATCH, BATCHES = 8, 4
"""Rows of a batch, and batches of an epoch."""


class FrozenMLP(DropoutMLP):
    """Never trains its first layer."""

    def configure_model(self) -> None:
        super().configure_model()
        assert isinstance(self.net, MLPNet)
        self.net.layers[0].requires_grad_(False)


class WarmUp(SequentialLR):
    """A linear warm-up, then a cosine."""

    def __init__(self, optimizer: Optimizer, steps: int, total: int) -> None:
        schedules = [LinearLR(optimizer, 0.1, total_iters=steps), CosineAnnealingLR(optimizer, total - steps)]
        super().__init__(optimizer, schedules, [steps])


class Rows(LightningDataModule):
    """A few rows for the tiny MLP, ResNet or GPT-2; with workers, through torch's DataLoader."""

    def __init__(self, model: str = "mlp", workers: int = 0) -> None:
        super().__init__()
        self.module = {"mlp": mlp, "resnet": resnet, "gpt2": gpt2}[model]()
        self.workers = workers

    def train_dataloader(self) -> Any:
        tensors = rows(self.module, BATCH * BATCHES, torch.float32)
        if self.workers:
            return WorkedLoader(tensors, self.workers)
        return ResidentLoader(tensors, BATCH, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return ResidentLoader(rows(self.module, BATCH, torch.float32), BATCH, shuffle=False)


class WorkedLoader:
    """Batches made by other processes, in an order that depends on the epoch; can be resumed at any batch."""

    def __init__(self, tensors: tuple[Tensor, ...], workers: int) -> None:
        self.data, self.workers = TensorDataset(*tensors), workers
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        if self.position == BATCHES:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)][self.position :]
        generator = torch.Generator().manual_seed(self.epoch)  # or the loader draws from the run's own
        for batch in DataLoader(self.data, batch_sampler=batches, num_workers=self.workers, generator=generator):
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]
