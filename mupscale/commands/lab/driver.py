"""The driver: makes the trials of one stage after another, by an executor, and goes on where it was interrupted.

A job is some trials that one process makes: as one program if they differ only in numbers, otherwise one after another.
A stage is a list of trials that may be made in any order. All state is in the folders of the runs: a trial whose runs
have a result is not made again, and an interrupted run is resumed from its newest checkpoint. So the same command
continues after any kill.
"""

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from mupscale.commands.lab import run as runs
from mupscale.commands.lab.run import Result, Run, Trial
from mupscale.commands.lab.stack_loop import Apart, Opening, StackLoop, room_in_stack
from mupscale.errors import UserError

Size = int | Literal["auto", "off"]
"""The largest number of runs to train at once."""

MOST_DEATHS = 3
"""How often the process of a trial may die: the trial itself may be the cause."""

WAIT = 1.0
"""Seconds between two looks at what other parts have finished."""


# --- jobs


@dataclass(frozen=True)
class Job:
    """Trials that one process makes. `size` is that of their stack; `off` makes their runs one after another."""

    trials: list[Trial]
    size: Size

    def __str__(self) -> str:
        more = f" and {len(self.trials) - 1} more" if len(self.trials) > 1 else ""
        return f"{self.trials[0].name}{more}"

    def carry_out(self) -> "Ending":
        """Makes the runs: as many as the memory has room for, and of a trial those up to the first that diverged."""
        try:
            return Ending(self, make_apart(self.trials) if self.size == "off" else make_stack(self))
        except Apart as reason:
            return Ending(self, apart=str(reason))


def make_apart(trials: list[Trial]) -> dict[Path, Result]:
    answer = {}
    for trial in trials:
        print(f"{trial.name}: begins", flush=True)
        for run in trial.runs:
            answer[run.folder] = run.make()
            if math.isinf(answer[run.folder][0]):
                break
    return answer


def make_stack(job: Job) -> dict[Path, Result]:
    """Makes similar runs together, as many of them as there is room for. Raises Apart if they cannot be stacked."""
    results: dict[Path, Result] = {}
    begun: list[Run] = []
    clock = runs.Progress()

    def openings() -> Iterator[Opening]:
        for trial in job.trials:
            print(f"{trial.name}: begins", flush=True)
            for run in trial.runs:
                known = run.result_of_others()
                if known is None:
                    begun.append(run)
                    yield runs.open_stacked(run, results, lambda: len(begun))
                else:
                    results[run.folder] = known

    def show(step: int, steps: int, count: int) -> None:
        clock.print(f"{len(begun)} runs", step, steps, f"{count} still on")

    try:
        StackLoop(openings(), most=lambda first: room_in_stack(first, job.size), progress=show).run()
    finally:
        runs.free_memory()
    return results


# --- executors


@dataclass
class Ending:
    """How a job ended: with results by folder; because its runs cannot be stacked; or with the death of its process."""

    job: Job
    results: dict[Path, Result] = field(default_factory=dict)
    apart: str = ""
    """Why the runs cannot be stacked."""
    death: str = ""
    """Why the process died."""
    is_own_fault: bool = True
    """Whether the job may be the cause of the death."""


class Executor(Protocol):
    """Makes jobs, in this process or in others. An error of a run is raised by `wait`."""

    @property
    def slots(self) -> int:
        """How many jobs it makes at a time."""

    @property
    def has_room(self) -> bool:
        """Whether it takes another job now."""

    def submit(self, job: Job) -> None: ...

    def wait(self) -> list[Ending]:
        """The jobs that have ended, once one has; may be empty."""


class Inline:
    """Makes one job at a time, in this process."""

    slots = 1

    def __init__(self) -> None:
        self._job: Job | None = None
        runs.set_aside()

    @property
    def has_room(self) -> bool:
        return self._job is None

    def submit(self, job: Job) -> None:
        self._job = job

    def wait(self) -> list[Ending]:
        assert self._job is not None
        job, self._job = self._job, None
        return [job.carry_out()]


def failed_words(job: Job) -> str:
    """The message about a run that failed in another process, which has printed the error."""
    return (
        f"{job} failed with the error above, and the other runs were stopped; fix it, then run the same command again "
        "to continue"
    )


# --- the driver


