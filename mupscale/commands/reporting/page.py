"""The page of a report: page.html.jinja with the texts, tables and pictures that it shows."""

import base64
import csv
import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from mupscale.commands.config import brief
from mupscale.commands.figures import DARK, LIGHT
from mupscale.commands.reporting.draw import ReportFigure, place_of
from mupscale.commands.reporting.folders import ExperimentFolder, Found, SweepFolder
from mupscale.commands.reporting.groups import Group, differing
from mupscale.commands.reporting.methods import AFTER, WINDOW, Method, Methods, spread_of
from mupscale.commands.reporting.midrun import BUDGETS, LOSSES, Midrun, mean_text
from mupscale.commands.reporting.numbers import Comparison, Numbers, width_range
from mupscale.commands.reporting.words import (
    COST_LABELS,
    duration,
    metric_name,
    number,
    ranged,
    teraflops,
    time_to_reach,
    times,
    title,
    verdicts,
)

GENERATOR = '<meta name="generator" content="mupscale report">'
"""The line of the template by which a page is recognised as a report."""

NUMBER = re.compile(r"(-?[0-9][0-9.,e+-]*×?( \(.*\))?|—)?")
LONG_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]{5,}(e-?[0-9]+)?")

SWEEP_FIGURES = ("heatmap", "profile", "scatter", "curves")


# --- what the template shows


class Cell(NamedTuple):
    """A text in a table; the name of a group has the CSS class of its colour."""

    text: str
    colour: str = ""


class Table(NamedTuple):
    head: list[str]
    rows: list[list[Cell]]
    is_number: list[bool]
    is_code: bool


class Picture(NamedTuple):
    """Images as data URIs: `source` on white, and `dark` for a dark page if there is one."""

    source: str
    alt: str
    dark: str = ""
    caption: str = ""


class Tile(NamedTuple):
    name: str
    value: str
    detail: str
    colour: str = ""


class ReachPart(NamedTuple):
    """`average` is empty if a run has not reached the minimum."""

    heading: str
    upscaled: str
    average: str
    table: Table


class CostPart(NamedTuple):
    heading: str
    table: Table
    has_tuning: bool


class TuningPart(NamedTuple):
    table: Table
    target: str


class ConfigurationFile(NamedTuple):
    group: str
    folder: str
    text: str


class Results(NamedTuple):
    """The parts of the page that runs have, in the order in which it shows them."""

    verdicts: list[list[str]]
    tiles: list[Tile]
    legend: list[Cell]
    figures: list[Picture]
    window: str
    interval: int | None
    per_epoch: str
    recorded: str
    ends: Table
    reaches: list[ReachPart]
    costs: list[CostPart]
    tuning: TuningPart | None
    runs: Table
    differences: Table
    configurations: list[ConfigurationFile]


class TransferPart(NamedTuple):
    """`optima` and `trials` are None while there is no transfer.csv, `drift` while there is no drift.csv."""

    name: str
    pictures: list[Picture]
    optima: Table | None
    trials: Table | None
    drift: Table | None


class MidrunPart(NamedTuple):
    """`costs` is None while they are not measured."""

    name: str
    verdicts: list[list[str]]
    metric: str
    pictures: list[Picture]
    arms: Table
    costs: Table | None
    device: str
    timed_steps: int
    budget: str
    tuned_at: str
    edges: str
    missing: int


class MethodsPart(NamedTuple):
    """`before` is the loss just before the growth; `after` the steps, and `window` how many of them are averaged."""

    name: str
    verdict: list[str]
    table: Table
    before: str
    after: int
    window: int


class SweepPart(NamedTuple):
    name: str
    best: str
    axes: str
    pictures: list[Picture]


class ExperimentPart(NamedTuple):
    name: str
    command: str
    description: str


