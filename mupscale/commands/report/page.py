"""The page of a report: one HTML file that needs no other."""

import base64
import csv
import html
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupscale.commands.config import brief
from mupscale.commands.figures import DARK, LIGHT
from mupscale.commands.report.draw import Drawn, colour_of
from mupscale.commands.report.groups import Experiment, Found, Group, Sweep, differing
from mupscale.commands.report.numbers import Comparison, Numbers, spread, told_width
from mupscale.commands.report.style import STYLE
from mupscale.commands.report.words import (
    in_words,
    number,
    ranged,
    reach_told,
    teraflops,
    times,
    title,
    verdicts,
    within_told,
)

NUMBER = re.compile(r"(-?[0-9][0-9.,e+-]*×?( \(.*\))?|—)?")

SWEEP_FIGURES = ("heatmap", "profile", "scatter", "curves")


class Safe(str):
    """HTML, to be put in a page as it is."""


def page(
    found: Found, groups: list[Group], numbers: Numbers | None, drawn: list[Drawn], command: str, generator: str
) -> str:
    name = (
        title(found.runs, groups)
        if groups
        else f"Transfer: {' and '.join(each.folder.name for each in found.experiments)}"
    )
    parts: list[str] = [f"<header><p class=kicker>mupscale report</p><h1>{escape(name)}</h1></header>"]
    if numbers is not None:
        parts.append(opening(groups, numbers))
    notes = [
        *found.notes,
        *(numbers.notes if numbers else []),
        *(note for c in (numbers.comparisons if numbers else []) for note in c.notes),
    ]
    if notes:
        parts.append("<aside><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul></aside>")
    if numbers is not None:
        parts.append(section("Curves", curves(drawn, groups, numbers)))
        parts.append(section("Ends", end_table(groups, numbers)))
        parts += [
            section(heading("Reach", each, numbers), reach_table(each, numbers))
            for each in numbers.comparisons
            if each.reaches
        ]
        parts += [
            section(heading("Costs", each, numbers), cost_table(each, numbers))
            for each in numbers.comparisons
            if each.costs
        ]
        if numbers.tuning:
            parts.append(section("Tuning", tuning_table(numbers)))
    parts += [
        section(f"Optima by width: {each.folder.name}", transfer(each))
        for each in found.experiments
        if each.protocol == "transfer"
    ]
    own = [(sweep, f"Sweep: {sweep.name}") for sweep in found.sweeps]
    inner = [
        (s, f"Sweep: {s.folder.relative_to(e.folder)}")
        for e in found.experiments
        if e.protocol == "transfer"
        for s in e.sweeps
    ]
    parts += [
        section(text, sweep_part(sweep)) for sweep, text in own + inner if (sweep.folder / "sweep.json").is_file()
    ]
    if numbers is not None:
        parts.append(section("Runs", run_table(groups, numbers)))
        parts.append(section("Configuration", configuration(groups)))
    parts.append(section("Commands", commands(found, command)))
    palette = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(LIGHT.palette))
    dark = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(DARK.palette))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{generator}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(name)}</title>\n<style>{STYLE}{palette}@media "
        f"(prefers-color-scheme:dark){{{dark}}}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


# --- parts


def opening(groups: list[Group], numbers: Numbers) -> str:
    told = ""
    for first, *rest in verdicts(numbers, groups):
        told += f"<p class=verdict><strong>{escape(first)}</strong>{''.join(f' {escape(each)}' for each in rest)}</p>"
    return f"<div class=opening>{told}</div>{tiles(groups, numbers)}"


def tiles(groups: list[Group], numbers: Numbers) -> str:
    """Where each group ends, and what it saved, at a glance."""
    cells = []
    for group in groups[:6]:
        final = numbers.final(group)
        value = number(final.mean) if final else "diverged"
        small = f"{number(final.low)}–{number(final.high)}" if final and final.runs > 1 else "final training loss"
        cells.append((colour_class(group, groups), group.name, value, small))
    for each in numbers.comparisons[:1]:
        if each.costs is not None:
            rows = each.costs.rows()
            with_base = next((factor for name, _, factor in rows if name.endswith("base model")), None)
            small = f"{times(with_base)} with the base model" if with_base else "to reach from scratch's minimum"
            cells.append(("", "savings", times(rows[1][2]), small))
    inner = "".join(
        f'<div class="tile {colour}"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(small)}</small></div>'
        for colour, name, value, small in cells
    )
    return f"<div class=tiles>{inner}</div>"