class Driver:
    """Makes trials by an executor, similar ones together."""

    def __init__(self, executor: Executor, size: Size, part: int = 0, parts: int = 1) -> None:
        """`size` runs are made together. Part `part` of `parts` of every stage, from 0, is made here."""
        self._executor, self._size, self._part, self._parts = executor, size, part, parts
        self._results: dict[Path, Result] = {}
        self._apart: set[str] = set()
        """What runs have in common that cannot be stacked."""
        self._deaths: Counter[Path] = Counter()

    def make(self, trials: dict[int, Trial], progress: Callable[[], str]) -> None:
        """Makes the trials of a stage, by their numbers in it, that are not finished.

        `progress` says how much is left, in words.
        """
        mine = [trial for number, trial in trials.items() if self._is_mine(number)]
        trial_of = {run.folder: trial for trial in mine for run in trial.runs}
        jobs = deque(self._jobs_of([trial for trial in mine if self._results_of(trial) is None]))
        under_way = 0
        while jobs or under_way:
            while jobs and self._executor.has_room:
                self._executor.submit(jobs.popleft())
                under_way += 1
            for ending in self._executor.wait():
                under_way -= 1
                self._note(ending)
                left = []
                for trial in [trial_of[each.runs[0].folder] for each in ending.job.trials]:
                    results = self._results_of(trial)
                    if results is None:
                        left.append(trial)
                    else:
                        assert trial.finish is not None
                        print(f"{trial.name}: {trial.finish(results)}; {progress()}", flush=True)
                jobs.extend(self._jobs_of(left))

    def wait_for_other_parts(self, trials: dict[int, Trial]) -> None:
        """Waits until the trials of a stage that other parts make are finished."""
        if not self.have_finished(trials):
            print("waiting for the other parts", flush=True)
        while not self.have_finished(trials):
            time.sleep(WAIT)

    def have_finished(self, trials: dict[int, Trial]) -> bool:
        """Whether all trials of a stage are finished, by this part and the others."""
        for number, trial in trials.items():
            find = self._result_of if self._is_mine(number) else lambda run: run.written_result()
            if runs.ending_of(trial.runs, find) is None:
                return False
        return True

    def _results_of(self, trial: Trial) -> list[Result] | None:
        """The results of a trial whose runs are finished, up to the first that diverged; None of any other."""
        return runs.ending_of(trial.runs, self._result_of)

    def _result_of(self, run: Run) -> Result | None:
        if run.folder not in self._results and (result := run.known_result()) is not None:
            self._results[run.folder] = result
        return self._results.get(run.folder)

    def _is_mine(self, number: int) -> bool:
        return number % self._parts == self._part

    def _jobs_of(self, trials: list[Trial]) -> list[Job]:
        """Divides trials into jobs of similar ones, so that all slots have some."""
        answer: dict[str, list[Job]] = {}
        for trial in trials:
            left = Trial(trial.name, [run for run in trial.runs if self._result_of(run) is None])
            kind = left.runs[0].kind
            if self._size == "off" or kind is None or kind in self._apart:
                answer[str(left.runs[0].folder)] = [Job([left], "off")]
                continue
            most = math.ceil(len(trials) / self._executor.slots)
            if self._size != "auto":
                most = max(1, self._size // len(trial.runs))
            jobs = answer.setdefault(kind, [])
            if not jobs or len(jobs[-1].trials) >= most:
                jobs.append(Job([], self._size))
            jobs[-1].trials.append(left)
        return [job for jobs in answer.values() for job in jobs]

    def _note(self, ending: Ending) -> None:
        """Notes the results of a job, and what follows for those like it."""
        self._results |= ending.results
        if ending.apart:
            if self._size != "auto":
                raise UserError(f"--stack {self._size}: {ending.apart}; --stack off trains runs one after another")
            kind = ending.job.trials[0].runs[0].kind
            assert kind is not None
            if kind not in self._apart:
                print(f"runs are trained one after another: {ending.apart}", flush=True)
            self._apart.add(kind)
        if ending.death:
            first = ending.job.trials[0].runs[0].folder
            self._deaths[first] += ending.is_own_fault
            if self._deaths[first] >= MOST_DEATHS:
                raise UserError(
                    f"{ending.job}: {ending.death}, {MOST_DEATHS} times. If the memory is too small, give a smaller "
                    "--stack or fewer runs at a time; then run the same command again to continue"
                )
            print(f"{ending.job}: {ending.death}; the runs continue", file=sys.stderr, flush=True)
