"""The results of a sweep: trials.csv, best.yaml, and figures."""

import csv
import io
import json
import math
import shlex
import shutil
import statistics
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from mupscale.atomic import write_text
from mupscale.callbacks.trial_metric import window_of
from mupscale.commands import figures
from mupscale.commands.config import Config, Point, at, brief, callback_key, callbacks_of, class_name
from mupscale.commands.event_files import read_log
from mupscale.commands.lab.space import Axis, labels, point_text
from mupscale.commands.lab.trial import folder_name
from mupscale.errors import UserError

POINTS = 60
"""The most points of a curve: each is the mean of several steps."""


@dataclass(frozen=True)
class Settings:
    """What a sweep runs. Two sweeps are the same if their settings are equal."""

    config: Config
    axes: list[Axis]
    sampler: Literal["grid", "random", "tpe"]
    trials: int
    seeds: list[int]
    metric: str

    def description(self) -> dict[str, Any]:
        """The settings as plain values, as JSON returns them."""
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


class Results:
    """The finished trials of a sweep in the folder `out`."""

    def __init__(self, out: Path, settings: Settings, outcomes: list[Outcome]) -> None:
        self.out, self.settings, self.outcomes = out, settings, outcomes
        self.names = labels(settings.axes)

    @property
    def best(self) -> Outcome | None:
        """The trial with the smallest mean; None if all diverged."""
        finite = [outcome for outcome in self.outcomes if math.isfinite(outcome.value)]
        return min(finite, key=lambda outcome: outcome.value, default=None)

    def folders(self, cell: int, point: Point) -> dict[int, Path]:
        """The folders of a trial's runs, by seed."""
        name = folder_name(cell, point, self.names)
        ends = {seed: f",seed={seed}" if len(self.settings.seeds) > 1 else "" for seed in self.settings.seeds}
        return {seed: self.out / "trials" / f"{name}{end}" for seed, end in ends.items()}

    def runs(self, outcome: Outcome) -> list[Path]:
        """The folders of the runs that a trial made."""
        return list(self.folders(outcome.cell, outcome.point).values())[: len(outcome.values)]

    # --- the table

    def write_table(self) -> None:
        """Writes trials.csv: a row for each finished trial."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        keys = [axis.key for axis in self.settings.axes]
        seeds = [f"seed {seed}" for seed in self.settings.seeds] if len(self.settings.seeds) > 1 else []
        table.writerow(["trial", *keys, self.settings.metric, *seeds, "seconds", "run"])
        for outcome in self.outcomes:
            values = [value_text(value) for value in outcome.values] if seeds else []
            values += [""] * (len(seeds) - len(values))  # seeds after one that diverged are not run
            run = self.runs(outcome)[0].relative_to(self.out)
            row = [outcome.cell, *outcome.point.values(), value_text(outcome.value), *values]
            table.writerow([*row, f"{outcome.seconds:.1f}", run])
        write_text(self.out / "trials.csv", text.getvalue())

    # --- the best

    def tuned(self, best: Outcome) -> Config:
        """The swept values alone, to override those of another configuration."""
        config = at(self.settings.config, best.point)
        tuned: Config = {}
        arguments: dict[str, list[Config]] = {}
        for key, value in best.point.items():
            if key.partition(".")[0] in config:
                lay(tuned, config, key.split("."), value)
            else:
                name, (argument, *_) = callback_key(key)
                callbacks = callbacks_of(config, name)
                given = arguments.setdefault(name, [{} for _ in callbacks])
                for own, callback in zip(given, callbacks, strict=True):
                    # the whole argument, because the target's own may be of another class
                    own[argument] = deepcopy(without_nulls(callback["init_args"][argument]))
        swap = signal_swap(config)
        if swap is not None:
            recorded = {"class_path": "mupscale.RecordedNoise", "init_args": {"path": str(self.out / "noise.json")}}
            swaps = callbacks_of(config, "UpscaleCallback")
            given = arguments.setdefault("UpscaleCallback", [{} for _ in swaps])
            for own, callback in zip(given, swaps, strict=True):
                if callback is swap:
                    own["noise"] = recorded
        if arguments:
            tuned["callback_args"] = {name: for_all(given) for name, given in arguments.items()}
        return tuned

    def write_best(self, best: Outcome) -> Path:
        """Writes best.yaml; and noise.json, if the noise is signal-normalised: its constants."""
        swap = signal_swap(at(self.settings.config, best.point))
        if swap is not None:
            shutil.copyfile(self.runs(best)[0] / f"noise-{swap['init_args']['at_step']}.json", self.out / "noise.json")
        path = self.out / "best.yaml"
        seeds = f", mean of {len(best.values)} seeds" if len(best.values) > 1 else ""
        head = (
            f"# {point_text(best.point, self.names)}: {self.settings.metric} {best.value:.6g}{seeds}, "
            f"the best of {len(self.outcomes)} trials.\n"
            "#\n"
            f"#     python -m mupscale fit --config TARGET.yaml --config {shlex.quote(str(path))}\n"
        )
        write_text(path, head + yaml.safe_dump(self.tuned(best), sort_keys=False))
        return path

    # --- the figures

    def draw(self, best: Outcome) -> list[Path]:
        """Draws the metric over the axes, and training curves over the levels of one of them, in PNG and PDF."""
        axes = [axis for axis in self.settings.axes if len(axis.values) != 1]
        if not axes:
            return []
        label = metric_label(self.settings.metric)
        if len(axes) == 1:
            key = axes[0].key
            levels = [level(outcome.point[key]) for outcome in self.outcomes]
            values = [outcome.value for outcome in self.outcomes]
            paths = figures.profile(self.out / "profile", levels, values, key, label)
        else:
            x, y = axes if len(axes) == 2 else most_influential(axes, self.outcomes)
            paths = self._plane(x, y, label)
        colour = next((axis for axis in axes if "noise" in axis.key), axes[-1])
        return [*paths, *self._curves(best, colour)]

    def _plane(self, x: Axis, y: Axis, label: str) -> list[Path]:
        """Draws the metric over two axes; of trials that differ in the other axes, the best."""
        others = len([axis for axis in self.settings.axes if len(axis.values) != 1]) - 2
        label = f"{label} (best over {others} more)" if others else label
        places = [(level(outcome.point[x.key]), level(outcome.point[y.key])) for outcome in self.outcomes]
        values = [outcome.value for outcome in self.outcomes]
        if x.bounds or y.bounds:
            points = [(*place, value) for place, value in zip(places, values, strict=True)]
            return figures.scatter(self.out / "scatter", points, x.key, y.key, label)

        def best_at(a: Any, b: Any) -> float | None:
            there = [value for place, value in zip(places, values, strict=True) if place == (a, b)]
            return min(there, default=None)

        return figures.heatmap(self.out / "heatmap", in_order(x), in_order(y), best_at, x.key, y.key, label)

    def _curves(self, best: Outcome, colour: Axis) -> list[Path]:
        """Draws training curves by the level of one axis, the others at their best where they have levels."""
        others = [axis for axis in self.settings.axes if axis != colour and len(axis.values) > 1]
        fixed = {axis.key: best.point[axis.key] for axis in others}
        lines = []
        for outcome in self.outcomes:
            if math.isfinite(outcome.value) and all(outcome.point[key] == value for key, value in fixed.items()):
                x, y = mean_curve([training_curve(run) for run in self.runs(outcome)])
                if x:
                    lines.append(figures.Curve(level(outcome.point[colour.key]), x, y))
        if not lines:
            return []
        title = f"at {point_text(fixed, self.names)}" if fixed else ""
        return figures.curves(self.out / "curves", lines, "step", "training loss", colour.key, title)


# --- metrics


def value_text(value: float) -> str:
    """A metric as tables have it: all its digits, or "diverged"."""
    return repr(value) if math.isfinite(value) else "diverged"


def checked_metric(metric: Any) -> str:
    """A metric as it is. Raises a UserError if it is not a name, or if larger values of it are better."""
    if not isinstance(metric, str) or not metric.strip():
        raise UserError(f"metric: give last_epoch, last_2%, or the name of a metric that is logged, got {metric!r}")
    if window_of(metric) is None and figures.higher_is_better(metric):
        raise UserError(
            f"metric {metric}: metrics are minimised, and larger values of this one are better; "
            "give last_epoch, last_2%, or a loss such as val/loss"
        )
    return metric


def metric_label(metric: str) -> str:
    """A metric as figures and tables name it."""
    part = window_of(metric)
    if part is None:
        return metric
    return "training loss, last epoch" if part == "epoch" else f"training loss, {metric.replace('_', ' ')} of steps"


# --- axes


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


# --- configurations


def lay(tuned: Config, config: Config, parts: list[str], value: Any) -> None:
    """Sets a value in `tuned` where it is in `config`, without the classes on the way: they stay the target's."""
    node: Any = config
    for index, part in enumerate(parts):
        if "class_path" in node and part not in ("class_path", "init_args"):
            tuned, node = tuned.setdefault("init_args", {}), node["init_args"]
        if index == len(parts) - 1:
            tuned[part] = value
        else:
            tuned, node = tuned.setdefault(part, {}), node[part]


