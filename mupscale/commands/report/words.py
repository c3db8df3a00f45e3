"""What a report says: its numbers in words."""

import math
from collections.abc import Sequence
from typing import Any

from mupscale.commands.report.groups import Group
from mupscale.commands.report.numbers import Comparison, Numbers, Spread, spread
from mupscale.commands.run_logs import Run, higher_is_better


def number(value: float) -> str:
    """Four digits: a loss, an accuracy."""
    return f"{value:#.4g}".removesuffix(".") if math.isfinite(value) else "—"


def teraflops(flops: float) -> str:
    """As the paper prints costs, in TFLOPs; with decimals where there are few."""
    value = flops / 1e12
    if not math.isfinite(value):
        return "—"
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")


def times(factor: float) -> str:
    return f"{factor:,.1f}×" if factor < 1000 else f"{factor:,.0f}×"


def count(amount: float, thing: str) -> str:
    """`1 seed`, `3 seeds`, `26.4 epochs`."""
    text = f"{amount:,.1f}".removesuffix(".0")
    return f"{text} {thing}" if text == "1" else f"{text} {thing}s"


def ranged(values: Spread | None, seeds: bool = True) -> str:
    """A mean with its range."""
    if values is None:
        return "—"
    if values.runs == 1:
        return f"{number(values.mean)} (1 seed)" if seeds else number(values.mean)
    tail = f", {values.runs} seeds" if seeds else ""
    return f"{number(values.mean)} ({number(values.low)}–{number(values.high)}{tail})"


def title(runs: list[Run], groups: list[Group]) -> str:
    """The task, and how wide it grew."""
    model, data = (described["class_path"].rpartition(".")[2] for described in (runs[0].model, runs[0].data))
    growths = dict.fromkeys(
        (str(g.runs[0].start_width), str(g.runs[0].end_width)) for g in groups if g.role == "upscaled"
    )
    told = ", ".join(f"width {start} → {end}" for start, end in growths)
    return f"{model} on {data}: {told}" if told else f"{model} on {data}"


def verdicts(numbers: Numbers, groups: list[Group]) -> list[list[str]]:
    """For each upscaled group beside from scratch what came of it, in sentences; otherwise where the groups end."""
    if numbers.comparisons:
        return [verdict(comparison, numbers) for comparison in numbers.comparisons]
    answer = []
    for group in groups:
        final = numbers.final(group)
        ends = "stands at" if numbers.so_far(group) else "ends at"
        answer.append(
            [f"{capital(group.name)} {ends} {ranged(final)}." if final else f"{capital(group.name)} diverged."]
        )
    lonely = next((group for group in groups if group.role == "upscaled"), None)
    if lonely is not None:
        answer.append([f"There is no run from scratch at width {lonely.runs[0].end_width} to compare with."])
    return answer


def verdict(comparison: Comparison, numbers: Numbers) -> list[str]:
    upscaled, scratch = comparison.upscaled, comparison.scratch
    ours, theirs = numbers.final(upscaled), numbers.final(scratch)
    if ours is None or theirs is None:
        gone = upscaled if ours is None else scratch
        return [f"All runs of {gone.name} diverged: there is nothing to compare."]
    progress = numbers.so_far(upscaled) or numbers.so_far(scratch)
    ends = "stands at" if progress else "ends at"
    answer = [
        f"{capital(upscaled.name)} {ends} {ranged(ours)}, {scratch.name} at {ranged(theirs)}: "
        f"{difference(ours, theirs)}."
    ]
    for group in (upscaled, scratch):
        if len(group.good) < len(group.runs):
            answer.append(
                f"{len(group.runs) - len(group.good)} of {count(len(group.runs), 'run')} of {group.name} diverged, and "
                "did not count."
            )
    if progress:
        answer.append("Runs are still in progress: this is how they stand now.")
    answer += reach_sentences(comparison, numbers)
    for metric in numbers.metrics:
        a, b = numbers.last(upscaled, metric), numbers.last(scratch, metric)
        if a is not None and b is not None:
            answer.append(
                f"{capital(in_words(metric))} {ends} {ranged(a, False)} against "
                f"{ranged(b, False)}{judgement(metric, a, b)}."
            )
    return answer


def difference(ours: Spread, theirs: Spread) -> str:
    """`lower by 58 %`; and whether every seed agrees."""
    if ours.mean == theirs.mean:
        return "the same"
    share = abs(theirs.mean - ours.mean) / abs(theirs.mean) if theirs.mean else math.inf
    percent = f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
    overlap = ours.low <= theirs.high and theirs.low <= ours.high and max(ours.runs, theirs.runs) > 1
    told = f"lower by {percent}" if ours.mean < theirs.mean else f"not lower but higher, by {percent}"
    return f"{told}, though the ranges overlap" if overlap else told


def judgement(metric: str, ours: Spread, theirs: Spread) -> str:
    direction = higher_is_better(metric)
    if direction is None:
        return ""
    if ours.mean == theirs.mean:
        return ": the same"
    return ": better" if (ours.mean > theirs.mean) == direction else ": worse"


def reach_sentences(comparison: Comparison, numbers: Numbers) -> list[str]:
    reaches = comparison.reaches
    if not reaches:
        return ["No seed is in both groups, so nothing can be said of when it reaches from scratch's minimum."]
    missed = [reach for reach in reaches if reach.step is None]
    if missed:
        seeds = f"seed {listed([reach.seed for reach in missed])}" if len(missed) < len(reaches) else ""
        within = within_told(max(reach.of_steps for reach in missed), numbers)
        who = f"With {seeds} it" if seeds else "It"
        return [f"{who} does not reach {comparison.scratch.name}'s minimum within {within}: no savings can be stated."]
    sentence = f"It reaches {comparison.scratch.name}'s minimum after {reach_told(comparison, numbers)}"
    if comparison.costs is None:
        return [f"{sentence}."]
    _, (_, _, plain), *rest = comparison.costs.rows()
    told = {"… and tuning": "with tuning", "… and the base model": "with the base model", "… and both": "with both"}
    charged = [f"{cheaper(factor)} {told[name]} charged" for name, _, factor in rest]
    return [f"{sentence}, {cheaper(plain)} than training from scratch{''.join(f'; {each}' for each in charged)}."]


def reach_told(comparison: Comparison, numbers: Numbers) -> str:
    """Whole epochs, averaged over seeds, as the paper counts; or steps."""
    epochs = numbers.windows.epochs
    values = spread([float(reach.epoch if epochs else reach.step) for reach in comparison.reaches])  # type: ignore[arg-type]
    assert values is not None
    text = count(values.mean, "epoch" if epochs else "step")
    return text if values.low == values.high else f"{text} ({values.low:,.0f}–{values.high:,.0f})"


def within_told(steps: int, numbers: Numbers) -> str:
    return count(steps / numbers.windows.size, "epoch") if numbers.windows.epochs else count(steps, "step")


def cheaper(factor: float) -> str:
    return f"{times(factor)} cheaper" if factor >= 1 else f"{times(1 / factor)} dearer"


def in_words(metric: str) -> str:
    return metric.replace("val/", "validation ", 1).replace("_", " ")


def listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
