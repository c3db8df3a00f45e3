"""The growth methods that an experiment compares: where each ends, at equal tuning, and a verdict."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mupscale.commands.config import class_name
from mupscale.commands.reporting.compare import Losses, compare, compare_best, mean_of, rank, spread
from mupscale.commands.reporting.folders import ExperimentFolder, SweepFolder
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.reach import Comparison, Numbers
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.commands.reporting.words import capital, count, ranged
from mupscale.data_files import interpreting

AFTER = 100
"""Steps after the growth at which losses are compared, beside those just after it and at the end."""

WINDOW = 20
"""How many steps up to then are averaged: as many of them as were logged."""

PAPERS = "Duplication"
"""The class of the paper's method, which has noise as well."""

BEFORE, JUST_AFTER, LATER, FINAL = "loss_before", "loss_just_after", f"loss_after_{AFTER}", "final_loss"
VALIDATION = "val/loss"
"""Losses of a method: of the next batch just before and after the growth, AFTER steps later, and at the end."""


@dataclass
class Method:
    """A growth method: its tuning, and its runs at the target size, if there are any."""

    name: str
    is_papers: bool
    tuned: dict[str, str]
    """The best trial's values, by key."""
    at_edge: list[str]
    """The keys whose best value is at the edge of the grid."""
    has_no_best: bool
    """Whether all trials diverged: then there are no runs at the target size."""
    group: Group | None
    comparison: Comparison | None

    @property
    def runs(self) -> list[LoggedRun]:
        return self.group.ended if self.group else []

    @cached_property
    def losses(self) -> dict[str, Losses]:
        """By name and seed; infinite if a run diverged."""
        answer: dict[str, Losses] = {
            BEFORE: {run.seed: run.last_growth.get("loss_before", math.nan) for run in self.runs},
            JUST_AFTER: {run.seed: run.last_growth.get("loss_after", math.nan) for run in self.runs},
            LATER: {run.seed: loss_after_growth(run) for run in self.runs},
        }
        diverged = {run.seed: math.inf for run in self.runs if run.diverged_at is not None}
        answer[FINAL] = {run.seed: run.final for run in self.runs} | diverged
        answer[VALIDATION] = {run.seed: run.last(VALIDATION) for run in self.runs} | diverged
        return answer

    @property
    def noise(self) -> str:
        """The tuned level of noise in words; empty if it was not tuned."""
        level = next((value for key, value in self.tuned.items() if key.startswith("UpscaleCallback.noise")), None)
        if level is None:
            return ""
        return " without noise, which was best at the small size" if level == "0" else f" with noise {level}"

    @property
    def why_unranked(self) -> str:
        if any(map(math.isinf, self.losses[FINAL].values())):
            return "diverged at the target size"
        return "all trials diverged" if self.has_no_best else "no run at the target size yet"