def render_page(
    found: Found,
    groups: list[Group],
    numbers: Numbers | None,
    figures: list[ReportFigure],
    methods: list[Methods],
    midruns: list[tuple[Midrun, list[Path]]],
    command: str,
) -> str:
    """The page as HTML. `numbers` is None if there are no runs, only experiments of protocols transfer and midrun.

    Each of `midruns` has its figures with it.
    """
    transfers = found.transfers
    environment = Environment(
        loader=PackageLoader("mupscale.commands.reporting", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    notes = list(found.notes)
    if numbers is not None:
        notes += numbers.notes
        for comparison in numbers.comparisons:
            notes += comparison.notes
    fit_command = ""
    if found.runs and not found.experiments:
        fit_command = f"python -m mupscale fit --config {found.runs[0].folder}/config.yaml"
    folders = " and ".join(experiment.folder.name for experiment in found.experiments)
    topic = "Growing in the middle" if midruns else "Transfer"
    page = environment.get_template("page.html.jinja").render(
        title=title(found.runs, groups) if groups else f"{topic}: {folders}",
        light=LIGHT.palette,
        dark=DARK.palette,
        results=results_of(groups, numbers, figures) if numbers is not None else None,
        notes=notes,
        transfers=[transfer_part(experiment) for experiment in transfers],
        methods=[methods_part(each, groups) for each in methods],
        midruns=[midrun_part(midrun, drawn) for midrun, drawn in midruns],
        sweeps=sweep_parts(found.sweeps, transfers + found.midruns),
        experiments=[experiment_part(experiment) for experiment in found.experiments],
        fit_command=fit_command,
        command=command,
    )
    return page.lstrip()


# --- parts


def results_of(groups: list[Group], numbers: Numbers, figures: list[ReportFigure]) -> Results:
    intervals = {status.run.interval for status in numbers.statuses}
    recorded = numbers.recorded or ""
    return Results(
        verdicts=verdicts(numbers, groups),
        tiles=tiles(groups, numbers),
        legend=[key(group, groups) for group in groups],
        figures=[picture(figure) for figure in figures],
        window=numbers.windows.length,
        interval=intervals.pop() if len(intervals) == 1 else None,
        per_epoch=f"{numbers.per_epoch:,}" if numbers.per_epoch else "",
        recorded=recorded.removeprefix("last_").replace("%", " % of steps"),
        ends=end_table(groups, numbers),
        reaches=[reach_part(comparison, numbers) for comparison in numbers.comparisons if comparison.reaches],
        costs=[part for comparison in numbers.comparisons if (part := cost_part(comparison, numbers)) is not None],
        tuning=tuning_part(numbers) if numbers.tuning else None,
        runs=run_table(groups, numbers),
        differences=difference_table(groups),
        configurations=[
            ConfigurationFile(group.name, str(group.runs[0].folder), group.runs[0].text) for group in groups
        ],
    )


def tiles(groups: list[Group], numbers: Numbers) -> list[Tile]:
    """Where each group ends, and what the first comparison saved."""
    answer = []
    for group in groups[:6]:
        final = numbers.final(group)
        value = number(final.mean) if final else "diverged"
        detail = f"{number(final.low)}–{number(final.high)}" if final and final.runs > 1 else "final training loss"
        answer.append(Tile(group.name, value, detail, colour_class(group, groups)))
    costs = numbers.comparisons[0].costs if numbers.comparisons else None
    savings = costs.factor("upscaled") if costs else None
    with_base = costs.factor("base") if costs else None
    if savings is not None:
        detail = f"{times(with_base)} with the base model" if with_base else "to reach from scratch's minimum"
        answer.append(Tile("savings", times(savings), detail))
    return answer


def end_table(groups: list[Group], numbers: Numbers) -> Table:
    """Where the groups end."""
    head = ["", "seeds", "final training loss", *(metric_name(metric) for metric in numbers.metrics), "TFLOPs"]
    rows: list[list[str | Cell]] = []
    for group in groups:
        counted = numbers.counted(group)
        final = ranged(numbers.final(group), False) if counted else "diverged"
        validation = [ranged(numbers.last(group, metric), False) for metric in numbers.metrics]
        cost = numbers.flops(group)
        flops = teraflops(cost.mean) if cost else "—"
        rows.append([key(group, groups), str(len(counted)), final, *validation, flops])
    return make_table(head, rows)


def reach_part(comparison: Comparison, numbers: Numbers) -> ReachPart:
    in_epochs = numbers.windows.epochs
    rows = []
    for reach in comparison.reaches:
        row = [str(reach.seed), number(reach.target)]
        if reach.step is None:
            row += [f"not within {duration(reach.of_steps, numbers)}", "—"]
            row += ["—"] if in_epochs else []
        else:
            row += [f"{reach.epoch:,}"] if in_epochs else []
            row += [f"{reach.step:,}", teraflops(reach.flops)]
        rows.append(row)
    head = ["seed", "minimum from scratch", *(["epoch"] if in_epochs else []), "step", "TFLOPs"]
    average = time_to_reach(comparison, numbers) if comparison.reached else ""
    return ReachPart(heading("Reach", comparison, numbers), comparison.upscaled.name, average, make_table(head, rows))


def cost_part(comparison: Comparison, numbers: Numbers) -> CostPart | None:
    costs = comparison.costs
    if costs is None:
        return None
    rows = [[COST_LABELS[row.kind], teraflops(row.flops), times(row.factor)] for row in costs.rows()]
    table = make_table(["charged", "TFLOPs", "speed-up"], rows)
    return CostPart(heading("Costs", comparison, numbers), table, costs.tuning is not None)


def tuning_part(numbers: Numbers) -> TuningPart:
    rows = []
    for each in numbers.tuning:
        ratio = times(each.ratio) if each.ratio else "—"
        rows.append([each.sweep.name, each.width or "—", f"{each.trials:,}", teraflops(each.flops), ratio])
    table = make_table(["sweep", "width", "trials", "TFLOPs", "F(kn) / F(kn₀)"], rows)
    return TuningPart(table, next((each.target for each in numbers.tuning if each.target), ""))


def run_table(groups: list[Group], numbers: Numbers) -> Table:
    metrics = [metric_name(metric) for metric in numbers.metrics]
    rows: list[list[str | Cell]] = []
    for status in numbers.statuses:
        run = status.run
        validation = [number(status.last(metric)) for metric in numbers.metrics]
        values = [str(run.seed), width_range(run), status.state, number(status.final), *validation]
        rows.append([key(status.group, groups), *values, teraflops(status.flops), str(run.folder)])
    return make_table(["", "seed", "width", "state", "final loss", *metrics, "TFLOPs", "folder"], rows)


def difference_table(groups: list[Group]) -> Table:
    """The values of the configuration in which groups differ; without rows if there is one group."""
    rows = [[name, *(brief(value) for value in values)] for name, values in differing(groups)]
    return make_table(["key", *(group.name for group in groups)], rows, is_code=True)


def transfer_part(experiment: ExperimentFolder) -> TransferPart:
    name, images = experiment.folder.name, pictures([experiment.folder / "transfer.png"])
    path = experiment.folder / "transfer.csv"
    if not path.is_file():
        return TransferPart(name, images, None, None, None)
    head, rows = read_table(path)
    optima = [row[:-1] for row in rows if row[-1] == "*"]
    drifts = experiment.folder / "drift.csv"
    drift = make_table(*read_table(drifts)) if drifts.is_file() else None
    return TransferPart(name, images, make_table(head[:-1], optima), make_table(head, rows), drift)


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The head of a CSV file, and its rows with short numbers."""
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    return head, [[short_decimal(cell) for cell in line] for line in lines]


def midrun_part(midrun: Midrun, drawn: list[Path]) -> MidrunPart:
    costs, described = midrun.costs or {}, midrun.description
    tuned_at = described.get("tuned_at") or described.get("shares") or []
    return MidrunPart(
        name=midrun.folder.name,
        verdicts=midrun.verdicts,
        metric=midrun.metric.replace("_", " ").replace("%", " % of steps"),
        pictures=pictures(drawn),
        arms=arm_table(midrun),
        costs=step_table(costs) if costs else None,
        device=str(costs.get("device", "")),
        timed_steps=costs.get("timed_steps", 0),
        budget=f"{costs['steps']:,}" if costs else "",
        tuned_at=", ".join(f"{100 * share:g} %" for share in tuned_at),
        edges="; ".join(midrun.edges),
        missing=midrun.missing,
    )


def arm_table(midrun: Midrun) -> Table:
    """Where runs that differ in their seeds end, and what they cost."""
    head = ["schedule", "budget", "", "seeds", "validation loss", "training loss", "grown at step", "steps", "epochs"]
    head += ["lr", "lr after", "noise", "TFLOPs", "seconds", "pause, s"]
    rows = []
    for comparison in midrun.comparisons:
        for arm, runs in comparison.arms.items():
            first = runs[0]
            losses = [mean_text(comparison, arm, loss) for loss in LOSSES]
            at_step = "—" if first.at_step is None else f"{first.at_step:,}"
            rates = [f"{value:.4g}" if value is not None else "—" for value in (first.lr, first.lr_after, first.level)]
            costs = [teraflops(first.flops), number(first.seconds), number(first.pause)]
            where = [comparison.schedule, BUDGETS[comparison.budget], str(arm), str(len(runs))]
            rows.append([*where, *losses, at_step, f"{first.steps:,}", f"{first.epochs:.3g}", *rates, *costs])
    return make_table(head, rows)


def step_table(costs: dict[str, Any]) -> Table:
    """What a step costs at each width."""
    rows = []
    for width, flops in costs["flops"].items():
        seconds, start = (costs[name].get(width, math.nan) for name in ("seconds", "start_seconds"))
        rows.append([width, f"{flops:.4g}", number(1000 * seconds), number(start)])
    return make_table(["width", "FLOPs of a step", "ms of a step", "start and compilation, s"], rows)


def methods_part(methods: Methods, groups: list[Group]) -> MethodsPart:
    name, table = methods.folder.name, method_table(methods, groups)
    before = next((ranged(spread_of(methods.just_before(method))) for method in methods.all if method.group), "—")
    return MethodsPart(name, methods.verdict, table, before, AFTER, WINDOW)


def method_table(methods: Methods, groups: list[Group]) -> Table:
    """Growth methods, those that end lowest first, and then from scratch."""
    numbers, labels = methods.numbers, short_keys(methods.keys)
    metrics = [metric_name(metric) for metric in numbers.metrics]
    head = ["method", "seeds", "just after", f"after {AFTER} steps", "final training loss", *metrics]
    head += ["step of reach", "TFLOPs until then", "… and the base", *labels, "at the edge"]
    rows: list[list[str | Cell]] = []
    for method in methods.all:
        losses = [methods.just_after(method), methods.after_steps(method), methods.finals(method)]
        validation = [ranged(numbers.last(method.group, metric), False) for metric in numbers.metrics if method.group]
        cells = [str(len(losses[0])), *map(losses_text, losses), *(validation or ["—" for _ in metrics])]
        cells += [*reach_cells(methods, method), *(method.tuned.get(key, "—") for key in methods.keys)]
        colour = colour_class(method.group, groups) if method.group else ""
        edges = [label for key, label in zip(methods.keys, labels, strict=True) if key in method.at_edge]
        rows.append([Cell(method.name, colour), *cells, ", ".join(edges) or "no"])
    if methods.scratch is not None:
        scratch = methods.scratch
        validation = [ranged(numbers.last(scratch, metric), False) for metric in numbers.metrics]
        cells = [str(len(numbers.counted(scratch))), "—", "—", ranged(numbers.final(scratch), False), *validation]
        flops = numbers.flops(scratch)
        cells += ["—", teraflops(flops.mean) if flops else "—", "—", *("—" for _ in labels), ""]
        rows.append([key(scratch, groups), *cells])
    return make_table(head, rows)


def short_keys(keys: list[str]) -> list[str]:
    """The last parts of keys, or the whole keys if these are not distinct."""
    labels = [key.rpartition(".")[2] for key in keys]
    return labels if len(set(labels)) == len(keys) else keys


def losses_text(losses: dict[Any, float]) -> str:
    """The mean and the range of losses, and how many runs diverged."""
    diverged = sum(math.isinf(loss) for loss in losses.values())
    text = ranged(spread_of(losses), False)
    if not diverged:
        return text
    return f"{text}, {diverged} diverged" if diverged < len(losses) else "diverged"


def reach_cells(methods: Methods, method: Method) -> list[str]:
    """When a method reaches from-scratch's minimum, and what that costs without and with the base model."""
    steps = methods.reach_steps(method)
    reached = [float(step) for step in steps if step is not None]
    if not steps or len(reached) < len(steps):
        return [f"in {len(reached)} of {len(steps)} seeds" if reached else "not reached" if steps else "—", "—", "—"]
    low, high = min(reached), max(reached)
    span = f" ({low:,.0f}–{high:,.0f})" if low < high else ""
    costs = []
    for kind in ("upscaled", "base"):
        known = method.comparison.costs.rows() if method.comparison and method.comparison.costs else []
        row = next((row for row in known if row.kind == kind), None)
        costs.append(f"{teraflops(row.flops)} ({times(row.factor)})" if row else "—")
    return [f"{sum(reached) / len(reached):,.0f}{span}", *costs]


def short_decimal(cell: str) -> str:
    return f"{float(cell):.5g}" if LONG_DECIMAL.fullmatch(cell) else cell


def sweep_parts(sweeps: list[SweepFolder], experiments: list[ExperimentFolder]) -> list[SweepPart]:
    """The sweeps that were found, and then those of experiments whose runs the page does not show."""
    named = [(sweep.name, sweep) for sweep in sweeps]
    for experiment in experiments:
        named += [(str(sweep.folder.relative_to(experiment.folder)), sweep) for sweep in experiment.sweeps]
    return [sweep_part(name, sweep) for name, sweep in named if sweep.is_sweep]


def sweep_part(name: str, sweep: SweepFolder) -> SweepPart:
    axes = [f"{key} in {', '.join(brief(value) for value in values)}" for key, values in sweep.axes.items()]
    images = pictures([sweep.folder / f"{figure}.png" for figure in SWEEP_FIGURES])
    return SweepPart(name, sweep.best, "; ".join(axes), images)


def experiment_part(experiment: ExperimentFolder) -> ExperimentPart:
    words = experiment.description.get("command") or ""
    command = shlex.join(map(str, words)) if isinstance(words, list) else str(words)
    description = json.dumps(experiment.description.get("experiment", {}), indent=2, ensure_ascii=False)
    return ExperimentPart(experiment.folder.name, command, description)


# --- what parts are made of


def heading(text: str, comparison: Comparison, numbers: Numbers) -> str:
    return text if len(numbers.comparisons) == 1 else f"{text}: {comparison.upscaled.name}"


def key(group: Group, groups: list[Group]) -> Cell:
    """The name of a group, with its colour."""
    return Cell(group.name, colour_class(group, groups))


def colour_class(group: Group, groups: list[Group]) -> str:
    return f"c{place_of(group, groups) % len(LIGHT.palette)}"


def make_table(head: list[str], rows: Sequence[Sequence[str | Cell]], *, is_code: bool = False) -> Table:
    """A table in which columns of numbers stand to the right."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    is_number = []
    for column in range(len(head)):
        is_number.append(not is_code and all(is_numeric(row[column]) for row in cells))
    return Table(head, cells, is_number, is_code)


def is_numeric(cell: Cell) -> bool:
    return not cell.colour and NUMBER.fullmatch(cell.text) is not None


def picture(figure: ReportFigure) -> Picture:
    return Picture(data_uri(figure.png), figure.title, data_uri(figure.dark), figure.caption)


def pictures(paths: list[Path]) -> list[Picture]:
    """The images that are there."""
    return [Picture(data_uri(path), path.stem) for path in paths if path.is_file()]


def data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
