"""Losses over windows of steps, when upscaled runs reach the minimum from scratch, and what that and tuning cost."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mupscale.commands.reporting.compare import Difference, Spread, compare, mean_of, spread
from mupscale.commands.reporting.folders import Found, SweepFolder
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.runs import FloatArray, Line, LoggedRun
from mupscale.flops import first_reach, speedup

SHARE = 0.02
"""The window over which losses are averaged in runs of no or few epochs, as a share of the steps."""

FEWEST = 5
"""The least number of logged losses in such a window, and of whole epochs in a run, for their means to be compared."""


# --- windows


@dataclass
class Windows:
    """The steps over which training losses are averaged: whole epochs, or a running window of `size` steps that ends
    at every `every`-th step.
    """

    size: int
    every: int
    epochs: bool
    per_epoch: int | None = None
    """The steps of an epoch, if known."""

    def of(self, run: LoggedRun) -> Line:
        """The ends of a run's windows (in steps) and the mean of the losses logged in each."""
        steps, losses = run.curve
        if not len(steps):
            return np.empty(0), np.empty(0)
        reached = int(steps[-1])
        if self.epochs:
            end = math.ceil(reached / self.size) * self.size
            reached = end if reached + run.interval > end else reached  # no more of the epoch would be logged
        ends = np.arange(self.size, reached + 1, self.every)
        if not self.epochs and (not len(ends) or ends[-1] != reached):
            ends = np.append(ends, reached)
        return trailing_means(steps, losses, ends.astype(float), self.size)

    @property
    def length(self) -> str:
        return "an epoch" if self.epochs else f"{self.size:,} steps"

    @property
    def words(self) -> str:
        return f"{'mean' if self.epochs else 'running mean'} over {self.length}"


def trailing_means(x: FloatArray, y: FloatArray, ends: FloatArray, size: float) -> Line:
    """The mean of the values within `size` before each end; and these ends, without those that have no value."""
    sums = np.concatenate([[0.0], np.cumsum(y, dtype=float)])
    last = np.searchsorted(x, ends, side="right")
    first = np.searchsorted(x, ends - size, side="right")
    filled = last > first
    return ends[filled], (sums[last] - sums[first])[filled] / (last - first)[filled]


