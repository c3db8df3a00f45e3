"""What a sweep ends in: trials.csv, best.yaml, and figures."""

import csv
import io
import math
import shlex
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mupscale.callbacks.trial_metric import window_of
from mupscale.commands import figures
from mupscale.commands.config import Config, Point, at, brief, callback_key, callbacks_of, class_name
from mupscale.commands.run_logs import higher_is_better, read_log
from mupscale.commands.sweep.space import Axis, labels, point_text
from mupscale.commands.sweep.study import Outcome, Settings, write
from mupscale.commands.sweep.trial import folder_name
from mupscale.errors import UserError

POINTS = 60
"""A curve has at most so many: each is the mean of what it stands for."""


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
        """Where a trial's runs are, by seed."""
        name = folder_name(cell, point, self.names)
        ends = {seed: f",seed={seed}" if len(self.settings.seeds) > 1 else "" for seed in self.settings.seeds}
        return {seed: self.out / "trials" / f"{name}{end}" for seed, end in ends.items()}

    def runs(self, outcome: Outcome) -> list[Path]:
        return list(self.folders(outcome.cell, outcome.point).values())[: len(outcome.values)]

    # --- the table

    def write_table(self) -> None:
        """trials.csv: a row for each finished trial."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        seeds = [f"seed {seed}" for seed in self.settings.seeds] if len(self.settings.seeds) > 1 else []
        table.writerow(
            [
                "trial",
                *(axis.key for axis in self.settings.axes),
                self.settings.metric,
                *seeds,
                "seconds",
                "attempts",
                "run",
            ]
        )
        for outcome in self.outcomes:
            each = (
                [shown_value(value) for value in outcome.values] + [""] * (len(seeds) - len(outcome.values))
                if seeds
                else []
            )
            run = self.runs(outcome)[0].relative_to(self.out)
            row = [
                outcome.cell,
                *outcome.point.values(),
                shown_value(outcome.value),
                *each,
                f"{outcome.seconds:.1f}",
                outcome.attempts,
            ]
            table.writerow([*row, run])
        write(self.out / "trials.csv", text.getvalue())

    # --- the best

    def tuned(self, best: Outcome) -> Config:
        """The swept values alone, to be laid over another configuration."""
        config = at(self.settings.config, best.point)
        tuned: Config = {}
        for key, value in best.point.items():
            if key.partition(".")[0] in config:
                lay(tuned, config, key.split("."), value)
            else:
                name, (argument, *_) = callback_key(key)
                carried = callbacks_of(config, name)[0]["init_args"][
                    argument
                ]  # whole: the target's may be of another class
                tuned.setdefault("callback_args", {}).setdefault(name, {})[argument] = without_nulls(carried)
        swap = signal_swap(config)
        if swap is not None:
            recorded = {"class_path": "mupscale.RecordedNoise", "init_args": {"path": str(self.out / "noise.json")}}
            tuned.setdefault("callback_args", {}).setdefault("UpscaleCallback", {})["noise"] = recorded
        return tuned

    def write_best(self, best: Outcome) -> Path:
        """best.yaml; and noise.json, the constants of signal-normalised noise."""
        swap = signal_swap(at(self.settings.config, best.point))
        if swap is not None:
            shutil.copyfile(self.runs(best)[0] / f"noise-{swap['init_args']['at_step']}.json", self.out / "noise.json")
        seeds = f", mean of {len(best.values)} seeds" if len(best.values) > 1 else ""
        head = (
            f"# {point_text(best.point, self.names)}: {self.settings.metric} {best.value:.6g}{seeds}, the best of "
            f"{len(self.outcomes)} trials.\n"
            "#\n#     python -m mupscale fit --config TARGET.yaml --config "
            f"{shlex.quote(str(self.out / 'best.yaml'))}\n"
        )
        write(self.out / "best.yaml", head + yaml.safe_dump(self.tuned(best), sort_keys=False))
        return self.out / "best.yaml"

    # --- the figures

    def draw(self, best: Outcome) -> list[Path]:
        """The metric over the axes, and training curves over the levels of one of them, in PNG and PDF."""
        axes = [axis for axis in self.settings.axes if len(axis.values) != 1]
        label = metric_label(self.settings.metric)
        paths: list[Path] = []
        if len(axes) >= 2:
            x, y = axes if len(axes) == 2 else most_telling(axes, self.outcomes)
            paths += self._plane(x, y, label)
        elif axes:
            key = axes[0].key
            pairs = [(level(outcome.point[key]), outcome.value) for outcome in self.outcomes]
            values = [value for _, value in pairs]
            paths += figures.profile(self.out / "profile", [x for x, _ in pairs], values, key, label)
        if axes:
            colour = next((axis for axis in axes if "noise" in axis.key), axes[-1])
            paths += self._curves(best, colour)
        return paths

    def _plane(self, x: Axis, y: Axis, label: str) -> list[Path]:
        """Over two axes; of trials that differ in the others, the best."""
        others = len([axis for axis in self.settings.axes if len(axis.values) != 1]) - 2
        label = f"{label} (best over {others} more)" if others else label
        if x.bounds or y.bounds:
            points = [
                (level(outcome.point[x.key]), level(outcome.point[y.key]), outcome.value) for outcome in self.outcomes
            ]
            return figures.scatter(self.out / "scatter", points, x.key, y.key, label)

        def value(a: Any, b: Any) -> float | None:
            there = [o.value for o in self.outcomes if level(o.point[x.key]) == a and level(o.point[y.key]) == b]
            return min(there, default=None)

        return figures.heatmap(self.out / "heatmap", in_order(x), in_order(y), value, x.key, y.key, label)

    def _curves(self, best: Outcome, colour: Axis) -> list[Path]:
        """Training curves by the level of one axis, the others at their best where they have levels."""
        fixed = {axis.key: best.point[axis.key] for axis in self.settings.axes if axis != colour and not axis.bounds}
        fixed = {key: value for key, value in fixed.items() if len(self._axis(key).values) > 1}
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

    def _axis(self, key: str) -> Axis:
        return next(axis for axis in self.settings.axes if axis.key == key)


def shown_value(value: float) -> str:
    return repr(value) if math.isfinite(value) else "diverged"


def checked_metric(metric: Any) -> str:
    """A metric as it is. UserError if it is none, or one of which less is worse."""
    if not isinstance(metric, str):
        raise UserError(f"metric: give last_epoch, last_2%, or the name of a metric that is logged, got {metric!r}")
    if window_of(metric) is None and higher_is_better(metric):
        raise UserError(
            f"metric {metric}: it would be minimised, and more of it is better; give last_epoch, last_2%, or val/loss, "
            "say"
        )
    return metric


def metric_label(metric: str) -> str:
    part = window_of(metric)
    if part is None:
        return metric
    return "training loss, last epoch" if part == "epoch" else f"training loss, {metric.replace('_', ' ')} of steps"


def in_order(axis: Axis) -> list[Any]:
    return sorted(axis.values) if figures.is_ordered(axis.values) else [level(value) for value in axis.values]


def level(value: Any) -> Any:
    """A value as figures take it: a number as it is, what has parts in words."""
    return brief(value) if isinstance(value, dict | list) else value


def most_telling(axes: list[Axis], outcomes: list[Outcome]) -> list[Axis]:
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


def lay(tuned: Config, config: Config, parts: list[str], value: Any) -> None:
    """Sets a value in `tuned` where it stands in `config`, and nothing else: classes stay the target's."""
    node: Any = config
    for index, part in enumerate(parts):
        if "class_path" in node and part not in ("class_path", "init_args"):
            tuned, node = tuned.setdefault("init_args", {}), node["init_args"]
        if index == len(parts) - 1:
            tuned[part] = value
        else:
            tuned, node = tuned.setdefault(part, {}), node[part]


