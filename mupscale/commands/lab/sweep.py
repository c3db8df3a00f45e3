"""A sweep: its trials, what they have come to, trials.csv and best.yaml. All of it is in one folder.

Every trial has a number, its cell. The points of a grid follow from the axes; those of an Optuna study from the axes
and the results of the trials before. The results are those of the runs.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, pvariance
from typing import TYPE_CHECKING, Any

import yaml

from mupscale.atomic import write_text
from mupscale.callbacks.trial_metric import window_of
from mupscale.commands import figures
from mupscale.commands.checkpoints import LOCK
from mupscale.commands.config import (
    Config,
    Point,
    apply_point,
    brief,
    callback_key,
    class_name,
    configured_callbacks,
    labels,
    put,
    read_json,
    refuse_difference,
    whole_key,
)
from mupscale.commands.event_files import read_log
from mupscale.commands.lab.jobs import Executor, Size, jobs_of
from mupscale.commands.lab.run import Result, Run, Trial, drop_checkpoints, results_in, with_run
from mupscale.commands.lab.space import (
    Settings,
    SweptAxis,
    TrialResult,
    distribution,
    grid,
    new_study,
    point_of,
    point_text,
)
from mupscale.commands.process import refuse_output_folder
from mupscale.data_files import refuse_linked_folders
from mupscale.errors import UserError
from mupscale.text_tables import as_csv

if TYPE_CHECKING:
    from optuna import Study

TPE_ROUNDS = 10
"""The number of rounds in which a TPE draws its points: those of a round may be trained together."""

MOST_POINTS = 60
"""The most points of a training curve: each is the mean of several steps."""

MOST_LINES = 12
"""The most lines in the figure of training curves; of more trials, some are left out."""


class Sweep:
    """A sweep in a folder. Raises a UserError if the folder holds another one, or something else."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.labels = labels([axis.key for axis in settings.axes])
        self._found: dict[Path, Result] = {}
        refuse_output_folder("--out", folder)
        path = folder / "sweep.json"
        if path.exists():
            refuse_difference(read_json(path), settings.description(), f"--out {folder} holds another sweep")
        elif folder.exists() and any(each.name != LOCK and not each.match("part-*-of-*") for each in folder.iterdir()):
            raise UserError(f"--out {folder} is not empty and has no sweep; name a new folder")
        refuse_linked_folders(folder)

    # --- points

    @property
    def points(self) -> list[Point]:
        """The points by cell; of a sweep that draws them, those of the rounds so far."""
        if self.settings.sampler == "grid":
            return list(grid(self.settings.axes))
        return [point_of(self.settings.axes, trial.params) for trial in self._study.trials]

    @cached_property
    def _study(self) -> "Study":
        """The study that draws the points: each follows from the axes and the results, so no file has to keep them."""
        assert self.settings.sampler != "grid"
        return new_study(self.settings.sampler)

    def _draw(self, count: int) -> None:
        """Draws points until there are so many, after the study has been told the results that it does not know."""
        known = {outcome.cell: outcome.value for outcome in self.outcomes}
        for trial in self._study.trials:
            if not trial.state.is_finished():
                self._study.tell(trial.number, known[trial.number])
        distributions = {axis.key: distribution(axis) for axis in self.settings.axes}
        for _ in range(count - len(self._study.trials)):
            self._study.ask(distributions)

    # --- trials

    def rounds(self) -> Iterator[dict[int, Trial]]:
        """The trials by cell, in rounds: only a TPE has several, whose points depend on the results of those before."""
        trials = self.settings.trials
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "sweep.json").exists():
            write_text(self.folder / "sweep.json", json.dumps(self.settings.description(), indent=1) + "\n")
        size = math.ceil(trials / TPE_ROUNDS) if self.settings.sampler == "tpe" else trials
        for start in range(0, trials, size):
            if self.settings.sampler != "grid":
                self._draw(min(start + size, trials))
            yield {cell: self._trial(cell) for cell in range(start, min(start + size, trials))}

    def _trial(self, cell: int) -> Trial:
        settings, point = self.settings, self.points[cell]
        config = apply_point(settings.config, point)
        name = point_text(point, self.labels) or self.folder.name
        runs = []
        for seed, folder in self.folders(cell, point).items():
            of_seed = f", seed {seed}" if len(settings.seeds) > 1 else ""
            runs.append(Run(with_run(config, settings.metric, seed, folder), folder, f"the trial {name}{of_seed}"))
        return Trial(name, runs)

    def make(self, trials: list[Trial], executor: Executor, size: Size) -> None:
        """Makes the trials of a round that are not finished."""
        left = [trial for trial in trials if results_in(trial.folders, self._found) is None]
        for results in executor.make(jobs_of(trials, size, executor.slots, self._found)):
            self._found |= results
            for trial in list(left):
                found = results_in(trial.folders, self._found)
                if found is not None:
                    left.remove(trial)
                    print(f"{trial.name}: {self._finish(found)}", flush=True)

    def _finish(self, results: list[Result]) -> str:
        """Writes the table; returns the end of a trial in words."""
        self.tidy()
        seconds, value, best = sum(seconds for _, seconds in results), fmean(value for value, _ in results), self.best
        leader = f"best {best.value:.5g} ({point_text(best.point, self.labels)})" if best else "all diverged so far"
        total = self.settings.trials
        said = f"{value:.5g}" if math.isfinite(value) else "diverged"
        return f"{said} in {seconds:.0f} s; {leader}; {total - len(self.outcomes)} of {total} left"

    # --- results

    def folders(self, cell: int, point: Point) -> dict[int, Path]:
        """The folders of a trial's runs, by seed; TensorBoard shows their names."""
        values = ",".join(f"{self.labels[key]}={brief(value)}" for key, value in point.items())
        plain = re.sub(r"[^\w.,=+-]+", "-", values)
        name = f"{cell:03d}_{plain or 'run'}"[:120]  # never a number, which YAML would read as one
        ends = {seed: f",seed={seed}" if len(self.settings.seeds) > 1 else "" for seed in self.settings.seeds}
        return {seed: self.folder / "trials" / f"{name}{end}" for seed, end in ends.items()}

    @property
    def outcomes(self) -> list[TrialResult]:
        """The finished trials, by cell."""
        answer = []
        for cell, point in enumerate(self.points):
            runs = list(self.folders(cell, point).values())
            results = results_in(runs, self._found)
            if results is not None:
                values, seconds = ([result[place] for result in results] for place in (0, 1))
                answer.append(TrialResult(cell, point, fmean(values), values, sum(seconds), runs[: len(values)]))
        return answer

    @property
    def best(self) -> TrialResult | None:
        finite = [outcome for outcome in self.outcomes if math.isfinite(outcome.value)]
        return min(finite, key=lambda outcome: outcome.value, default=None)

    def tidy(self) -> None:
        """Writes the table of finished trials, and deletes the checkpoints of all of them but the best."""
        outcomes, best, metric = self.outcomes, self.best, self.settings.metric
        seeds = [f"seed {seed}" for seed in self.settings.seeds] if len(self.settings.seeds) > 1 else []
        rows = []
        for outcome in outcomes:
            of_seeds = dict(zip_longest(seeds, outcome.values[: len(seeds)], fillvalue=""))  # none after a divergence
            last = {"seconds": f"{outcome.seconds:.1f}", "run": outcome.runs[0].relative_to(self.folder)}
            rows.append({"trial": outcome.cell, **outcome.point, metric: outcome.value, **of_seeds, **last})
        head = ["trial", *(axis.key for axis in self.settings.axes), metric, *seeds, "seconds", "run"]
        write_text(self.folder / "trials.csv", as_csv(rows, head))
        for folder in (folder for outcome in outcomes if outcome != best for folder in outcome.runs):
            drop_checkpoints(folder)

    # --- the best

    def write_best(self) -> tuple[Path, list[Path]]:
        """Writes the figures of a finished sweep and then best.yaml; returns the paths of best.yaml and the figures.

        If the noise is signal-normalised, noise.json holds its constants.
        """
        self.tidy()  # again, because the process that finished the last trial may have died before it did
        best, total = self.best, self.settings.trials
        if best is None:
            raise UserError(
                f"all {total} trials diverged: no best.yaml; sweep smaller learning rates or less noise. "
                f"{self.folder / 'trials.csv'} lists the trials"
            )
        drawn = draw_sweep(self.folder, self.settings, self.outcomes, best)
        config = apply_point(self.settings.config, best.point)
        swap = signal_swap(config)
        if swap is not None:
            constants = best.runs[0] / f"noise-{swap['init_args']['at_step']}.json"
            write_text(self.folder / "noise.json", constants.read_text("utf-8"))
        path = self.folder / "best.yaml"
        seeds = f", mean of {len(best.values)} seeds" if len(best.values) > 1 else ""
        named = point_text(best.point, self.labels) or self.folder.name
        head = (
            f"# {named}: {self.settings.metric} {best.value:.6g}{seeds}, the best of {total} trials.\n"
            f"#\n#     python -m mupscale fit --config TARGET.yaml --config {shlex.quote(str(path))}\n"
        )
        tuned = tuned_values(config, best.point, self.folder / "noise.json")
        write_text(path, head + yaml.safe_dump(tuned, sort_keys=False))
        return path, drawn


