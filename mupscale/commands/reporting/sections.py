"""The sections of a report: sentences, tables and pictures on runs, growth methods, optima and sweeps."""

import csv
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mupscale.commands.config import brief, labels
from mupscale.commands.figures import PALETTE
from mupscale.commands.reporting.compare import spread
from mupscale.commands.reporting.folders import OWN_PART, ExperimentFolder, Found
from mupscale.commands.reporting.groups import Group, differing
from mupscale.commands.reporting.methods import AFTER, BEFORE, FINAL, JUST_AFTER, LATER, WINDOW, Method, Methods
from mupscale.commands.reporting.midrun import BUDGETS, LOSSES, Midrun
from mupscale.commands.reporting.page import Cell, Details, Picture, Section, Table, make_table, read_pictures
from mupscale.commands.reporting.reach import Comparison, Cost, Numbers
from mupscale.commands.reporting.words import (
    COST_LABELS,
    duration,
    metric_name,
    number,
    ranged,
    ranged_losses,
    teraflops,
    time_to_reach,
    times,
)

LONG_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]{5,}(e-?[0-9]+)?")

RATES = ("lr", "lr_after", "noise_level")

SWEEP_FIGURES = ("heatmap", "profile", "scatter", "curves")

COSTS = (
    "Training FLOPs as the runs logged them: matrix products forward and backward, none for a gradient of the data; "
    "means over seeds. “From scratch” is its whole training. Where the base model is there already its training is no "
    "cost; where it is trained once and for this alone, it is."
)
TUNING = (
    "Tuning is every trial of every sweep below{but}, charged to the upscaled run alone, though the run from scratch "
    "uses it, too."
)
DRIFT = (
    "Each optimum is the lowest point of a parabola through the best value of the grid and its neighbours, both in "
    "logarithms; at an edge it is the best value itself. The exponent is the slope of the optima over the width before "
    "the growth, with one standard error."
)
EDGE = (
    "A value is at the edge if it is the least or largest of a grid of three or more, or beside one that diverged: "
    "better ones may lie beyond. No noise is no edge."
)


# --- runs


def result_sections(
    groups: list[Group], numbers: Numbers, figures: list[Picture], has_methods: bool
) -> Iterator[Section]:
    """Curves, ends, when upscaled runs reach the minimum from scratch, costs and tuning."""
    notes = " ".join(curve_notes(groups, numbers))
    yield Section("Curves", legend=list(map(key, groups)), pictures=figures, fine=[notes])
    yield Section("Ends", tables=[("", end_table(groups, numbers))])
    for comparison in numbers.comparisons:
        if comparison.reaches:
            yield reach_section(comparison, numbers)
    for comparison in numbers.comparisons:
        if comparison.costs:
            costs = comparison.costs.values()
            rows = [[COST_LABELS[cost.kind], teraflops(cost.flops), times(cost.factor)] for cost in costs]
            tuning = TUNING.format(but=" but those of other growth methods" if has_methods else "")
            fine = f"{COSTS} {tuning}" if "tuning" in comparison.costs else COSTS
            table = make_table(["charged", "TFLOPs", "speed-up"], rows)
            yield Section(heading("Costs", comparison, numbers), tables=[("", table)], fine=[fine])
    if numbers.tuning:
        yield tuning_section(numbers)


def curve_notes(groups: list[Group], numbers: Numbers) -> Iterator[str]:
    """How the losses of curves and tables are averaged."""
    intervals = {run.interval for group in groups for run in group.runs}
    interval = intervals.pop() if len(intervals) == 1 else None
    every = "" if interval is None else ", at every step" if interval == 1 else f", every {interval} steps"
    yield f"Training losses are means over {numbers.windows.length} of the losses that were logged{every}."
    if numbers.per_epoch:
        yield f"An epoch is {numbers.per_epoch:,} steps."
    if numbers.recorded:
        window = numbers.recorded.removeprefix("last_").replace("%", " % of steps")
        yield f"Final losses are means over every step of the last {window}, as the runs recorded them."
    else:
        yield "Final losses are those of the last window."
    yield "Axes are cut so that differences show, and then say so."