def without_nulls(value: Any) -> Any:
    return (
        {key: without_nulls(item) for key, item in value.items() if item is not None}
        if isinstance(value, dict)
        else value
    )


def signal_swap(config: Config) -> Config | None:
    """The UpscaleCallback whose noise is signal-normalised, if there is one; UserError if there are several."""
    swaps = [c for c in callbacks_of(config, "UpscaleCallback") if c["init_args"].get("noise")]
    found = [c for c in swaps if class_name(c["init_args"]["noise"]) == "SignalNoise"]
    if len(found) > 1:
        raise UserError(
            "trainer.callbacks: several UpscaleCallbacks have SignalNoise, whose constants best.yaml could not tell "
            "apart; sweep one growth"
        )
    return found[0] if found else None


def training_curve(run: Path) -> list[tuple[int, float]]:
    """The training loss by step, from a run's TensorBoard logs."""
    return [(step - 1, loss) for step, loss in sorted(read_log(run).loss.items())]


def mean_curve(curves: list[list[tuple[int, float]]]) -> tuple[list[float], list[float]]:
    """The mean of curves over the same steps, with neighbouring points merged."""
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
    tables = [dict(curve) for curve in curves]
    size = max(1, math.ceil(len(steps) / POINTS))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    mean: Callable[[list[float]], float] = statistics.fmean
    return [mean([float(s) for s in group]) for group in groups], [
        mean([table[s] for s in group for table in tables]) for group in groups
    ]
