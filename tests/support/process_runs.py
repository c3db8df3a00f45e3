"""Trains on 2, 4 and 1 processes in turn, across a growth; distributed_run.py is the program.

Torch's launcher forks the processes of each part, so that none has to import anything.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import mupscale  # first, so that torchvision can be imported beside a CPU-only torch

# isort: split
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_modules import ADAMW, gpt2, mlp, rows
from torch.distributed.checkpoint import state_dict  # noqa: F401  before the forks
from torch.distributed.fsdp import fully_shard  # noqa: F401
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from training_runs import Record, quiet_trainer

from mupscale import __main__ as command_line
from mupscale.callbacks.run_checkpoint import write_whole_files
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.base import Growable
from mupscale.models.checkpoint import optimizer_names
from mupscale.models.fsdp2 import FSDP2  # noqa: F401  registers it
from mupscale.sharding import gathered

MAKE = {"mlp": mlp, "gpt2": gpt2}
AT, STEPS, WIDTH = 6, 12, 24
"""The growth, the length of a run, and the width after it."""

PARTS = ((2, 0, 7, None), (4, AT, 8, f"pre-upscale-{AT}"), (1, 8, STEPS, "step=8"))
"""Processes, first step, last step, checkpoint: the second part begins before the growth, the third after it."""

WIDE = "widened"
"""The checkpoint that is made offline, in place of the growth inside the run."""

OFFLINE = "fsdp2, widened offline"

CASES = {
    "ddp": ("mlp", 0.0, "64-true", ("ddp",) * 3),
    "fsdp2": ("mlp", 0.0, "32-true", ("fsdp2",) * 3),
    OFFLINE: ("mlp", 0.0, "32-true", ("fsdp2",) * 3),
    "fsdp2 with noise": ("gpt2", 0.1, "32-true", ("fsdp2",) * 3),
    "from ddp to fsdp2 to one process, with noise": ("mlp", 0.1, "32-true", ("ddp", "fsdp2", "auto")),
}
"""Model, noise, precision, and the strategy of each part."""


def fit(
    model: str, noise: float, precision: Any, kind: str, folder: Path, part: tuple[int, int, int, str | None]
) -> dict[str, Any]:
    """Trains one part of a run in this process, which is one of several."""
    processes, first, last, start = part
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    # a rate and an eps at which rounding does not grow over the run
    optimizer = partial(ADAMW, lr=1e-3, eps=1e-4)
    module, record = MAKE[model](WIDTH if first > AT or start == WIDE else 8, optimizer=optimizer), Record()
    growth = UpscaleCallback(AT, WIDTH, noise=mupscale.AdditiveNoise(noise) if noise else None)
    trainer = quiet_trainer(
        devices=processes,
        strategy=kind,
        max_steps=last,
        precision=precision,
        gradient_clip_val=0.05,
        callbacks=[record, growth, ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)],
        default_root_dir=folder,
        enable_checkpointing=True,
    )
    write_whole_files(trainer)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    share = {"rank": int(os.environ.get("RANK", "0")), "world_size": processes}
    loader = ResidentLoader(rows(module, 80, dtype), 8, shuffle=True, drop_last=True, **share)
    trainer.fit(module, loader, ckpt_path=None if start is None else folder / f"{start}.ckpt")
    return left_by(trainer, module, record)


def left_by(trainer: Trainer, module: Growable, record: Record) -> dict[str, Any]:
    """The losses of a run, means over its processes, and its steps; weights and optimizer state by name, gathered."""
    assert module.net is not None
    (used,) = trainer.optimizers
    state = {name: gathered(parameter.detach()).clone() for name, parameter in module.net.named_parameters()}
    parameters = [parameter for group in used.param_groups for parameter in group["params"]]
    for name, parameter in zip(optimizer_names(module, used), parameters, strict=True):
        state |= {f"{name} {key}": gathered(value).clone() for key, value in used.state[parameter].items()}
    losses = torch.tensor(record.losses, dtype=torch.float64)
    return {
        "losses": trainer.strategy.reduce(losses, reduce_op="mean"),
        "steps": record.steps,
        "width": module.width,
        "state": state,
    }


def widen_offline(folder: Path) -> None:
    """Widens the sharded checkpoint before the growth into another one."""
    narrow, wide = (str(folder / f"{name}.ckpt") for name in (f"pre-upscale-{AT}", WIDE))
    command_line.main(["upscale", narrow, "--width", str(WIDTH), "--noise", "none", "--out", wide])


def launched(processes: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function returns on each rank."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="processes", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.05, start_method="fork",
    )  # fmt: skip
    answers = elastic_launch(config, function)(*arguments)
    return [answers[rank] for rank in range(processes)]


def run_cases(names: Iterable[str], folder: Path) -> dict[Any, Any]:
    """What every rank of every part of every run reports."""
    answers: dict[Any, Any] = {}
    for name in names:
        model, noise, precision, kinds = CASES[name]
        case = model, noise, precision
        if (*case, "whole") not in answers:
            answers[*case, "whole"] = launched(1, fit, *case, "auto", folder / name / "whole", (1, 0, STEPS, None))
        answers[name] = []
        for kind, part in zip(kinds, PARTS, strict=True):
            if name == OFFLINE and part[0] == 4:
                widen_offline(folder / name)
                part = (*part[:3], WIDE)
            answers[name].append(launched(part[0], fit, *case, kind, folder / name, part))
    return answers
