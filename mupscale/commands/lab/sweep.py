"""A sweep: its trials, what they have come to, trials.csv and best.yaml. All of it is in one folder.

Every trial has a number, its cell. The points of a grid follow from the axes; drawn points are in points.json before
their runs begin. The results are those of the runs.
"""

import json
import math
import re
import shlex
import shutil
import statistics
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from mupscale.atomic import write_text
from mupscale.callbacks.trial_metric import window_of
from mupscale.commands import figures
from mupscale.commands.config import (
    Config,
    Point,
    at,
    brief,
    callback_key,
    callbacks_of,
    class_name,
    labels,
    put,
    read_json,
    whole_key,
)
from mupscale.commands.event_files import read_log
from mupscale.commands.lab.execution import refuse_other_content
from mupscale.commands.lab.run import Part, Result, Run, Trial, drop_checkpoints, ending_of, result_of, with_run
from mupscale.commands.lab.space import Axis, Outcome, Settings, draw, grid, point_of, point_text
from mupscale.data_files import refuse_links
from mupscale.errors import UserError
from mupscale.text_tables import as_csv, read_csv

NO_BEST = "no_best.txt"
"""In the folder of a finished sweep whose trials all diverged, instead of a best.yaml."""

TPE_ROUNDS = 10
"""In how many rounds a TPE draws its points: those of a round may be trained together, without each other's ends."""

POINTS = "points.json"
"""In the folder of a sweep that draws its points: their parameters, as Optuna has them, by cell."""

MOST_POINTS = 60
"""Of a training curve: each is the mean of several steps."""

MOST_LINES = 12
"""In the figure of training curves; of more trials, some are left out."""