def curves(drawn: list[Drawn], groups: list[Group], numbers: Numbers) -> str:
    names = " ".join(key(group, groups) for group in groups)
    figures = "".join(
        f"<figure><picture><source media='(prefers-color-scheme: dark)' srcset='{data_uri(each.dark)}'>"
        f"<img src='{data_uri(each.png)}' "
        f"alt='{escape(each.title)}'></picture><figcaption>{escape(each.caption)}</figcaption></figure>"
        for each in drawn
    )
    logged = (
        "the losses that were logged"
        if len({stand.run.interval for stand in numbers.stands}) > 1
        else (f"the losses that were logged, every {numbers.stands[0].run.interval} steps")
    )
    epoch = f" An epoch is {numbers.per_epoch:,} steps." if numbers.per_epoch else ""
    final = "Final losses are those of the last window."
    if numbers.recorded is not None:
        part = numbers.recorded.removeprefix("last_").replace("%", " % of steps")
        final = f"Final losses are means over every step of the last {part}, as the runs recorded them."
    note = (
        f"Training losses are means over {numbers.windows.told()} of {logged}.{epoch} {final} Axes are cut so that "
        "differences show, "
        "and then say so."
    )
    return f"<p>{names}</p><div class=figures>{figures}</div><p class=fine>{escape(note)}</p>"


def reach_table(comparison: Comparison, numbers: Numbers) -> str:
    unit = "epoch" if numbers.windows.epochs else "step"
    rows: list[Sequence[Any]] = []
    for reach in comparison.reaches:
        if reach.step is None:
            cells = [f"not within {within_told(reach.of_steps, numbers)}", "—", "—"]
        else:
            cells = [f"{reach.epoch:,}" if reach.epoch is not None else "", f"{reach.step:,}", teraflops(reach.flops)]
        rows.append(
            [f"{reach.seed}", number(reach.target), *(cells if unit == "epoch" or reach.step is None else cells[1:])]
        )
    head = ["seed", "minimum from scratch", *(["epoch", "step"] if unit == "epoch" else ["step"]), "TFLOPs"]
    rows = [row[: len(head)] for row in rows]
    told = f"On average after {reach_told(comparison, numbers)}." if comparison.reached else "Not with every seed."
    return (
        f"<p>When {escape(comparison.upscaled.name)} first comes down to the minimum training loss from scratch with "
        "the same seed. "
        f"{escape(told)}</p>{table(head, rows)}"
    )


def cost_table(comparison: Comparison, numbers: Numbers) -> str:
    assert comparison.costs is not None
    rows = [[name, teraflops(flops), times(factor)] for name, flops, factor in comparison.costs.rows()]
    note = (
        "Training FLOPs as the runs logged them: matrix products forward and backward, none for a gradient of the "
        "data; means over seeds. "
        "“From scratch” is its whole training. Where the base model is there already its training is no cost; where it "
        "is trained once "
        "and for this alone, it is."
    )
    if comparison.costs.tuning is not None:
        note += (
            " Tuning is every trial of every sweep below, charged to the upscaled run alone, though the run from scratch "
            "uses it, too."
        )
    return f"{table(['charged', 'TFLOPs', 'speed-up'], rows)}<p class=fine>{escape(note)}</p>"


def tuning_table(numbers: Numbers) -> str:
    rows = [
        [
            each.sweep.name,
            each.width or "—",
            f"{each.trials:,}",
            teraflops(each.flops),
            times(each.ratio) if each.ratio else "—",
        ]
        for each in numbers.tuning
    ]
    target = next((each.target for each in numbers.tuning if each.target), "")
    told = f"F(kn) / F(kn₀): how many times cheaper a tuning run is than one at the target, {target}." if target else ""
    head = ["sweep", "width", "trials", "TFLOPs", "F(kn) / F(kn₀)"]
    return f"{table(head, rows)}<p class=fine>{escape(told)}</p>"


def end_table(groups: list[Group], numbers: Numbers) -> str:
    """Where the groups end."""
    head = ["", "seeds", "final training loss", *(in_words(metric) for metric in numbers.metrics), "TFLOPs"]
    rows: list[Sequence[Any]] = []
    for group in groups:
        counted = numbers.counted(group)
        validation = [ranged(numbers.last(group, metric), False) for metric in numbers.metrics]
        cost = spread([stand.flops for stand in counted])
        final = ranged(numbers.final(group), False) if counted else "diverged"
        rows.append([key(group, groups), str(len(counted)), final, *validation, teraflops(cost.mean) if cost else "—"])
    return table(head, rows)


