"""sweep: run a configuration with many values of some of its keys, and find the best.

Start the same command again, on this machine or on others that share the folder --out, and the processes share the
trials. Interrupted, the same command goes on where it stopped. It ends in trials.csv, figures, and best.yaml, which
holds the swept values alone: fit --config TARGET.yaml --config OUT/best.yaml.
"""

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mupscale.errors import UserError, as_user_errors, needs_extra

if TYPE_CHECKING:
    from mupscale.commands.sweep.results import Results
    from mupscale.commands.sweep.study import Settings, Study, Taken

WAIT = 1.0
"""Seconds between two looks at what other processes do."""

EPILOG = """--config FILE and all other options are those of fit: they make the configuration of every trial.

A key is that of fit's options (model.optimizer.lr), or starts with the class of a callback in trainer.callbacks
(UpscaleCallback.noise.std). docs/sweeps.md tells more."""


def main(command: str, arguments: list[str]) -> None:
    options, rest = parser().parse_known_args(arguments)
    with needs_extra("sweep"):
        import matplotlib  # noqa: F401
        import optuna  # noqa: F401
    try:
        with as_user_errors(OSError):
            sweep(options, rest)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("the same command goes on where it stopped") from interrupt


def parser() -> argparse.ArgumentParser:
    answer = argparse.ArgumentParser(
        prog="python -m mupscale sweep",
        usage="%(prog)s --config FILE [--config FILE …] --sweep KEY=VALUES [--sweep …] --out FOLDER [options]",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    answer.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=VALUES",
        help="V1,V2,… are values; LOW:HIGH:N are N values, evenly by ratio; LOW:HIGH is a range to draw from "
        "(random, tpe)",
    )  # fmt: skip
    answer.add_argument("--out", type=Path, required=True, help="the folder of the sweep")
    answer.add_argument(
        "--seeds", default=None, metavar="S1,S2,…", help="run each trial with these seeds; their mean decides"
    )
    answer.add_argument(
        "--sampler", choices=["grid", "random", "tpe"], default="grid", help="how values are chosen (default grid)"
    )
    answer.add_argument("--trials", type=int, help="how many, if not by a grid")
    answer.add_argument(
        "--metric", default="last_epoch",
        help="what is minimised: last_epoch, last_2%% (mean training loss over the last epoch, or 2 %% of the steps; "
        "the former is the "
        "default), or a metric that is logged, such as val/loss (its last value)",
    )  # fmt: skip
    answer.add_argument(
        "--storage", metavar="URL", help="keep the study in this database (postgresql://…), not in a file in --out"
    )
    return answer


def sweep(options: argparse.Namespace, rest: list[str]) -> None:
    from mupscale.commands.sweep.space import labels, point_text
    from mupscale.commands.sweep.study import Study
    from mupscale.commands.sweep.trial import without_announcements

    with without_announcements():
        settings = settings_of(options, rest)
        study = Study(options.out, settings, options.storage)
        names, said = labels(settings.axes), False
        while True:
            taken = study.take()
            if taken is not None:
                point = point_text(taken.point, names)
                value, seconds = complete(study, taken, point)
                print_progress(results_of(study), point, value, seconds)
                said = False
                continue
            left = settings.trials - len(study.outcomes())
            if left == 0:
                break
            if not said:
                print(f"waiting for other processes: {left} of {settings.trials} left", flush=True)
                said = True
            time.sleep(WAIT)
        path, drawn = conclude(study)
        print(path.read_text(), end="")
        print(f"wrote {', '.join(str(p) for p in [path, study.out / 'trials.csv', *drawn])}")


def settings_of(options: argparse.Namespace, rest: list[str]) -> "Settings":
    """What the command line asks for, checked as far as can be without a run."""
    from mupscale.commands.sweep.results import checked_metric, signal_swap
    from mupscale.commands.sweep.space import grid, parsed_axis
    from mupscale.commands.sweep.study import Settings
    from mupscale.commands.sweep.trial import described, for_trials, refuse_invalid

    axes = [parsed_axis(text) for text in options.sweep]
    if not axes:
        raise UserError(
            "--sweep: the grid is empty, name a key and its values: --sweep model.optimizer.lr=0.01,0.02,0.04"
        )
    if len({axis.key for axis in axes}) < len(axes):
        raise UserError(f"--sweep: a key is there twice in {', '.join(axis.key for axis in axes)}")
    ranges = [axis.key for axis in axes if axis.bounds]
    if options.sampler == "grid" and ranges:
        raise UserError(
            f"--sweep {ranges[0]}=LOW:HIGH is a range; give LOW:HIGH:N for a grid, or --sampler random or tpe"
        )
    if (options.sampler == "grid") != (options.trials is None):
        raise UserError("--trials: give it with --sampler random or tpe, and only then")
    if options.trials is not None and options.trials < 1:
        raise UserError(f"--trials must be at least 1, got {options.trials}")
    checked_metric(options.metric)
    config = for_trials(described(rest)[0])
    signal_swap(config)
    if not (options.out / "sweep.json").exists():  # or it was checked before
        refuse_invalid(config, axes, "--sweep")
    seeds = [config["seed_everything"]] if options.seeds is None else seeds_of(options.seeds)
    config["seed_everything"] = seeds[0]
    trials = options.trials or len(list(grid(axes)))
    return Settings(config, axes, options.sampler, trials, seeds, options.metric)


def seeds_of(text: str) -> list[int]:
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds {text}: give whole numbers, separated by commas") from error
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text}: a seed is there twice")
    return seeds


def complete(study: "Study", taken: "Taken", name: str) -> tuple[float, float]:
    """Runs a trial that was taken, and that messages call `name`; its value and the seconds it took.

    Unfinished, it goes back.
    """
    from mupscale.commands.config import at
    from mupscale.commands.sweep.trial import explained, run_trial

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


def tidy(study: "Study") -> None:
    """The table as of now; and of all finished trials only the best keeps its checkpoints."""
    from mupscale.commands.sweep.trial import drop_checkpoints

    with study.locked():
        results = results_of(study)
        results.write_table()
        for outcome in results.outcomes:
            if outcome != results.best:
                for folder in results.runs(outcome):
                    drop_checkpoints(folder)


def results_of(study: "Study") -> "Results":
    from mupscale.commands.sweep.results import Results

    return Results(study.out, study.settings, study.outcomes())


def print_progress(results: "Results", point: str, value: float, seconds: float) -> None:
    from mupscale.commands.sweep.space import point_text

    best = results.best
    done = f"{value:.5g}" if math.isfinite(value) else "diverged"
    leader = f"best {best.value:.5g} ({point_text(best.point, results.names)})" if best else "none has not diverged"
    left = results.settings.trials - len(results.outcomes)
    print(f"{point}: {done} in {seconds:.0f} s; {leader}; {left} of {results.settings.trials} left", flush=True)


def conclude(study: "Study") -> tuple[Path, list[Path]]:
    """Writes what the sweep ends in: best.yaml, which is the last, and the figures."""
    tidy(study)  # once more, for the process that died before it did
    with study.locked():
        results = results_of(study)
        best = results.best
        if best is None:
            raise UserError(
                f"all {len(results.outcomes)} trials diverged; sweep smaller learning rates or less noise. "
                f"{study.out / 'trials.csv'} lists them, and there is no best.yaml"
            )
        drawn = results.draw(best)
        return results.write_best(best), drawn
