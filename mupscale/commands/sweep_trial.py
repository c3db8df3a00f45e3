"""A trial of a sweep: ordinary runs of one configuration, one for each seed, resumed where a process died over them."""

import gc
import json
import logging
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml

from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.commands.fit import CLI, parsed
from mupscale.commands.resume import newest_checkpoint
from mupscale.commands.sweep_space import Config, Point, shown
from mupscale.commands.sweep_study import write

RESULT = "result.json"
"""In the folder of a run that is finished: its metric, and how long it took."""


def run_trial(config: Config, metric: str, folders: dict[int, Path]) -> tuple[list[float], float]:
    """Each seed's metric and the seconds they took, from runs in the folders by seed. A seed that diverges decides, and is the last."""
    values: list[float] = []
    seconds = 0.0
    for seed, folder in folders.items():
        value, took = run(with_run(config, metric, seed, folder), folder)
        values.append(value)
        seconds += took
        if math.isinf(value):
            break
    return values, seconds


def run(config: Config, folder: Path) -> tuple[float, float]:
    """A run's metric and the seconds it took; one that is finished is not repeated, one that was interrupted is resumed."""
    if (folder / RESULT).exists():
        result = json.loads((folder / RESULT).read_text())
        return float(result["value"]), result["seconds"]
    start = time.monotonic()
    path, _ = newest_checkpoint(folder) if (folder / "config.yaml").exists() else (None, {})
    torch.compiler.reset()  # dynamo stops compiling after a few networks
    if path is None:
        shutil.rmtree(folder, ignore_errors=True)  # what it has cannot be resumed
        with file_of(config) as file, logged(folder):
            cli = parsed(["fit", "--config", file])
    else:
        with logged(folder):
            cli = parsed(["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", str(path)], folder=folder)
    value, took = metric_of(cli), time.monotonic() - start
    del cli
    gc.collect()  # a trainer holds itself, and with it the network
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    write(folder / RESULT, json.dumps({"value": str(value), "seconds": took}) + "\n")
    return value, took


def metric_of(cli: CLI) -> float:
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, TrialMetric)).value  # type: ignore[attr-defined]


def with_run(config: Config, metric: str, seed: int, folder: Path) -> Config:
    """The configuration of one run: its seed, its folder, and what computes the metric."""
    answer = deepcopy(config)
    answer["seed_everything"] = seed
    answer["trainer"]["logger"] = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": str(folder.parent), "name": "", "version": folder.name, "default_hp_metric": False},
    }
    judge = {"class_path": f"{TrialMetric.__module__}.{TrialMetric.__qualname__}", "init_args": {"metric": metric}}
    answer["trainer"]["callbacks"] = [*(answer["trainer"]["callbacks"] or []), judge]
    return answer


def for_trials(config: Config) -> Config:
    """A configuration as every trial has it: on one device, quiet, and with one checkpoint at a time."""
    answer = deepcopy(config)
    trainer = answer["trainer"]
    if trainer["devices"] == "auto":
        trainer["devices"] = 1
    one = len(trainer["devices"]) == 1 if isinstance(trainer["devices"], list) else trainer["devices"] in (1, "1")
    if not one or trainer["num_nodes"] != 1:
        raise ValueError(
            f"trainer.devices = {trainer['devices']}, trainer.num_nodes = {trainer['num_nodes']}: a trial runs on one device; "
            "start the command once per device instead, with CUDA_VISIBLE_DEVICES"
        )
    if trainer["fast_dev_run"] or trainer["barebones"] or trainer["enable_checkpointing"] is False:
        raise ValueError("trainer.fast_dev_run, trainer.barebones, trainer.enable_checkpointing: a trial must be able to log and to resume")
    trainer["logger"] = False  # each gets its own
    trainer["enable_progress_bar"] = False
    trainer["callbacks"] = trainer["callbacks"] if isinstance(trainer["callbacks"], list | None) else [trainer["callbacks"]]
    answer["checkpoint"]["dirpath"] = None  # each has its own
    answer["checkpoint"]["save_top_k"] = min(1, abs(answer["checkpoint"]["save_top_k"]))
    return answer


def described(arguments: list[str]) -> Config:
    """The whole configuration of a command line, defaults and all; made once, so that what cannot be made is told now."""
    cli = parsed(arguments, run=False, parser_kwargs={"prog": "python -m mupscale sweep"})
    return yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))


def refuse_invalid(config: Config, key: str, value: Any) -> None:
    """ValueError if `fit` would not take the configuration, in which `key` was set to `value`."""
    with file_of(config) as file:
        try:
            parsed(["--config", file], run=False)
        except SystemExit as error:
            told = str(error.code).removeprefix("error: ")
            raise ValueError(f"--sweep {key}={shown(value)}: {told}") from error


def folder_name(cell: int, point: Point, names: dict[str, str]) -> str:
    """A trial's folder: its number and its values, as TensorBoard will show it."""
    values = ",".join(f"{names[key]}={shown(value)}" for key, value in point.items())
    plain = re.sub(r"[^\w.,=+-]+", "-", values)
    return f"{cell:03d}_{plain}"[:120]


def drop_checkpoints(folder: Path) -> None:
    """Deletes a finished run's checkpoints: the disk that a sweep needs must not grow with its trials."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


@contextmanager
def file_of(config: Config) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        yield str(path)


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """What a run says goes to log.txt in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log, redirect_stdout(log), redirect_stderr(log), without_announcements():
        yield


@contextmanager
def without_announcements() -> Iterator[None]:
    """Without what Lightning says about every trainer: seeds and devices."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
