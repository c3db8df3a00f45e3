"""A run of a sweep: its configuration, its result, and how it is made, or resumed, in this process."""

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
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from mupscale.atomic import append_to
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.commands.checkpoints import RESULT, FolderLock, FolderLocked, newest_checkpoint, read_result
from mupscale.commands.cli import LOGGER, open_cli
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

Result = tuple[float, float]
"""The metric of a finished run, infinite if it diverged, and the seconds it took."""


@dataclass(frozen=True)
class Run:
    """A run that is to be made: its configuration, its folder, and what messages call it."""

    config: Config
    folder: Path
    name: str

    @property
    def kind(self) -> str:
        """What runs of one stack have in common: a configuration without the numbers that may differ."""
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

    @property
    def result(self) -> Result | None:
        return read_ending(self.folder)

    def newest_checkpoint(self) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint from which the run continues; None if it starts from the beginning."""
        return newest_checkpoint(self.folder) if (self.folder / "config.yaml").exists() else (None, {})

    def make(self) -> Result:
        """Fits or resumes the run, if it is not finished; prints its progress if it is long."""
        claim_when_free(self.folder).release()  # another process, whose driver died, may be about to end it
        if self.result is not None:
            return self.result
        path, checkpoint = self.newest_checkpoint()
        if checkpoint.get("callbacks", {}).get("TrialMetric", {}).get("diverged"):
            return self.record({"value": math.inf, "seconds": 0.0})  # its process died before it wrote the result
        arguments: list[str] | Config = self.config
        if path is not None:
            arguments = ["--config", str(self.folder / "config.yaml"), "--ckpt_path", str(path)]
        else:
            shutil.rmtree(self.folder, ignore_errors=True)  # without a checkpoint nothing in it can be resumed
        torch.compiler.reset()  # dynamo stops compiling after a few networks
        clock, start = RunProgress(), time.monotonic()
        TrialMetric.progress = lambda step, steps, loss: clock.print(self.name, step, steps, f"loss {loss:.4g}")
        try:
            with (
                explained(self.name, self.folder),
                logged(self.folder),
                open_cli(arguments, "fit", folder=path and self.folder) as cli,
            ):
                cli.run()
        finally:
            TrialMetric.progress = None
        value, seconds = callbacks_in(cli.trainer, TrialMetric)[0].value, time.monotonic() - start
        return self.record({"value": value, "seconds": seconds, **cli.journal.numbers(cli.trainer)})

    def record(self, numbers: dict[str, Any]) -> Result:
        """Writes the numbers of the finished run to its folder; returns its result."""
        write_result(self.folder, numbers)
        return numbers["value"], numbers["seconds"]


@dataclass(frozen=True)
class Trial:
    """Runs that count as one, such as the seeds of a point. If one diverges, the trial has diverged and ends there."""

    name: str
    runs: list[Run]

    @property
    def folders(self) -> list[Path]:
        return [run.folder for run in self.runs]


def read_ending(folder: Path) -> Result | None:
    """The result in the folder of a run; None if it is not written."""
    result = read_result(folder)
    with interpreting(f"{folder / RESULT} is damaged; delete it, and the run is made again"):
        return (float(result["value"]), float(result["seconds"])) if result else None


def results_in(folders: list[Path], known: dict[Path, Result]) -> list[Result] | None:
    """The results of the runs of a trial up to the first that diverged; None if a run before that is not finished.

    `known` has results, and gets those that are read.
    """
    answer: list[Result] = []
    for folder in folders:
        result = known.get(folder) or read_ending(folder)
        if result is None:
            return None
        known[folder] = result
        answer.append(result)
        if math.isinf(result[0]):
            break
    return answer


def make_apart(trials: list[Trial]) -> dict[Path, Result]:
    """Makes runs one after another; of a trial that diverges those up to the first that did."""
    answer = {}
    for trial in trials:
        print(f"{trial.name}: begins", flush=True)
        for run in trial.runs:
            answer[run.folder] = run.make()
            free_memory()
            if math.isinf(answer[run.folder][0]):
                break
    return answer


def claim_when_free(folder: Path) -> FolderLock:
    """The right to write to a folder, once the process that has it ends. Raises a UserError if it does not."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return FolderLock(folder)
        except FolderLocked:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


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


# --- what is printed


def prepare_process() -> None:
    """Keeps Lightning from printing seeds and devices for every run, and collections from looking through imports."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()


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


class RunProgress:
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
    with TextIOWrapper(append_to(folder / "log.txt"), "utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        yield
