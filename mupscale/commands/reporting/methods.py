"""The growth methods that an experiment compares: where each ends, at equal tuning, and a verdict."""

import csv
import io
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mupscale.commands import figures
from mupscale.commands.config import class_name
from mupscale.commands.reporting.folders import ExperimentFolder, SweepFolder
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.numbers import Comparison, Numbers, RunStatus, Spread, spread
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.commands.reporting.words import count, ranged
from mupscale.data_files import what_is_wrong
from mupscale.errors import UserError

AFTER = 100
"""Steps after the growth at which losses are compared, beside those just after it and at the end."""

WINDOW = 20
"""How many steps up to then are averaged: as many of them as were logged."""

PAPERS = "Duplication"
"""The class of the paper's method, which has noise as well."""

VALIDATION = "val/loss"

Losses = dict[Any, float]
"""By seed. Infinite if the run diverged."""


@dataclass
class Method:
    """A growth method: its tuning, and its runs at the target size, if there are any."""

    name: str
    is_papers: bool
    tuned: dict[str, str]
    """The best trial's values, by key."""
    at_edge: list[str]
    """The keys whose best value is the least or largest of the grid."""
    has_no_best: bool
    """Whether all trials diverged: then there are no runs at the target size."""
    group: Group | None
    comparison: Comparison | None

    @property
    def noise(self) -> str:
        """The tuned level of noise in words; empty if it was not tuned."""
        level = next((value for key, value in self.tuned.items() if key.startswith("UpscaleCallback.noise")), None)
        if level is None:
            return ""
        return " without noise, which was best at the small size" if is_zero(level) else f" with noise {level}"


