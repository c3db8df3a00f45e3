"""A tiny version of any experiment, by fixed rules: it shows in minutes on a CPU that the experiment runs.

Widths are divided by one number, lengths cut to a few steps, grids to two trials, growths to two, seeds, shares,
noises and schedules to one; growth methods that are compared have one trial each; data are the embedded samples, or
random images. Protocol, methods, factors of growth, model and optimizer stay what they are.
"""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from mupscale.commands.config import Config, class_name
from mupscale.commands.lab.file import Description
from mupscale.commands.lab.space import Axis

LEAST_WIDTH = 4
STEPS, WARM_UP, EPOCHS, TIMING_STEPS = 10, 2, 2, 10

IMAGE_COUNT = 8
IMAGES = "quick_data"
"""The folder of random images, in that of the experiment."""

DATA: dict[str, Config] = {
    "Covertype": {"data_dir": None, "batch_size": 1000},
    "FineWeb": {"data_dir": None, "batch_size": 4, "context": 16},
    "CIFAR100": {"batch_size": 4},
}
"""Arguments of data modules by class; others keep theirs."""

MODEL = {"layers": 2, "heads": 2, "head_dim": 2, "vocabulary": 4096, "context": 16, "compile": False}
"""Arguments of models that have them; 4,096 is the vocabulary of the embedded text."""


def quick_content(description: Description, out: Path) -> dict[str, Any]:
    """The content of the file of a tiny version of an experiment, which will be in the folder `out`."""
    answer = deepcopy(description.content)
    sizes = [key for key in ("small", "target", "middle", "growths") if key in answer]
    divisor = divisor_of(widths_in([answer[key] for key in sizes]))
    for key in sizes:
        answer[key] = divided(answer[key], divisor)
    if "growths" in answer:
        answer["growths"] = answer["growths"][:2]
    answer["seeds"] = description.seeds[:1]
    tables = answer["sweeps"] if description.protocol == "transfer" else answer
    for name, axes in description.sweeps.items():
        tables[name] = few_trials(axes, one=bool(description.methods) and name == "sweep_2")
    if description.midrun is not None:
        shares = description.midrun.shares
        answer["shares"] = answer["tuned_at"] = [shares[len(shares) // 2]]
        answer["noises"] = dict([[*description.midrun.noises.items()][-1]])
        answer["schedules"] = shortened(dict([[*description.midrun.schedules.items()][-1]]))
        answer["timing_steps"] = TIMING_STEPS
    files = answer["config"] if isinstance(answer["config"], list) else [answer["config"]]
    answer["config"] = [*files, overlay(description.common, divisor, out)]
    return answer


# --- widths and grids


def widths_in(value: Any) -> list[int]:
    """All numbers that are widths in a size, or in a list of sizes."""
    if isinstance(value, list):
        return [width for each in value for width in widths_in(each)]
    return widths_in(value["width"]) if isinstance(value, dict) else [value]


def divisor_of(widths: list[int]) -> int:
    """The largest number that leaves all widths whole, even (for two heads), and at least LEAST_WIDTH.

    >>> divisor_of([100, 400, 500, 2000]), divisor_of([10, 20])
    (25, 1)
    """
    common = math.gcd(*widths)
    fitting = [each for each in range(1, common + 1) if common % each == 0 and common // each % 2 == 0]
    return max((each for each in fitting if min(widths) // each >= LEAST_WIDTH), default=1)


def divided(width: Any, divisor: int, multiple_of: int = 1) -> Any:
    """A width, or a size, divided; if that is not whole, a smaller multiple of `multiple_of`, at least that."""
    if isinstance(width, dict):
        return {**width, "width": divided(width["width"], divisor)}
    if isinstance(width, list):
        return [divided(each, divisor, multiple_of) for each in width]
    return max(multiple_of, width // divisor // multiple_of * multiple_of)


def few_trials(axes: list[Axis], *, one: bool) -> dict[str, list[Any]]:
    """A grid of one value of each axis, in the middle; unless it has `one` trial, the first axis' first and last."""
    answer = {axis.key: [axis.values[len(axis.values) // 2]] for axis in axes}
    first = axes[0].values
    return answer if one else {**answer, axes[0].key: [*first[:1], *first[1:][-1:]]}


# --- the configuration


def overlay(common: Config, divisor: int, out: Path) -> Config:
    data, model = common["data"], common["model"]["init_args"]
    arguments = dict(DATA.get(class_name(data), {}))
    if class_name(data) == "CIFAR100":
        arguments["data_dir"] = str(out / IMAGES)
    schedule = model.get("lr_scheduler")
    smaller: Config = {name: value for name, value in MODEL.items() if model.get(name) is not None}
    if "base_width" in model:
        smaller["base_width"] = divided(model["base_width"], divisor, 2 if "heads" in model else 1)  # for two heads
    if schedule:
        smaller["lr_scheduler"] = shortened(schedule)
    trainer = trainer_overlay(common["trainer"])
    if schedule and "max_epochs" in trainer:
        trainer["limit_train_batches"] = STEPS // EPOCHS  # so that a schedule ends with the run
    return {
        "trainer": trainer,
        "model": {"init_args": smaller},
        "data": {"init_args": arguments},
        "checkpoint": {"every_n_train_steps": 1000},
        "loop": {"cuda_graph": False, "tf32": False},
    }


def shortened(schedule: Any) -> Any:
    """A schedule, at any depth of dictionaries, with a short warm-up and the length of a run."""
    if not isinstance(schedule, dict):
        return schedule
    answer = {key: shortened(value) for key, value in schedule.items()}
    for key, length in (("warmup", WARM_UP), ("steps", STEPS)):
        if isinstance(answer.get(key), int):
            answer[key] = min(answer[key], length)
    return answer


def trainer_overlay(trainer: Config) -> Config:
    answer: Config = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "log_every_n_steps": 1,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
    }
    if trainer["max_steps"] not in (None, -1):
        answer["max_steps"] = STEPS
    if trainer["max_epochs"] not in (None, -1):
        answer["max_epochs"] = EPOCHS
    if trainer["check_val_every_n_epoch"] is None:
        answer["val_check_interval"] = STEPS // 2
    else:
        answer["check_val_every_n_epoch"] = 1
    return answer


def write_images(folder: Path) -> None:
    draw = np.random.default_rng(0)
    content: dict[str, Any] = {}
    for part in ("train", "test"):
        content[f"x_{part}"] = draw.integers(256, size=(IMAGE_COUNT, 32, 32, 3), dtype=np.uint8)
        content[f"y_{part}"] = draw.integers(100, size=IMAGE_COUNT)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "cifar100.npz", **content)