# --- metrics


def check_metric(metric: Any) -> str:
    """A metric as it is. Raises a UserError if it is not a name, or if larger values of it are better."""
    if not isinstance(metric, str) or not metric.strip():
        raise UserError(f"metric: give last_epoch, last_2%, or the name of a metric that is logged, got {metric!r}")
    if window_of(metric) is None and figures.higher_is_better(metric):
        raise UserError(f"metric {metric}: metrics are minimised; give last_epoch, last_2%, or a loss such as val/loss")
    return metric


# --- configurations


def tuned_values(config: Config, point: Point, noise: Path) -> Config:
    """The values of a point alone, as `config` has them, to override those of another configuration.

    `noise` is the file with the constants of signal-normalised noise.
    """
    tuned: Config = {}
    arguments: dict[str, list[Config]] = {}
    for key, value in point.items():
        if key.partition(".")[0] in config:
            put(tuned, whole_key(config, key.split("."), key), value)
        else:
            name, (argument, *_) = callback_key(key)
            callbacks = configured_callbacks(config, name)
            given = arguments.setdefault(name, [{} for _ in callbacks])
            for own, callback in zip(given, callbacks, strict=True):
                # the whole argument, because the target's own may be of another class
                own[argument] = deepcopy(without_nulls(callback["init_args"][argument]))
    swap = signal_swap(config)
    if swap is not None:
        recorded = {"class_path": "mupscale.RecordedNoise", "init_args": {"path": str(noise)}}
        swaps = configured_callbacks(config, "UpscaleCallback")
        given = arguments.setdefault("UpscaleCallback", [{} for _ in swaps])
        for own, callback in zip(given, swaps, strict=True):
            if callback is swap:
                own["noise"] = recorded
    if arguments:
        # once, if all callbacks of a class have the same; otherwise in a list, one by one
        tuned["callback_args"] = {
            name: given[0] if all(own == given[0] for own in given) else given for name, given in arguments.items()
        }
    return tuned


