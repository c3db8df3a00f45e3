"""A trial of a sweep: ordinary runs of one configuration, one for each seed, resumed where a process died over them."""

import gc
import json
import logging
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path

import torch
import yaml

from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.commands.cli import CLI, LOGGER, parsed
from mupscale.commands.config import Config, Point, at, brief
from mupscale.commands.resume import newest_checkpoint
from mupscale.commands.sweep.space import Axis
from mupscale.commands.sweep.study import read, write
from mupscale.errors import UserError

RESULT = "result.json"
"""In the folder of a run that is finished: its metric, and how long it took."""

TOLD = 60.0
"""Seconds between two lines about one run."""


def run_trial(config: Config, metric: str, folders: dict[int, Path], name: str) -> tuple[list[float], float]:
    """Each seed's metric and the seconds they took, from runs in the folders by seed.

    A seed that diverges decides, and is the last.
    """
    values: list[float] = []
    seconds = 0.0
    for seed, folder in folders.items():
        value, took = run(
            with_run(config, metric, seed, folder), folder, f"{name}, seed {seed}" if len(folders) > 1 else name
        )
        values.append(value)
        seconds += took
        if math.isinf(value):
            break
    return values, seconds


def run(config: Config, folder: Path, name: str) -> tuple[float, float]:
    """A run's metric and the seconds it took; one that is finished is not repeated, one that was interrupted is
    resumed.

    If it takes long, how far it is is printed under its name.
    """
    if (folder / RESULT).exists():
        return result_of(folder)
    start = time.monotonic()
    path, checkpoint = newest_checkpoint(folder) if (folder / "config.yaml").exists() else (None, {})
    if checkpoint.get("callbacks", {}).get("TrialMetric", {}).get("diverged"):  # and its process died before it said so
        return finished(folder, math.inf, time.monotonic() - start)
    torch.compiler.reset()  # dynamo stops compiling after a few networks
    if path is None:
        shutil.rmtree(folder, ignore_errors=True)  # what it has cannot be resumed
        with file_of(config) as file, progress(name), logged(folder):
            cli = parsed(["fit", "--config", file])
    else:
        with progress(name), logged(folder):
            cli = parsed(["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", str(path)], folder=folder)
    value, took = metric_of(cli), time.monotonic() - start
    del cli
    gc.collect()  # a trainer holds itself, and with it the network
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return finished(folder, value, took)


def finished(folder: Path, value: float, seconds: float) -> tuple[float, float]:
    """Writes down a run's metric and the seconds it took, and returns them."""
    write(folder / RESULT, json.dumps({"value": str(value), "seconds": seconds}) + "\n")
    return value, seconds


def result_of(folder: Path) -> tuple[float, float]:
    """The metric and the seconds of a run that is finished."""
    result = read(folder / RESULT)
    return float(result["value"]), result["seconds"]


@contextmanager
def explained(name: str, folder: Path) -> Iterator[None]:
    """Names the run in a UserError, and its log where anything else fails."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception:
        print(f"{name} failed; its log is in {folder}", file=sys.stderr)
        raise


def metric_of(cli: CLI) -> float:
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, TrialMetric)).value  # type: ignore[attr-defined]


def with_run(config: Config, metric: str, seed: int, folder: Path) -> Config:
    """The configuration of one run: its seed, its folder, and what computes the metric.

    {seed} in model.init_from becomes the seed.
    """
    answer = deepcopy(config)
    answer["seed_everything"] = seed
    base = answer["model"]["init_args"].get("init_from")
    if base is not None:
        answer["model"]["init_args"]["init_from"] = base.replace("{seed}", str(seed))
    answer["trainer"]["logger"] = {
        "class_path": LOGGER["class_path"],
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
        raise UserError(
            f"trainer.devices = {trainer['devices']}, trainer.num_nodes = {trainer['num_nodes']}: a trial runs on one "
            "device; "
            "start the command once per device instead, with CUDA_VISIBLE_DEVICES"
        )
    if trainer["fast_dev_run"] or trainer["barebones"] or trainer["enable_checkpointing"] is False:
        raise UserError(
            "trainer.fast_dev_run, trainer.barebones, trainer.enable_checkpointing: a trial must be able to log and to "
            "resume"
        )
    trainer["logger"] = False  # each gets its own
    trainer["enable_progress_bar"] = False
    trainer["callbacks"] = (
        trainer["callbacks"] if isinstance(trainer["callbacks"], list | None) else [trainer["callbacks"]]
    )
    answer["checkpoint"]["dirpath"] = None  # each has its own
    answer["checkpoint"]["save_top_k"] = min(1, abs(answer["checkpoint"]["save_top_k"]))
    return answer


def described(arguments: list[str], command: str = "sweep") -> tuple[Config, CLI]:
    """The whole configuration of a command line, defaults and all, and what was made of it, so that what cannot be made
    is told now.
    """
    cli = parsed(arguments, run=False, parser_kwargs={"prog": f"python -m mupscale {command}"})
    return yaml.safe_load(cli.parser.dump(cli.config, skip_none=False)), cli


def refuse_invalid(config: Config, axes: list[Axis], where: str) -> None:
    """UserError, starting with `where`, if `fit` would refuse the configuration with one of the axes' values."""
    for axis in axes:
        numbers = all(isinstance(value, float) for value in axis.values)
        ends = sorted({min(axis.values), max(axis.values)}) if numbers and axis.values else axis.values
        for value in axis.bounds or ends:  # of numbers the ends are enough; and a parse takes a quarter of a second
            try:
                changed = at(config, {axis.key: value})
            except UserError as error:
                raise UserError(f"{where} {error}") from error
            try:
                with file_of(changed) as file:
                    parsed(["--config", file], run=False)
            except UserError as error:
                raise UserError(f"{where} {axis.key}={brief(value)}: {error}") from error


def folder_name(cell: int, point: Point, names: dict[str, str]) -> str:
    """A trial's folder: its number and its values, as TensorBoard will show it."""
    values = ",".join(f"{names[key]}={brief(value)}" for key, value in point.items())
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
def progress(name: str) -> Iterator[None]:
    """Prints how far a run is, at most once a minute, to where this process prints now."""
    stream, first, last = sys.stdout, (0.0, -1), time.monotonic()

    def tell(step: int, steps: int, loss: float) -> None:
        nonlocal first, last
        now = time.monotonic()
        if first[1] < 0:
            first = now, step  # from here on: what comes before, compiling say, is no measure of the rest
        elif now - last >= TOLD:
            last = now
            seconds = (steps - step) * (now - first[0]) / (step - first[1])
            left = f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
            print(f"{name}: step {step:,} of {steps:,}, loss {loss:.4g}, {left}", file=stream, flush=True)

    TrialMetric.progress = tell
    try:
        yield
    finally:
        TrialMetric.progress = None


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
