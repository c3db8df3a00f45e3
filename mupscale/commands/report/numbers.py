"""The numbers of a report: losses over windows, when an upscaled run reaches the from-scratch run's minimum, and what
it all cost.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mupscale.commands.report.groups import Found, Group, Sweep, grows, init_from
from mupscale.commands.run_logs import Run
from mupscale.flops import first_reach, speedup

SHARE = 0.02
"""Of the steps: the window over which losses are averaged in runs of no or few epochs."""

FEWEST = 5
"""Logged losses in such a window, and whole epochs in a run, for their means to be worth comparing."""


class Spread(NamedTuple):
    """A mean over runs, and its range."""

    mean: float
    low: float
    high: float
    runs: int


def spread(values: Sequence[float]) -> Spread | None:
    finite = [value for value in values if math.isfinite(value)]
    return Spread(statistics.fmean(finite), min(finite), max(finite), len(finite)) if finite else None


@dataclass
class Windows:
    """Over which steps training losses are averaged: whole epochs, or a running window that ends at every `every`-th
    step.
    """

    size: int
    every: int
    epochs: bool

    def of(self, run: Run) -> tuple[np.ndarray, np.ndarray]:
        """The ends of a run's windows (in steps) and the mean of the losses logged in each."""
        finite = np.isfinite(run.losses)
        steps, losses = (
            values[: len(finite) if finite.all() else int(finite.argmin())] for values in (run.steps, run.losses)
        )
        if not len(steps):
            return np.empty(0), np.empty(0)
        reached = int(steps[-1])
        if self.epochs:
            end = math.ceil(reached / self.size) * self.size
            reached = end if reached + run.interval > end else reached  # no more of the epoch would be logged
        ends = np.arange(self.size, reached + 1, self.every)
        if not self.epochs and (not len(ends) or ends[-1] != reached):
            ends = np.append(ends, reached)
        sums = np.concatenate([[0.0], np.cumsum(losses, dtype=float)])
        last = np.searchsorted(steps, ends, side="right")
        first = np.searchsorted(steps, ends - self.size, side="right")
        there = last > first
        return ends[there], (sums[last] - sums[first])[there] / (last - first)[there]

    def told(self) -> str:
        return "an epoch" if self.epochs else f"{self.size:,} steps"