def without_nulls(value: Any) -> Any:
    """A value without the keys whose value is None, at any depth of dictionaries."""
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(item) for key, item in value.items() if item is not None}


def for_all(given: list[Config]) -> Config | list[Config]:
    """The arguments of the callbacks of a class: once if all have the same, otherwise in a list, one by one."""
    return given[0] if all(own == given[0] for own in given) else given


def signal_swap(config: Config) -> Config | None:
    """The UpscaleCallback with signal-normalised noise, if there is one; raises a UserError if there are several."""
    found = []
    for callback in callbacks_of(config, "UpscaleCallback"):
        noise = callback["init_args"].get("noise")
        if noise and class_name(noise) == "SignalNoise":
            found.append(callback)
    if len(found) > 1:
        raise UserError(
            "trainer.callbacks: several UpscaleCallbacks have SignalNoise, "
            "and best.yaml can hold the constants of one only; sweep one growth"
        )
    return found[0] if found else None


# --- curves


def training_curve(run: Path) -> list[tuple[int, float]]:
    """The training loss by step, from a run's TensorBoard logs."""
    return [(step - 1, loss) for step, loss in sorted(read_log(run).loss.items())]


def mean_curve(curves: list[list[tuple[int, float]]]) -> tuple[list[float], list[float]]:
    """The mean of curves over their common steps, with neighbouring points merged."""
    tables = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    size = max(1, math.ceil(len(steps) / POINTS))
    x: list[float] = []
    y: list[float] = []
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        x.append(statistics.fmean(group))
        y.append(statistics.fmean(table[step] for step in group for table in tables))
    return x, y
