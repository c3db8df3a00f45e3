"""A job: runs that one process makes, as one program if they differ only in numbers, otherwise one after another."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mupscale.callbacks.joint_steps import JointSteps
from mupscale.callbacks.stack_room import room_in_stack
from mupscale.commands.arguments import Size
from mupscale.commands.lab.run import Progress, Result, Run, Trial, fit_run, free_memory
from mupscale.commands.pattern import Pattern, Patterns


@dataclass(frozen=True)
class Job:
    """Trials that one process makes. `size` is that of their stack; `off` makes their runs one after another."""

    trials: list[Trial]
    size: Size

    def __str__(self) -> str:
        more = f" and {len(self.trials) - 1} more" if len(self.trials) > 1 else ""
        return f"{self.trials[0].name}{more}"

    def carry_out(self, patterns: Patterns) -> dict[Path, Result]:
        """Makes the runs: as many as the memory has room for, and of a trial those up to the first that diverged.

        Returns their results by folder. Raises Apart if they cannot be stacked.
        """
        with patterns.like(self.trials[0].runs[0].config) as pattern:
            return make_apart(self.trials, pattern) if self.size == "off" else make_stack(self, pattern)


def make_apart(trials: list[Trial], pattern: Pattern) -> dict[Path, Result]:
    answer = {}
    for trial in trials:
        print(f"{trial.name}: begins", flush=True)
        for run in trial.runs:
            answer[run.folder] = run.make(pattern)
            if math.isinf(answer[run.folder][0]):
                break
    return answer


def make_stack(job: Job, pattern: Pattern) -> dict[Path, Result]:
    """Makes similar runs together, as many of them as there is room for. Raises Apart if they cannot be stacked."""
    made: list[Run] = []
    clock = Progress()

    def jobs() -> Iterator[Callable[[], Result]]:
        for trial in job.trials:
            print(f"{trial.name}: begins", flush=True)
            for run in trial.runs:
                made.append(run)
                yield partial(fit_run, run, lambda: len(made), pattern)

    joint = JointSteps(
        jobs(),
        most=lambda awaited: room_in_stack(awaited, job.size),
        tell=lambda line: print(line, flush=True),
        progress=lambda step, steps, count: clock.print(f"{len(made)} runs", step, steps, f"{count} still on"),
    )
    try:
        joint.run()
    finally:
        free_memory()
    return {run.folder: result for run, result in zip(made, joint.results, strict=True)}