def without_nulls(value: Any) -> Any:
    """A value without the keys whose value is None, at any depth of dictionaries."""
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(item) for key, item in value.items() if item is not None}


def signal_swap(config: Config) -> Config | None:
    """The UpscaleCallback with signal-normalised noise, if there is one; raises a UserError if there are several."""
    found = []
    for callback in configured_callbacks(config, "UpscaleCallback"):
        noise = callback["init_args"].get("noise")
        if isinstance(noise, dict) and class_name(noise) == "SignalNoise":
            found.append(callback)
    if len(found) > 1:
        raise UserError("trainer.callbacks: several UpscaleCallbacks have SignalNoise; sweep one growth at a time")
    return found[0] if found else None


# --- figures


def draw_sweep(out: Path, settings: Settings, outcomes: list[TrialResult], best: TrialResult) -> list[Path]:
    """Draws the metric over the axes, and training curves over the levels of one of them, in PNG and PDF."""
    axes = [axis for axis in settings.axes if len(axis.values) != 1]
    if not axes:
        return []
    label = metric_label(settings.metric)
    if len(axes) == 1:
        key = axes[0].key
        found: dict[Any, list[float]] = {}
        for outcome in outcomes:
            found.setdefault(level(outcome.point[key]), []).append(outcome.value)
        levels = sorted(found) if axes[0].bounds else in_order(axes[0])
        paths = figures.profile(out / "profile", levels, found, key, label)
    else:
        x, y = axes if len(axes) == 2 else most_influential(axes, outcomes)
        label = f"{label} (best over {len(axes) - 2} more)" if len(axes) > 2 else label
        points = [(level(outcome.point[x.key]), level(outcome.point[y.key]), outcome.value) for outcome in outcomes]
        if x.bounds or y.bounds:
            paths = figures.scatter(out / "scatter", points, x.key, y.key, label)
        else:
            points.sort(key=lambda point: point[2], reverse=True)  # of trials that differ in other axes, the best stays
            lowest = {(a, b): value for a, b, value in points}
            paths = figures.heatmap(out / "heatmap", in_order(x), in_order(y), lowest, x.key, y.key, label)
    colour = next((axis for axis in axes if "noise" in axis.key), axes[-1])
    return [*paths, *draw_curves(out / "curves", settings, outcomes, best, colour)]


