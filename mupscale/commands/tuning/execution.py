"""Carrying out a study: run a trial, keep the folder tidy, and write the results."""

from pathlib import Path

from mupscale.commands.config import at
from mupscale.commands.runs import explained
from mupscale.commands.tuning.results import Results
from mupscale.commands.tuning.study import Study, Taken
from mupscale.commands.tuning.trial import drop_checkpoints, run_trial
from mupscale.errors import UserError


def complete(study: Study, taken: Taken, name: str) -> tuple[float, float]:
    """Runs a trial that was taken; returns its value and the seconds it took. Messages call the trial `name`.

    A trial that fails is given back.
    """
    folders = results_of(study).folders(taken.cell, taken.point)
    try:
        with explained(f"the trial {name}", next(iter(folders.values()))):
            values, seconds = run_trial(at(study.settings.config, taken.point), study.settings.metric, folders, name)
    except BaseException:
        study.give_back(taken)
        raise
    study.finish(taken, values, seconds)
    tidy(study)
    return sum(values) / len(values), seconds


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
