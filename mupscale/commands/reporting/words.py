"""The words of a report: numbers as sentences and tables have them, and sentences on groups of runs."""

import math
from collections.abc import Iterator

from mupscale.commands import figures
from mupscale.commands.reporting.compare import Difference, Losses, Spread, spread
from mupscale.commands.reporting.reach import CHARGES, Comparison, Numbers, Windows


def number(value: float | None, form: str = "#.4g") -> str:
    """Four digits, for a loss or an accuracy; or of another form. What is missing or not finite is a dash."""
    return f"{value:{form}}".removesuffix(".") if value is not None and math.isfinite(value) else "—"


def teraflops(flops: Spread | float | None) -> str:
    """TFLOPs, as the paper prints costs, or their mean; with decimals below 100."""
    value = math.nan if flops is None else (flops.mean if isinstance(flops, Spread) else flops) / 1e12
    return number(value, ",.0f" if value >= 100 else "#.3g")


def times(factor: float) -> str:
    return f"{factor:,.1f}×" if factor < 1000 else f"{factor:,.0f}×"


def cheaper(factor: float) -> str:
    return f"{times(factor)} cheaper" if factor >= 1 else f"{times(1 / factor)} dearer"


def count(amount: float, thing: str) -> str:
    """`1 seed`, `3 seeds`, `26.4 epochs`."""
    text = f"{amount:,.1f}".removesuffix(".0")
    return f"{text} {thing}" if text == "1" else f"{text} {thing}s"


def ranged(values: Spread | None, seeds: bool = False) -> str:
    """A mean with its range, and with the number of seeds if `seeds`."""
    if values is None:
        return "—"
    span = [] if values.runs == 1 else [f"{number(values.min)}–{number(values.max)}"]
    inside = ", ".join(span + [count(values.runs, "seed")] * seeds)
    return f"{number(values.mean)} ({inside})" if inside else number(values.mean)


def ranged_losses(losses: Losses) -> str:
    """The mean and the range of losses, and how many runs diverged."""
    found, diverged = spread(list(losses.values())), sum(map(math.isinf, losses.values()))
    if found is None:
        return "diverged" if diverged else "—"
    return f"{ranged(found)}, {diverged} diverged" if diverged else ranged(found)


def metric_name(metric: str) -> str:
    return metric.replace("val/", "validation ", 1).replace("_", " ")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- sentences on groups


def verdicts(numbers: Numbers) -> list[list[str]]:
    """For each upscaled group with a from-scratch counterpart how they compare, in sentences; if there is none, where
    the groups end.
    """
    if numbers.comparisons:
        return [verdict(comparison, numbers) for comparison in numbers.comparisons]
    answer = []
    for group in numbers.groups:
        ends = "stands at" if group.in_progress else "ends at"
        final = group.mean("final_loss")
        end = f"{ends} {ranged(final, True)}" if final else "diverged"
        answer.append([f"{capital(group.name)} {end}."])
    upscaled = next((group for group in numbers.groups if group.role == "upscaled"), None)
    if upscaled is not None:
        answer.append([f"There is no run from scratch at width {upscaled.runs[0].end_width} to compare with."])
    return answer


def verdict(comparison: Comparison, numbers: Numbers) -> list[str]:
    upscaled, scratch = comparison.upscaled, comparison.scratch
    ours, theirs = upscaled.mean("final_loss"), scratch.mean("final_loss")
    if ours is None or theirs is None:
        group = upscaled if ours is None else scratch
        return [f"All runs of {group.name} diverged: there is nothing to compare."]
    in_progress = upscaled.in_progress or scratch.in_progress
    ends = "stands at" if in_progress else "ends at"
    losses = f"{capital(upscaled.name)} {ends} {ranged(ours, True)}, {scratch.name} at {ranged(theirs, True)}"
    sentences = [f"{losses}: {comparison.difference().words(theirs.mean)}."]
    for group in (upscaled, scratch):
        diverged = len(group.runs) - len(group.not_diverged)
        if diverged:
            runs = count(len(group.runs), "run")
            sentences.append(f"{diverged} of {runs} of {group.name} diverged, and did not count.")
    if in_progress:
        sentences.append("Runs are still in progress: this is how they stand now.")
    sentences.append(reach_sentence(comparison, numbers.windows))
    for metric in numbers.metrics:
        ours, theirs = upscaled.mean(metric), scratch.mean(metric)
        if ours is not None and theirs is not None:
            values = f"{ranged(ours)} against {ranged(theirs)}"
            difference = judgement(metric, comparison.difference(metric))
            sentences.append(f"{capital(metric_name(metric))} {ends} {values}: {difference}.")
    return sentences


def judgement(metric: str, difference: Difference) -> str:
    """The difference, and whether ours is better, if that is clear and the metric's name says which direction is."""
    direction = figures.higher_is_better(metric)
    if direction is None or not difference.is_clear:
        return str(difference)
    return f"{difference}, {'better' if (difference.mean < 0) == direction else 'worse'}"


def reach_sentence(comparison: Comparison, windows: Windows) -> str:
    """When the upscaled runs reach the from-scratch minimum, and what that saves."""
    reaches, minimum = comparison.reaches, f"{comparison.scratch.name}'s minimum"
    if not reaches:
        return "No seed is in both groups, so nothing can be said of when it reaches from scratch's minimum."
    missed = [reach for reach in reaches if reach.step is None]
    if missed:
        seeds = ", ".join(str(reach.seed) for reach in missed)
        subject = f"With seed {seeds} it" if len(missed) < len(reaches) else "It"
        limit = duration(max(reach.of_steps for reach in missed), windows)
        return f"{subject} does not reach {minimum} within {limit}: no savings can be stated."
    sentence = f"It reaches {minimum} after {time_to_reach(comparison)}"
    known = [(comparison.costs[kind], words) for kind, (_, words, _) in CHARGES.items() if kind in comparison.costs]
    costs = "; ".join(f"{cheaper(cost.speedup)} {words}" for cost, words in known)
    return f"{', '.join(filter(None, [sentence, costs]))}."


def time_to_reach(comparison: Comparison) -> str:
    """Whole epochs averaged over seeds, as the paper counts; or steps. Every pair of runs must have reached it."""
    epochs = comparison.reached_at("epoch")
    values = epochs or comparison.reached_at("step")
    assert values is not None
    text = count(values.mean, "epoch" if epochs else "step")
    return text if values.min == values.max else f"{text} ({values.min:,.0f}–{values.max:,.0f})"


def duration(steps: int, windows: Windows) -> str:
    """Steps as epochs, where losses are averaged over epochs."""
    return count(steps / windows.size, "epoch") if windows.epochs else count(steps, "step")


def curve_notes(numbers: Numbers) -> Iterator[str]:
    """How the losses of curves and tables are averaged."""
    intervals = {run.interval for group in numbers.groups for run in group.runs}
    interval = intervals.pop() if len(intervals) == 1 else None
    every = "" if interval is None else ", at every step" if interval == 1 else f", every {interval} steps"
    yield f"Training losses are means over {numbers.windows.length} of the losses that were logged{every}."
    if numbers.windows.per_epoch:
        yield f"An epoch is {numbers.windows.per_epoch:,} steps."
    if numbers.recorded:
        window = numbers.recorded.removeprefix("last_").replace("%", " % of steps")
        yield f"Final losses are means over every step of the last {window}, as the runs recorded them."
    else:
        yield "Final losses are those of the last window."
    yield "Axes are cut so that differences show, and then say so."
