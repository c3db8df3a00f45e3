"""The numbers of a report in words."""

import math

from mupscale.commands import figures
from mupscale.commands.config import class_name
from mupscale.commands.reporting.compare import Difference, Losses, Spread, spread
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.reach import Comparison, Numbers

COST_LABELS = {
    "scratch": "from scratch",
    "upscaled": "upscaled, until it reaches that minimum",
    "tuning": "… and tuning",
    "base": "… and the base model",
    "both": "… and both",
}
"""Rows of the table of costs."""

CHARGED = {"tuning": "with tuning charged", "base": "with the base model charged", "both": "with both charged"}
"""What a verdict says of charges besides the upscaled run itself."""


# --- numbers


def number(value: float) -> str:
    """Four digits, for a loss or an accuracy."""
    return f"{value:#.4g}".removesuffix(".") if math.isfinite(value) else "—"


def teraflops(flops: float) -> str:
    """TFLOPs, as the paper prints costs; with decimals below 100."""
    value = flops / 1e12
    if not math.isfinite(value):
        return "—"
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")


def times(factor: float) -> str:
    return f"{factor:,.1f}×" if factor < 1000 else f"{factor:,.0f}×"


def cheaper(factor: float) -> str:
    return f"{times(factor)} cheaper" if factor >= 1 else f"{times(1 / factor)} dearer"


def count(amount: float, thing: str) -> str:
    """`1 seed`, `3 seeds`, `26.4 epochs`."""
    text = f"{amount:,.1f}".removesuffix(".0")
    return f"{text} {thing}" if text == "1" else f"{text} {thing}s"


def ranged(values: Spread | None, seeds: bool = True) -> str:
    """A mean with its range, and with the number of seeds if `seeds`."""
    if values is None:
        return "—"
    if values.runs == 1:
        return f"{number(values.mean)} (1 seed)" if seeds else number(values.mean)
    tail = f", {values.runs} seeds" if seeds else ""
    return f"{number(values.mean)} ({number(values.low)}–{number(values.high)}{tail})"


def ranged_losses(losses: Losses) -> str:
    """The mean and the range of losses, and how many runs diverged."""
    found, diverged = spread(list(losses.values())), sum(map(math.isinf, losses.values()))
    if found is None:
        return "diverged" if diverged else "—"
    text = ranged(found, False)
    return f"{text}, {diverged} diverged" if diverged else text


def metric_name(metric: str) -> str:
    return metric.replace("val/", "validation ", 1).replace("_", " ")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- sentences


def title(groups: list[Group]) -> str:
    """The task, and the widths between which groups grow."""
    config = groups[0].runs[0].config
    growths = [f"width {group.runs[0].width_range}" for group in groups if group.role == "upscaled"]
    task = f"{class_name(config['model'])} on {class_name(config['data'])}"
    return f"{task}: {', '.join(dict.fromkeys(growths))}" if growths else task


def verdicts(numbers: Numbers, groups: list[Group]) -> list[list[str]]:
    """For each upscaled group with a from-scratch counterpart how they compare, in sentences; if there is none, where
    the groups end.
    """
    if numbers.comparisons:
        return [verdict(comparison, numbers) for comparison in numbers.comparisons]
    answer = []
    for group in groups:
        ends = "stands at" if group.in_progress else "ends at"
        end = f"{ends} {ranged(group.final)}" if group.final else "diverged"
        answer.append([f"{capital(group.name)} {end}."])
    upscaled = next((group for group in groups if group.role == "upscaled"), None)
    if upscaled is not None:
        answer.append([f"There is no run from scratch at width {upscaled.runs[0].end_width} to compare with."])
    return answer


def verdict(comparison: Comparison, numbers: Numbers) -> list[str]:
    upscaled, scratch = comparison.upscaled, comparison.scratch
    ours, theirs = upscaled.final, scratch.final
    if ours is None or theirs is None:
        group = upscaled if ours is None else scratch
        return [f"All runs of {group.name} diverged: there is nothing to compare."]
    in_progress = upscaled.in_progress or scratch.in_progress
    ends = "stands at" if in_progress else "ends at"
    losses = f"{capital(upscaled.name)} {ends} {ranged(ours)}, {scratch.name} at {ranged(theirs)}"
    sentences = [f"{losses}: {comparison.difference().words(theirs.mean)}."]
    for group in (upscaled, scratch):
        diverged = len(group.runs) - len(group.not_diverged)
        if diverged:
            runs = count(len(group.runs), "run")
            sentences.append(f"{diverged} of {runs} of {group.name} diverged, and did not count.")
    if in_progress:
        sentences.append("Runs are still in progress: this is how they stand now.")
    sentences.append(reach_sentence(comparison, numbers))
    for metric in numbers.metrics:
        a, b = upscaled.last(metric), scratch.last(metric)
        if a is not None and b is not None:
            values = f"{ranged(a, False)} against {ranged(b, False)}"
            verdict_words = judgement(metric, comparison.difference(metric))
            sentences.append(f"{capital(metric_name(metric))} {ends} {values}: {verdict_words}.")
    return sentences


def judgement(metric: str, difference: Difference) -> str:
    """The difference, and whether ours is better, if that is clear and the metric's name says which direction is."""
    direction = figures.higher_is_better(metric)
    if direction is None or not difference.is_clear:
        return str(difference)
    return f"{difference}, {'better' if (difference.mean < 0) == direction else 'worse'}"


def reach_sentence(comparison: Comparison, numbers: Numbers) -> str:
    """When the upscaled runs reach the from-scratch minimum, and what that saves."""
    reaches, minimum = comparison.reaches, f"{comparison.scratch.name}'s minimum"
    if not reaches:
        return "No seed is in both groups, so nothing can be said of when it reaches from scratch's minimum."
    missed = [reach for reach in reaches if reach.step is None]
    if missed:
        seeds = ", ".join(str(reach.seed) for reach in missed)
        subject = f"With seed {seeds} it" if len(missed) < len(reaches) else "It"
        limit = duration(max(reach.of_steps for reach in missed), numbers)
        return f"{subject} does not reach {minimum} within {limit}: no savings can be stated."
    sentence = f"It reaches {minimum} after {time_to_reach(comparison, numbers)}"
    for kind, cost in comparison.costs.items():
        if kind == "upscaled":
            sentence += f", {cheaper(cost.factor)} than training from scratch"
        elif kind in CHARGED:
            sentence += f"; {cheaper(cost.factor)} {CHARGED[kind]}"
    return f"{sentence}."


def time_to_reach(comparison: Comparison, numbers: Numbers) -> str:
    """Whole epochs averaged over seeds, as the paper counts; or steps. Every pair of runs must have reached it."""
    epochs = numbers.windows.epochs
    reached = [reach.epoch if epochs else reach.step for reach in comparison.reaches]
    values = spread([each for each in reached if each is not None])
    assert values is not None
    text = count(values.mean, "epoch" if epochs else "step")
    return text if values.low == values.high else f"{text} ({values.low:,.0f}–{values.high:,.0f})"


def duration(steps: int, numbers: Numbers) -> str:
    """Steps as epochs, where losses are averaged over epochs."""
    return count(steps / numbers.windows.size, "epoch") if numbers.windows.epochs else count(steps, "step")