class Sweep(Part):
    """A sweep in a folder, whose trials are `total`. `settings` is called when it can start.

    If all of its trials diverge it is an error, unless it `may_diverge`: then it is finished, and has no best trial.
    """

    def __init__(
        self, name: str, folder: Path, settings: Callable[[], Settings], total: int, *, may_diverge: bool = False
    ) -> None:
        """`name` is what the names of its trials start with."""
        super().__init__(name, folder)
        self.total, self._settings, self._may_diverge = total, settings, may_diverge
        self._found: dict[Path, Result | None] = {}

    @cached_property
    def settings(self) -> Settings:
        """UserError if the folder holds another sweep."""
        settings = self._settings()
        refuse_other_sweep(self.folder, settings)
        return settings

    @cached_property
    def labels(self) -> dict[str, str]:
        return labels([axis.key for axis in self.settings.axes])

    @property
    def finished(self) -> bool:
        return (self.folder / "best.yaml").exists() or self.has_no_best

    @property
    def has_no_best(self) -> bool:
        """Whether all trials diverged, of a sweep that may."""
        return (self.folder / NO_BEST).exists()

    @property
    def done(self) -> int:
        return len(read_csv(self.folder / "trials.csv"))

    # --- points

    @cached_property
    def points(self) -> list[Point]:
        """The points by cell; of a sweep that draws them, those that it has drawn."""
        if self.settings.sampler == "grid":
            return list(grid(self.settings.axes))
        try:
            return [point_of(self.settings.axes, each) for each in self._drawn()]
        except (LookupError, TypeError, ValueError, StopIteration) as error:
            path = self.folder / POINTS
            raise UserError(f"{path} is not of this sweep ({error!r}); delete it, or name a new folder") from error

    def _drawn(self) -> list[dict[str, object]]:
        path = self.folder / POINTS
        return read_json(path)["points"] if path.exists() else []

    def _draw(self, count: int) -> None:
        """Draws points until there are so many. Those of a TPE follow the results of the finished trials."""
        assert self.settings.sampler != "grid"
        known = {outcome.cell: outcome.value for outcome in self.outcomes}
        drawn = self._drawn()
        while len(drawn) < count:
            before = [(each, known.get(cell)) for cell, each in enumerate(drawn)]
            drawn.append(draw(self.settings.axes, self.settings.sampler, len(drawn), before))
        write_text(self.folder / POINTS, json.dumps({"points": drawn}, indent=1) + "\n")
        self.__dict__.pop("points", None)

    # --- trials

    def trials(self) -> list[Trial]:
        (trials,) = self.rounds()
        return list(trials.values())

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
        config = at(settings.config, point)
        name = ", ".join(filter(None, [self.name, point_text(point, self.labels)]))
        runs = []
        for seed, folder in self.folders(cell, point).items():
            of_seed = f", seed {seed}" if len(settings.seeds) > 1 else ""
            runs.append(Run(with_run(config, settings.metric, seed, folder), folder, f"the trial {name}{of_seed}"))
        return Trial(name, runs, self._finish)

    def _finish(self, results: list[Result]) -> str:
        """Writes the table; returns the end of a trial in words."""
        self.tidy()
        values, seconds = [value for value, _ in results], sum(seconds for _, seconds in results)
        best = self.best
        leader = f"best {best.value:.5g} ({point_text(best.point, self.labels)})" if best else "all diverged so far"
        mean = sum(values) / len(values)
        return f"{f'{mean:.5g}' if math.isfinite(mean) else 'diverged'} in {seconds:.0f} s; {leader}"

    # --- results

    def folders(self, cell: int, point: Point) -> dict[int, Path]:
        """The folders of a trial's runs, by seed; TensorBoard shows their names."""
        values = ",".join(f"{self.labels[key]}={brief(value)}" for key, value in point.items())
        plain = re.sub(r"[^\w.,=+-]+", "-", values)
        name = f"{cell:03d}_{plain}"[:120]
        ends = {seed: f",seed={seed}" if len(self.settings.seeds) > 1 else "" for seed in self.settings.seeds}
        return {seed: self.folder / "trials" / f"{name}{end}" for seed, end in ends.items()}

    @property
    def outcomes(self) -> list[Outcome]:
        """The finished trials, by cell."""
        answer = []
        for cell, point in enumerate(self.points):
            runs = list(self.folders(cell, point).values())
            results = ending_of(runs, self._result_of)
            if results is not None:
                values = [value for value, _ in results]
                seconds = sum(seconds for _, seconds in results)
                answer.append(Outcome(cell, point, sum(values) / len(values), values, seconds, runs[: len(values)]))
        return answer

    def _result_of(self, folder: Path) -> Result | None:
        if self._found.get(folder) is None:
            self._found[folder] = result_of(folder)
        return self._found[folder]

    @property
    def best(self) -> Outcome | None:
        finite = [outcome for outcome in self.outcomes if math.isfinite(outcome.value)]
        return min(finite, key=lambda outcome: outcome.value, default=None)

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint of the best trial, of its first seed."""
        assert self.best is not None
        return self.best.runs[0] / "checkpoints" / "last.ckpt"

    def progress(self) -> str:
        return f"{self.total - len(self.outcomes)} of {self.total} left"

    def tidy(self) -> None:
        """Writes the table of finished trials, and deletes the checkpoints of all of them but the best."""
        self._write_table()
        best = self.best
        for outcome in self.outcomes:
            if outcome != best:
                for folder in outcome.runs:
                    drop_checkpoints(folder)

    def _write_table(self) -> None:
        seeds = [f"seed {seed}" for seed in self.settings.seeds] if len(self.settings.seeds) > 1 else []
        rows = []
        for outcome in self.outcomes:
            row = {"trial": outcome.cell, **outcome.point, self.settings.metric: outcome.value}
            row |= seed_cells(seeds, outcome.values)
            run = outcome.runs[0].relative_to(self.folder)
            rows.append({**row, "seconds": f"{outcome.seconds:.1f}", "run": run})
        head = ["trial", *(axis.key for axis in self.settings.axes), self.settings.metric, *seeds, "seconds", "run"]
        write_text(self.folder / "trials.csv", as_csv(rows, head))

    def conclude(self) -> None:
        if self.finished:
            return
        if self._may_diverge and self.best is None:
            self.tidy()
            write_text(self.folder / NO_BEST, f"none: all {self.total} trials diverged\n")
        else:
            self.write_best()

    # --- the best

    def write_best(self) -> tuple[Path, list[Path]]:
        """Writes the figures of a finished sweep and then best.yaml; returns the paths of best.yaml and the figures.

        If the noise is signal-normalised, noise.json holds its constants.
        """
        self.tidy()  # again, because the process that finished the last trial may have died before it did
        best = self.best
        if best is None:
            raise UserError(
                f"all {self.total} trials diverged: no best.yaml; sweep smaller learning rates or less noise. "
                f"{self.folder / 'trials.csv'} lists the trials"
            )
        drawn = draw_sweep(self.folder, self.settings, self.outcomes, best)
        swap = signal_swap(at(self.settings.config, best.point))
        if swap is not None:
            shutil.copyfile(best.runs[0] / f"noise-{swap['init_args']['at_step']}.json", self.folder / "noise.json")
        path = self.folder / "best.yaml"
        seeds = f", mean of {len(best.values)} seeds" if len(best.values) > 1 else ""
        head = (
            f"# {point_text(best.point, self.labels)}: {self.settings.metric} {best.value:.6g}{seeds}, "
            f"the best of {self.total} trials.\n"
            "#\n"
            f"#     python -m mupscale fit --config TARGET.yaml --config {shlex.quote(str(path))}\n"
        )
        write_text(path, head + yaml.safe_dump(self.tuned, sort_keys=False))
        return path, drawn

    @property
    def tuned(self) -> Config:
        """The best of the swept values alone, to override those of another configuration."""
        best = self.best
        assert best is not None
        return tuned_values(at(self.settings.config, best.point), best.point, self.folder / "noise.json")


def refuse_other_sweep(folder: Path, settings: Settings) -> None:
    """Raises a UserError if a folder holds another sweep, or something else."""
    refuse_links(folder, POINTS)
    refuse_other_content(folder, "sweep", settings.description())


# --- metrics


def seed_cells(seeds: list[str], values: list[float]) -> dict[str, float | str]:
    """The metric of each seed; seeds after one that diverged are not run."""
    return dict(zip_longest(seeds, values[: len(seeds)], fillvalue=""))


def checked_metric(metric: Any) -> str:
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
            callbacks = callbacks_of(config, name)
            given = arguments.setdefault(name, [{} for _ in callbacks])
            for own, callback in zip(given, callbacks, strict=True):
                # the whole argument, because the target's own may be of another class
                own[argument] = deepcopy(without_nulls(callback["init_args"][argument]))
    swap = signal_swap(config)
    if swap is not None:
        recorded = {"class_path": "mupscale.RecordedNoise", "init_args": {"path": str(noise)}}
        swaps = callbacks_of(config, "UpscaleCallback")
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
    for callback in callbacks_of(config, "UpscaleCallback"):
        noise = callback["init_args"].get("noise")
        if noise and class_name(noise) == "SignalNoise":
            found.append(callback)
    if len(found) > 1:
        raise UserError("trainer.callbacks: several UpscaleCallbacks have SignalNoise; sweep one growth at a time")
    return found[0] if found else None


# --- figures


def draw_sweep(out: Path, settings: Settings, outcomes: list[Outcome], best: Outcome) -> list[Path]:
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


def draw_curves(path: Path, settings: Settings, outcomes: list[Outcome], best: Outcome, axis: Axis) -> list[Path]:
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


def in_order(axis: Axis) -> list[Any]:
    """The levels of an axis: numbers in order of size, others as they are listed."""
    return sorted(axis.values) if figures.is_ordered(axis.values) else [level(value) for value in axis.values]


def level(value: Any) -> Any:
    """A value as figures take it: a dictionary or a list as text."""
    return brief(value) if isinstance(value, dict | list) else value


def most_influential(axes: list[Axis], outcomes: list[Outcome]) -> list[Axis]:
    """The two axes between whose levels the best values differ most, in the order of the axes."""

    def spread(axis: Axis) -> float:
        levels: dict[str, float] = {}
        for outcome in outcomes:
            name = brief(outcome.point[axis.key])
            levels[name] = min(levels.get(name, math.inf), outcome.value)
        finite = [value for value in levels.values() if math.isfinite(value)]
        return statistics.pvariance(finite) if len(finite) > 1 else 0.0

    chosen = sorted(axes, key=spread, reverse=True)[:2]
    return [axis for axis in axes if axis in chosen]


def mean_curve(tables: list[dict[int, float]]) -> tuple[list[float], list[float]]:
    """The mean of curves over their common steps, with neighbouring points merged."""
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    y = [statistics.fmean(table[step] for step in group for table in tables) for group in groups]
    return [statistics.fmean(group) for group in groups], y