def end_table(groups: list[Group], numbers: Numbers) -> Table:
    """Final losses and metrics, and the lowest validation loss of each run: what it has if it stops early."""
    lowest = [f"lowest {metric_name(metric)}" for metric in numbers.validation_losses]
    head = ["", "seeds", "final training loss", *map(metric_name, numbers.metrics), *lowest, "TFLOPs"]
    rows: list[list[str | Cell]] = []
    for group in groups:
        final = ranged(group.final, False) if group.counted else "diverged"
        validation = [ranged(group.last(metric), False) for metric in numbers.metrics]
        validation += [ranged(group.lowest(metric), False) for metric in numbers.validation_losses]
        rows.append([key(group), str(len(group.counted)), final, *validation, mean_teraflops(group)])
    return make_table(head, rows)


def reach_section(comparison: Comparison, numbers: Numbers) -> Section:
    """When each upscaled run comes down to the minimum from scratch."""
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
    text = (
        f"When {comparison.upscaled.name} first comes down to the minimum training loss from scratch with the same "
        "seed. "
    )
    text += f"On average after {time_to_reach(comparison, numbers)}." if comparison.reached else "Not with every seed."
    return Section(heading("Reach", comparison, numbers), [text], tables=[("", make_table(head, rows))])


def tuning_section(numbers: Numbers) -> Section:
    rows = []
    for each in numbers.tuning:
        ratio = times(each.ratio) if each.ratio else "—"
        rows.append([each.sweep.name, each.width or "—", f"{each.trials:,}", teraflops(each.flops), ratio])
    table = make_table(["sweep", "width", "trials", "TFLOPs", "F(kn) / F(kn₀)"], rows)
    target = next((each.target for each in numbers.tuning if each.target), "")
    ratio = f"F(kn) / F(kn₀): how many times cheaper a tuning run is than one at the target, {target}."
    return Section("Tuning", tables=[("", table)], fine=[ratio] if target else [])


def run_sections(groups: list[Group], numbers: Numbers) -> Iterator[Section]:
    """Every run, and the configurations of the groups."""
    metrics = [metric_name(metric) for metric in numbers.metrics]
    rows: list[list[str | Cell]] = []
    for group in groups:
        for run in group.runs:
            validation = [number(run.last(metric)) for metric in numbers.metrics]
            values = [str(run.seed), run.width_range, run.state, number(run.final), *validation]
            rows.append([key(group), *values, teraflops(run.flops), str(run.folder)])
    head = ["", "seed", "width", "state", "final loss", *metrics, "TFLOPs", "folder"]
    yield Section("Runs", tables=[("", make_table(head, rows))])
    differences = [[name, *(brief(value) for value in values)] for name, values in differing(groups)]
    table = make_table(["key", *(group.name for group in groups)], differences, is_code=True)
    files = []
    for group in groups:
        run = group.runs[0]
        files.append(Details(f"{group.name}: config.yaml of {run.folder}", run.text))
    text = [] if differences else ["There is one group of runs."]
    yield Section("Configuration", text, tables=[("", table)] if differences else [], details=files)


# --- growth methods


def methods_section(methods: Methods) -> Section:
    """Growth methods, those that end lowest first, and then from scratch."""
    numbers, names = methods.numbers, labels(methods.keys)
    metrics = [metric_name(metric) for metric in numbers.metrics]
    head = ["method", "seeds", "just after", f"after {AFTER} steps", "final training loss", *metrics]
    head += ["step of reach", "TFLOPs until then", "… and the base", *names.values(), "at the edge"]
    rows: list[list[str | Cell]] = []
    for method in methods.all:
        losses = [ranged_losses(method.losses[name]) for name in (JUST_AFTER, LATER, FINAL)]
        validation = [ranged(method.group.last(metric), False) if method.group else "—" for metric in numbers.metrics]
        cells = [str(len(method.losses[FINAL])), *losses, *validation]
        cells += [*reach_cells(method), *(method.tuned.get(name, "—") for name in methods.keys)]
        colour = colour_class(method.group) if method.group else ""
        edges = [label for name, label in names.items() if name in method.at_edge]
        rows.append([Cell(method.name, colour), *cells, ", ".join(edges) or "no"])
    if methods.scratch is not None:
        scratch = methods.scratch
        validation = [ranged(scratch.last(metric), False) for metric in numbers.metrics]
        cells = [str(len(scratch.counted)), "—", "—", ranged(scratch.final, False), *validation]
        rows.append([key(scratch), *cells, "—", mean_teraflops(scratch), "—", *("—" for _ in names), ""])
    grown = next((method for method in methods.all if method.group), None)
    before = ranged(spread(list(grown.losses[BEFORE].values()))) if grown else "—"
    fine = (
        "Each method has the values that are best for it at the small size; all were given the same grid. “Just after” "
        "is the loss of the first batch on the wide network, before any step; just before the growth it is "
        f"{before}. “After {AFTER} steps” is the mean of the losses logged in the {WINDOW} steps up to then. “Step of "
        "reach” is when a method comes down to the minimum training loss from scratch with the same seed; brackets "
        f"say how many times cheaper that is. What LiGO learns before it grows is not charged. {EDGE}"
    )
    return Section(f"Growth methods: {methods.folder.name}", tables=[("", make_table(head, rows))], fine=[fine])


