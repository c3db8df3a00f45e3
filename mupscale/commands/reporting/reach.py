"""Losses over windows of steps, when upscaled runs reach the minimum from scratch, and what that and tuning cost."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mupscale.commands.reporting.compare import Difference, compare
from mupscale.commands.reporting.folders import Found, SweepFolder
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.runs import FloatArray, LoggedRun
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

    def of(self, run: LoggedRun) -> tuple[FloatArray, FloatArray]:
        """The ends of a run's windows (in steps) and the mean of the losses logged in each."""
        steps, losses = finite_losses(run)
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


def finite_losses(run: LoggedRun) -> tuple[FloatArray, FloatArray]:
    """The steps and losses that a run has logged, until one that is not finite."""
    finite = np.isfinite(run.losses)
    count = len(finite) if finite.all() else int(finite.argmin())
    return run.steps[:count], run.losses[:count]


def trailing_means(x: FloatArray, y: FloatArray, ends: FloatArray, size: float) -> tuple[FloatArray, FloatArray]:
    """The mean of the values within `size` before each end; and these ends, without those that have no value."""
    sums = np.concatenate([[0.0], np.cumsum(y, dtype=float)])
    last = np.searchsorted(x, ends, side="right")
    first = np.searchsorted(x, ends - size, side="right")
    filled = last > first
    return ends[filled], (sums[last] - sums[first])[filled] / (last - first)[filled]