def draw_curves(
    path: Path, settings: Settings, outcomes: list[TrialResult], best: TrialResult, axis: SweptAxis
) -> list[Path]:
    """Draws training curves by the level of one axis, the others at their best where they have levels."""
    names = labels([each.key for each in settings.axes])
    fixed = {each.key: best.point[each.key] for each in settings.axes if each != axis and len(each.values) > 1}
    shown = [outcome for outcome in outcomes if math.isfinite(outcome.value) and fixed.items() <= outcome.point.items()]
    if figures.is_ordered([outcome.point[axis.key] for outcome in shown]):
        shown.sort(key=lambda outcome: outcome.point[axis.key])
    lines: list[figures.Band] = []
    for outcome in shown[:: math.ceil(len(shown) / MOST_LINES)]:
        x, y = mean_curve([read_log(run).loss for run in outcome.runs])
        if x:
            lines.append(figures.Band(point_text({axis.key: outcome.point[axis.key]}, names), len(lines), x, y, y, y))
    x_label = f"steps, at {point_text(fixed, names)}" if fixed else "steps"
    return figures.bands(path, lines, x_label, "training loss") if lines else []


def metric_label(metric: str) -> str:
    """A metric as figures and tables name it."""
    part = window_of(metric)
    if part is None:
        return metric
    return "training loss, last epoch" if part == "epoch" else f"training loss, {metric.replace('_', ' ')} of steps"


def in_order(axis: SweptAxis) -> list[Any]:
    """The levels of an axis: numbers in order of size, others as they are listed."""
    return sorted(axis.values) if figures.is_ordered(axis.values) else [level(value) for value in axis.values]


def level(value: Any) -> Any:
    """A value as figures take it: a dictionary or a list as text."""
    return brief(value) if isinstance(value, dict | list) else value


def most_influential(axes: list[SweptAxis], outcomes: list[TrialResult]) -> list[SweptAxis]:
    """The two axes between whose levels the best values differ most, in the order of the axes."""

    def spread(axis: SweptAxis) -> float:
        levels: dict[str, float] = {}
        for outcome in outcomes:
            name = brief(outcome.point[axis.key])
            levels[name] = min(levels.get(name, math.inf), outcome.value)
        finite = [value for value in levels.values() if math.isfinite(value)]
        return pvariance(finite) if len(finite) > 1 else 0.0

    chosen = sorted(axes, key=spread, reverse=True)[:2]
    return [axis for axis in axes if axis in chosen]


def mean_curve(tables: list[dict[int, float]]) -> tuple[list[float], list[float]]:
    """The mean of curves over their common steps, with neighbouring points merged."""
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    y = [fmean(table[step] for step in group for table in tables) for group in groups]
    return [fmean(group) for group in groups], y