def reach_cells(method: Method) -> list[str]:
    """When a method reaches from-scratch's minimum, and what that costs without and with the base model."""
    steps = [reach.step for reach in method.comparison.reaches] if method.comparison else []
    reached = [float(step) for step in steps if step is not None]
    if method.comparison is None or not steps or len(reached) < len(steps):
        return [f"in {len(reached)} of {len(steps)} seeds" if reached else "not reached" if steps else "—", "—", "—"]
    low, high = min(reached), max(reached)
    span = f" ({low:,.0f}–{high:,.0f})" if low < high else ""
    costs = [cost_text(method.comparison.costs.get(kind)) for kind in ("upscaled", "base")]
    return [f"{sum(reached) / len(reached):,.0f}{span}", *costs]


def cost_text(cost: Cost | None) -> str:
    return f"{teraflops(cost.flops)} ({times(cost.factor)})" if cost else "—"


# --- protocols transfer and midrun


def transfer_section(experiment: ExperimentFolder) -> Section:
    """The optima by width, and how they drift, from the tables of the experiment."""
    title = f"Optima by width: {experiment.folder.name}"
    images = read_pictures([experiment.folder / "transfer.png"])
    path, drifts = (experiment.folder / name for name in ("transfer.csv", "drift.csv"))
    if not path.is_file():
        return Section(title, ["Not finished: it has no transfer.csv."], pictures=images, has_wide_pictures=True)
    head, rows = read_table(path)
    optima = [row[:-1] for row in rows if row[-1] == "*"]
    tables = [("", make_table(head[:-1], optima))]
    if drifts.is_file():
        tables.append(("Drift with the width", make_table(*read_table(drifts))))
    details = [Details(f"all {len(rows)} trials; those above are the optima", make_table(head, rows))]
    fine = [DRIFT] if drifts.is_file() else []
    return Section(title, pictures=images, has_wide_pictures=True, tables=tables, fine=fine, details=details)


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """The head of a CSV file, and its rows with short numbers."""
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    return head, [[f"{float(cell):.5g}" if LONG_DECIMAL.fullmatch(cell) else cell for cell in line] for line in lines]


def midrun_section(midrun: Midrun, pictures: list[Picture]) -> Section:
    arms, tables = arm_table(midrun), []
    if arms.rows:
        tables.append(("", arms))
    if midrun.costs:
        tables.append(("What is charged", step_table(midrun.costs)))
    heading = f"Growing in the middle: {midrun.folder.name}"
    text = [f"{midrun.missing} runs are not finished."] if midrun.missing else []
    fine = [" ".join(notes_on_midrun(midrun))] if midrun.costs else []
    return Section(heading, text, pictures=pictures, tables=tables, fine=fine)


def notes_on_midrun(midrun: Midrun) -> Iterator[str]:
    """What the losses and costs are; docs/experiments.md says more."""
    metric = midrun.metric.replace("_", " ").replace("%", " % of steps")
    if metric.startswith("last "):
        yield f"Training losses are means over every step of the {metric} of each run,"
        yield "validation losses those after its last step."
    else:
        yield f"Validation losses are those after the last step. The runs recorded {metric}, and no training losses."
    yield f"The budget is what {midrun.costs['steps']:,} steps of the wide width cost, in FLOPs or in seconds."
    if midrun.costs.get("timed_steps"):
        timed = f"{midrun.costs['timed_steps']} steps of each width ({midrun.costs.get('device', '')})"
        yield f"Seconds are those of training steps, measured over {timed}. Start, compilation, the pause of a growth,"
        yield "validation and checkpoints are not charged."
    shares = midrun.description.get("tuned_at") or midrun.description.get("shares") or []
    tuned_at = ", ".join(f"{100 * share:g} %" for share in shares)
    yield f"Learning rates are tuned at the small size, growths after {tuned_at} of the budget; tuning is not charged."
    if midrun.edges:
        yield f"These are the best at the edge of their grids: {'; '.join(midrun.edges)}."
    else:
        yield "No best value is at the edge of its grid."
    yield EDGE