def windows_of(runs: list[Run]) -> tuple[Windows, int | None]:
    """One window for all runs, so that their minima can be compared; and the steps of an epoch, if known."""
    per_epoch = next((run.steps_per_epoch for run in runs if run.steps_per_epoch), None)
    interval = max(run.interval for run in runs)
    planned = [run.planned_steps(per_epoch) or run.last_step for run in runs]
    if (
        per_epoch
        and per_epoch >= interval
        and (all(run.max_epochs for run in runs) or min(planned) >= FEWEST * per_epoch)
    ):
        return Windows(per_epoch, per_epoch, True), per_epoch
    wanted = max(math.ceil(SHARE * max(planned)), FEWEST * interval)
    return Windows(max(min(wanted, max(planned) // FEWEST), interval), interval, False), per_epoch


@dataclass
class Stand:
    """How far a run is, and what it has come to."""

    run: Run
    group: Group
    planned: int | None
    ends: np.ndarray
    losses: np.ndarray
    final: float
    flops: float

    @property
    def in_progress(self) -> bool:
        return in_progress(self.run, self.planned)

    @property
    def state(self) -> str:
        if self.run.diverged_at is not None:
            return f"diverged at step {self.run.diverged_at:,}"
        if self.in_progress:
            return f"in progress, {self.run.last_step:,} of {self.planned:,} steps"
        return f"{self.run.last_step:,} steps"

    def last(self, metric: str) -> float:
        values = self.run.log.validation.get(metric, {})
        return values[max(values)] if values else math.nan


def in_progress(run: Run, planned: int | None) -> bool:
    if run.result is not None or run.diverged_at is not None or planned is None:
        return False
    return run.last_step + run.interval <= planned


def spent(run: Run, planned: int | None) -> float:
    """A run's FLOPs: to the end of its plan if it got there, and otherwise to the last step that is known of it."""
    if planned is None or run.diverged_at is not None or in_progress(run, planned):
        return run.flops_at(run.last_step)
    return run.flops_at(planned)


@dataclass
class Reach:
    """When an upscaled run reached the minimum of the from-scratch run of its seed; `step` is None if never."""

    seed: Any
    target: float
    step: int | None
    epoch: int | None
    flops: float
    of_steps: int


@dataclass
class Comparison:
    """An upscaled group beside one from scratch."""

    upscaled: Group
    scratch: Group
    reaches: list[Reach]
    notes: list[str] = field(default_factory=list)
    costs: "Costs | None" = None

    @property
    def reached(self) -> bool:
        """By every pair of runs."""
        return bool(self.reaches) and all(reach.step is not None for reach in self.reaches)


@dataclass
class Costs:
    """FLOPs, as the paper's appendix "Evaluation criteria" charges them; None where nothing is known of it."""

    scratch: float
    upscaled: float
    tuning: float | None
    base: float | None

    def rows(self) -> list[tuple[str, float, float]]:
        """What is charged, its sum, and how many times cheaper than from scratch it is."""
        charges: list[tuple[str, list[float | None]]] = [
            ("upscaled, until it reaches that minimum", [self.upscaled]),
            ("… and tuning", [self.upscaled, self.tuning]),
            ("… and the base model", [self.upscaled, self.base]),
            ("… and both", [self.upscaled, self.tuning, self.base]),
        ]
        answer = [("from scratch", self.scratch, 1.0)]
        for name, charged in charges:
            known = [cost for cost in charged if cost is not None]
            if len(known) == len(charged):
                answer.append((name, sum(known), speedup(self.scratch, *known)))
        return answer


@dataclass
class Tuning:
    """What a sweep has cost, and how much cheaper a run of it is than one at the target width."""

    sweep: Sweep
    trials: int
    uncounted: int
    flops: float
    width: str
    ratio: float | None
    target: str


@dataclass
class Numbers:
    """All that is known of the runs."""

    windows: Windows
    per_epoch: int | None
    stands: list[Stand]
    comparisons: list[Comparison]
    tuning: list[Tuning]
    recorded: str | None
    notes: list[str]

    def of(self, group: Group) -> list[Stand]:
        return [stand for stand in self.stands if stand.group is group]

    def counted(self, group: Group) -> list[Stand]:
        """Whose ends are compared: those that have not diverged; finished ones, if there are any."""
        good = [stand for stand in self.of(group) if stand.run.diverged_at is None]
        return [stand for stand in good if not stand.in_progress] or good

    def so_far(self, group: Group) -> bool:
        return any(stand.in_progress for stand in self.counted(group))

    def final(self, group: Group) -> Spread | None:
        return spread([stand.final for stand in self.counted(group)])

    def last(self, group: Group, metric: str) -> Spread | None:
        return spread([stand.last(metric) for stand in self.counted(group)])

    @property
    def metrics(self) -> list[str]:
        """The validation metrics that are there."""
        return sorted({name for stand in self.stands for name in stand.run.log.validation})


def computed(found: Found, groups: list[Group]) -> Numbers:
    runs = [run for group in groups for run in group.runs]
    windows, per_epoch = windows_of(runs)
    stands = []
    notes = []
    metrics = {run.metric if run.result is not None else None for run in runs if run.diverged_at is None}
    metric = next(iter(metrics)) if len(metrics) == 1 else None
    recorded = metric if metric and metric.startswith("last_") else None  # a mean training loss, and everybody's
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            notes.append(
                f"{group.name} has several runs of seed {', '.join(map(str, twice))}: all count, and the first is "
                "compared by seed."
            )
        for run in group.runs:
            ends, losses = windows.of(run)
            final = float(losses[-1]) if len(losses) else math.nan
            if recorded and run.result is not None:
                final = run.result
            planned = run.planned_steps(per_epoch)
            stand = Stand(
                run, group, planned, ends, losses, final if run.diverged_at is None else math.nan, spent(run, planned)
            )
            stands.append(stand)
            if run.diverged_at is not None or stand.in_progress:
                out = ": it is left out of means" if run.diverged_at is not None else ""
                notes.append(f"{group.name}, seed {run.seed} ({run.folder}): {stand.state}{out}.")
            elif not len(losses):
                notes.append(
                    f"{group.name}, seed {run.seed} ({run.folder}) has no full window of {windows.told()} yet."
                )
    numbers = Numbers(windows, per_epoch, stands, [], [], recorded, notes)
    if any(math.isnan(stand.flops) for stand in stands):
        notes.append(
            "Some runs have logged no FLOPs (by_flops/…): they are in no figure against FLOPs, and in no costs."
        )
    numbers.tuning = [tuning_of(sweep, groups) for sweep in found.sweeps]
    for each in numbers.tuning:
        if each.uncounted:
            which = f"{each.uncounted} of {each.trials} trials of {each.sweep.name}"
            notes.append(f"{which} have logged no FLOPs, or are gone: tuning cost more than is said.")
    for upscaled in (group for group in groups if group.role == "upscaled"):
        scratch = counterpart(upscaled, groups, numbers)
        if scratch is not None:
            numbers.comparisons.append(compared(upscaled, scratch, groups, numbers))
    return numbers


def counterpart(upscaled: Group, groups: list[Group], numbers: Numbers) -> Group | None:
    """The from-scratch group of an upscaled one's width; of several, the one that ends lowest."""
    width = upscaled.runs[0].end_width
    there = [group for group in groups if group.role == "scratch" and group.runs[0].end_width == width]
    ends = {group.name: final.mean if (final := numbers.final(group)) else math.inf for group in there}
    return min(there, key=lambda group: ends[group.name], default=None)


def compared(upscaled: Group, scratch: Group, groups: list[Group], numbers: Numbers) -> Comparison:
    stands = {id(stand.run): stand for stand in numbers.stands}
    answer = Comparison(upscaled, scratch, [])
    pairs = []
    for run in upscaled.good:
        partner = scratch.of_seed(run.seed)
        if partner is None:
            answer.notes.append(
                f"Seed {run.seed} of {upscaled.name} has no partner from scratch, and is in no comparison by seed."
            )
            continue
        mine, theirs = stands[id(run)], stands[id(partner)]
        if not len(mine.losses) or not len(theirs.losses):
            continue
        pairs.append((mine, theirs))
        target = float(theirs.losses.min())
        count = first_reach(mine.losses.tolist(), target)
        step = None if count is None else int(mine.ends[count - 1])
        epoch = count if numbers.windows.epochs else None
        cost = math.nan if step is None else run.flops_at(step)
        answer.reaches.append(Reach(run.seed, target, step, epoch, cost, int(mine.ends[-1])))
    alone = [run.seed for run in scratch.good if upscaled.of_seed(run.seed) is None]
    if alone:
        answer.notes.append(f"No {upscaled.name} run for seed {', '.join(map(str, alone))} of {scratch.name}.")
    if answer.reached:
        tuning = sum(sweep.flops for sweep in numbers.tuning) if numbers.tuning else None
        base, missing = base_cost([mine.run for mine, _ in pairs], groups, stands)
        answer.notes += missing
        costs = Costs(
            statistics.fmean(theirs.flops for _, theirs in pairs),
            statistics.fmean(reach.flops for reach in answer.reaches),
            tuning,
            base,
        )
        if math.isfinite(costs.scratch) and math.isfinite(costs.upscaled):
            answer.costs = costs
    return answer


def base_cost(runs: list[Run], groups: list[Group], stands: dict[int, Stand]) -> tuple[float | None, list[str]]:
    """The mean cost of the base models that runs started from; None if one of them is not known."""
    if all(init_from(run) is None for run in runs):
        return None, ["The base model's training is part of the upscaled runs, and so of their cost."]
    costs = []
    for run in runs:
        source = base_of(run, groups)
        if source is None:
            return None, [
                f"The base model of seed {run.seed}, {init_from(run)}, is not among the runs: its cost is not charged."
            ]
        costs.append(stands[id(source)].flops)
    return (statistics.fmean(costs), []) if all(math.isfinite(cost) for cost in costs) else (None, [])


def base_of(run: Run, groups: list[Group]) -> Run | None:
    """The run that a run started from: the one whose checkpoint it names; or, if folders were moved, the base of its
    seed and width.
    """
    path = init_from(run)
    if path is None:
        return None
    bases = [other for group in groups for other in group.runs if not grows(other)]
    named = next((other for other in bases if other.folder.resolve() in path.resolve().parents), None)
    alike = [
        other for group in groups if group.role == "base" for other in group.good if other.end_width == run.start_width
    ]
    return named or next((other for other in alike if other.seed == run.seed), None)


# --- tuning


def tuning_of(sweep: Sweep, groups: list[Group]) -> Tuning:
    """The cost of a sweep's trials, as they logged it."""
    runs = [Run(folder) for folder in sweep.trials]
    flops = [
        cost
        for run in runs
        if run.has_loss and math.isfinite(cost := spent(run, run.planned_steps(run.steps_per_epoch)))
    ]
    like = next((run for run in runs if run.has_loss and grows(run)), next((run for run in runs if run.has_loss), None))
    ratio, width, target = None, "", ""
    if like is not None:
        width = told_width(like)
        upscaled = [run for group in groups if group.role == "upscaled" for run in group.runs]
        goal = next((run for run in upscaled if grows(like)), None)
        if goal is not None and goal.end_width != like.end_width:
            target = told_width(goal)
            value = speedup(goal.flops_per_step, like.flops_per_step)
            ratio = value if math.isfinite(value) else None
    trials = len(runs) + sweep.lost
    return Tuning(sweep, trials, trials - len(flops), sum(flops), width, ratio, target)


def told_width(run: Run) -> str:
    return f"{run.start_width} → {run.end_width}" if grows(run) else str(run.start_width)


# --- curves


class Line(NamedTuple):
    """A group's curve: the mean over its runs, and their range."""

    steps: np.ndarray
    flops: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def line(group: Group, curve: Callable[[Run], tuple[np.ndarray, np.ndarray]]) -> Line | None:
    """The mean of the runs that have not diverged, as far as all of them go."""
    curves = [(run, *curve(run)) for run in group.good]
    curves = [(run, x, y) for run, x, y in curves if len(x)]
    if not curves:
        return None
    first, last = max(x[0] for _, x, _ in curves), min(x[-1] for _, x, _ in curves)
    steps = np.unique(np.concatenate([x[(x >= first) & (x <= last)] for _, x, _ in curves]))
    if not len(steps):
        return None
    table = np.stack([np.interp(steps, x, y) for _, x, y in curves])
    flops = np.mean([run.flops_over(steps) for run, _, _ in curves], axis=0)
    return Line(steps, flops, table.mean(0), table.min(0), table.max(0))


def validations(metric: str) -> Callable[[Run], tuple[np.ndarray, np.ndarray]]:
    def curve(run: Run) -> tuple[np.ndarray, np.ndarray]:
        pairs = sorted(
            (step, value) for step, value in run.log.validation.get(metric, {}).items() if math.isfinite(value)
        )
        return np.array([float(step) for step, _ in pairs]), np.array([value for _, value in pairs])

    return curve