class Methods:
    """The growth methods of an experiment, those that end lowest first."""

    def __init__(self, experiment: ExperimentFolder, groups: list[Group], numbers: Numbers) -> None:
        self.folder, self.numbers = experiment.folder, numbers
        runs = experiment.method_of
        sweeps = {sweep.method: sweep for sweep in experiment.sweeps if sweep.method}
        with interpreting(f"{self.folder} is not a whole comparison of methods"):
            metric = experiment.description["experiment"].get("metric", "last_epoch")
            found = []
            for name, described in experiment.methods.items():
                folders = [folder for folder, method in runs.items() if method == name]
                group = next((group for group in groups if any(run.folder in folders for run in group.runs)), None)
                found.append(self._method(name, described, sweeps[name], metric, group))
        self.all = sorted(found, key=lambda method: mean_of(method.losses[FINAL]))
        made = [method.name for method in found if not method.has_no_best]
        self.missing = sum(name in made and not (run / "result.json").is_file() for run, name in runs.items())

    def _method(self, name: str, described: Any, sweep: SweepFolder, metric: str, group: Group | None) -> Method:
        best = sweep.best_trial(metric) if sweep.best else None
        at_edge = sweep.edges(metric) if best else []
        tuned = {key: shortened(best[key]) for key in sweep.axes if best}
        is_papers = class_name(described) == PAPERS
        comparison = self.numbers.comparison_of(group)
        return Method(str(name), is_papers, tuned, at_edge, sweep.has_no_best, group, comparison)

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for method in self.all for key in method.tuned))

    @property
    def scratch(self) -> Group | None:
        return next((method.comparison.scratch for method in self.all if method.comparison is not None), None)

    # --- the verdict

    @property
    def verdict(self) -> list[str]:
        """Which method ends lowest, whether that is clear, and where the paper's stands."""
        finals = {method.name: method.losses[FINAL] for method in self.all}
        ranked = rank(finals)
        if not ranked:
            reasons = [f"{method.name} ({method.why_unranked})" for method in self.all]
            return [f"No growth method has a loss to compare: {', '.join(reasons)}."]
        waiting = [method.name for method in self.all if not finals[method.name] and not method.has_no_best]
        finals = {name: losses for name, losses in finals.items() if name not in waiting}
        sentences = [f"Of {count(len(finals), 'growth method')} {lowest(finals)}."]
        papers = next((method for method in self.all if method.is_papers), None)
        if papers is not None:
            sentences.append(standing(papers, ranked, finals))
        validations = {method.name: method.losses[VALIDATION] for method in self.all}
        ranked = rank(validations)
        if ranked:
            text = f"By validation loss {lowest(validations)}"
            if papers is not None and papers.name in ranked[2:]:
                text += f"; {papers.name} is number {ranked.index(papers.name) + 1}"
            sentences.append(f"{text}.")
        sentences += self._against_scratch(finals)
        if self.missing:
            unbegun = f", among them all of {', '.join(waiting)}" if waiting else ""
            sentences.append(f"{count(self.missing, 'run')} not finished{unbegun}: this is how the methods stand now.")
        return sentences

    def _against_scratch(self, finals: dict[str, Losses]) -> Iterator[str]:
        """Which methods end lower than from scratch; each is compared, so each interval is corrected for all."""
        if self.scratch is None or self.scratch.final is None:
            return
        outcomes: dict[str, list[str]] = {}
        for name in rank(finals):
            difference = compare(finals[name], self.scratch.by_seed(), pairs=len(finals))
            outcome = difference.outcome
            if len(difference.seeds) < 2:
                outcome = f"{'below' if difference.mean > 0 else 'above'}, though {outcome}"
            outcomes.setdefault(outcome, []).append(name)
        text = "; ".join(f"{outcome}: {', '.join(names)}" for outcome, names in outcomes.items())
        yield f"Against from scratch, {ranged(self.scratch.final)}: {text}."

    # --- the table

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for method in self.all:
            for run in method.runs:
                reach = self.numbers.reach_of(run, method.group)
                row = {"method": method.name, "seed": run.seed}
                row |= {name: losses[run.seed] for name, losses in method.losses.items() if name != VALIDATION}
                row |= {metric: run.last(metric) for metric in self.numbers.metrics}
                row |= {"reach_step": reach and reach.step, "reach_flops": reach and reach.flops}
                row |= {key: method.tuned.get(key, "") for key in self.keys}
                rows.append({**row, "at_edge": " ".join(method.at_edge)})
        return rows


# --- words and numbers


def standing(papers: Method, ranked: list[str], finals: dict[str, Losses]) -> str:
    subject = f"the paper's method, {papers.name}{papers.noise}"
    if papers.name not in ranked:
        return f"{capital(subject)}, is not ranked ({papers.why_unranked})."
    if papers.name == ranked[0]:
        return f"That is {subject}."
    place = f"number {ranked.index(papers.name) + 1} of {len(finals)}"
    difference = compare(finals[ranked[0]], finals[papers.name], pairs=len(ranked) - 1)
    return (
        f"{capital(subject)}, does not end lowest: it is {place}, at {mean_of(finals[papers.name]):#.4g}; "
        f"{ranked[0]} is {difference}."
    )


def lowest(arms: dict[str, Losses]) -> str:
    """Which one is the lowest, and by how much, in words."""
    first = rank(arms)[0]
    text = f"{first} ends lowest, at {ranged(spread(list(arms[first].values())))}"
    found = compare_best(arms, arms)
    if found is None:
        return text
    _, second, difference = found
    return f"{text}; {second} is next, at {ranged(spread(list(arms[second].values())))}: {first} is {difference}"


def loss_after_growth(run: LoggedRun) -> float:
    """The mean of the losses logged in the WINDOW steps up to AFTER steps after the last growth; NaN if none was."""
    end = (run.growths[-1] if run.growths else 0) + AFTER
    there = (run.steps > end - WINDOW) & (run.steps <= end)
    return float(np.mean(run.losses[there])) if there.any() else math.nan


def shortened(value: str) -> str:
    """A value of a table; a number with four digits."""
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value
