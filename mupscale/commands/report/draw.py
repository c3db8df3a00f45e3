"""The curves of a report."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mupscale.commands import figures
from mupscale.commands.report.groups import Group, Role
from mupscale.commands.report.numbers import Line, Numbers, line, validations
from mupscale.commands.report.words import capital, in_words
from mupscale.commands.run_logs import Run, higher_is_better

POINTS = 600
"""That a line is drawn with, at most: more than a screen shows."""

COLOURS: dict[Role, int] = {"upscaled": 0, "scratch": 1, "base": 2}
"""Places in the palette that the first group of each role has, in all figures."""


class Drawn(NamedTuple):
    """A figure, as PNG on white, PDF, and PNG on black."""

    title: str
    caption: str
    png: Path
    pdf: Path
    dark: Path


def draw(folder: Path, groups: list[Group], numbers: Numbers) -> list[Drawn]:
    """Training loss and every validation metric, against steps and against FLOPs."""
    told = (
        f"mean over {numbers.windows.told()}"
        if numbers.windows.epochs
        else f"running mean over {numbers.windows.told()}"
    )
    answer = figure_pair(
        folder, "training_loss", "training loss", f"Training loss, {told}", groups, numbers.windows.of, False
    )
    for metric in numbers.metrics:
        label, up = in_words(metric), bool(higher_is_better(metric))
        answer += figure_pair(folder, metric.replace("/", "_"), label, capital(label), groups, validations(metric), up)
    return answer


def figure_pair(
    folder: Path,
    name: str,
    label: str,
    what: str,
    groups: list[Group],
    curve: Callable[[Run], tuple[np.ndarray, np.ndarray]],
    up: bool,
) -> list[Drawn]:
    lines = [(group, found) for group in groups if (found := line(group, curve)) is not None]
    many = any(len(group.good) > 1 for group, _ in lines)
    answer = []
    for axis, x_label in (("steps", "steps"), ("flops", "training FLOPs")):
        drawn = [
            band(group, found, axis, colour_of(group, groups))
            for group, found in lines
            if np.isfinite(getattr(found, axis)).all()
        ]
        if not drawn:
            continue
        (png, pdf), dark = figures.bands(folder / f"{name}_{axis}", drawn, x_label, label, higher_is_better=up)
        seeds = ": mean over seeds, and the range from the lowest to the highest" if many else ""
        caption = f"{what}, against {x_label}{seeds}."
        answer.append(Drawn(f"{what}, against {x_label}", caption, png, pdf, dark))
    return answer


def band(group: Group, found: Line, axis: str, colour: int) -> figures.Band:
    every = math.ceil(len(found.steps) / POINTS)
    kept = np.unique(np.append(np.arange(0, len(found.steps), every), len(found.steps) - 1))
    x = getattr(found, axis)[kept].tolist()
    run = group.good[0]
    marks = [step if axis == "steps" else run.flops_at(step) for step in run.growths if step > 0]
    return figures.Band(
        group.name, colour, x, found.mean[kept].tolist(), found.low[kept].tolist(), found.high[kept].tolist(), marks
    )


def colour_of(group: Group, groups: list[Group]) -> int:
    """Its role's, for the first of a role; the others have those that are left, in order."""
    first = {role: next((each for each in groups if each.role == role), None) for role in COLOURS}
    if first.get(group.role) is group:
        return COLOURS[group.role]
    rest = [each for each in groups if not any(each is one for one in first.values())]
    return len(COLOURS) + next(index for index, each in enumerate(rest) if each is group)
