"""The numbers of a report, as JSON and CSV."""

import math
from dataclasses import asdict
from typing import Any

from mupscale.commands.reporting.compare import Spread, spread
from mupscale.commands.reporting.folders import Found
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.methods import Methods
from mupscale.commands.reporting.midrun import Midrun
from mupscale.commands.reporting.reach import Comparison, Numbers
from mupscale.commands.reporting.words import COST_LABELS, verdicts


def as_json(
    found: Found,
    groups: list[Group],
    numbers: Numbers | None,
    methods: list[Methods],
    midruns: list[Midrun],
    files: list[str],
    command: str,
) -> dict[str, Any]:
    sentences = [each for midrun in midruns for each in midrun.verdicts]
    sentences += [each.verdict for each in methods]
    sentences += verdicts(numbers, groups) if numbers else []
    summary: dict[str, Any] = {
        "command": command,
        "files": files,
        "notes": [*found.notes, *(numbers.notes if numbers else [])],
        "verdicts": [" ".join(each) for each in sentences],
        "experiments": [{"folder": str(each.folder), "protocol": each.protocol} for each in found.experiments],
        "sweeps": [{"name": each.name, "folder": str(each.folder), "best": each.best} for each in found.sweeps],
    }
    if numbers is None:
        return summary
    windows = numbers.windows
    summary["window"] = {"steps": windows.size, "epochs": windows.epochs, "final_loss": numbers.recorded}
    summary["groups"] = [
        {
            "name": group.name,
            "role": group.role,
            "seeds": [run.seed for run in group.runs],
            "final_loss": span(group.final),
            "flops": span(group.flops),
            "validation": {metric: span(group.last(metric)) for metric in numbers.metrics},
        }
        for group in groups
    ]
    summary["comparisons"] = [comparison_as_json(comparison) for comparison in numbers.comparisons]
    summary["tuning"] = [
        {
            "sweep": each.sweep.name,
            "trials": each.trials,
            "flops": each.flops,
            "width": each.width,
            "speedup": each.ratio,
        }
        for each in numbers.tuning
    ]
    if methods:
        summary["methods"] = [
            {"folder": str(each.folder), "verdict": each.verdict, "table": list(map(finite_row, each.rows()))}
            for each in methods
        ]
    summary["runs"] = list(map(finite_row, run_rows(groups, numbers)))
    return summary


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    difference, reaches = comparison.difference(), comparison.reaches
    steps = [float(reach.step) for reach in reaches if reach.step is not None]
    epochs = [float(reach.epoch) for reach in reaches if reach.epoch is not None]
    costs = [
        {"kind": cost.kind, "charged": COST_LABELS[cost.kind], "flops": cost.flops, "speedup": cost.factor}
        for cost in comparison.costs.values()
    ]
    return {
        "upscaled": comparison.upscaled.name,
        "scratch": comparison.scratch.name,
        "difference": finite_row({**difference._asdict(), "outcome": difference.outcome}),
        "reach": [finite_row(asdict(reach)) for reach in reaches],
        "all_reach": comparison.reached,
        "reach_step": span(spread(steps)) if comparison.reached else None,
        "reach_epoch": span(spread(epochs)) if comparison.reached else None,
        "costs": costs or None,
        "notes": comparison.notes,
    }


def run_rows(groups: list[Group], numbers: Numbers) -> list[dict[str, Any]]:
    """A row for each run."""
    rows = []
    for group in groups:
        comparison = next((each for each in numbers.comparisons if each.upscaled is group), None)
        reaches = {reach.seed: reach for reach in reversed(comparison.reaches)} if comparison else {}
        for run in group.runs:
            reach = reaches.get(run.seed)
            rows.append(
                {
                    "group": group.name,
                    "seed": run.seed,
                    "folder": str(run.folder),
                    "start_width": run.start_width,
                    "width": run.end_width,
                    "steps": run.last_step,
                    "state": run.state,
                    "final_loss": run.final,
                    "min_loss": float(run.means.min()) if len(run.means) else None,
                    **{metric: run.last(metric) for metric in numbers.metrics},
                    "flops": run.flops,
                    "reach_step": reach and reach.step,
                    "reach_epoch": reach and reach.epoch,
                    "reach_flops": reach and reach.flops,
                }
            )
    return rows


def finite_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row without numbers that JSON lacks."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def span(values: Spread | None) -> dict[str, Any] | None:
    return None if values is None else {"mean": values.mean, "min": values.low, "max": values.high, "runs": values.runs}
