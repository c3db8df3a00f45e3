"""The growth methods that an experiment compares: where each ends, at equal tuning, and a verdict."""

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mupscale.commands import figures
from mupscale.commands.config import brief, class_name, labels, number_in
from mupscale.commands.reporting.compare import Losses, compare, compare_best, mean_of, rank, spread
from mupscale.commands.reporting.draw import AXES, Picture, draw_bands, mean_band, picture, without_range
from mupscale.commands.reporting.folders import ExperimentFolder, SweepFolder
from mupscale.commands.reporting.groups import PLACES, Group
from mupscale.commands.reporting.reach import Numbers
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.commands.reporting.words import capital, count, ranged, teraflops, times
from mupscale.data_files import interpreting

OTHERS = 2
"""The place in the palette of the growth methods that are not the paper's, where rows have names."""

AFTER = 100
"""Steps after the growth at which losses are compared, beside those just after it and at the end."""

WINDOW = 20
"""How many steps up to then are averaged: as many of them as were logged."""

PAPERS = "Duplication"
"""The class of the paper's method, which has noise as well."""

BEFORE, JUST_AFTER, LATER, FINAL = "loss_before", "loss_just_after", f"loss_after_{AFTER}", "final_loss"
VALIDATION = "val/loss"
"""Losses of a method: of the next batch just before and after the growth, AFTER steps later, and at the end."""


class Method:
    """A growth method: its tuning by a metric, and the group of its runs at the target size, if there are any."""

    def __init__(
        self, name: str, described: Any, sweep: SweepFolder, metric: str, group: Group | None, numbers: Numbers
    ) -> None:
        self.name, self.is_papers, self.group = name, class_name(described) == PAPERS, group
        self.comparison = numbers.comparison_of(group)
        best = sweep.best_trial(metric) if sweep.best else None
        self.tuned = {key: brief(number_in(best[key])) for key in sweep.axes if best}
        """The best trial's values, by key."""
        self.at_edge = sweep.edges(metric) if best else []
        """The keys whose best value is at the edge of the grid."""
        self.has_no_best = sweep.has_no_best
        """Whether all trials diverged: then there are no runs at the target size."""
        self.rows: list[dict[str, Any]] = []
        """Of its runs in the table. The final loss is infinite if a run diverged."""
        for run in group.ended if group else []:
            before, after = (run.last_growth.get(loss, math.nan) for loss in ("loss_before", "loss_after"))
            row = {"method": name, "seed": run.seed, BEFORE: before, JUST_AFTER: after, LATER: loss_after_growth(run)}
            row[FINAL] = run.row[FINAL] if run.diverged_at is None else math.inf
            row |= {column: run.row[column] for column in (*numbers.metrics, "reach_step", "reach_flops")}
            self.rows.append(row)

    def losses(self, column: str) -> Losses:
        """By seed; at the end, those of a run that diverged are infinite."""
        lost = [row["seed"] for row in self.rows if column == VALIDATION and row[FINAL] == math.inf]
        return {row["seed"]: row.get(column, math.nan) for row in self.rows} | dict.fromkeys(lost, math.inf)

    @property
    def noise(self) -> str:
        """The tuned level of noise in words; empty if it was not tuned."""
        level = next((value for key, value in self.tuned.items() if key.startswith("UpscaleCallback.noise")), None)
        if level is None:
            return ""
        return " without noise, which was best at the small size" if level == "0" else f" with noise {level}"

    def reach_cells(self) -> list[str]:
        """When it reaches from-scratch's minimum, and what that costs without and with the base model."""
        reaches = self.comparison.reaches if self.comparison else []
        if self.comparison is None or (found := self.comparison.reached_at("step")) is None:
            reached = sum(reach.step is not None for reach in reaches)
            missed = f"in {reached} of {len(reaches)} seeds" if reached else "not reached" if reaches else "—"
            return [missed, "—", "—"]
        span = f" ({found.min:,}–{found.max:,})" if found.min < found.max else ""
        costs = [self.comparison.costs.get(kind) for kind in ("upscaled", "base")]
        texts = [f"{teraflops(cost.flops)} ({times(cost.speedup)})" if cost else "—" for cost in costs]
        return [f"{found.mean:,.0f}{span}", *texts]

    @property
    def why_unranked(self) -> str:
        if any(map(math.isinf, self.losses(FINAL).values())):
            return "diverged at the target size"
        return "all trials diverged" if self.has_no_best else "no run at the target size yet"


