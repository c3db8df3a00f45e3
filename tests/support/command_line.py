"""Command lines that fail, and small configurations for commands that train."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from mupscale.__main__ import main

LR, NOISE = "model.optimizer.lr", "UpscaleCallback.noise.std"
"""Keys that sweeps of a small configuration vary."""


def refused(*arguments: str) -> str:
    """The one line of a command that fails."""
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    assert isinstance(exit.value.code, str)  # which python prints, and exits with 1
    assert "\n" not in exit.value.code
    return exit.value.code


def upscale(at_step: int, width: int) -> dict[str, Any]:
    """An UpscaleCallback with noise, as a configuration has it."""
    noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
    return {"class_path": "UpscaleCallback", "init_args": {"at_step": at_step, "width": width, "noise": noise}}


def small(path: Path, *callbacks: dict[str, Any], width: int = 8, **trainer: Any) -> str:
    """Writes a configuration that trains in a second: 20 steps, 6 an epoch. Its path, as a command line takes it."""
    config = {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 20,
            "limit_val_batches": 1,
            "val_check_interval": 6,
            "log_every_n_steps": 1,
            "callbacks": list(callbacks),
            **trainer,
        },
        "model": {
            "class_path": "MLP",
            "init_args": {
                "width": width,
                "base_width": 8,
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
            },
        },
        "data": {"class_path": "Covertype", "init_args": {"batch_size": 1000}},
        "checkpoint": {"every_n_train_steps": 5},
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def trials(out: Path) -> list[dict[str, str]]:
    """The rows of a sweep's table."""
    with open(out / "trials.csv") as file:
        return list(csv.DictReader(file))


def config_of(run: Path) -> Any:
    """The configuration of a run."""
    return yaml.safe_load((run / "config.yaml").read_text())


def swap_of(run: Path) -> Any:
    """The arguments of the one UpscaleCallback of a run."""
    callbacks = config_of(run)["trainer"]["callbacks"]
    (swap,) = (each["init_args"] for each in callbacks if each["class_path"].endswith("UpscaleCallback"))
    return swap
