"""The numbers of a report: losses over windows, when upscaled runs reach the from-scratch minimum, and the costs."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mupscale.commands.reporting.compare import Difference, Spread, compare, spread
from mupscale.commands.reporting.folders import Found, SweepFolder
from mupscale.commands.reporting.groups import Group, grows, init_from
from mupscale.commands.reporting.runs import FloatArray, LoggedRun
from mupscale.commands.reporting.windows import Windows, windows_of
from mupscale.flops import first_reach, speedup

# --- runs


@dataclass
class RunStatus:
    """How far a run is, its losses over windows, and its cost."""

    run: LoggedRun
    group: Group
    planned: int | None
    ends: FloatArray
    losses: FloatArray
    final: float
    flops: float

    @property
    def diverged(self) -> bool:
        return self.run.diverged_at is not None

    @property
    def in_progress(self) -> bool:
        return in_progress(self.run)

    @property
    def state(self) -> str:
        if self.run.diverged_at is not None:
            return f"diverged at step {self.run.diverged_at:,}"
        if self.in_progress:
            return f"in progress, {self.run.last_step:,} of {self.planned:,} steps"
        return f"{self.run.last_step:,} steps"

    def last(self, metric: str) -> float:
        """The last value of a validation metric; NaN if there is none."""
        return self.run.last(metric)


def status_of(run: LoggedRun, group: Group, windows: Windows, recorded: bool) -> RunStatus:
    """`recorded`: the final loss is the one that the run itself recorded."""
    ends, losses = windows.of(run)
    final = float(losses[-1]) if len(losses) else math.nan
    if recorded and run.value is not None:
        final = run.value
    if run.diverged_at is not None:
        final = math.nan
    return RunStatus(run, group, run.planned_steps, ends, losses, final, spent(run))


def in_progress(run: LoggedRun) -> bool:
    if run.result or run.diverged_at is not None or run.planned_steps is None:
        return False
    return run.last_step + run.interval <= run.planned_steps


def spent(run: LoggedRun) -> float:
    """A run's FLOPs: to the end of its plan if it got there, and otherwise to the last step that is known of it."""
    if run.planned_steps is None or run.diverged_at is not None or in_progress(run):
        return run.flops_at(run.last_step)
    return run.flops_at(run.planned_steps)


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


CostKind = Literal["scratch", "upscaled", "tuning", "base", "both"]
"""What a row of costs charges: training from scratch; the upscaled run until it reaches that minimum; and the upscaled
run together with tuning, with the base model's training, or with both.
"""


class CostRow(NamedTuple):
    """What is charged, its FLOPs, and how many times cheaper than training from scratch it is."""

    kind: CostKind
    flops: float
    factor: float


@dataclass
class Costs:
    """FLOPs, as the paper's appendix "Evaluation criteria" charges them; None where they are not known."""

    scratch: float
    upscaled: float
    tuning: float | None
    base: float | None

    def rows(self) -> list[CostRow]:
        """The rows whose costs are all known."""
        charges: list[tuple[CostKind, list[float | None]]] = [
            ("upscaled", [self.upscaled]),
            ("tuning", [self.upscaled, self.tuning]),
            ("base", [self.upscaled, self.base]),
            ("both", [self.upscaled, self.tuning, self.base]),
        ]
        rows = [CostRow("scratch", self.scratch, 1.0)]
        for kind, charged in charges:
            known = [cost for cost in charged if cost is not None]
            if len(known) == len(charged):
                rows.append(CostRow(kind, sum(known), speedup(self.scratch, *known)))
        return rows

    def factor(self, kind: CostKind) -> float | None:
        return next((row.factor for row in self.rows() if row.kind == kind), None)


@dataclass
class Comparison:
    """An upscaled group beside one from scratch."""

    upscaled: Group
    scratch: Group
    candidates: int
    """Among how many groups from scratch this one ends lowest."""
    reaches: list[Reach] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    costs: Costs | None = None

    @property
    def reached(self) -> bool:
        """Whether every pair of runs has reached the minimum."""
        return bool(self.reaches) and all(reach.step is not None for reach in self.reaches)


@dataclass
class Tuning:
    """What a sweep has cost, and how much cheaper a run of it is than one at the target width."""

    sweep: SweepFolder
    trials: int
    uncounted: int
    flops: float
    width: str
    ratio: float | None
    target: str


