"""LightningCLI: a module of your own grows in mid-run, by four lines of its configuration.

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
"""

import mupscale  # noqa: F401  # before lightning, which may look for torchvision

# isort: split
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Points(LightningDataModule):
    def __init__(self, rows: int = 4096, batch_size: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        points = torch.randn(self.hparams["rows"], 16, generator=torch.Generator().manual_seed(0))
        labels = points[:, :4].argmax(1)
        return DataLoader(TensorDataset(points, labels), batch_size=self.hparams["batch_size"], shuffle=True)


class Classifier(LightningModule):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss


if __name__ == "__main__":
    LightningCLI(Classifier, Points, seed_everything_default=0)
