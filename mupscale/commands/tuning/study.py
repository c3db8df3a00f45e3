"""The study of a sweep: its trials, and which process runs which of them.

No trial is lost, and no two processes run one trial at the same time. All trials wait in Optuna's journal from the
beginning, so taking one is a single change of its state. A process holds a lease on its trial: a locked file, which the
system unlocks when the process dies, and whose modification time the process renews. If a lease lapses, its trial is
marked as failed, and queued again with the same values.
"""

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from mupscale.atomic import write_text
from mupscale.commands.config import Config, Point, read_json, refuse_difference
from mupscale.commands.leases import Lease, lapsed, locked
from mupscale.commands.tuning.space import Axis, grid
from mupscale.data_files import refuse_links
from mupscale.errors import UserError

Sampler = Literal["grid", "random", "tpe"]


@dataclass(frozen=True)
class Settings:
    """What a sweep runs. Two sweeps are the same if their settings are equal."""

    config: Config
    axes: list[Axis]
    sampler: Sampler
    trials: int
    seeds: list[int]
    metric: str

    def description(self) -> dict[str, Any]:
        """The settings as plain values, as the journal returns them."""
        values = {
            "sweep": [axis.description() for axis in self.axes],
            "sampler": self.sampler,
            "trials": self.trials,
            "seeds": self.seeds,
            "metric": self.metric,
            "config": self.config,
        }
        return json.loads(json.dumps(values))


@dataclass(frozen=True)
class Outcome:
    """A finished trial: a point of the search space, and the mean metric of its runs; infinite if one diverged."""

    cell: int
    point: Point
    value: float
    values: list[float]
    seconds: float
    attempts: int


@dataclass(frozen=True)
class Taken:
    """A trial that this process runs, until it finishes it or gives it back."""

    trial: optuna.Trial
    cell: int
    point: Point
    lease: Lease


class Study:
    """The trials of a sweep in the folder `out`, shared with other processes.

    UserError if the folder holds another sweep.
    """

    def __init__(self, out: Path, settings: Settings) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.out, self.settings = out, settings
        refuse_other_folder(out)
        refuse_other_settings(out / "sweep.json", settings)
        out.mkdir(parents=True, exist_ok=True)
        (out / "leases").mkdir(exist_ok=True)
        with self.locked():
            with quiet():
                drop_unfinished_line(out / "study.journal")
                self.study = optuna.create_study(study_name="sweep", storage=read_journal(out), load_if_exists=True)
            if not all(
                isinstance(trial.user_attrs.get("cell"), int) for trial in self.study.get_trials(deepcopy=False)
            ):
                raise UserError(
                    f"{out / 'study.journal'} is not of a sweep of mupscale; delete it, or name a new folder"
                )
            there, here = self.study.user_attrs.get("settings"), settings.description()
            if there is None:
                self.study.set_user_attr("settings", here)
            else:
                refuse_difference(there, here, f"{out / 'study.journal'} holds another sweep")
            if not (out / "sweep.json").exists():
                write_text(out / "sweep.json", json.dumps(here, indent=1) + "\n")
            self._mend()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps out the other processes of the sweep."""
        with locked(self.out):
            yield

    def waiting(self) -> list[int]:
        """The cells of the trials that are waiting, in the order in which they are taken."""
        with self.locked():
            return list(self._waiting())

    def take(self, cell: int | None = None) -> Taken | None:
        """A trial to run, that of `cell` or else the first; None if it is not waiting."""
        with self.locked():
            waiting = self._waiting()
            if not waiting or cell not in (None, *waiting):
                return None
            if cell is None:
                cell = next(iter(waiting))
            # seeded by the cell, so that every process would draw the same values
            self.study.sampler = sampler(self.settings.sampler, cell)
            trial = asked(self.study, waiting[cell], {axis.key: distribution(axis) for axis in self.settings.axes})
            assert trial.user_attrs["cell"] == cell
            return Taken(trial, cell, self._point(trial.params), Lease(self._lease(cell)))

    def finish(self, taken: Taken, values: list[float], seconds: float) -> None:
        # If this process was taken for dead, the trial was given to another one, and this result does not count.
        with self.locked(), suppress(optuna.exceptions.UpdateFinishedTrialError):
            taken.trial.set_user_attr("values", [str(value) for value in values])  # JSON has no infinity
            taken.trial.set_user_attr("seconds", seconds)
            self.study.tell(taken.trial, sum(values) / len(values))
        taken.lease.release()

    def give_back(self, taken: Taken) -> None:
        """Leaves a trial that could not be finished to the next process."""
        with self.locked():
            self.study.tell(taken.trial, state=TrialState.FAIL, skip_if_finished=True)
        taken.lease.release()

    def outcomes(self) -> list[Outcome]:
        """The finished trials, by cell."""
        trials = self.study.get_trials(deepcopy=False)
        attempts = Counter(trial.user_attrs["cell"] for trial in trials)
        answer = []
        for trial in trials:
            if trial.state != TrialState.COMPLETE:
                continue
            outcome = Outcome(
                cell=trial.user_attrs["cell"],
                point=self._point(trial.params),
                value=math.inf if trial.value is None else trial.value,
                values=[float(value) for value in trial.user_attrs["values"]],
                seconds=trial.user_attrs["seconds"],
                attempts=attempts[trial.user_attrs["cell"]],
            )
            answer.append(outcome)
        return sorted(answer, key=lambda outcome: outcome.cell)

    def _waiting(self) -> dict[int, FrozenTrial]:
        """The trials that are waiting, by cell."""
        self._mend()
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return {trial.user_attrs["cell"]: trial for trial in waiting}

    def _mend(self) -> None:
        """Puts every cell in the queue that is neither finished nor run by a living process."""
        cells: dict[int, list[FrozenTrial]] = {}
        for trial in self.study.get_trials(deepcopy=False):
            cells.setdefault(trial.user_attrs["cell"], []).append(trial)
        points = list(grid(self.settings.axes)) if self.settings.sampler == "grid" else [{}] * self.settings.trials
        for cell, point in enumerate(points):
            attempts = cells.get(cell, [])
            dead = [trial for trial in attempts if trial.state == TrialState.RUNNING and lapsed(self._lease(cell))]
            for trial in dead:
                self.study.tell(trial.number, state=TrialState.FAIL)
            if all(trial in dead or trial.state == TrialState.FAIL for trial in attempts):
                self.study.enqueue_trial(self._parameters(point, attempts), user_attrs={"cell": cell})

    def _parameters(self, point: Point, attempts: list[FrozenTrial]) -> dict[str, Any]:
        """The parameters of the next attempt: those of the last one if all were drawn, or those of the point."""
        for trial in reversed(attempts):
            if len(trial.params) == len(self.settings.axes):
                return trial.params
        return {key: encoded(value) for key, value in point.items()}

    def _point(self, params: dict[str, Any]) -> Point:
        return {axis.key: decoded(axis, params[axis.key]) for axis in self.settings.axes}

    def _lease(self, cell: int) -> Path:
        return self.out / "leases" / str(cell)


# --- the journal


def drop_unfinished_line(path: Path) -> None:
    """Cuts off the end of a journal after its last whole line.

    A machine that goes down may leave a part of a line. The next line would be appended to it, and could not be read.
    """
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class Unlocked(JournalFileOpenLock):
    """No lock on a journal: only the process that has locked the study writes it.

    The system unlocks the study when that process dies. Optuna's own lock is a file that stays behind if a process is
    killed while it writes; all others then wait for it, some of them forever.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def asked(study: optuna.Study, waiting: FrozenTrial, distributions: dict[str, BaseDistribution]) -> optuna.Trial:
    """`study.ask` for one of the trials that wait. Optuna itself takes the first of them."""

    def pop() -> int:
        study._storage.set_trial_state_values(waiting._trial_id, state=TrialState.RUNNING)
        return waiting._trial_id

    study._pop_waiting_trial_id = pop  # type: ignore[method-assign]
    try:
        return study.ask(distributions)
    finally:
        del study._pop_waiting_trial_id