@dataclass
class Numbers:
    """The numbers of all runs, comparisons and sweeps. `recorded` is the metric that final losses are, if the runs
    recorded them.
    """

    windows: Windows
    per_epoch: int | None
    recorded: str | None
    statuses: list[RunStatus] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    tuning: list[Tuning] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def status(self, run: LoggedRun) -> RunStatus:
        return next(status for status in self.statuses if status.run is run)

    def counted(self, group: Group) -> list[RunStatus]:
        """The runs whose ends are compared: of those that have not diverged the finished ones, or all if none is."""
        not_diverged = [status for status in self.statuses if status.group is group and not status.diverged]
        return [status for status in not_diverged if not status.in_progress] or not_diverged

    def so_far(self, group: Group) -> bool:
        """Whether the ends of a group are those of runs in progress."""
        return any(status.in_progress for status in self.counted(group))

    def final(self, group: Group) -> Spread | None:
        return spread([status.final for status in self.counted(group)])

    def last(self, group: Group, metric: str) -> Spread | None:
        return spread([status.last(metric) for status in self.counted(group)])

    def difference(self, comparison: Comparison, metric: str = "") -> Difference:
        """By how much the upscaled group ends lower, in its final loss or in a validation metric, seed by seed."""
        ours, theirs = (self._by_seed(group, metric) for group in (comparison.upscaled, comparison.scratch))
        return compare(ours, theirs, pairs=comparison.candidates)

    def _by_seed(self, group: Group, metric: str) -> dict[Any, float]:
        """Of several runs of one seed the first counts."""
        statuses = reversed(self.counted(group))
        return {each.run.seed: each.last(metric) if metric else each.final for each in statuses}

    def flops(self, group: Group) -> Spread | None:
        return spread([status.flops for status in self.counted(group)])

    @property
    def metrics(self) -> list[str]:
        """The validation metrics that are there."""
        return sorted({name for status in self.statuses for name in status.run.log.validation})


def compute_numbers(found: Found, groups: list[Group]) -> Numbers:
    runs = [run for group in groups for run in group.runs]
    windows, per_epoch = windows_of(runs)
    numbers = Numbers(windows, per_epoch, recorded_metric(runs))
    for group in groups:
        add_statuses(group, numbers)
    if any(math.isnan(status.flops) for status in numbers.statuses):
        numbers.notes.append("Some runs have logged no FLOPs: they are in no figure against FLOPs, and in no costs.")
    numbers.tuning = [tuning_of(sweep, groups) for sweep in found.sweeps]
    for each in numbers.tuning:
        if each.uncounted:
            trials = f"{each.uncounted} of {each.trials} trials of {each.sweep.name}"
            numbers.notes.append(f"{trials} have logged no FLOPs, or are gone: tuning cost more than is said.")
    for upscaled in (group for group in groups if group.role == "upscaled"):
        size = upscaled.end_size
        candidates = [group for group in groups if group.role == "scratch" and group.end_size == size]
        if candidates:
            scratch = min(candidates, key=lambda group: final.mean if (final := numbers.final(group)) else math.inf)
            comparison = Comparison(upscaled, scratch, len(candidates))
            complete(comparison, groups, numbers)
            numbers.comparisons.append(comparison)
    return numbers


def recorded_metric(runs: list[LoggedRun]) -> str | None:
    """The mean training loss over the last steps, if every run that has not diverged recorded the same one."""
    metrics = {run.metric if run.value is not None else None for run in runs if run.diverged_at is None}
    metric = metrics.pop() if len(metrics) == 1 else None
    return metric if metric and metric.startswith("last_") else None


