"""Runs as pandas tables: a row for each run, a row for each point of a curve, and how arms compare."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mupscale.commands.reporting.arms import Arm, arms_of
from mupscale.commands.reporting.compare import ArmDifference, Losses, compare, mean_of
from mupscale.commands.reporting.folders import RunFolders
from mupscale.commands.reporting.runs import LoggedRun, Windows, windows_of
from mupscale.flops import first_reach


def load_runs(*folders: str | Path) -> pd.DataFrame:
    """Returns a table with a row for each run in folders of runs, sweeps and experiments, at any depth.

    Runs that differ in their seeds only have the same `arm`. `final_loss` is that of the metric that a sweep recorded,
    or else the mean of the last window, `min_loss` the lowest mean of a window; both are missing if the run diverged.
    `base_flops` are those of the run from whose checkpoint it started. Trials of a sweep over values have
    `is_tuning`, and the sweep's folder as arm.

    >>> runs = load_runs("runs/quickstart")  # doctest: +SKIP
    >>> runs.groupby("arm").final_loss.agg(["mean", "std"])  # doctest: +SKIP
    """
    return Results.read(folders).table


def load_curves(*folders: str | Path) -> pd.DataFrame:
    """Returns the training losses of all runs but tuning: a row for each logged step, with samples and FLOPs so far.

    >>> curves = load_curves("runs/quickstart")  # doctest: +SKIP
    >>> curves.pivot_table(index="step", columns="arm", values="loss").plot()  # doctest: +SKIP
    """
    return Results.read(folders).curves


@dataclass
class Comparison:
    """An arm beside the reference, seed by seed. Differences are positive where the arm is lower."""

    arm: Arm
    reference: Arm
    at_flops: float
    """The compute at which both are compared, the base model's included: the mean over seeds of the smaller total."""
    ours: Losses
    theirs: Losses
    """The reference's losses at equal compute, by seed."""
    equal: ArmDifference
    final: ArmDifference
    reached: dict[Any, float]
    """FLOPs until each seed reaches the reference's lowest loss, without the base; infinite if it never does."""
    costs: list[tuple[str, float, float]]
    """What is charged, its FLOPs, and how many times more the reference costs; empty if a seed never reaches it."""