class Methods:
    """The growth methods of an experiment, those that end lowest first."""

    def __init__(self, experiment: ExperimentFolder, groups: list[Group], numbers: Numbers) -> None:
        self.folder, self.numbers = experiment.folder, numbers
        self._runs = experiment.method_of
        sweeps = {sweep.method: sweep for sweep in experiment.sweeps if sweep.method}
        try:
            metric = experiment.description["experiment"].get("metric", "last_epoch")
            found = []
            for name, described in experiment.methods.items():
                found.append(self._method(name, described, sweeps[name], metric, groups))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.folder} is not a whole comparison of methods: {what_is_wrong(error)}") from error
        self.all = sorted(found, key=lambda method: mean_of(self.finals(method)))
        made = [method.name for method in found if not method.has_no_best]
        unfinished = [folder for folder in self._runs if not (folder / "result.json").is_file()]
        self.missing = sum(self._runs[folder] in made for folder in unfinished)

    def _method(self, name: str, described: Any, sweep: SweepFolder, metric: str, groups: list[Group]) -> Method:
        folders = [folder for folder, method in self._runs.items() if method == name]
        group = next((group for group in groups if any(run.folder in folders for run in group.runs)), None)
        comparison = next((each for each in self.numbers.comparisons if each.upscaled is group), None)
        best = sweep.best_trial(metric) if sweep.best else None
        at_edge = [key for key, levels in sweep.axes.items() if best and is_edge(best[key], levels)]
        tuned = {key: shortened(best[key]) for key in sweep.axes if best}
        is_papers = class_name(described) == PAPERS
        return Method(str(name), is_papers, tuned, at_edge, sweep.has_no_best, group, comparison)

    @property
    def keys(self) -> list[str]:
        """The keys that were tuned."""
        return list(dict.fromkeys(key for method in self.all for key in method.tuned))

    @property
    def scratch(self) -> Group | None:
        return next((method.comparison.scratch for method in self.all if method.comparison is not None), None)

    # --- losses of the target size

    def statuses(self, method: Method) -> list[RunStatus]:
        """The runs of a method that have ended, those that diverged too; or all if none has ended."""
        if method.group is None:
            return []
        runs = [self.numbers.status(run) for run in method.group.runs]
        return [status for status in runs if not status.in_progress] or runs

    def finals(self, method: Method) -> Losses:
        return {status.run.seed: infinite_if_diverged(status, status.final) for status in self.statuses(method)}

    def validations(self, method: Method) -> Losses:
        """The last validation losses."""
        found = {}
        for status in self.statuses(method):
            found[status.run.seed] = infinite_if_diverged(status, status.last(VALIDATION))
        return found

    def just_before(self, method: Method) -> Losses:
        return {status.run.seed: loss_at_growth(status.run, "loss_before") for status in self.statuses(method)}

    def just_after(self, method: Method) -> Losses:
        return {status.run.seed: loss_at_growth(status.run, "loss_after") for status in self.statuses(method)}

    def after_steps(self, method: Method) -> Losses:
        """The losses AFTER steps after the growth."""
        return {status.run.seed: loss_after_growth(status.run) for status in self.statuses(method)}

    def reach_steps(self, method: Method) -> list[int | None]:
        """When each pair of runs has the method at from-scratch's minimum."""
        return [] if method.comparison is None else [reach.step for reach in method.comparison.reaches]

    # --- the verdict

    @property
    def verdict(self) -> list[str]:
        """Which method ends lowest, whether that exceeds the spread over seeds, and where the paper's stands."""
        finals = {method.name: self.finals(method) for method in self.all}
        ranked = ranking(finals)
        if not ranked:
            return [none_ranked(self.all, finals)]
        waiting = [method.name for method in self.all if not finals[method.name] and not method.has_no_best]
        finals = {name: losses for name, losses in finals.items() if name not in waiting}
        sentences = [f"Of {count(len(finals), 'growth method')} {lowest(ranked, finals)}."]
        papers = next((method for method in self.all if method.is_papers), None)
        if papers is not None:
            sentences.append(standing(papers, ranked, finals))
        validations = {method.name: self.validations(method) for method in self.all}
        ranked = ranking(validations)
        if ranked:
            text = f"By validation loss {lowest(ranked, validations)}"
            if papers is not None and papers.name in ranked[2:]:
                text += f"; {papers.name} is number {ranked.index(papers.name) + 1}"
            sentences.append(f"{text}.")
        sentences += self._against_scratch(finals)
        if self.missing:
            unbegun = f", among them all of {', '.join(waiting)}" if waiting else ""
            text = f"{count(self.missing, 'run')} not finished{unbegun}: this is how the methods stand now."
            sentences.append(text)
        return sentences

    def _against_scratch(self, finals: dict[str, Losses]) -> Iterator[str]:
        scratch = self.numbers.final(self.scratch) if self.scratch is not None else None
        if scratch is None:
            return
        below = [name for name, losses in finals.items() if mean_of(losses) < scratch.mean]
        others = [name for name in finals if name not in below]
        text = f"{len(below)} of {len(finals)} end below from scratch, {ranged(scratch)}"
        yield f"{text}; these do not: {', '.join(others)}." if below and others else f"{text}."

    # --- tables

    def as_csv(self) -> str:
        """A row for each method and seed."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        head = ["method", "seed", "loss_before", "loss_just_after", f"loss_after_{AFTER}", "final_loss"]
        table.writerow([*head, *self.numbers.metrics, "reach_step", "reach_flops", *self.keys, "at_edge"])
        for method in self.all:
            losses = [self.just_before(method), self.just_after(method), self.after_steps(method), self.finals(method)]
            reaches = {reach.seed: reach for reach in method.comparison.reaches} if method.comparison else {}
            for status in self.statuses(method):
                seed = status.run.seed
                values = [table_of[seed] for table_of in losses]
                values += [status.last(metric) for metric in self.numbers.metrics]
                reach = reaches.get(seed)
                step = "" if reach is None or reach.step is None else reach.step
                flops = cell(reach.flops) if reach is not None else ""
                tuned = [method.tuned.get(key, "") for key in self.keys]
                row = [method.name, seed, *map(cell, values), step, flops, *tuned]
                table.writerow([*row, " ".join(method.at_edge)])
        return text.getvalue()

    def as_json(self) -> dict[str, Any]:
        rows = []
        for method in self.all:
            costs = method.comparison.costs if method.comparison is not None else None
            rows.append(
                {
                    "method": method.name,
                    "is_papers": method.is_papers,
                    "just_before": as_list(self.just_before(method)),
                    "just_after": as_list(self.just_after(method)),
                    f"after_{AFTER}": as_list(self.after_steps(method)),
                    "final_loss": as_list(self.finals(method)),
                    "validation_loss": as_list(self.validations(method)),
                    "reach_steps": self.reach_steps(method),
                    "reach_flops": None if costs is None else costs.upscaled,
                    "base_flops": None if costs is None else costs.base,
                    "tuned": method.tuned,
                    "at_edge": method.at_edge,
                }
            )
        return {"folder": str(self.folder), "verdict": self.verdict, "table": rows}


# --- words


def ranking(table: dict[str, Losses]) -> list[str]:
    """The names whose losses are all finite, the lowest mean first."""
    means = {name: mean_of(losses) for name, losses in table.items()}
    return sorted((name for name in means if math.isfinite(means[name])), key=means.__getitem__)


def none_ranked(methods: list[Method], finals: dict[str, Losses]) -> str:
    """That no method can be ranked, and for which reasons, in a sentence."""
    names: dict[str, list[str]] = {}
    for method in methods:
        names.setdefault(why_unranked(method, finals[method.name]), []).append(method.name)
    reasons = [f"{', '.join(each)} ({reason})" for reason, each in names.items()]
    return f"No growth method has a loss to compare: {'; '.join(reasons)}."


def why_unranked(method: Method, losses: Losses) -> str:
    """Why a method is not in the ranking."""
    if any(map(math.isinf, losses.values())):
        return "diverged at the target size"
    return "all trials diverged" if method.has_no_best else "no run at the target size yet"


def lowest(ranked: list[str], table: dict[str, Losses]) -> str:
    """Which one is the lowest, and by how much, in words."""
    first = f"{ranked[0]} ends lowest, at {ranged(spread_of(table[ranked[0]]))}"
    if len(ranked) == 1:
        return first
    second = table[ranked[1]]
    next_one = f"{ranked[1]} is next, at {ranged(spread_of(second))}"
    return f"{first}; {next_one}: {compared(ranked[0], table[ranked[0]], second)}"


def standing(papers: Method, ranked: list[str], finals: dict[str, Losses]) -> str:
    """Where the paper's method stands, in a sentence."""
    subject = f"the paper's method, {papers.name}{papers.noise}"
    if papers.name not in ranked:
        return (
            f"{subject[:1].upper()}{subject[1:]}, is not ranked ({why_unranked(papers, finals.get(papers.name, {}))})."
        )
    if papers.name == ranked[0]:
        return f"That is {subject}."
    place = f"number {ranked.index(papers.name) + 1} of {len(finals)}"
    loss = mean_of(finals[papers.name])
    return (
        f"{subject[:1].upper()}{subject[1:]}, does not end lowest: it is {place}, at {loss:#.4g}; "
        f"to {ranked[0]} {compared(ranked[0], finals[ranked[0]], finals[papers.name])}."
    )


