"""Carrying out a study: run a trial, keep the folder tidy, and write the results."""

import math
from collections.abc import Callable
from pathlib import Path

from mupscale.commands.config import at
from mupscale.commands.runs import Result
from mupscale.commands.stacks import Key, Unit
from mupscale.commands.tuning.results import Results
from mupscale.commands.tuning.space import labels, point_text
from mupscale.commands.tuning.study import Settings, Study, Taken
from mupscale.commands.tuning.trial import drop_checkpoints, runs_of
from mupscale.errors import UserError

TPE_ROUNDS = 10
"""In how many rounds a TPE asks for its points: those of a round may be trained together, without each other's ends."""


def unit_of(study: Study, taken: Taken, name: str) -> Unit:
    """A trial that was taken, as a unit of work. Messages call it `name`."""
    folders = results_of(study).folders(taken.cell, taken.point)
    runs = runs_of(at(study.settings.config, taken.point), study.settings.metric, folders, f"the trial {name}")

    def finish(results: list[Result]) -> str:
        values, seconds = [value for value, _ in results], sum(seconds for _, seconds in results)
        study.finish(taken, values, seconds)
        tidy(study)
        mean = sum(values) / len(values)
        best = results_of(study).best
        leader = f"best {best.value:.5g} ({point_text(best.point, labels(study.settings.axes))})" if best else ""
        return f"{value_words(mean)} in {seconds:.0f} s; {leader or 'all diverged so far'}"

    return Unit(name, runs, finish, lambda: study.give_back(taken))


class Sweep:
    """The trials of a study as units of work. Its arguments are those of a Study."""

    def __init__(self, out: Path, settings: Settings) -> None:
        self.study = Study(out, settings)
        self.most_together = batch_of(settings) if settings.sampler == "tpe" else None

    @property
    def left(self) -> int:
        """How many trials are not finished."""
        return self.study.settings.trials - len(self.study.outcomes())

    @property
    def finished(self) -> bool:
        return self.left == 0

    def waiting(self) -> list[Key]:
        return keys_of(self.study, self.study.out.resolve().name)

    def take(self, key: Key | None = None) -> Unit | None:
        taken = self.study.take(None if key is None else key.number)
        return None if taken is None else unit_of(self.study, taken, point_text(taken.point, self._names))

    def takes(self) -> Callable[[], Unit | None]:
        """What takes the trials of one round.

        Of a TPE that is a batch: the next points are better chosen once these are known.
        """
        left = batch_of(self.study.settings)

        def take() -> Unit | None:
            nonlocal left
            unit = self.take() if left else None
            left -= unit is not None
            return unit

        return take

    def progress(self) -> str:
        return f"{self.left} of {self.study.settings.trials} left"

    @property
    def _names(self) -> dict[str, str]:
        return labels(self.study.settings.axes)


def keys_of(study: Study, name: str) -> list[Key]:
    """The trials of a study that are waiting."""
    return [Key(name, "trial", cell, len(study.settings.seeds)) for cell in study.waiting()]


def batch_of(settings: Settings) -> int:
    """How many trials are taken at a time, at most."""
    return max(1, math.ceil(settings.trials / TPE_ROUNDS)) if settings.sampler == "tpe" else settings.trials


def value_words(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "diverged"


def tidy(study: Study) -> None:
    """Writes the table of finished trials, and deletes the checkpoints of all of them but the best."""
    with study.locked():
        results = results_of(study)
        results.write_table()
        for outcome in results.outcomes:
            if outcome != results.best:
                for folder in results.runs(outcome):
                    drop_checkpoints(folder)


def results_of(study: Study) -> Results:
    """The results of a study so far."""
    return Results(study.out, study.settings, study.outcomes())


def conclude(study: Study) -> tuple[Path, list[Path]]:
    """Writes the figures of a finished study and then best.yaml; returns the path of best.yaml and of the figures."""
    tidy(study)  # again, because the process that finished the last trial may have died before it did
    with study.locked():
        results = results_of(study)
        best = results.best
        if best is None:
            raise UserError(
                f"all {len(results.outcomes)} trials diverged, so there is no best.yaml; "
                f"sweep smaller learning rates or less noise. {study.out / 'trials.csv'} lists the trials"
            )
        drawn = results.draw(best)
        return results.write_best(best), drawn
