"""The numbers of a report, as JSON and CSV."""

import csv
import io
import math
from typing import Any

from mupscale.commands.report.groups import Found, Group
from mupscale.commands.report.numbers import Comparison, Numbers, Spread, Stand, spread
from mupscale.commands.report.words import verdicts


def as_json(
    found: Found, groups: list[Group], numbers: Numbers | None, files: list[str], command: str
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "command": command,
        "files": files,
        "notes": [*found.notes, *(numbers.notes if numbers else [])],
    }
    answer["verdicts"] = [" ".join(sentences) for sentences in verdicts(numbers, groups)] if numbers else []
    answer["experiments"] = [{"folder": str(each.folder), "protocol": each.protocol} for each in found.experiments]
    answer["sweeps"] = [{"name": s.name, "folder": str(s.folder), "best": s.best} for s in found.sweeps]
    if numbers is None:
        return answer
    answer["window"] = {"steps": numbers.windows.size, "epochs": numbers.windows.epochs, "final_loss": numbers.recorded}
    answer["groups"] = [
        {
            "name": group.name,
            "role": group.role,
            "seeds": [run.seed for run in group.runs],
            "final_loss": span(numbers.final(group)),
            "flops": span(spread([stand.flops for stand in numbers.counted(group)])),
            "validation": {metric: span(numbers.last(group, metric)) for metric in numbers.metrics},
        }
        for group in groups
    ]
    answer["comparisons"] = [compared(comparison) for comparison in numbers.comparisons]
    answer["tuning"] = [
        {
            "sweep": each.sweep.name,
            "trials": each.trials,
            "flops": each.flops,
            "width": each.width,
            "speedup": each.ratio,
        }
        for each in numbers.tuning
    ]
    answer["runs"] = [row(stand, numbers) for stand in numbers.stands]
    return answer


def compared(comparison: Comparison) -> dict[str, Any]:
    reaches = comparison.reaches
    steps = [float(reach.step) for reach in reaches if reach.step is not None]
    epochs = [float(reach.epoch) for reach in reaches if reach.epoch is not None]
    return {
        "upscaled": comparison.upscaled.name,
        "scratch": comparison.scratch.name,
        "reach": [
            {
                "seed": r.seed,
                "target": r.target,
                "step": r.step,
                "epoch": r.epoch,
                "flops": finite(r.flops),
                "of_steps": r.of_steps,
            }
            for r in reaches
        ],
        "all_reach": comparison.reached,
        "reach_step": span(spread(steps)) if comparison.reached else None,
        "reach_epoch": span(spread(epochs)) if comparison.reached else None,
        "costs": [
            {"charged": name, "flops": flops, "speedup": factor} for name, flops, factor in comparison.costs.rows()
        ]
        if comparison.costs
        else None,
        "notes": comparison.notes,
    }


def as_csv(numbers: Numbers) -> str:
    """A row for each run."""
    text = io.StringIO()
    rows = [row(stand, numbers) for stand in numbers.stands]
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def row(stand: Stand, numbers: Numbers) -> dict[str, Any]:
    run = stand.run
    reach = next(
        (r for c in numbers.comparisons if c.upscaled is stand.group for r in c.reaches if r.seed == run.seed), None
    )
    return {
        "group": stand.group.name,
        "seed": run.seed,
        "folder": str(run.folder),
        "start_width": run.start_width,
        "width": run.end_width,
        "steps": run.last_step,
        "state": stand.state,
        "final_loss": finite(stand.final),
        "min_loss": finite(float(stand.losses.min())) if len(stand.losses) else None,
        **{metric: finite(stand.last(metric)) for metric in numbers.metrics},
        "flops": finite(stand.flops),
        "reach_step": reach.step if reach else None,
        "reach_epoch": reach.epoch if reach else None,
        "reach_flops": finite(reach.flops) if reach else None,
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def span(values: Spread | None) -> dict[str, Any] | None:
    return None if values is None else {"mean": values.mean, "min": values.low, "max": values.high, "runs": values.runs}