def run_table(groups: list[Group], numbers: Numbers) -> str:
    head = [
        "",
        "seed",
        "width",
        "state",
        "final loss",
        *(in_words(metric) for metric in numbers.metrics),
        "TFLOPs",
        "folder",
    ]
    rows: list[Sequence[Any]] = []
    for stand in numbers.stands:
        run = stand.run
        validation = [number(stand.last(metric)) for metric in numbers.metrics]
        cost, folder = teraflops(stand.flops), str(run.folder)
        rows.append(
            [
                key(stand.group, groups),
                str(run.seed),
                told_width(run),
                stand.state,
                number(stand.final),
                *validation,
                cost,
                folder,
            ]
        )
    return table(head, rows)


def configuration(groups: list[Group]) -> str:
    rows = [[key, *(brief(value) for value in values)] for key, values in differing(groups)]
    told = (
        table(["key", *(group.name for group in groups)], rows, code=True)
        if rows
        else "<p>There is one group of runs.</p>"
    )
    for group in groups:
        run = group.runs[0]
        told += (
            f"<details><summary>{escape(group.name)}: config.yaml of {escape(str(run.folder))}</summary>"
            f"<pre>{escape(run.text)}</pre></details>"
        )
    return told


def commands(found: Found, command: str) -> str:
    told = ""
    for experiment in found.experiments:
        words = experiment.description.get("command")
        if words:
            told += f"<pre>{escape(shlex.join(map(str, words)) if isinstance(words, list) else str(words))}</pre>"
        described = json.dumps(experiment.description.get("experiment", {}), indent=2, ensure_ascii=False)
        told += f"<details><summary>experiment {escape(experiment.folder.name)}</summary><pre>{escape(described)}</pre></details>"
    if not found.experiments and found.runs:
        told += "<p>Each run is repeated by its own configuration:</p>"
        told += f"<pre>{escape(f'python -m mupscale fit --config {found.runs[0].folder}/config.yaml')}</pre>"
    return f"{told}<p>This page:</p><pre>{escape(command)}</pre>"


def sweep_part(sweep: Sweep) -> str:
    axes = "; ".join(f"{key} in {', '.join(brief(value) for value in values)}" for key, values in sweep.axes.items())
    told = (
        f"<p>Best: {escape(sweep.best)}</p>" if sweep.best else "<p>Not finished: it has no best.yaml.</p>"
    ) + f"<p class=fine>{escape(axes)}</p>"
    return told + pictures([sweep.folder / f"{name}.png" for name in SWEEP_FIGURES])


def transfer(experiment: Experiment) -> str:
    told = pictures([experiment.folder / "transfer.png"], wide=True)
    path = experiment.folder / "transfer.csv"
    if not path.is_file():
        return f"{told}<p>Not finished: it has no transfer.csv.</p>"
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    rows = [
        [f"{float(cell):.5g}" if re.fullmatch(r"[0-9]+\.[0-9]{5,}", cell) else cell for cell in line] for line in lines
    ]
    best = [row for row in rows if row[-1] == "*"]
    return f"{told}{table(head[:-1], [row[:-1] for row in best])}" + (
        f"<details><summary>all {len(rows)} trials; those above are the optima</summary>{table(head, rows)}</details>"
    )


# --- HTML


def heading(text: str, comparison: Comparison, numbers: Numbers) -> str:
    return text if len(numbers.comparisons) == 1 else f"{text}: {comparison.upscaled.name}"


def section(name: str, content: str) -> str:
    return f"<section><h2>{escape(name)}</h2>{content}</section>"


def key(group: Group, groups: list[Group]) -> Safe:
    """The name of a group, with its colour."""
    return Safe(f'<span class="key {colour_class(group, groups)}">{escape(group.name)}</span>')


def colour_class(group: Group, groups: list[Group]) -> str:
    return f"c{colour_of(group, groups) % len(LIGHT.palette)}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, code: bool = False) -> str:
    """Columns of numbers stand to the right."""
    right = [not code and all(NUMBER.fullmatch(str(row[column])) for row in rows) for column in range(len(head))]
    kinds = [" class=n" if each else "" for each in right]
    first = "".join(f"<th scope=col{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, head, strict=True))
    lines = ("".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    kind = " class=code" if code else ""
    return f"<div class=scroll><table{kind}><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>"


def pictures(paths: list[Path], *, wide: bool = False) -> str:
    """Those that are there, on white."""
    there = [path for path in paths if path.is_file()]
    inner = "".join(
        f"<figure><img class=white src='{data_uri(path)}' alt='{escape(path.stem)}'></figure>" for path in there
    )
    return f"<div class={'wide' if wide else 'figures'}>{inner}</div>" if there else ""


def data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def escape(text: Any) -> str:
    return text if isinstance(text, Safe) else html.escape(str(text))
