"""Trains modules of lightning_modules.py on two CPU processes, without and with a growth; rank r writes r.pt."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning_modules import EXAMPLES, rows
from torch.utils.data import DataLoader, TensorDataset
from training_runs import Losses, quiet_trainer

import mupscale
from mupscale.callbacks.upscale import UpscaleCallback

SETTINGS: dict[str, dict[str, Any]] = {
    "groups without decay": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "GAN": {},
}


def run(name: str, folder: Path, *swaps: Callback) -> dict[str, Any]:
    example, losses = EXAMPLES[name], Losses()
    seed_everything(0, verbose=False)
    module = example.make()
    trainer = quiet_trainer(
        **SETTINGS[name],
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=name == "GAN"),
        precision="64-true",
        max_epochs=3,
        logger=[DummyLogger()],
        default_root_dir=folder,
        callbacks=[losses, *swaps],
    )
    seed_everything(1 + trainer.global_rank, verbose=False)  # ranks draw unlike numbers
    trainer.fit(module, DataLoader(TensorDataset(*rows(example.kind, 64)), batch_size=8))
    return {"losses": torch.tensor(losses.values, dtype=torch.float64), "weights": dict(module.state_dict())}


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    noise = mupscale.AdditiveNoise(0.1)
    answer = {}
    for name in SETTINGS:
        growth = EXAMPLES[name].growth
        answer[name, "narrow"] = run(name, folder)
        answer[name, "wide"] = run(name, folder, UpscaleCallback(4, noise=None, **growth))
        answer[name, "noisy"] = run(name, folder, UpscaleCallback(4, noise=noise, **growth))
    torch.save(answer, folder / f"{torch.distributed.get_rank()}.pt")
