"""Trains modules of lightning_modules.py on two CPU processes, without and with a growth.

`python -m torch.distributed.run --nproc-per-node 2 … FOLDER`; rank r writes FOLDER/r.pt.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import collector  # isort: skip  before what takes long to import
import mupscale

# isort: split
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning_modules import EXAMPLES, rows
from torch.utils.data import DataLoader, TensorDataset

from mupscale.callbacks.upscale import UpscaleCallback

SETTINGS: dict[str, dict[str, Any]] = {
    "groups without decay": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "GAN": {},
    "vision transformer": {},
}


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        self.values.append(float(loss.detach()))


def run(name: str, folder: Path, *swaps: Callback) -> dict[str, Any]:
    example, losses = EXAMPLES[name], Losses()
    seed_everything(0, verbose=False)
    module = example.make()
    trainer = Trainer(
        **SETTINGS[name],
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=name == "GAN"),
        precision="64-true",
        max_epochs=3,
        logger=[DummyLogger()],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, *swaps],
    )
    seed_everything(1 + trainer.global_rank, verbose=False)  # ranks draw unlike numbers
    trainer.fit(module, DataLoader(TensorDataset(*rows(example.kind, 64)), batch_size=8))
    return {"losses": torch.tensor(losses.values, dtype=torch.float64), "weights": dict(module.state_dict())}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    noise = mupscale.AdditiveNoise(0.1)
    answer = {}
    for name in SETTINGS:
        growth = EXAMPLES[name].growth
        answer[name, "narrow"] = run(name, folder)
        answer[name, "wide"] = run(name, folder, UpscaleCallback(4, **growth))
        answer[name, "noisy"] = run(name, folder, UpscaleCallback(4, noise=noise, **growth))
    torch.save(answer, folder / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    collector.begin()
    main(Path(sys.argv[1]))
