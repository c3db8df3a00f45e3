"""Files of experiments, and results as if their runs had been made."""

from pathlib import Path
from typing import Any

import yaml
from command_line import LR, NOISE, config_of, small

from mupscale.commands.lab.run import record

ADDITIVE = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}


def described(protocol: str, trainer: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """The content of an experiment's file; keys that are None are left out. Its runs take a second: 20 steps."""
    content = {"protocol": protocol, "config": small(Path("c.yaml"), **(trainer or {})), **keys}
    return {key: value for key, value in content.items() if value is not None}


def upscale(**keys: Any) -> dict[str, Any]:
    defaults = {
        "small": [8, 16], "target": [16, 32], "seeds": [3, 4], "noise": ADDITIVE,
        "sweep_1": {LR: [0.001, 0.02]}, "sweep_2": {LR: [0.005], NOISE: [0.05, 5.0]},
    }  # fmt: skip
    return described(**{"protocol": "upscale", **defaults, **keys})


def file(content: Any) -> str:
    Path("e.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return "e.yaml"


def lr_in(config: Any) -> float:
    return config["model"]["init_args"]["optimizer"]["init_args"]["lr"]


def lr_of(run: Path) -> float:
    return lr_in(config_of(run))


def finish(folder: Path, value: float) -> None:
    """Leaves a result in the folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    record(folder, {"value": value, "seconds": 1.0})
