"""Many trials as one program, with validation, curves and checkpoints, compared with one trial after another.

    python -m benchmarks stack --data_dir data/covertype

The first epochs of the paper's 500 are timed and the others extrapolated; set-up, the first epoch (which compiles) and
checkpoints count as they are. Without a GPU, or with --quick, sizes are tiny and the times mean nothing.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.harness import ONLY, Options, Row, clear_memory, peak_gb
from mupscale.commands.cli import load_configuration
from mupscale.commands.config import apply_point
from mupscale.commands.lab.run import Run, prepare_process, with_run
from mupscale.commands.lab.space import for_trials
from mupscale.commands.lab.stack import train_stack
from mupscale.models.mlp import MLP

EPOCHS, TIMED = 500, 8
"""Epochs of the paper's runs, and of those that are timed here."""
EPOCH = 232
"""Steps of an epoch of the full Covertype, by batches of 2000."""


def make_runs(case: dict[str, Any], options: argparse.Namespace, folder: Path, epochs: int = EPOCHS) -> list[Run]:
    """The paper's MLP on Covertype at a width, or grown to it after two steps; by seed, or by learning rate."""
    epoch = 3 if options.quick else EPOCH
    changes: dict[str, Any] = {
        "trainer": {
            "max_epochs": epochs, "limit_train_batches": epoch, "precision": case["precision"],
            "log_every_n_steps": 2 if options.quick else 58,
        },
        "model": {"init_args": {"width": case["base"]}},
        "data": {"init_args": {"data_dir": options.data_dir}},
        "checkpoint": {"every_n_train_steps": TIMED // 2 * epoch},
    }  # fmt: skip
    if case["base"] != case["width"]:
        noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.3}}
        swap = {"at_step": 2, "width": case["width"], "noise": noise}
        changes["trainer"]["callbacks"] = [{"class_path": "UpscaleCallback", "init_args": swap}]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.parent / "changes.yaml"
    file.write_text(yaml.safe_dump(changes))
    files = ["--config", "configs/mlp/adamw/base.yaml", "--config", str(file)]
    config = for_trials(load_configuration(files, "sweep")[0])
    answer = []
    for index in range(case["trials"]):
        seed = index if case["seeds"] else 0
        point = {} if case["seeds"] else {"model.optimizer.lr": 0.02 * 1.02**index}
        name = f"trial={index}"
        answer.append(Run(with_run(apply_point(config, point), "last_epoch", seed, folder / name), folder / name, name))
    return answer


def time_stack(case: dict[str, Any], options: argparse.Namespace) -> Row:
    """The time of the trials of a case as one program, extrapolated from stacks of two lengths."""

    def train(folder: Path, epochs: int) -> int:
        runs = make_runs(case, options, folder / "trials", epochs)
        train_stack(runs, folder / "stack", "auto")
        return len(runs)

    fixed, epoch, count = extrapolated(train)
    steps = (3 if options.quick else EPOCH) / epoch
    flops = count * flops_of_step(case["width"], 8 if options.quick else 2000)
    return {
        "set-up and end": fixed,
        "epoch": epoch,
        "steps/s": steps,
        "TFLOP/s": flops * steps / 1e12,
        "minutes for 500 epochs": (fixed + EPOCHS * epoch) / 60,
        "peak GB": peak_gb(),
    }


def extrapolated(train: Callable[[Path, int], int]) -> tuple[float, float, int]:
    """The seconds of a training before and after its epochs and of an epoch, and what the training returned."""
    seconds = []
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "first", 2)  # reads the data, and compiles
        for epochs in (TIMED, 3 * TIMED):
            start = time.perf_counter()
            count = train(Path(folder) / str(epochs), epochs)
            seconds.append(time.perf_counter() - start)
    epoch = (seconds[1] - seconds[0]) / (2 * TIMED)
    return seconds[0] - TIMED * epoch, epoch, count


def flops_of_step(width: int, rows: int) -> float:
    module = MLP(width)
    module.configure_model()
    return module.training_flops((torch.zeros(rows, 54), torch.zeros(rows, dtype=torch.long)))


def time_single(case: dict[str, Any], options: argparse.Namespace) -> Row:
    """The time of trials one after another, extrapolated from single runs of two lengths."""

    def train(folder: Path, epochs: int) -> int:
        make_runs(case, options, folder, epochs)[1].make()
        return 1

    fixed, epoch, _ = extrapolated(train)
    minutes = case["trials"] * (fixed + EPOCHS * epoch) / 60
    return {"set-up and end": fixed, "epoch": epoch, "minutes for 500 epochs": minutes, "peak GB": peak_gb()}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    options.quick |= options.device.type != "cuda"
    many, seeds = (3, 2) if options.quick else (100, 5)
    small, wide, widest = (4, 16, 8) if options.quick else (100, 400, 2000)
    cases = {
        "sweep 1": {"trials": many, "base": small, "width": small, "precision": "32-true", "seeds": False},
        "sweep 2": {"trials": many, "base": small, "width": wide, "precision": "32-true", "seeds": False},
        "sweep 2, bf16": {"trials": many, "base": small, "width": wide, "precision": "bf16-mixed", "seeds": False},
        "5 seeds": {"trials": seeds, "base": widest, "width": widest, "precision": "32-true", "seeds": True},
    }
    for name in (name for name in cases if options.only in name):
        clear_memory()
        yield {"case": name, **cases[name], **time_stack(cases[name], options)}
        if options.separate:
            clear_memory()
            yield {"case": f"{name}, one by one", **cases[name], **time_single(cases[name], options)}


OPTIONS: Options = ONLY | {
    "--data_dir": {"help": "the folder of the full Covertype"},
    "--separate": {"action": "store_true", "help": "also one trial by itself"},
}