def add_statuses(group: Group, numbers: Numbers) -> None:
    """Adds the runs of a group to the numbers, with notes on those that are not as they should be."""
    seeds = [run.seed for run in group.runs]
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        numbers.notes.append(
            f"{group.name} has several runs of seed {', '.join(map(str, repeated))}: "
            "all count, and the first is compared by seed."
        )
    for run in group.runs:
        status = status_of(run, group, numbers.windows, numbers.recorded is not None)
        numbers.statuses.append(status)
        name = f"{group.name}, seed {run.seed} ({run.folder})"
        if status.diverged:
            numbers.notes.append(f"{name}: {status.state}: it is left out of means.")
        elif status.in_progress:
            numbers.notes.append(f"{name}: {status.state}.")
        elif grows(run) and run.last_step <= run.first_growth:
            numbers.notes.append(f"{name} ended after {status.state}, before it grew.")
        elif not len(status.losses):
            numbers.notes.append(f"{name} has no full window of {numbers.windows.length} yet.")


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
            continue
        ours, theirs = numbers.status(run), numbers.status(partner)
        if len(ours.losses) and len(theirs.losses):
            pairs.append((ours, theirs))
            comparison.reaches.append(reach_of(ours, theirs, numbers.windows))
    alone = [run.seed for run in scratch.not_diverged if upscaled.of_seed(run.seed) is None]
    if alone:
        comparison.notes.append(f"No {upscaled.name} run for seed {', '.join(map(str, alone))} of {scratch.name}.")
    if not comparison.reached:
        return
    base, missing = base_cost([ours.run for ours, _ in pairs], groups, numbers)
    comparison.notes += missing
    costs = Costs(
        scratch=statistics.fmean(theirs.flops for _, theirs in pairs),
        upscaled=statistics.fmean(reach.flops for reach in comparison.reaches),
        tuning=tuning_cost(upscaled, numbers),
        base=base,
    )
    if math.isfinite(costs.scratch) and math.isfinite(costs.upscaled):
        comparison.costs = costs


def reach_of(ours: RunStatus, theirs: RunStatus, windows: Windows) -> Reach:
    """When our run reaches the minimum of theirs."""
    target = float(theirs.losses.min())
    window = first_reach(ours.losses.tolist(), target)
    step = None if window is None else int(ours.ends[window - 1])
    epoch = window if windows.epochs else None
    flops = math.nan if step is None else ours.run.flops_at(step)
    return Reach(ours.run.seed, target, step, epoch, flops, int(ours.ends[-1]))


def base_cost(runs: list[LoggedRun], groups: list[Group], numbers: Numbers) -> tuple[float | None, list[str]]:
    """The mean cost of the base models that runs started from, None if one of them is not known; and notes."""
    if all(init_from(run) is None for run in runs):
        return None, ["The base model's training is part of the upscaled runs, and so of their cost."]
    costs = []
    for run in runs:
        source = base_of(run, groups)
        if source is None:
            model = f"The base model of seed {run.seed}, {init_from(run)},"
            return None, [f"{model} is not among the runs: its cost is not charged."]
        costs.append(numbers.status(source).flops)
    return (statistics.fmean(costs), []) if all(math.isfinite(cost) for cost in costs) else (None, [])


def base_of(run: LoggedRun, groups: list[Group]) -> LoggedRun | None:
    """The run that a run started from: the one whose checkpoint it names; or, if folders were moved, the base of its
    seed and width.
    """
    path = init_from(run)
    if path is None:
        return None
    for group in groups:
        for other in group.runs:
            if not grows(other) and other.folder.resolve() in path.resolve().parents:
                return other
    for group in groups:
        if group.role == "base":
            for other in group.not_diverged:
                if other.end_size == run.start_size and other.seed == run.seed:
                    return other
    return None


# --- tuning


def tuning_cost(upscaled: Group, numbers: Numbers) -> float | None:
    """What all sweeps have cost, without those that tuned other growth methods; None if there are none."""
    charged = [sweep.flops for sweep in numbers.tuning if sweep.sweep.method in ("", upscaled.method)]
    return sum(charged) if charged else None


def tuning_of(sweep: SweepFolder, groups: list[Group]) -> Tuning:
    """The cost of a sweep's trials, as they logged it."""
    runs = [LoggedRun(folder) for folder in sweep.trials]
    logged = [run for run in runs if run.has_loss]
    costs = [spent(run) for run in logged]
    known = [cost for cost in costs if math.isfinite(cost)]
    trials = len(runs) + sweep.lost
    tuning = Tuning(sweep, trials, trials - len(known), sum(known), width="", ratio=None, target="")
    example = next((run for run in logged if grows(run)), next(iter(logged), None))
    if example is None:
        return tuning
    tuning.width = width_range(example)
    upscaled = next((group.runs[0] for group in groups if group.role == "upscaled"), None)
    if upscaled is not None and grows(example) and upscaled.end_size != example.end_size:
        tuning.target = width_range(upscaled)
        costs_of_a_step = upscaled.flops_per_step, example.flops_per_step
        if all(cost > 0 for cost in costs_of_a_step):  # NaN if a run has logged no FLOPs
            tuning.ratio = speedup(*costs_of_a_step)
    return tuning


def width_range(run: LoggedRun) -> str:
    """`100 → 400`, or the one width of a run that does not grow."""
    return f"{run.start_width} → {run.end_width}" if grows(run) else str(run.start_width)
