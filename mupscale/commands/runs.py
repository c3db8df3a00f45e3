"""One run in this process: its configuration, its log, and its result; a run that was interrupted is resumed."""

import gc
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path

import torch

from mupscale.atomic import write_text
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.commands.cli import CLI, LOGGER, callbacks_in, parsed
from mupscale.commands.config import Config, read_json, temporary_file
from mupscale.errors import UserError

RESULT = "result.json"
"""In the folder of a finished run: its metric, and how long it took."""

PROGRESS_SECONDS = 60.0
"""The least time between two lines about one run."""


def run(config: Config, folder: Path, name: str) -> tuple[float, float]:
    """Makes a run, or resumes it; returns its metric and the seconds it took. A finished run is not repeated.

    A long run prints lines of progress that start with `name`.
    """
    if (folder / RESULT).exists():
        return result_of(folder)
    start = time.monotonic()
    path, checkpoint = newest_checkpoint(folder) if (folder / "config.yaml").exists() else (None, {})
    if checkpoint.get("callbacks", {}).get("TrialMetric", {}).get("diverged"):  # its process died before it wrote that
        return record(folder, math.inf, time.monotonic() - start)
    torch.compiler.reset()  # dynamo stops compiling after a few networks
    if path is None:
        shutil.rmtree(folder, ignore_errors=True)  # without a checkpoint nothing in it can be resumed
        with temporary_file(config) as file, progress(name), logged(folder):
            cli = parsed(["fit", "--config", file])
    else:
        with progress(name), logged(folder):
            cli = parsed(["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", str(path)], folder=folder)
    value, seconds = metric_of(cli), time.monotonic() - start
    del cli
    gc.collect()  # a trainer refers to itself, and so keeps the network in memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return record(folder, value, seconds)


def with_run(config: Config, metric: str, seed: int, folder: Path) -> Config:
    """The configuration of one run: with its seed, its folder, and the callback that computes the metric.

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


def metric_of(cli: CLI) -> float:
    return callbacks_in(cli.trainer, TrialMetric)[0].value


# --- results


def record(folder: Path, value: float, seconds: float) -> tuple[float, float]:
    """Writes the metric of a finished run and the seconds it took to its folder, and returns them."""
    write_text(folder / RESULT, json.dumps({"value": str(value), "seconds": seconds}) + "\n")
    return value, seconds


def result_of(folder: Path) -> tuple[float, float]:
    """The metric of a finished run, and the seconds it took."""
    result = read_json(folder / RESULT)
    try:
        return float(result["value"]), float(result["seconds"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / RESULT} is damaged ({error!r}); delete it, and the run is made again") from error


# --- what is printed


@contextmanager
def explained(name: str, folder: Path) -> Iterator[None]:
    """Puts the name of a run before a UserError; where anything else fails, prints where its log is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception:
        print(f"{name} failed; its log is in {folder}", file=sys.stderr)
        raise


@contextmanager
def progress(name: str) -> Iterator[None]:
    """Prints how far a run is, at most once a minute, to the standard output at this moment."""
    stream, last = sys.stdout, time.monotonic()
    begin: tuple[float, int] | None = None

    def print_step(step: int, steps: int, loss: float) -> None:
        nonlocal begin, last
        now = time.monotonic()
        if begin is None:
            begin = now, step  # the steps before it took longer, for they were compiled, say
        elif now - last >= PROGRESS_SECONDS:
            last = now
            seconds = (steps - step) * (now - begin[0]) / (step - begin[1])
            left = f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
            print(f"{name}: step {step:,} of {steps:,}, loss {loss:.4g}, {left}", file=stream, flush=True)

    TrialMetric.progress = print_step
    try:
        yield
    finally:
        TrialMetric.progress = None


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Sends what a run prints to log.txt in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log, redirect_stdout(log), redirect_stderr(log), without_announcements():
        yield


@contextmanager
def without_announcements() -> Iterator[None]:
    """Keeps Lightning from printing seeds and devices for every trainer."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
