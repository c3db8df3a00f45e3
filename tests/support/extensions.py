"""Classes of a user's own, which configurations in tests name by `class_path`."""

import time
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from mupscale.base_shapes import apply_mup
from mupscale.datamodules.covertype import Covertype
from mupscale.models.mlp import MLP


class Marker(Callback):
    """Does nothing, and can be found in a list."""


class Silent(Logger):
    """Logs nothing; `trainer.log_dir` is the folder of all its runs."""

    def __init__(self, save_dir: str, name: str, version: str) -> None:
        super().__init__()
        self.place = save_dir, name, version

    save_dir = property(lambda self: self.place[0])
    name = property(lambda self: self.place[1])
    version = property(lambda self: self.place[2])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass


class UnscaledMLP(MLP):
    """Trained as if there were no muP."""

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        return self.optimizer_callable(self.net.parameters())


class ScaledByWidthMLP(MLP):
    """A loss with a constant that depends on the width."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) / self.width**0.5


class OneGroupMLP(UnscaledMLP):
    """Has a schedule that needs a run."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [LambdaLR(optimizer, lambda step: 1 - step / steps)]


class TwoOptimizersMLP(MLP):
    """Trains matrices and vectors with two optimizers, the first with a schedule of absolute rates."""

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        matrices = [parameter for parameter in self.net.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.net.parameters() if parameter.ndim < 2]
        first = apply_mup(AdamW(matrices, lr=0.01), self.net)
        second = apply_mup(SGD(vectors, lr=0.1, momentum=0.9), self.net)
        return [first, second], [CosineAnnealingLR(first, 50, eta_min=1e-3)]


class Even(MLP):
    """Takes even widths only."""

    def build(self, width: Any) -> nn.Module:
        assert width % 2 == 0, f"width {width} is odd"
        return super().build(width)


class Hold(Callback):
    """Stops a run after 30 steps, as long as a file `hold` names a part of its folder's path."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 30:
            while holds(str(trainer.log_dir)):
                time.sleep(0.05)


def holds(folder: str) -> bool:
    try:
        return Path("hold").read_text() in folder
    except FileNotFoundError:
        return False


class Crash(Callback):
    """Ends a run before the step that a test names."""

    at = -1

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == Crash.at:
            raise Crashed


class Crashed(Exception):
    """What Crash raises."""


class FrozenMLP(MLP):
    """Freezes its first layer, and doubles its output, where it makes its network."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            assert self.net is not None
            next(self.net.parameters()).requires_grad_(False)
            self.net.register_forward_hook(lambda module, inputs, output: 2 * output)


class WidthOfRows(Covertype):
    """Saves an argument that models also have."""

    def __init__(self, batch_size: int = 500, width: int = 54) -> None:
        super().__init__(batch_size=batch_size)
        self.save_hyperparameters()


class LoggingLoss(MLP):
    """Logs where it computes its loss."""

    def stacked_losses(self) -> None:
        return None

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.log("mine", loss)
        return loss


class MaskedLoss(MLP):
    """Leaves rows out of its loss: how many depends on their values."""

    def stacked_losses(self) -> None:
        return None

    def loss(self, batch: Any) -> Tensor:
        rows, labels = batch
        kept = labels > 0
        return nn.functional.cross_entropy(self(rows)[kept], labels[kept])


class Recurrent(MLP):
    """An LSTM over a sequence of one row."""

    def stacked_losses(self) -> None:
        return None

    def build(self, width: Any) -> nn.Module:
        return RecurrentNet(self.hparams["inputs"], width, self.hparams["outputs"])


class RecurrentNet(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.readout = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(self.first(x).unsqueeze(1))[0].squeeze(1))


class OwnStep(MLP):
    """Trains by a step of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 2 * super().training_step(batch, batch_idx)


class Dropping(MLP):
    """An MLP with dropout."""

    def build(self, width: Any) -> nn.Module:
        return DroppingNet(self.hparams["inputs"], width, self.hparams["outputs"])


class DroppingNet(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.dropout = nn.Dropout(0.3)
        self.readout = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.dropout(self.first(x).relu()))


class Counting(Callback):
    """Notes the steps after which its hook is called, of all runs together."""

    steps: ClassVar[list[int]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        Counting.steps.append(trainer.global_step)
