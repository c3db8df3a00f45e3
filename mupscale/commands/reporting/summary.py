"""The numbers of a report, as JSON and CSV."""

import csv
import io
import math
from typing import Any

from mupscale.commands.reporting.compare import Difference, Spread, spread
from mupscale.commands.reporting.folders import Found
from mupscale.commands.reporting.groups import Group
from mupscale.commands.reporting.methods import Methods
from mupscale.commands.reporting.midrun import Midrun
from mupscale.commands.reporting.numbers import Comparison, Numbers, Reach, RunStatus
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
            "final_loss": span(numbers.final(group)),
            "flops": span(numbers.flops(group)),
            "validation": {metric: span(numbers.last(group, metric)) for metric in numbers.metrics},
        }
        for group in groups
    ]
    summary["comparisons"] = [comparison_as_json(comparison, numbers) for comparison in numbers.comparisons]
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
    summary["runs"] = list(map(finite_row, run_rows(numbers)))
    return summary


def comparison_as_json(comparison: Comparison, numbers: Numbers) -> dict[str, Any]:
    reaches = comparison.reaches
    steps = [float(reach.step) for reach in reaches if reach.step is not None]
    epochs = [float(reach.epoch) for reach in reaches if reach.epoch is not None]
    costs = None
    if comparison.costs is not None:
        costs = [
            {"kind": row.kind, "charged": COST_LABELS[row.kind], "flops": row.flops, "speedup": row.factor}
            for row in comparison.costs.rows()
        ]
    return {
        "upscaled": comparison.upscaled.name,
        "scratch": comparison.scratch.name,
        "difference": difference_as_json(numbers.difference(comparison)),
        "reach": [reach_as_json(reach) for reach in reaches],
        "all_reach": comparison.reached,
        "reach_step": span(spread(steps)) if comparison.reached else None,
        "reach_epoch": span(spread(epochs)) if comparison.reached else None,
        "costs": costs,
        "notes": comparison.notes,
    }


def reach_as_json(reach: Reach) -> dict[str, Any]:
    return {
        "seed": reach.seed,
        "target": reach.target,
        "step": reach.step,
        "epoch": reach.epoch,
        "flops": finite(reach.flops),
        "of_steps": reach.of_steps,
    }


def difference_as_json(difference: Difference) -> dict[str, Any]:
    return finite_row({**difference._asdict(), "outcome": difference.outcome})


def as_csv(rows: list[dict[str, Any]]) -> str:
    """A table of rows with the same keys. What is missing or not a number is an empty cell."""
    text = io.StringIO()
    if rows:
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    return repr(value) if math.isfinite(value) else "diverged"


def run_rows(numbers: Numbers) -> list[dict[str, Any]]:
    """A row for each run."""
    rows = []
    for status in numbers.statuses:
        run, reach = status.run, reach_of_run(status, numbers)
        rows.append(
            {
                "group": status.group.name,
                "seed": run.seed,
                "folder": str(run.folder),
                "start_width": run.start_width,
                "width": run.end_width,
                "steps": run.last_step,
                "state": status.state,
                "final_loss": status.final,
                "min_loss": float(status.losses.min()) if len(status.losses) else None,
                **{metric: status.last(metric) for metric in numbers.metrics},
                "flops": status.flops,
                "reach_step": reach.step if reach else None,
                "reach_epoch": reach.epoch if reach else None,
                "reach_flops": reach.flops if reach else None,
            }
        )
    return rows


def reach_of_run(status: RunStatus, numbers: Numbers) -> Reach | None:
    """When a run reached its counterpart's minimum; None for a run that is in no comparison."""
    for comparison in numbers.comparisons:
        if comparison.upscaled is status.group:
            return next((reach for reach in comparison.reaches if reach.seed == status.run.seed), None)
    return None


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def finite_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row without numbers that JSON lacks."""
    return {name: finite(value) if isinstance(value, float) else value for name, value in row.items()}


def span(values: Spread | None) -> dict[str, Any] | None:
    return None if values is None else {"mean": values.mean, "min": values.low, "max": values.high, "runs": values.runs}
