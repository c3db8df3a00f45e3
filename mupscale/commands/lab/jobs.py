"""Jobs: trials that one process makes, as one program if they differ only in numbers, otherwise one after another.

All state is in the folders of the runs: a run with a result is not made again, and an interrupted run, or stack, is
resumed from its newest checkpoint. So a job that is done again goes on where it was killed.
"""

import math
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mupscale.commands.config import read_json
from mupscale.commands.lab.run import Result, Trial, free_memory, make_apart, results_in
from mupscale.commands.lab.stack import NotStackable, checkpoints_in, train_stack
from mupscale.errors import UserError

Size = int | Literal["auto", "off"]
"""The largest number of runs to train at once."""

STACKS = "stacks"
"""The folder of the stacks that are under way, beside that of their runs."""


@dataclass(frozen=True)
class Job:
    """Trials that one process makes. `size` is that of their stack; `off` makes their runs one after another."""

    trials: list[Trial]
    size: Size

    def __str__(self) -> str:
        more = f" and {len(self.trials) - 1} more" if len(self.trials) > 1 else ""
        return f"{self.trials[0].name}{more}"

    def carry_out(self) -> dict[Path, Result]:
        """Makes the runs, and of a trial that diverges those up to the first that did."""
        results: dict[Path, Result] = {}
        left = [run for trial in self.trials for run in trial.runs] if self.size != "off" else []
        while left:
            folder = left[0].folder.parent.parent / STACKS / left[0].folder.name
            begun = [run for run in left if str(run.folder) in runs_of_stack(folder)]
            if not begun and left[0].result is not None:
                results[left[0].folder] = left[0].result
            elif not begun and any(run.newest_checkpoint()[0] for run in left):
                break  # they were begun alone, and go on so
            else:
                try:
                    print(f"{self}: {len(begun or left)} runs begin", flush=True)
                    results |= train_stack(begun or left, folder, self.size)
                except NotStackable as reason:
                    shutil.rmtree(folder)
                    with suppress(OSError):
                        folder.parent.rmdir()
                    if self.size != "auto":
                        hint = "--stack off trains runs one after another"
                        raise UserError(f"--stack {self.size}: {reason}; {hint}") from reason
                    print(f"runs are trained one after another: {reason}", flush=True)
                    break
                finally:
                    free_memory()
            left = [run for run in left if run.folder not in results]
        alone = [Trial(trial.name, [run for run in trial.runs if run.folder not in results]) for trial in self.trials]
        return results | make_apart([trial for trial in alone if trial.runs])


class Executor(Protocol):
    """Makes jobs: in this process, in others, or on other machines."""

    @property
    def slots(self) -> int:
        """How many jobs it makes at a time."""

    def make(self, jobs: list[Job]) -> Iterator[dict[Path, Result]]:
        """Makes the jobs; yields the results of each that has ended. Raises the error of a run."""


class Inline:
    """Makes one job at a time, in this process."""

    slots = 1

    def make(self, jobs: list[Job]) -> Iterator[dict[Path, Result]]:
        return (job.carry_out() for job in jobs)


def jobs_of(trials: list[Trial], size: Size, slots: int, known: dict[Path, Result]) -> list[Job]:
    """Divides trials that are not finished into jobs of similar ones, so that all slots have some.

    Stacks that have begun come first. `known` has the results of runs, and gets those that are read.
    """
    waiting = [trial for trial in trials if results_in(trial.folders, known) is None]
    jobs = stacks_begun(trials, size) if size != "off" else []
    taken = {folder for job in jobs for trial in job.trials for folder in trial.folders}
    most = math.ceil(len(waiting) / slots)
    kinds: dict[str, list[Job]] = {}
    for trial in waiting:
        left = [run for run in trial.runs if run.folder not in taken and run.result is None]
        if not left:
            continue
        if isinstance(size, int):
            most = max(1, size // len(trial.runs))
        alike = kinds.setdefault(trial.name if size == "off" else left[0].kind, [])
        if not alike or len(alike[-1].trials) >= most:
            alike.append(Job([], size))
        alike[-1].trials.append(Trial(trial.name, left))
    return [*jobs, *(job for alike in kinds.values() for job in alike)]


def stacks_begun(trials: list[Trial], size: Size) -> list[Job]:
    """The stacks of these trials that were interrupted, and may have written some of their results."""
    folders = {str(folder): folder for trial in trials for folder in trial.folders}
    jobs = []
    for place in sorted({folder.parent.parent / STACKS for folder in folders.values()}):
        for path in sorted(place.glob("*/runs.json")):
            names = runs_of_stack(path.parent)
            if names and all(name in folders for name in names):
                parts = (Trial(each.name, [run for run in each.runs if str(run.folder) in names]) for each in trials)
                jobs.append(Job([trial for trial in parts if trial.runs], size))
    return jobs


def runs_of_stack(folder: Path) -> list[str]:
    """The folders of the runs of a stack that goes on from a checkpoint; none if it would begin anew."""
    return read_json(folder / "runs.json")["runs"] if checkpoints_in(folder) else []