@dataclass
class Results:
    """Everything that a report shows of the runs in folders."""

    found: RunFolders
    arms: list[Arm]
    windows: Windows
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folders: tuple[str | Path, ...] | list[Path]) -> "Results":
        found = RunFolders([Path(folder) for folder in folders])
        answer = cls(found, arms_of(found.runs), windows_of(found.runs), list(found.notes))
        answer.notes += [note for arm in answer.arms for note in notes_on(arm)]
        return answer

    # --- runs

    @property
    def table(self) -> pd.DataFrame:
        rows = [self._row(arm, run) for arm in self.arms for run in arm.runs]
        rows += [
            {**self._shared(run), "arm": str(sweep.folder), "role": "tuning", "is_tuning": True}
            for sweep in self.found.sweeps
            for run in map(LoggedRun, sweep.trials)
        ]
        first = ["arm", "role", "seed", "folder", "size", "steps", "samples", "flops", "base_flops", "final_loss"]
        table = pd.DataFrame(rows)
        return table[[*(name for name in first if name in table), *(name for name in table if name not in first)]]

    @property
    def metrics(self) -> list[str]:
        return sorted({name for run in self.found.runs for name in run.log.validation})

    def _shared(self, run: LoggedRun) -> dict[str, Any]:
        value = math.nan if run.value is None or run.diverged_at is not None else run.value
        return {
            "seed": run.seed, "folder": str(run.folder), "size": run.width_range, "steps": run.end_step,
            "samples": float(run.samples_over(np.array([run.end_step]))[0]), "flops": run.flops, "final_loss": value,
            "state": run.state, "grown_at": run.growths[-1] if run.growths else math.nan,
            "seconds": run.result.get("seconds", math.nan), "is_tuning": False,
            **{f"last {metric}": run.last(metric) for metric in self.metrics},
        }  # fmt: skip

    def _row(self, arm: Arm, run: LoggedRun) -> dict[str, Any]:
        _, means = self.windows.of(run)
        base = self.base_of(run)
        row = {"arm": arm.name, "role": arm.role, **self._shared(run)}
        has_ends = len(means) and run.diverged_at is None
        if run.value is None and has_ends:
            row["final_loss"] = float(means[-1])
        return row | {
            "min_loss": float(means.min()) if has_ends else math.nan,
            "base_flops": math.nan if run.init_from is not None and base is None else base.flops if base else 0.0,
        }

    @property
    def curves(self) -> pd.DataFrame:
        parts = []
        for arm in self.arms:
            for run in arm.runs:
                steps, losses = run.curve
                x = {"step": steps, "samples": run.samples_over(steps), "flops": run.flops_over(steps)}
                parts.append(pd.DataFrame({"arm": arm.name, "seed": run.seed, **x, "loss": losses}))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def base_of(self, run: LoggedRun) -> LoggedRun | None:
        """The run that a run started from: the one whose checkpoint it names; or, if folders were moved, the base of
        its seed and size."""
        path = run.init_from
        if path is None:
            return None
        alike = (
            each
            for arm in self.arms
            if arm.role == "base"
            for each in arm.not_diverged
            if each.end_size == run.start_size and each.seed == run.seed
        )
        named = (each for each in self.found.runs if each.folder.resolve() in path.resolve().parents)
        return next(named, next(alike, None))

    # --- comparisons

    @property
    def tuning_flops(self) -> float:
        """The FLOPs of all sweeps; NaN if one is not known, 0 if there are none."""
        return sum(LoggedRun(folder).flops for sweep in self.found.sweeps for folder in sweep.trials)

    @property
    def comparisons(self) -> list[Comparison]:
        """Every arm but bases beside the reference: of the arms from scratch the lowest, or else of all."""
        arms = [arm for arm in self.arms if arm.counted and arm.role != "base"]
        scratch = [arm for arm in arms if arm.role == "scratch"] or arms
        if len(arms) < 2:
            return []
        reference = min(scratch, key=lambda arm: mean_of(self.final_losses(arm)))
        others = [arm for arm in arms if arm is not reference and arm.runs[0].end_size == reference.runs[0].end_size]
        return [self.compare(arm, reference, len(others) * len(scratch)) for arm in others]

    def final_losses(self, arm: Arm) -> Losses:
        return {seed: self._row(arm, run)["final_loss"] for seed, run in by_seed(arm).items()}

    def compare(self, arm: Arm, reference: Arm, pairs: int) -> Comparison:
        """Compares two arms over their common seeds, at equal compute and at their ends."""
        others = by_seed(reference)
        common = {seed: (run, others[seed]) for seed, run in by_seed(arm).items() if seed in others}
        ours: dict[Any, float] = {}
        theirs: dict[Any, float] = {}
        spent, reached = [], {}
        for seed, runs in common.items():
            places, losses = zip(*(self.over_compute(run) for run in runs), strict=True)
            if not all(len(each) and np.isfinite(each).all() for each in places):
                continue
            budget = float(min(each[-1] for each in places))
            if budget < max(each[0] for each in places):
                continue  # a base model alone costs more than the other run
            spent.append(budget)
            ours[seed], theirs[seed] = (float(np.interp(budget, *each)) for each in zip(places, losses, strict=True))
            count = first_reach(losses[0].tolist(), float(losses[1].min()))
            base = self._row(arm, runs[0])["base_flops"]
            reached[seed] = math.inf if count is None else float(places[0][count - 1]) - base
        at = statistics.fmean(spent) if spent else math.nan
        ends = compare(self.final_losses(arm), self.final_losses(reference), pairs)
        costs = list(self._costs(common, reached)) if len(reached) == len(common) else []
        return Comparison(arm, reference, at, ours, theirs, compare(ours, theirs, pairs), ends, reached, costs)

    def over_compute(self, run: LoggedRun) -> tuple[np.ndarray, np.ndarray]:
        """The mean losses of a run over its compute, with that of the base model it started from."""
        ends, means = self.windows.of(run)
        base = self.base_of(run)
        known = 0.0 if run.init_from is None else math.nan if base is None else base.flops
        return run.flops_over(ends) + known, means

    def _costs(
        self, runs: Mapping[Any, tuple[LoggedRun, LoggedRun]], reached: dict[Any, float]
    ) -> Iterator[tuple[str, float, float]]:
        """What reaching the reference's lowest loss costs, as the paper charges it: with tuning, with the base."""
        if not reached or not all(map(math.isfinite, reached.values())):
            return
        whole = statistics.fmean(theirs.flops for _, theirs in runs.values())
        until = statistics.fmean(reached.values())
        bases = [self.base_of(ours) for ours, _ in runs.values()]
        base = statistics.fmean(each.flops for each in bases if each) if all(bases) else math.nan
        tuning = self.tuning_flops or math.nan
        yield "the reference, whole", whole, 1.0
        charges = {
            "until it is reached": 0.0,
            "… and tuning": tuning,
            "… and the base": base,
            "… and both": tuning + base,
        }
        for label, more in charges.items():
            if math.isfinite(whole / (until + more)):
                yield label, until + more, whole / (until + more)


def by_seed(arm: Arm) -> dict[Any, LoggedRun]:
    """The runs that count; of several of one seed the first."""
    answer: dict[Any, LoggedRun] = {}
    for run in arm.counted:
        answer.setdefault(run.seed, run)
    return answer


def notes_on(arm: Arm) -> Iterator[str]:
    """What a reader must know of runs that are not as they should be."""
    seeds = [run.seed for run in arm.runs]
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        yield f"{arm.name} has several runs of seed {', '.join(map(str, repeated))}; the first is compared by seed."
    for run in arm.runs:
        name = f"{arm.name}, seed {run.seed} ({run.folder})"
        if run.diverged_at is not None:
            yield f"{name}: {run.state}; it is left out of means."
        elif run.in_progress:
            yield f"{name}: {run.state}."
        elif run.grows and not run.growths and run.init_from is None:
            yield f"{name} ended after {run.last_step:,} steps, before it grew."
