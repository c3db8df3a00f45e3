"""A run in this process: its configuration, log and result. An interrupted run is resumed."""

import gc
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.commands.checkpoints import RESULT, Claim, Taken, newest_checkpoint, read_result
from mupscale.commands.cli import CLI, LOGGER, opened
from mupscale.commands.config import Config, class_name
from mupscale.commands.run import write_result
from mupscale.data_files import interpreting
from mupscale.errors import UserError
from mupscale.models._lightning import callbacks_in
from mupscale.models.checkpoint import SAVED

PROGRESS_SECONDS = 60.0
"""The least time between two lines about one run."""

PATIENCE = 60.0
"""Seconds that another process has to leave a folder: one whose driver was killed ends after its current step."""

NUMBERS = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening")
"""Arguments of optimizers that may differ within a stack."""

OF_THE_SWAP = ("at_step", "width", "layers", "depth")
"""Arguments of UpscaleCallback that runs of a stack have in common; the swap itself is each one's own."""


@dataclass(frozen=True)
class Run:
    """A run that is to be made: its configuration, its folder, and what messages call it."""

    config: Config
    folder: Path
    name: str
    starts_from: Path | None = None
    """A checkpoint of another run, which was the same up to there; None to start from the beginning."""

    @property
    def kind(self) -> str | None:
        """What runs of one stack have in common: a configuration without the numbers that may differ.

        None if the run is always made alone.
        """
        answer = deepcopy(self.config)
        answer["seed_everything"] = None
        answer["trainer"]["logger"] = None
        model, data = answer["model"]["init_args"], answer["data"].get("init_args") or {}
        model["init_from"] = data["seed"] = None
        numbers = (model.get("optimizer") or {}).get("init_args") or {}
        for name in NUMBERS:
            if name in numbers:
                numbers[name] = bool(numbers[name]) if name == "momentum" else None
        for callback in answer["trainer"]["callbacks"] or []:
            if class_name(callback) == "UpscaleCallback":
                arguments = callback["init_args"]
                callback["init_args"] = {name: arguments.get(name) for name in OF_THE_SWAP}
        return json.dumps(answer, sort_keys=True, default=str)

    def known_result(self) -> "Result | None":
        written = self.written_result()
        # of a run whose process died before it wrote the result
        if written is None and self.newest_checkpoint()[1].get("callbacks", {}).get("TrialMetric", {}).get("diverged"):
            return record(self.folder, {"value": math.inf, "seconds": 0.0})
        return written

    def written_result(self) -> "Result | None":
        """The result, if it is written; the checkpoints, which another process may be deleting, are not looked at."""
        return result_of(self.folder)

    def result_of_others(self) -> "Result | None":
        """The result, if another process has finished the run; one whose driver died may still be about to end."""
        claim_when_free(self.folder).release()
        return self.known_result()

    def newest_checkpoint(self) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint from which the run continues; None if it starts from the beginning."""
        return newest_checkpoint(self.folder) if (self.folder / "config.yaml").exists() else (None, {})

    def make(self) -> "Result":
        """Fits or resumes the run; prints its progress if it is long."""
        torch.compiler.reset()  # dynamo stops compiling after a few networks
        start = time.monotonic()
        result = self.result_of_others()
        if result is None:
            clock = Progress()
            TrialMetric.progress = lambda step, steps, loss: clock.print(self.name, step, steps, f"loss {loss:.4g}")
            try:
                with open_run(self) as cli:
                    cli.run()
            finally:
                TrialMetric.progress = None
            result = record_run(self, cli, time.monotonic() - start)
        free_memory()
        return result


@dataclass(frozen=True)
class Trial:
    """Runs that count as one, such as the seeds of a point. If one diverges, the trial has diverged and ends there."""

    name: str
    runs: list[Run]
    finish: "Callable[[list[Result]], str] | None" = None
    """Takes their results, up to the first that diverged; returns a summary in words. Other processes have none."""


class Part:
    """Some trials of a stage. Its folder shows what is done.

    It makes its configurations only when its stage begins: they follow from the results of the stages before.
    """

    total = 1
    """How many trials it has."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    @property
    def done(self) -> int:
        return int(self.finished)

    def trials(self) -> list[Trial]:
        """All of them, also those that are finished."""
        raise NotImplementedError

    def conclude(self) -> None:
        """Writes what there is to write once all trials are finished."""