def arm_table(midrun: Midrun) -> Table:
    """Where runs that differ in their seeds end, and what they cost."""
    head = ["schedule", "budget", "", "seeds", "validation loss", "training loss", "grown at step", "steps", "epochs"]
    head += ["lr", "lr after", "noise", "TFLOPs", "seconds", "pause, s"]
    rows = []
    for comparison in midrun.comparisons:
        for arm, runs in comparison.arms.items():
            first = runs[0].row
            losses = [ranged_losses(comparison.losses(arm, loss)) for loss in LOSSES]
            at_step = "—" if first["grown_at_step"] is None else f"{first['grown_at_step']:,}"
            rates = [f"{first[name]:.4g}" if first[name] is not None else "—" for name in RATES]
            costs = [teraflops(first["flops"]), number(first["seconds"]), number(first["pause_seconds"])]
            where = [comparison.schedule, BUDGETS[comparison.budget], str(arm), str(len(runs))]
            rows.append([*where, *losses, at_step, f"{first['steps']:,}", f"{first['epochs']:.3g}", *rates, *costs])
    return make_table(head, rows)


def step_table(costs: dict[str, Any]) -> Table:
    rows = []
    for width, flops in costs["flops"].items():
        seconds, start = (costs[name].get(width, math.nan) for name in ("seconds", "start_seconds"))
        rows.append([width, f"{flops:.4g}", number(1000 * seconds), number(start)])
    return make_table(["width", "FLOPs of a step", "ms of a step", "start and compilation, s"], rows)


# --- sweeps and commands


def sweep_sections(found: Found) -> Iterator[Section]:
    """The sweeps that were found, and then those of experiments whose runs the page does not show."""
    named = [(sweep.name, sweep) for sweep in found.sweeps]
    for experiment in found.of_protocol(*OWN_PART):
        named += [(str(sweep.folder.relative_to(experiment.folder)), sweep) for sweep in experiment.sweeps]
    for name, sweep in named:
        if not sweep.is_sweep:
            continue
        axes = [f"{key} in {', '.join(brief(value) for value in values)}" for key, values in sweep.axes.items()]
        images = read_pictures([sweep.folder / f"{figure}.png" for figure in SWEEP_FIGURES])
        best = f"Best: {sweep.best}" if sweep.best else "Not finished: it has no best.yaml."
        yield Section(f"Sweep: {name}", [best, "; ".join(axes)], pictures=images)


def command_section(found: Found, command: str) -> Section:
    """The commands that repeat the experiments, or the runs, and this page."""
    commands, details = [], []
    for experiment in found.experiments:
        words = experiment.description.get("command") or ""
        commands.append(shlex.join(map(str, words)) if isinstance(words, list) else str(words))
        description = json.dumps(experiment.description.get("experiment", {}), indent=2, ensure_ascii=False)
        details.append(Details(f"experiment {experiment.folder.name}", description))
    text = []
    if found.runs and not found.experiments:
        text = ["Each run is repeated by its own configuration."]
        commands.append(f"python -m mupscale fit --config {found.runs[0].folder}/config.yaml")
    return Section("Commands", text, commands=[*filter(None, commands), command], details=details)


# --- what sections are made of


def heading(text: str, comparison: Comparison, numbers: Numbers) -> str:
    return text if len(numbers.comparisons) == 1 else f"{text}: {comparison.upscaled.name}"


def key(group: Group) -> Cell:
    return Cell(group.name, colour_class(group))


def colour_class(group: Group) -> str:
    return f"c{group.place % len(PALETTE)}"


def mean_teraflops(group: Group) -> str:
    return teraflops(group.flops.mean) if group.flops else "—"