def read_journal(out: Path) -> JournalStorage:
    """What the journal of a study holds. Raises a UserError if it cannot be read."""
    path = out / "study.journal"
    try:
        return JournalStorage(JournalFileBackend(str(path), Unlocked(str(path))))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}); delete it and {out / 'sweep.json'} and run the same command again: "
            "finished runs are not repeated"
        ) from error


def sampler(name: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    with quiet():
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        return optuna.samplers.RandomSampler(seed)


@contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings that a feature of Optuna may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def distribution(axis: Axis) -> BaseDistribution:
    if axis.bounds is None:
        return CategoricalDistribution([encoded(value) for value in axis.values])
    low, high = axis.bounds
    return IntDistribution(int(low), int(high), log=True) if axis.is_whole else FloatDistribution(low, high, log=True)


def encoded(value: Any) -> Any:
    """A value of an axis in a form that Optuna accepts: lists and dictionaries as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def decoded(axis: Axis, stored: Any) -> Any:
    """The value of an axis that Optuna stored."""
    if axis.bounds is None:
        return next(value for value in axis.values if encoded(value) == stored)
    return stored if axis.is_whole else float(f"{stored:.6g}")


# --- which folder, and which sweep


def refuse_other_folder(out: Path) -> None:
    """Raises a UserError if the folder is not that of a sweep."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder for the sweep")
    refuse_links(out, "lock", "leases", "study.journal")
    if out.is_dir() and any(out.iterdir()) and not (out / "sweep.json").exists() and not (out / "lock").exists():
        raise UserError(f"--out {out} is not empty and has no sweep; name a new folder")


def refuse_other_settings(path: Path, settings: Settings) -> None:
    """Raises a UserError if the sweep.json of a folder has other settings."""
    if path.exists():
        refuse_difference(read_json(path), settings.description(), f"--out {path.parent} holds another sweep")