class Methods:
    """The growth methods of an experiment, those that end lowest first."""

    columns, after, window = (JUST_AFTER, LATER, FINAL), AFTER, WINDOW

    def __init__(self, experiment: ExperimentFolder, numbers: Numbers) -> None:
        self.folder, self.numbers = experiment.folder, numbers
        runs = experiment.method_of
        sweeps = {sweep.method: sweep for sweep in experiment.sweeps}
        self.all: list[Method] = []
        with interpreting(f"{self.folder} is not a whole comparison of methods"):
            metric = experiment.keys.get("metric", "last_epoch")
            for name, described in experiment.methods.items():
                of_method = (g for g in numbers.groups if any(runs.get(run.folder) == name for run in g.runs))
                method = Method(name, described, sweeps[name], metric, next(of_method, None), numbers)
                self.all.append(method)
        self.all.sort(key=lambda method: mean_of(method.losses(FINAL)))
        self.labels = labels(list(dict.fromkeys(key for method in self.all for key in method.tuned)))
        """Of the keys that were tuned."""
        self.scratch = next((method.comparison.scratch for method in self.all if method.comparison is not None), None)
        made = [method.name for method in self.all if not method.has_no_best]
        self.missing = sum(name in made and not (run / "result.json").is_file() for run, name in runs.items())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each run."""
        answer = []
        for method in self.all:
            tuned = {key: method.tuned.get(key, "") for key in self.labels}
            answer += [{**row, **tuned, "at_edge": " ".join(method.at_edge)} for row in method.rows]
        return answer

    @property
    def before(self) -> str:
        """The loss just before the growth, which all methods have in common."""
        grown = next((method for method in self.all if method.group), None)
        return ranged(spread(list(grown.losses(BEFORE).values())), True) if grown else "—"

    def edges(self, method: Method) -> list[str]:
        return [label for key, label in self.labels.items() if key in method.at_edge]

    # --- the verdict

    @property
    def verdict(self) -> list[str]:
        """Which method ends lowest, whether that is clear, and where the paper's stands."""
        finals = {method.name: method.losses(FINAL) for method in self.all}
        ranked = rank(finals)
        if not ranked:
            reasons = [f"{method.name} ({method.why_unranked})" for method in self.all]
            return [f"No growth method has a loss to compare: {', '.join(reasons)}."]
        waiting = [method.name for method in self.all if not method.rows and not method.has_no_best]
        finals = {name: losses for name, losses in finals.items() if name not in waiting}
        sentences = [f"Of {count(len(finals), 'growth method')} {lowest(finals)}."]
        papers = next((method for method in self.all if method.is_papers), None)
        if papers is not None:
            sentences.append(standing(papers, ranked, finals))
        validations = {method.name: method.losses(VALIDATION) for method in self.all}
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
        final = self.scratch.mean(FINAL) if self.scratch else None
        if self.scratch is None or final is None:
            return
        outcomes: dict[str, list[str]] = {}
        for name in rank(finals):
            difference = compare(finals[name], self.scratch.losses(FINAL), pairs=len(finals))
            outcome = difference.outcome
            if len(difference.seeds) < 2:
                outcome = f"{'below' if difference.mean > 0 else 'above'}, though {outcome}"
            outcomes.setdefault(outcome, []).append(name)
        text = "; ".join(f"{outcome}: {', '.join(names)}" for outcome, names in outcomes.items())
        yield f"Against from scratch, {ranged(final, True)}: {text}."


# --- its figures


def draw_methods(methods: Methods, path: Path) -> list[Picture]:
    """Draws where growth methods and from scratch end, and their training loss as means over seeds.

    The names of the files begin with that of `path`.
    """
    named = {method.name: method.group for method in methods.all if method.group is not None}
    if methods.scratch is not None:
        named[methods.scratch.name] = methods.scratch
    windows = methods.numbers.windows
    lines = [without_range(mean_band(group, windows.of)) for group in named.values()]
    bands = [line and line._replace(label=label) for label, line in zip(named, lines, strict=True)]
    title, more = f"Training loss of growth methods, {windows.words}", ": means over seeds, the lowest end first"
    return [*draw_ends(methods, path), *draw_bands(path, bands, AXES["steps"][0], "training loss", title, more)]


def draw_ends(methods: Methods, path: Path) -> list[Picture]:
    """Draws where the growth methods and from scratch end, seed by seed: training loss, and validation loss if any."""
    arms = [(method.name, 0 if method.is_papers else OTHERS, method.losses) for method in methods.all]
    if methods.scratch is not None:
        arms.append((methods.scratch.name, PLACES["scratch"], methods.scratch.losses))
    labels = {FINAL: "training loss at the end"}
    if VALIDATION in methods.numbers.metrics:
        labels[VALIDATION] = "validation loss at the end"
    rows = []
    for name, place, losses in arms:
        panels = [[*losses(column).values()] for column in labels]
        if any(map(math.isfinite, panels[0])):
            rows.append(figures.Dots(name, place, panels))
    rows.sort(key=lambda row: fmean(row.panels[0]))
    if not rows:
        return []
    paths = figures.dots(path.with_name(f"{path.name}_ends"), rows, [*labels.values()])
    return [picture(paths[0], "Where growth methods end", ": a dot for each seed, and a stroke at the mean")]


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
    text = f"{first} ends lowest, at {ranged(spread(list(arms[first].values())), True)}"
    found = compare_best(arms, arms)
    if found is None:
        return text
    _, second, difference = found
    return f"{text}; {second} is next, at {ranged(spread(list(arms[second].values())), True)}: {first} is {difference}"


def loss_after_growth(run: LoggedRun) -> float:
    """The mean of the losses logged in the WINDOW steps up to AFTER steps after the last growth; NaN if none was."""
    end = (run.growths[-1] if run.growths else 0) + AFTER
    there = (run.steps > end - WINDOW) & (run.steps <= end)
    return float(np.mean(run.losses[there])) if there.any() else math.nan
