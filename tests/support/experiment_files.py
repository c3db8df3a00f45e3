"""Files of experiments, and results as if their runs had been made."""

from pathlib import Path
from typing import Any

import yaml
from command_line import LR, NOISE, small

from mupscale.commands.run import write_result

ADDITIVE = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}


def described(trainer: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """The content of an experiment's file; keys that are None are left out. Its runs take a second: 20 steps."""
    defaults = {
        "config": small(Path("c.yaml"), **(trainer or {})), "small": [8, 16], "target": [16, 32], "seeds": [3, 4],
        "noise": ADDITIVE, "sweep_1": {LR: [0.001, 0.02]}, "sweep_2": {LR: [0.005], NOISE: [0.05, 5.0]},
    }  # fmt: skip
    return {key: value for key, value in {**defaults, **keys}.items() if value is not None}


def file(content: Any) -> str:
    Path("e.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return "e.yaml"


def finish(folder: Path, value: float) -> None:
    """Leaves a result in the folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_result(folder, {"value": value, "seconds": 1.0})
