"""The study of a sweep: which trials there are, and which process runs which. No trial is lost, and none runs twice at
a time.

All trials wait in Optuna's storage from the beginning, so that to take one is a single change of its state. A process
holds a lease on the trial it runs: a locked file, which the system unlocks when the process dies, however it dies, and
whose time of change it renews. A trial whose lease has lapsed is marked as failed, and its cell is put in the queue
again, with the same values.
"""

import json
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from mupscale.atomic import replacing
from mupscale.commands.config import Config, Point
from mupscale.commands.leases import Lease, lapsed, locked
from mupscale.commands.sweep.space import Axis, grid
from mupscale.errors import UserError

Sampler = Literal["grid", "random", "tpe"]


@dataclass(frozen=True)
class Settings:
    """What makes two sweeps the same."""

    config: Config
    axes: list[Axis]
    sampler: Sampler
    trials: int
    seeds: list[int]
    metric: str

    def description(self) -> dict[str, Any]:
        """As primitives, the way they come back from a storage."""
        axes = [axis.description() for axis in self.axes]
        values = {
            "sweep": axes,
            "sampler": self.sampler,
            "trials": self.trials,
            "seeds": self.seeds,
            "metric": self.metric,
        }
        return json.loads(json.dumps({**values, "config": self.config}))


@dataclass(frozen=True)
class Outcome:
    """A finished trial: a point of the search space, and the mean of its runs' metrics; infinite if one of them
    diverged.
    """

    cell: int
    point: Point
    value: float
    values: list[float]
    seconds: float
    attempts: int


class Taken:
    """A trial that this process runs, until it is told how it ended."""

    def __init__(self, trial: optuna.Trial, cell: int, point: Point, lease: Lease) -> None:
        self.trial, self.cell, self.point, self.lease = trial, cell, point, lease


class Study:
    """The trials of a sweep in the folder `out`, shared with other processes.

    UserError if the folder has another sweep's.
    """

    def __init__(self, out: Path, settings: Settings, storage: str | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.out, self.settings = out, settings
        refuse_other_folder(out, storage)
        refuse_other_settings(out / "sweep.json", settings)
        out.mkdir(parents=True, exist_ok=True)
        (out / "leases").mkdir(exist_ok=True)
        with self.locked():
            with quiet():
                drop_unfinished_line(out / "study.journal")
                name = "sweep" if storage is None else out.resolve().name  # a database has many
                self.study = opened(name, store(out, storage))
            there = self.study.user_attrs.get("settings")
            if there is None:
                self.study.set_user_attr("settings", settings.description())
            else:
                refuse_difference(
                    there, settings.description(), f"--storage: its study {self.study.study_name} is of another sweep"
                )
            if not (out / "sweep.json").exists():
                if self.study.get_trials(deepcopy=False) and not (out / "trials").exists():
                    raise UserError(
                        f"--storage: its study {self.study.study_name} has its runs in another folder, not in {out}; "
                        "name that one with --out, or a new one of another name"
                    )
                write(out / "sweep.json", json.dumps(settings.description(), indent=1) + "\n")
            self._mend()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the processes of the sweep."""
        with locked(self.out):
            yield

    def take(self) -> Taken | None:
        """A trial to run; None if none is waiting."""
        with self.locked():
            self._mend()
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if not waiting:
                return None
            cell = waiting[0].user_attrs["cell"]  # the one that `ask` hands out
            # seeded by the cell, so that the draws are the same whichever process makes them
            self.study.sampler = sampler(self.settings.sampler, cell)
            trial = self.study.ask({axis.key: distribution(axis) for axis in self.settings.axes})
            assert trial.user_attrs["cell"] == cell
            return Taken(trial, cell, self._point(trial.params), Lease(self._lease(cell)))

    def finish(self, taken: Taken, values: list[float], seconds: float) -> None:
        with (
            self.locked(),
            suppress(optuna.exceptions.UpdateFinishedTrialError),
        ):  # taken for dead, and given to another process
            taken.trial.set_user_attr("values", [str(value) for value in values])  # JSON has no infinity
            taken.trial.set_user_attr("seconds", seconds)
            self.study.tell(taken.trial, sum(values) / len(values))
        taken.lease.release()

    def give_back(self, taken: Taken) -> None:
        """Leaves a trial that could not be finished to whoever comes next."""
        with self.locked():
            self.study.tell(taken.trial, state=TrialState.FAIL, skip_if_finished=True)
        taken.lease.release()

    def outcomes(self) -> list[Outcome]:
        """The finished trials, by cell."""
        trials = self.study.get_trials(deepcopy=False)
        attempts = [trial.user_attrs["cell"] for trial in trials]
        answer = [
            Outcome(
                cell=trial.user_attrs["cell"],
                point=self._point(trial.params),
                value=math.inf if trial.value is None else trial.value,
                values=[float(value) for value in trial.user_attrs["values"]],
                seconds=trial.user_attrs["seconds"],
                attempts=attempts.count(trial.user_attrs["cell"]),
            )
            for trial in trials
            if trial.state == TrialState.COMPLETE
        ]
        return sorted(answer, key=lambda outcome: outcome.cell)

    def _mend(self) -> None:
        """Every cell is finished, running or waiting after this; whatever happened before it."""
        trials = self.study.get_trials(deepcopy=False)
        cells: dict[int, list[FrozenTrial]] = {}
        for trial in trials:
            cells.setdefault(trial.user_attrs["cell"], []).append(trial)
        points = list(grid(self.settings.axes)) if self.settings.sampler == "grid" else [{}] * self.settings.trials
        for cell, point in enumerate(points):
            attempts = cells.get(cell, [])
            dead = [trial for trial in attempts if trial.state == TrialState.RUNNING and lapsed(self._lease(cell))]
            for trial in dead:
                self.study.tell(trial.number, state=TrialState.FAIL)
            live = [trial for trial in attempts if trial not in dead and trial.state != TrialState.FAIL]
            if not live:
                tried = next(
                    (trial.params for trial in reversed(attempts) if len(trial.params) == len(self.settings.axes)), None
                )
                fixed = tried or {axis.key: encoded(point[axis.key]) for axis in self.settings.axes if point}
                self.study.enqueue_trial(fixed, user_attrs={"cell": cell})

    def _point(self, params: dict[str, Any]) -> Point:
        return {axis.key: decoded(axis, params[axis.key]) for axis in self.settings.axes}

    def _lease(self, cell: int) -> Path:
        return self.out / "leases" / str(cell)


# --- the storage


def drop_unfinished_line(path: Path) -> None:
    """Takes out of a journal the line that a machine went down over: the next one would be written behind it, and
    neither be read.
    """
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class Unlocked(JournalFileOpenLock):
    """No lock on a journal, for it is written only by who holds that of the study, which the system takes from the
    dead.

    Optuna's is a file that a process leaves behind if it is killed while it writes; all others then wait for it, some
    forever.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def opened(name: str, storage: BaseStorage | str) -> optuna.Study:
    """The study of that name, a new one if there is none. UserError if its database cannot be reached."""
    make = partial(optuna.create_study, study_name=name, storage=storage, load_if_exists=True)
    if not isinstance(storage, str):
        return make()
    from sqlalchemy.exc import SQLAlchemyError  # which only databases need

    try:
        return make()
    except (ImportError, SQLAlchemyError) as error:
        raise UserError(f"--storage: {str(error).splitlines()[0]}") from error


def store(out: Path, url: str | None) -> BaseStorage | str:
    """The storage of a study. UserError if its journal cannot be read."""
    if url is not None:
        return url
    path = out / "study.journal"
    try:
        return JournalStorage(JournalFileBackend(str(path), Unlocked(str(path))))
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path} is damaged ({error}); delete it and {out / 'sweep.json'}, and the same command goes on: "
            "finished runs count"
        ) from error