Result = tuple[float, float]
"""The metric of a finished run, and the seconds it took."""


def ending_of(runs: Iterable[Any], find: Callable[[Any], Result | None]) -> list[Result] | None:
    """The results of the runs of a trial up to the first that diverged; None if a run before that is not finished."""
    answer = []
    for run in runs:
        result = find(run)
        if result is None:
            return None
        answer.append(result)
        if math.isinf(result[0]):
            break
    return answer


@contextmanager
def open_run(run: Run) -> Iterator[CLI]:
    """The command line that fits or resumes a run; what is printed inside of the context goes to the log of the run."""
    path, _ = run.newest_checkpoint()
    arguments: list[str] | Config
    with explained(run.name, run.folder):
        if path is not None:
            arguments = ["--config", str(run.folder / "config.yaml"), "--ckpt_path", str(path)]
        else:
            shutil.rmtree(run.folder, ignore_errors=True)  # without a checkpoint nothing in it can be resumed
            starts_from = None if run.starts_from is None else str(run.starts_from)
            arguments = {**run.config, "ckpt_path": starts_from}
        folder = None if path is None else run.folder
        with logged(run.folder), opened(arguments, "fit", folder=folder) as cli:
            yield cli


@contextmanager
def open_stacked(
    run: Run, results: dict[Path, Result], beside: Callable[[], int]
) -> Iterator[tuple[Trainer, dict[str, Any]]]:
    """The trainer of a run, and the arguments of its `fit`, which others call in parts.

    In the end its result is among the `results`. `beside` is the number of runs that share its time, itself included.
    """
    start = time.monotonic()
    with open_run(run) as cli:
        cli.before_fit()
        yield cli.trainer, cli.command_arguments()
        cli.after_fit()
    results[run.folder] = record_run(run, cli, (time.monotonic() - start) / beside())


def record_run(run: Run, cli: CLI, seconds: float) -> Result:
    value = callbacks_in(cli.trainer, TrialMetric)[0].value
    return record(run.folder, {"value": value, "seconds": seconds, **cli.journal.numbers(cli.trainer)})


def claim_when_free(folder: Path) -> Claim:
    """The right to write to a folder, once the process that has it ends. Raises a UserError if it does not."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return Claim(folder)
        except Taken:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def set_aside() -> None:
    """Takes what there is, above all what was imported, out of what `free_memory` looks through after every run."""
    gc.collect()
    gc.freeze()


def drop_checkpoints(folder: Path) -> None:
    """Deletes the checkpoints of a finished run: the disk space of a sweep must not grow with its trials."""
    for name in ("checkpoints", SAVED):
        shutil.rmtree(folder / name, ignore_errors=True)


def free_memory() -> None:
    """Frees what finished runs leave: a trainer refers to itself, and so keeps the network in memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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


# --- results


def record(folder: Path, numbers: dict[str, Any]) -> Result:
    """Writes the numbers of a finished run to its folder; returns its metric and the seconds it took."""
    write_result(folder, numbers)
    return numbers["value"], numbers["seconds"]


def result_of(folder: Path) -> Result | None:
    """The result in the folder of a run; None if it is not written."""
    result = read_result(folder)
    with interpreting(f"{folder / RESULT} is damaged; delete it, and the run is made again"):
        return (float(result["value"]), float(result["seconds"])) if result else None


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


class Progress:
    """Prints how far something is, at most once a minute, to the standard output at the moment when this is made."""

    def __init__(self) -> None:
        self._stream, self._last = sys.stdout, time.monotonic()
        self._begin: tuple[float, int] | None = None

    def print(self, name: str, step: int, steps: int, what: str) -> None:
        now = time.monotonic()
        if self._begin is None:
            self._begin = now, step  # the steps before it took longer, for they were compiled, say
        elif now - self._last >= PROGRESS_SECONDS and step > self._begin[1]:
            self._last = now
            seconds = (steps - step) * (now - self._begin[0]) / (step - self._begin[1])
            left = f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
            print(f"{name}: step {step:,} of {steps:,}, {what}, {left}", file=self._stream, flush=True)


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Sends what a run prints to log.txt in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log, redirect_stdout(log), redirect_stderr(log):
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