def windows_of(runs: list[LoggedRun]) -> Windows:
    """One window for all runs, so that their minima can be compared."""
    per_epoch = next((steps for run in runs if (steps := run.planned("steps_per_epoch"))), None)
    interval = max((run.interval for run in runs), default=1)
    planned = [run.planned_steps or run.last_step for run in runs]
    if per_epoch and per_epoch >= interval:
        many_epochs = min(planned) >= FEWEST * per_epoch
        if many_epochs or all(run.counts_epochs for run in runs):
            return Windows(per_epoch, per_epoch, True, per_epoch)
    steps = max(planned, default=1)
    wanted = max(math.ceil(SHARE * steps), FEWEST * interval)
    return Windows(max(min(wanted, steps // FEWEST), interval), interval, False, per_epoch)


# --- a group beside one from scratch

CHARGES = {
    "upscaled": ("upscaled, until it reaches that minimum", "than training from scratch", []),
    "tuning": ("… and tuning", "with tuning charged", ["tuning"]),
    "base": ("… and the base model", "with the base model charged", ["base"]),
    "both": ("… and both", "with both charged", ["tuning", "base"]),
}
"""What is charged: in the table of costs, in the verdict, and what of it there is besides the upscaled run itself."""


class Reach(NamedTuple):
    """When an upscaled run reached the minimum of the from-scratch run of its seed; `step` is None if never."""

    seed: Any
    target: float
    step: int | None
    epoch: int | None
    flops: float
    of_steps: int


class Cost(NamedTuple):
    """What is charged, its FLOPs, and how many times cheaper than from scratch it is."""

    kind: str
    flops: float
    speedup: float
    charged: str


class Comparison:
    """An upscaled group beside the one of several from scratch that ends lowest."""

    def __init__(self, upscaled: Group, candidates: list[Group], numbers: "Numbers") -> None:
        self.upscaled, self.candidates = upscaled, len(candidates)
        self.scratch = min(candidates, key=lambda group: mean_of(group.losses("final_loss")))
        self.reaches: list[Reach] = []
        self.notes: list[str] = []
        self.costs: dict[str, Cost] = {}
        """As the paper's appendix "Evaluation criteria" charges them, those that are known; none if a run misses it."""
        pairs = []
        for run in upscaled.not_diverged:
            partner = self.scratch.of_seed(run.seed)
            if partner is None:
                seed = f"Seed {run.seed} of {upscaled.name}"
                self.notes.append(f"{seed} has no partner from scratch, and is in no comparison by seed.")
            elif len(run.means) and len(partner.means):
                reach = reach_of(run, partner, numbers.windows)
                run.row |= {f"reach_{name}": getattr(reach, name) for name in ("step", "epoch", "flops")}
                pairs.append((run, partner))
                self.reaches.append(reach)
        alone = [str(run.seed) for run in self.scratch.not_diverged if upscaled.of_seed(run.seed) is None]
        if alone:
            self.notes.append(f"No {upscaled.name} run for seed {', '.join(alone)} of {self.scratch.name}.")
        if self.reached:
            self._charge(pairs, numbers)

    @property
    def reached(self) -> bool:
        """Whether every pair of runs has reached the minimum."""
        return self.reached_at("step") is not None

    def reached_at(self, unit: str) -> Spread | None:
        """The steps, or epochs, at which all pairs of runs have reached the minimum; None if one has not."""
        places = [getattr(reach, unit) for reach in self.reaches]
        return None if None in places else spread(places)

    def difference(self, column: str = "final_loss") -> Difference:
        """By how much the upscaled group ends lower, in its final loss or in a validation metric, seed by seed."""
        return compare(self.upscaled.losses(column), self.scratch.losses(column), pairs=self.candidates)

    def _charge(self, pairs: list[tuple[LoggedRun, LoggedRun]], numbers: "Numbers") -> None:
        # what all sweeps have cost, without those that tuned other growth methods
        tuning = [each.flops for each in numbers.tuning if each.sweep.method in ("", self.upscaled.method)]
        base = self._base_cost([run for run, _ in pairs], numbers.groups)
        known = {"tuning": sum(tuning) if tuning else math.nan, "base": base}
        whole = statistics.fmean(partner.flops for _, partner in pairs)
        until = statistics.fmean(reach.flops for reach in self.reaches)
        for kind, (label, _, more) in CHARGES.items():
            charged = [until, *(known[name] for name in more)]
            if math.isfinite(whole + sum(charged)):
                self.costs.setdefault("scratch", Cost("scratch", whole, 1.0, "from scratch"))
                self.costs[kind] = Cost(kind, sum(charged), speedup(whole, *charged), label)

    def _base_cost(self, runs: list[LoggedRun], groups: list[Group]) -> float:
        """The mean cost of the base models that runs started from; NaN, with a note, if one of them is not known."""
        if all(run.init_from is None for run in runs):
            self.notes.append("The base model's training is part of the upscaled runs, and so of their cost.")
            return math.nan
        costs = []
        for run in runs:
            source = base_of(run, groups)
            if source is None:
                model = f"The base model of seed {run.seed}, {run.init_from},"
                self.notes.append(f"{model} is not among the runs: its cost is not charged.")
                return math.nan
            costs.append(source.flops)
        return statistics.fmean(costs)


def reach_of(ours: LoggedRun, theirs: LoggedRun, windows: Windows) -> Reach:
    """When our run reaches the minimum of theirs."""
    target = float(theirs.means.min())
    window = first_reach(ours.means.tolist(), target)
    step = None if window is None else int(ours.ends[window - 1])
    epoch = window if windows.epochs else None
    flops = math.nan if step is None else ours.flops_at(step)
    return Reach(ours.seed, target, step, epoch, flops, int(ours.ends[-1]))


def base_of(run: LoggedRun, groups: list[Group]) -> LoggedRun | None:
    """The run that a run started from: the one whose checkpoint it names; or, if folders were moved, the base of its
    seed and width.
    """
    path = run.init_from
    if path is None:
        return None
    named = (each for group in groups for each in group.runs if not each.grows)
    bases = (each for group in groups if group.role == "base" for each in group.not_diverged)
    alike = (each for each in bases if each.end_size == run.start_size and each.seed == run.seed)
    return next((each for each in named if each.folder.resolve() in path.resolve().parents), next(alike, None))


# --- sweeps


class Tuning:
    """What a sweep has cost, and how much cheaper a run of it is than one at the target width."""

    def __init__(self, sweep: SweepFolder, groups: list[Group]) -> None:
        runs = [LoggedRun(folder) for folder in sweep.trials]
        logged = [run for run in runs if run.has_loss]
        known = [run.flops for run in logged if math.isfinite(run.flops)]
        self.sweep, self.trials = sweep, len(runs) + sweep.lost
        self.uncounted, self.flops = self.trials - len(known), sum(known)
        self.width = self.target = ""
        self.speedup: float | None = None
        example = next((run for run in logged if run.grows), next(iter(logged), None))
        upscaled = next((group.runs[0] for group in groups if group.role == "upscaled"), None)
        if example is not None:
            self.width = example.width_range
        if example is not None and example.grows and upscaled is not None and upscaled.end_size != example.end_size:
            self.target = upscaled.width_range
            costs_of_a_step = upscaled.flops_per_step, example.flops_per_step
            if all(cost > 0 for cost in costs_of_a_step):  # NaN if a run has logged no FLOPs
                self.speedup = speedup(*costs_of_a_step)


# --- all runs


class Numbers:
    """The numbers of all runs, comparisons and sweeps; sets the windows of the runs and their rows."""

    def __init__(self, found: Found, groups: list[Group]) -> None:
        runs = [run for group in groups for run in group.runs]
        self.groups, self.windows = groups, windows_of(runs)
        self.recorded = recorded_metric(runs)
        """The metric that final losses are, if the runs recorded them."""
        self.metrics = sorted({name for run in runs for name in run.log.validation})
        """The validation metrics that are there."""
        self.lowest = [f"lowest {metric}" for metric in self.metrics if metric.endswith("loss")]
        for group in groups:
            for run in group.runs:
                run.ends, run.means = self.windows.of(run)
                run.row = self._row(run, group)
        self.notes = [note for group in groups for note in notes_on(group, self.windows)]
        if any(math.isnan(run.flops) for run in runs):
            self.notes.append("Some runs have logged no FLOPs: they are in no figure against FLOPs, and in no costs.")
        self.tuning = [Tuning(sweep, groups) for sweep in found.sweeps if groups]
        for each in self.tuning:
            if each.uncounted:
                trials = f"{each.uncounted} of {each.trials} trials of {each.sweep.name}"
                self.notes.append(f"{trials} have logged no FLOPs, or are gone: tuning cost more than is said.")
        self.comparisons: list[Comparison] = []
        for upscaled in (group for group in groups if group.role == "upscaled"):
            size = upscaled.runs[0].end_size
            candidates = [group for group in groups if group.role == "scratch" and group.runs[0].end_size == size]
            if candidates:
                self.comparisons.append(Comparison(upscaled, candidates, self))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each run."""
        return [run.row for group in self.groups for run in group.runs]

    def comparison_of(self, upscaled: Group | None) -> Comparison | None:
        return next((each for each in self.comparisons if each.upscaled is upscaled), None)

    def _row(self, run: LoggedRun, group: Group) -> dict[str, Any]:
        final = float(run.means[-1]) if len(run.means) else math.nan
        if self.recorded and run.value is not None:
            final = run.value
        return {
            "group": group.name,
            "seed": run.seed,
            "folder": str(run.folder),
            "start_width": run.start_width,
            "width": run.end_width,
            "steps": run.last_step,
            "state": run.state,
            "final_loss": final if run.diverged_at is None else math.nan,
            "min_loss": float(run.means.min()) if len(run.means) else None,
            **{metric: run.last(metric) for metric in self.metrics},
            **{column: run.lowest(column.removeprefix("lowest "))[0] for column in self.lowest},
            **{f"step of {column}": run.lowest(column.removeprefix("lowest "))[1] for column in self.lowest},
            "flops": run.flops,
            **dict.fromkeys(("reach_step", "reach_epoch", "reach_flops")),
        }


def recorded_metric(runs: list[LoggedRun]) -> str | None:
    """The mean training loss over the last steps, if every run that has not diverged recorded the same one."""
    metrics = {run.metric if run.value is not None else None for run in runs if run.diverged_at is None}
    metric = metrics.pop() if len(metrics) == 1 else None
    return metric if metric and metric.startswith("last_") else None


def notes_on(group: Group, windows: Windows) -> Iterator[str]:
    """What a reader must know of runs that are not as they should be."""
    seeds = [run.seed for run in group.runs]
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        several = f"{group.name} has several runs of seed {', '.join(map(str, repeated))}"
        yield f"{several}: all count, and the first is compared by seed."
    for run in group.runs:
        name = f"{group.name}, seed {run.seed} ({run.folder})"
        if run.diverged_at is not None:
            yield f"{name}: {run.state}: it is left out of means."
        elif run.in_progress:
            yield f"{name}: {run.state}."
        elif run.grows and not run.growths:
            yield f"{name} ended after {run.state}, before it grew."
        elif not len(run.means):
            yield f"{name} has no full window of {windows.length} yet."