def windows_of(runs: list[LoggedRun]) -> tuple[Windows, int | None]:
    """One window for all runs, so that their minima can be compared; and the steps of an epoch, if known."""
    per_epoch = next((steps for run in runs if (steps := run.planned("steps_per_epoch"))), None)
    interval = max(run.interval for run in runs)
    planned = [run.planned_steps or run.last_step for run in runs]
    if per_epoch and per_epoch >= interval:
        many_epochs = min(planned) >= FEWEST * per_epoch
        if many_epochs or all(run.counts_epochs for run in runs):
            return Windows(per_epoch, per_epoch, True), per_epoch
    steps = max(planned)
    wanted = max(math.ceil(SHARE * steps), FEWEST * interval)
    return Windows(max(min(wanted, steps // FEWEST), interval), interval, False), per_epoch


# --- comparisons and costs


@dataclass
class Reach:
    """When an upscaled run reached the minimum of the from-scratch run of its seed; `step` is None if never."""

    seed: Any
    target: float
    step: int | None
    epoch: int | None
    flops: float
    of_steps: int


class Cost(NamedTuple):
    """What is charged (a key of COST_LABELS), its FLOPs, and how many times cheaper than from scratch it is."""

    kind: str
    flops: float
    factor: float


@dataclass
class Comparison:
    """An upscaled group beside one from scratch."""

    upscaled: Group
    scratch: Group
    candidates: int
    """Among how many groups from scratch this one ends lowest."""
    reaches: list[Reach] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    """As the paper's appendix "Evaluation criteria" charges them, those that are known; none if a run misses it."""

    @property
    def reached(self) -> bool:
        """Whether every pair of runs has reached the minimum."""
        return bool(self.reaches) and all(reach.step is not None for reach in self.reaches)

    def difference(self, metric: str = "") -> Difference:
        """By how much the upscaled group ends lower, in its final loss or in a validation metric, seed by seed."""
        return compare(self.upscaled.by_seed(metric), self.scratch.by_seed(metric), pairs=self.candidates)


@dataclass
class Tuning:
    """What a sweep has cost, and how much cheaper a run of it is than one at the target width."""

    sweep: SweepFolder
    trials: int
    uncounted: int
    flops: float
    width: str = ""
    ratio: float | None = None
    target: str = ""


@dataclass
class Numbers:
    """The numbers of all runs, comparisons and sweeps. `recorded` is the metric that final losses are, if the runs
    recorded them.
    """

    windows: Windows
    per_epoch: int | None
    recorded: str | None
    metrics: list[str]
    """The validation metrics that are there."""
    comparisons: list[Comparison] = field(default_factory=list)
    tuning: list[Tuning] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def validation_losses(self) -> list[str]:
        return [metric for metric in self.metrics if metric.endswith("loss")]

    def comparison_of(self, upscaled: Group | None) -> Comparison | None:
        return next((each for each in self.comparisons if each.upscaled is upscaled), None)

    def reach_of(self, run: LoggedRun, group: Group | None) -> Reach | None:
        comparison = self.comparison_of(group)
        reaches = comparison.reaches if comparison else []
        return next((reach for reach in reaches if reach.seed == run.seed), None)


def compute_numbers(found: Found, groups: list[Group]) -> Numbers:
    """The numbers of the groups; sets the windows and final losses of their runs."""
    runs = [run for group in groups for run in group.runs]
    windows, per_epoch = windows_of(runs)
    metrics = sorted({name for run in runs for name in run.log.validation})
    numbers = Numbers(windows, per_epoch, recorded_metric(runs), metrics)
    for run in runs:
        run.ends, run.means = windows.of(run)
        if numbers.recorded and run.value is not None:
            run.final = run.value
        elif len(run.means):
            run.final = float(run.means[-1])
        if run.diverged_at is not None:
            run.final = math.nan
    for group in groups:
        numbers.notes += notes_on(group, windows)
    if any(math.isnan(run.flops) for run in runs):
        numbers.notes.append("Some runs have logged no FLOPs: they are in no figure against FLOPs, and in no costs.")
    numbers.tuning = [tuning_of(sweep, groups) for sweep in found.sweeps]
    for each in numbers.tuning:
        if each.uncounted:
            trials = f"{each.uncounted} of {each.trials} trials of {each.sweep.name}"
            numbers.notes.append(f"{trials} have logged no FLOPs, or are gone: tuning cost more than is said.")
    for upscaled in (group for group in groups if group.role == "upscaled"):
        size = upscaled.runs[0].end_size
        candidates = [group for group in groups if group.role == "scratch" and group.runs[0].end_size == size]
        if candidates:
            scratch = min(candidates, key=lambda group: final.mean if (final := group.final) else math.inf)
            comparison = Comparison(upscaled, scratch, len(candidates))
            complete(comparison, groups, numbers)
            numbers.comparisons.append(comparison)
    return numbers


def recorded_metric(runs: list[LoggedRun]) -> str | None:
    """The mean training loss over the last steps, if every run that has not diverged recorded the same one."""
    metrics = {run.metric if run.value is not None else None for run in runs if run.diverged_at is None}
    metric = metrics.pop() if len(metrics) == 1 else None
    return metric if metric and metric.startswith("last_") else None


def notes_on(group: Group, windows: Windows) -> list[str]:
    """What a reader must know of runs that are not as they should be."""
    notes = []
    seeds = [run.seed for run in group.runs]
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        notes.append(
            f"{group.name} has several runs of seed {', '.join(map(str, repeated))}: "
            "all count, and the first is compared by seed."
        )
    for run in group.runs:
        name = f"{group.name}, seed {run.seed} ({run.folder})"
        if run.diverged_at is not None:
            notes.append(f"{name}: {run.state}: it is left out of means.")
        elif run.in_progress:
            notes.append(f"{name}: {run.state}.")
        elif run.grows and not run.growths:
            notes.append(f"{name} ended after {run.state}, before it grew.")
        elif not len(run.means):
            notes.append(f"{name} has no full window of {windows.length} yet.")
    return notes


def complete(comparison: Comparison, groups: list[Group], numbers: Numbers) -> None:
    """Adds to a comparison when its runs reach the minimum from scratch, what that costs, and notes."""
    upscaled, scratch = comparison.upscaled, comparison.scratch
    pairs = []
    for run in upscaled.not_diverged:
        partner = scratch.of_seed(run.seed)
        if partner is None:
            comparison.notes.append(
                f"Seed {run.seed} of {upscaled.name} has no partner from scratch, and is in no comparison by seed."
            )
        elif len(run.means) and len(partner.means):
            pairs.append((run, partner))
            comparison.reaches.append(reach_of(run, partner, numbers.windows))
    alone = [run.seed for run in scratch.not_diverged if upscaled.of_seed(run.seed) is None]
    if alone:
        comparison.notes.append(f"No {upscaled.name} run for seed {', '.join(map(str, alone))} of {scratch.name}.")
    if not comparison.reached:
        return
    base, missing = base_cost([run for run, _ in pairs], groups)
    comparison.notes += missing
    # what all sweeps have cost, without those that tuned other growth methods
    tuning = [sweep.flops for sweep in numbers.tuning if sweep.sweep.method in ("", upscaled.method)]
    whole = statistics.fmean(partner.flops for _, partner in pairs)
    until = statistics.fmean(reach.flops for reach in comparison.reaches)
    if math.isfinite(whole) and math.isfinite(until):
        comparison.costs = costs_of(whole, until, sum(tuning) if tuning else None, base)


def costs_of(scratch: float, upscaled: float, tuning: float | None, base: float | None) -> dict[str, Cost]:
    """The costs by what is charged; without those of which a part is not known."""
    charges: dict[str, list[float | None]] = {
        "upscaled": [upscaled],
        "tuning": [upscaled, tuning],
        "base": [upscaled, base],
        "both": [upscaled, tuning, base],
    }
    answer = {"scratch": Cost("scratch", scratch, 1.0)}
    for kind, charged in charges.items():
        known = [cost for cost in charged if cost is not None]
        if len(known) == len(charged):
            answer[kind] = Cost(kind, sum(known), speedup(scratch, *known))
    return answer


def reach_of(ours: LoggedRun, theirs: LoggedRun, windows: Windows) -> Reach:
    """When our run reaches the minimum of theirs."""
    target = float(theirs.means.min())
    window = first_reach(ours.means.tolist(), target)
    step = None if window is None else int(ours.ends[window - 1])
    epoch = window if windows.epochs else None
    flops = math.nan if step is None else ours.flops_at(step)
    return Reach(ours.seed, target, step, epoch, flops, int(ours.ends[-1]))


def base_cost(runs: list[LoggedRun], groups: list[Group]) -> tuple[float | None, list[str]]:
    """The mean cost of the base models that runs started from, None if one of them is not known; and notes."""
    if all(run.init_from is None for run in runs):
        return None, ["The base model's training is part of the upscaled runs, and so of their cost."]
    costs = []
    for run in runs:
        source = base_of(run, groups)
        if source is None:
            model = f"The base model of seed {run.seed}, {run.init_from},"
            return None, [f"{model} is not among the runs: its cost is not charged."]
        costs.append(source.flops)
    return (statistics.fmean(costs), []) if all(math.isfinite(cost) for cost in costs) else (None, [])


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


def tuning_of(sweep: SweepFolder, groups: list[Group]) -> Tuning:
    """The cost of a sweep's trials, as they logged it."""
    runs = [LoggedRun(folder) for folder in sweep.trials]
    logged = [run for run in runs if run.has_loss]
    known = [run.flops for run in logged if math.isfinite(run.flops)]
    trials = len(runs) + sweep.lost
    tuning = Tuning(sweep, trials, trials - len(known), sum(known))
    example = next((run for run in logged if run.grows), next(iter(logged), None))
    if example is None:
        return tuning
    tuning.width = example.width_range
    upscaled = next((group.runs[0] for group in groups if group.role == "upscaled"), None)
    if upscaled is not None and example.grows and upscaled.end_size != example.end_size:
        tuning.target = upscaled.width_range
        costs_of_a_step = upscaled.flops_per_step, example.flops_per_step
        if all(cost > 0 for cost in costs_of_a_step):  # NaN if a run has logged no FLOPs
            tuning.ratio = speedup(*costs_of_a_step)
    return tuning
