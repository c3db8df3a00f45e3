"""The growth methods that an experiment compares: where each ends, at equal tuning, and a verdict."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mupscale.commands.config import class_name
from mupscale.commands.reporting.compare import Losses, compare, compare_best, mean_of, rank, spread
from mupscale.commands.reporting.folders import ExperimentFolder, SweepFolder
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.numbers import Comparison, Numbers, RunStatus
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.commands.reporting.words import capital, count, ranged
from mupscale.data_files import what_is_wrong
from mupscale.errors import UserError

AFTER = 100
"""Steps after the growth at which losses are compared, beside those just after it and at the end."""

WINDOW = 20
"""How many steps up to then are averaged: as many of them as were logged."""

PAPERS = "Duplication"
"""The class of the paper's method, which has noise as well."""

VALIDATION = "val/loss"


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
        at_edge = sweep.edges(metric) if best else []
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

    # --- losses of the target size, by seed

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

    def at_growth(self, method: Method, name: str) -> Losses:
        """`loss_before` or `loss_after`: the loss of the next batch just before or just after the growth."""
        return {each.run.seed: each.run.last_growth.get(name, math.nan) for each in self.statuses(method)}

    def after_steps(self, method: Method) -> Losses:
        """The losses AFTER steps after the growth."""
        return {status.run.seed: loss_after_growth(status.run) for status in self.statuses(method)}

    def reach_steps(self, method: Method) -> list[int | None]:
        """When each pair of runs has the method at from-scratch's minimum."""
        return [] if method.comparison is None else [reach.step for reach in method.comparison.reaches]

    # --- the verdict

    @property
    def verdict(self) -> list[str]:
        """Which method ends lowest, whether that is clear, and where the paper's stands."""
        finals = {method.name: self.finals(method) for method in self.all}
        ranked = rank(finals)
        if not ranked:
            return [self._why_none(finals)]
        waiting = [method.name for method in self.all if not finals[method.name] and not method.has_no_best]
        finals = {name: losses for name, losses in finals.items() if name not in waiting}
        sentences = [f"Of {count(len(finals), 'growth method')} {lowest(finals)}."]
        papers = next((method for method in self.all if method.is_papers), None)
        if papers is not None:
            sentences.append(self._standing(papers, ranked, finals))
        validations = {method.name: self.validations(method) for method in self.all}
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

    def _why_none(self, finals: dict[str, Losses]) -> str:
        """That no method can be ranked, and for which reasons, in a sentence."""
        names: dict[str, list[str]] = {}
        for method in self.all:
            names.setdefault(why_unranked(method, finals[method.name]), []).append(method.name)
        reasons = [f"{', '.join(each)} ({reason})" for reason, each in names.items()]
        return f"No growth method has a loss to compare: {'; '.join(reasons)}."

    def _standing(self, papers: Method, ranked: list[str], finals: dict[str, Losses]) -> str:
        """Where the paper's method stands, in a sentence."""
        subject = f"the paper's method, {papers.name}{papers.noise}"
        if papers.name not in ranked:
            reason = why_unranked(papers, finals.get(papers.name, {}))
            return f"{capital(subject)}, is not ranked ({reason})."
        if papers.name == ranked[0]:
            return f"That is {subject}."
        place = f"number {ranked.index(papers.name) + 1} of {len(finals)}"
        difference = compare(finals[ranked[0]], finals[papers.name], pairs=len(ranked) - 1)
        return (
            f"{capital(subject)}, does not end lowest: it is {place}, at {mean_of(finals[papers.name]):#.4g}; "
            f"{ranked[0]} is {difference}."
        )

    def _against_scratch(self, finals: dict[str, Losses]) -> Iterator[str]:
        """Which methods end lower than from scratch; each is compared, so each interval is corrected for all."""
        if self.scratch is None or self.numbers.final(self.scratch) is None:
            return
        scratch = {each.run.seed: each.final for each in self.numbers.counted(self.scratch)}
        outcomes: dict[str, list[str]] = {}
        for name in rank(finals):
            difference = compare(finals[name], scratch, pairs=len(finals))
            outcome = difference.outcome
            if len(difference.seeds) < 2:
                outcome = f"{'below' if difference.mean > 0 else 'above'}, though {outcome}"
            outcomes.setdefault(outcome, []).append(name)
        text = "; ".join(f"{outcome}: {', '.join(names)}" for outcome, names in outcomes.items())
        yield f"Against from scratch, {ranged(self.numbers.final(self.scratch))}: {text}."

    # --- the table

    def rows(self) -> list[dict[str, Any]]:
        """A row for each method and seed."""
        rows = []
        for method in self.all:
            before, after = (self.at_growth(method, name) for name in ("loss_before", "loss_after"))
            later, finals = self.after_steps(method), self.finals(method)
            reaches = {reach.seed: reach for reach in method.comparison.reaches} if method.comparison else {}
            for status in self.statuses(method):
                seed, reach = status.run.seed, reaches.get(status.run.seed)
                rows.append(
                    {
                        "method": method.name,
                        "seed": seed,
                        "loss_before": before[seed],
                        "loss_just_after": after[seed],
                        f"loss_after_{AFTER}": later[seed],
                        "final_loss": finals[seed],
                        **{metric: status.last(metric) for metric in self.numbers.metrics},
                        "reach_step": None if reach is None else reach.step,
                        "reach_flops": None if reach is None else reach.flops,
                        **{key: method.tuned.get(key, "") for key in self.keys},
                        "at_edge": " ".join(method.at_edge),
                    }
                )
        return rows


# --- words and numbers


def why_unranked(method: Method, losses: Losses) -> str:
    """Why a method is not in the ranking."""
    if any(map(math.isinf, losses.values())):
        return "diverged at the target size"
    return "all trials diverged" if method.has_no_best else "no run at the target size yet"


def lowest(arms: dict[str, Losses]) -> str:
    """Which one is the lowest, and by how much, in words."""
    first = rank(arms)[0]
    text = f"{first} ends lowest, at {ranged(spread(list(arms[first].values())))}"
    found = compare_best(arms, arms)
    if found is None:
        return text
    _, second, difference = found
    return f"{text}; {second} is next, at {ranged(spread(list(arms[second].values())))}: {first} is {difference}"


def infinite_if_diverged(status: RunStatus, value: float) -> float:
    return math.inf if status.diverged else value


def loss_after_growth(run: LoggedRun) -> float:
    """The mean of the losses logged in the WINDOW steps up to AFTER steps after the last growth; NaN if none was."""
    end = (run.growths[-1] if run.growths else 0) + AFTER
    there = (run.steps > end - WINDOW) & (run.steps <= end)
    return float(np.mean(run.losses[there])) if there.any() else math.nan


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