def compared(name: str, low: Losses, high: Losses) -> str:
    """The difference of two means, and whether it exceeds the spread over seeds, in words."""
    difference = f"the difference is {mean_of(high) - mean_of(low):.3g}"
    if min(len(low), len(high)) < 2:
        return f"{difference}, and one seed proves nothing"
    both = [seed for seed in low if seed in high]
    lower = f"{sum(low[seed] < high[seed] for seed in both)} of {count(len(both), 'seed')}"
    widest = max(range_of(low), range_of(high))
    exceeds = "exceeds" if mean_of(high) - mean_of(low) > widest else "does not exceed"
    return f"{difference}, which {exceeds} the spread over seeds ({widest:.2g}), and {name} is lower in {lower}"


# --- numbers


def mean_of(losses: Losses) -> float:
    """Infinite without losses, or if a run diverged: a method is not to win by those that did not."""
    values = list(losses.values())
    return statistics.fmean(values) if values and all(map(math.isfinite, values)) else math.inf


def range_of(losses: Losses) -> float:
    return max(losses.values()) - min(losses.values())


def spread_of(losses: Losses) -> Spread | None:
    return spread(list(losses.values()))


def infinite_if_diverged(status: RunStatus, value: float) -> float:
    return math.inf if status.diverged else value


def loss_at_growth(run: LoggedRun, name: str) -> float:
    """The loss of the next batch just before or just after the last growth; NaN until the run has ended."""
    return run.last_growth.get(name, math.nan)


def loss_after_growth(run: LoggedRun) -> float:
    """The mean of the losses logged in the WINDOW steps up to AFTER steps after the last growth; NaN if none was."""
    end = (run.growths[-1] if run.growths else 0) + AFTER
    there = (run.steps > end - WINDOW) & (run.steps <= end)
    return float(np.mean(run.losses[there])) if there.any() else math.nan


def is_edge(value: str, levels: list[Any]) -> bool:
    """Whether values beyond this one were not tried. None are below zero."""
    if len(levels) < 2 or not figures.is_ordered(levels):
        return False
    number = float(value)
    return number == max(levels) or (number == min(levels) and number != 0)


def is_zero(value: str) -> bool:
    try:
        return float(value) == 0
    except ValueError:
        return False


def shortened(value: str) -> str:
    """A value of a table; a number with four digits."""
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value


def cell(value: float) -> str:
    """A loss as tables have it."""
    if math.isnan(value):
        return ""
    return repr(value) if math.isfinite(value) else "diverged"


def as_list(losses: Losses) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in losses.values()]