def sampler(name: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    with quiet():
        return (
            optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            if name == "tpe"
            else optuna.samplers.RandomSampler(seed)
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings that a feature of Optuna may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        yield


def distribution(axis: Axis) -> BaseDistribution:
    if axis.bounds is None:
        return CategoricalDistribution([encoded(value) for value in axis.values])
    low, high = axis.bounds
    return IntDistribution(int(low), int(high), log=True) if axis.is_whole else FloatDistribution(low, high, log=True)


def encoded(value: Any) -> Any:
    """A value of an axis as Optuna takes it: lists and the like as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def decoded(axis: Axis, stored: Any) -> Any:
    if axis.bounds is None:
        return next(value for value in axis.values if encoded(value) == stored)
    return stored if axis.is_whole else float(f"{stored:.6g}")


# --- which folder, and which sweep


def refuse_other_folder(out: Path, storage: str | None) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder for the sweep")
    if out.is_dir() and any(out.iterdir()) and not (out / "sweep.json").exists() and not (out / "lock").exists():
        raise UserError(f"--out {out} is not empty and has no sweep; name a new folder")
    if (out / "sweep.json").exists() and storage is None and not (out / "study.journal").exists():
        raise UserError(f"--storage: the study of {out} is in a database; name its URL")
    if (out / "study.journal").exists() and storage is not None:
        raise UserError(f"--storage: the study of {out} is in its study.journal; leave --storage out")


def refuse_other_settings(path: Path, settings: Settings) -> None:
    if path.exists():
        refuse_difference(read(path), settings.description(), f"--out {path.parent} is of another sweep")


def refuse_difference(there: dict[str, Any], here: dict[str, Any], what: str) -> None:
    """UserError with the settings that differ, if any do."""
    if there != here:
        pairs = differences(there, here)
        told = "; ".join(f"{key.removeprefix('config.')} is {a!r} there and {b!r} here" for key, a, b in pairs[:4])
        more = f"; and {len(pairs) - 4} more" if len(pairs) > 4 else ""
        raise UserError(f"{what}: {told}{more}. Name another folder with --out, or delete that one")


def differences(there: Any, here: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(k for k in here if k not in there)]
        return [d for k in keys for d in differences(there.get(k), here.get(k), f"{key}.{k}".removeprefix("."))]
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        return [d for i, (a, b) in enumerate(zip(there, here, strict=True)) for d in differences(a, b, f"{key}.{i}")]
    return [] if there == here else [(key, there, here)]


def read(path: Path) -> dict[str, Any]:
    """What a JSON file of ours holds. UserError if it is damaged."""
    try:
        there = json.loads(path.read_text())
        if not isinstance(there, dict) or not there:
            raise UserError(f"it holds {there!r}")
        return there
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and the same command goes on") from error


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    with replacing(path) as new:
        new.write_text(text)
