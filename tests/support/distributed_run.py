"""A program that trains on two CPU processes, and cases of process_runs.py: `python distributed_run.py FOLDER CASE …`.

Torch's launcher forks them, so that none has to import anything. All runs are in one program, because starting
processes takes longer than training. Rank r writes FOLDER/r.pt; FOLDER/cases.pt has the cases.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import collector  # isort: skip  before what takes long to import
import mupscale  # first, so that torchvision can be imported beside a CPU-only torch

# isort: split
import distributed_modules
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from process_runs import STEPS, launched, left_by, run_cases
from tiny_modules import ADAMW, SGD, gpt2, mlp, rows
from training_runs import Record, quiet_trainer

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.checkpoints import load_validated
from mupscale.datamodules.resident import ResidentLoader
from mupscale.errors import UserError
from mupscale.methods import GrowthMethod
from mupscale.models.base import Growable

MAKE = {"mlp": (mlp, 24, ADAMW), "gpt2": (gpt2, 24, SGD)}

SAVED = 9
"""The step after which a run saves a checkpoint; it grows after six."""

RUNS: dict[str, Any] = {"narrow": {"grow": False}, "wide": {"grow": True}, "noisy": {"grow": True, "noise": 0.1}}


DEEPER: dict[str, Any] = {"layers": 4, "depth": "random", "width": 24}


class Data(LightningDataModule):
    def __init__(self, module: Growable) -> None:
        super().__init__()
        self.rows = rows(module, 80, torch.float32)

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        share = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return ResidentLoader(self.rows, 8, shuffle=True, drop_last=True, **share)


def learned() -> GrowthMethod:
    """A method that learns from the run's data."""
    return mupscale.methods.LiGO(steps=10, lr=0.01)


def strategy(name: str) -> Any:
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    whole = name == "fsdp, whole checkpoints"
    return ModelParallelStrategy(2, 1, save_distributed_checkpoint=not whole, process_group_backend="gloo")


def fit(
    kind: str,
    model: str,
    folder: Path,
    *callbacks: Callback,
    grow: bool,
    noise: float = 0.0,
    to: int | None = None,
    deeper: dict[str, Any] | None = None,
    method: GrowthMethod | None = None,
    ckpt: Path | None = None,
    **arguments: Any,
) -> tuple[dict[str, Any], Trainer]:
    seed_everything(1, verbose=False)
    make, target, optimizer = MAKE[model]
    module, record = make(optimizer=optimizer, **arguments), Record()
    size: dict[str, Any] = {"width": to or target} if deeper is None else deeper
    growth = UpscaleCallback(6, noise=mupscale.AdditiveNoise(noise) if noise else None, method=method, **size)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy(kind),
        max_steps=STEPS,
        gradient_clip_val=0.05,
        callbacks=[*callbacks, record, *([growth] if grow else [])],
        default_root_dir=folder,
        enable_checkpointing=bool(callbacks),
    )
    if ckpt is not None:
        load_validated(ckpt)  # as the commands do, before Lightning reads it
    trainer.fit(module, datamodule=Data(module), ckpt_path=ckpt)
    return left_by(trainer, module, record), trainer


def main(folder: Path) -> None:
    answers = {}
    for kind in ("ddp", "fsdp"):
        for model in MAKE:
            for name in ("narrow", "wide"):
                if (kind, model) == ("ddp", "gpt2") or (model, name) == ("mlp", "wide"):
                    continue  # process_runs.py has an MLP, and a growth in depth follows below
                answers[kind, model, name], trainer = fit(kind, model, folder / kind / model / name, **RUNS[name])
                if (kind, model, name) == ("ddp", "mlp", "narrow"):
                    trainer.save_checkpoint(folder / "base.ckpt")
        saver = ModelCheckpoint(folder / kind / "deeper", "{step}", every_n_train_steps=SAVED)
        settings = {"grow": True, "deeper": DEEPER, "base_layers": 2}
        answers[kind, "gpt2", "deeper"], _ = fit(kind, "gpt2", folder / kind / "deeper", saver, **settings)
    path = folder / "fsdp" / "deeper" / f"step={SAVED}.ckpt"
    answers["fsdp", "gpt2", "deeper, resumed"], _ = fit(
        "fsdp", "gpt2", folder / "fsdp", ckpt=path, **settings, layers=4, width=24
    )
    base = str(folder / "base.ckpt")
    answers["fsdp", "mlp", "from base"], _ = fit("fsdp", "mlp", folder / "fsdp", grow=True, init_from=base)
    for kind in ("ddp", "fsdp", "fsdp, whole checkpoints"):
        saver = ModelCheckpoint(folder / kind, "{step}", every_n_train_steps=SAVED)
        answers[kind, "mlp", "noisy"], _ = fit(kind, "mlp", folder / kind, saver, **RUNS["noisy"])
        for name, width in (("pre-upscale-6", 8), (f"step={SAVED}", 24)):
            # a sharded checkpoint loads before the module can read its width: the configuration must have it
            width = 8 if kind == "ddp" else width
            answers[kind, "mlp", name], _ = fit(
                kind, "mlp", folder / "again", **RUNS["noisy"], width=width, ckpt=folder / kind / f"{name}.ckpt"
            )
        if kind != "fsdp":
            continue
        fraction: dict[str, Any] = {"grow": True, "to": 20}
        saver = ModelCheckpoint(folder / f"{kind} fraction", "{step}", every_n_train_steps=SAVED)
        answers[kind, "mlp", "fraction"], _ = fit(kind, "mlp", folder / kind, saver, **fraction)
        answers[kind, "mlp", "fraction, resumed"], _ = fit(
            kind, "mlp", folder / "again", **fraction, width=20, ckpt=folder / f"{kind} fraction" / f"step={SAVED}.ckpt"
        )
    answers["ddp", "mlp", "learned"], _ = fit("ddp", "mlp", folder / "learned", grow=True, method=learned())
    try:
        fit("fsdp", "mlp", folder / "refused", grow=True, method=learned())
    except UserError as error:
        answers["fsdp", "mlp", "refused"] = str(error)
    torch.save(answers, folder / f"{os.environ['RANK']}.pt")
    distributed_modules.main(folder / "modules")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    collector.begin()
    place = Path(sys.argv[1])
    launched(2, main, place)
    torch.save(run_cases(sys.argv[2:], place / "cases"), place / "cases.pt")
