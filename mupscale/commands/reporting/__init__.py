"""A report on runs: one page, its figures, and its numbers."""

import json
import math
import shlex
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mupscale.commands.reporting.compare import Spread, spread
from mupscale.commands.reporting.draw import draw_figures, draw_midrun, numbered
from mupscale.commands.reporting.folders import find_runs
from mupscale.commands.reporting.groups import Group, group_runs, refuse_other_tasks
from mupscale.commands.reporting.methods import Methods
from mupscale.commands.reporting.midrun import Midrun
from mupscale.commands.reporting.page import GENERATOR, Opening, render_page
from mupscale.commands.reporting.reach import Comparison, Numbers, compute_numbers
from mupscale.commands.reporting.sections import (
    command_section,
    methods_section,
    midrun_section,
    result_sections,
    run_sections,
    sweep_sections,
    transfer_section,
)
from mupscale.commands.reporting.words import COST_LABELS, title, verdicts
from mupscale.data_files import json_of
from mupscale.errors import UserError
from mupscale.text_tables import as_csv


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Writes a report on the runs in `folders` to `out`, and returns the paths of its files, the page first.

    UserError, with nothing written, if there is nothing to report, if the runs are of different tasks, or if `out` has
    files but no report. A report that is there already is replaced once the new one is complete.

    >>> write_report([Path("runs/quickstart")], Path("report"))[0]
    PosixPath('report/index.html')
    """
    refuse_other_folder(out)
    command = shlex.join(["python", "-m", "mupscale", "report", *map(str, folders), "--out", str(out)])
    report = Report(folders, command)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as draft:
        names = report.write(Path(draft))
        replace_report(out, Path(draft), names)
    return [out / each for each in reversed(names)]


class Report:
    """What a report on the runs in folders holds; `command` makes it."""

    def __init__(self, folders: list[Path], command: str) -> None:
        self.command, self.found = command, find_runs(folders)
        refuse_other_tasks(self.found.runs)
        self.groups = group_runs(self.found.runs, self.found.method_of)
        self.numbers = compute_numbers(self.found, self.groups) if self.groups else None
        self.midruns = [Midrun(experiment) for experiment in self.found.of_protocol("midrun")]
        self.methods: list[Methods] = []
        if self.numbers is not None:
            compared = [experiment for experiment in self.found.experiments if experiment.method_of]
            self.methods = [Methods(experiment, self.groups, self.numbers) for experiment in compared]

    def write(self, draft: Path) -> list[str]:
        """Writes all files to an empty folder; their names, the page last."""
        groups, numbers = self.groups, self.numbers
        sections = [methods_section(each) for each in self.methods]
        if numbers is not None:
            figures = draw_figures(draft, groups, numbers, self.methods)
            sections += result_sections(groups, numbers, figures, bool(self.methods))
            (draft / "summary.csv").write_text(as_csv(run_rows(groups, numbers)))
        sections += [transfer_section(experiment) for experiment in self.found.of_protocol("transfer")]
        for name, midrun in numbered("midrun", self.midruns):
            sections.append(midrun_section(midrun, draw_midrun(midrun, draft, name)))
            (draft / f"{name}.csv").write_text(as_csv(midrun.rows()))
        for name, each in numbered("methods", self.methods):
            (draft / f"{name}.csv").write_text(as_csv(each.rows()))
        sections += sweep_sections(self.found)
        sections += run_sections(groups, numbers) if numbers is not None else []
        sections.append(command_section(self.found, self.command))
        names = [*sorted(path.name for path in draft.iterdir()), "summary.json", "index.html"]
        (draft / "summary.json").write_text(json.dumps(self.as_json(names), indent=1, allow_nan=False) + "\n")
        (draft / "index.html").write_text(render_page(self.opening(), sections))
        return names

    def opening(self) -> Opening:
        """The top of the page: the verdicts, those on methods first, and notes on what is missing."""
        folders = " and ".join(experiment.folder.name for experiment in self.found.experiments)
        topic = "Growing in the middle" if self.midruns else "Transfer"
        notes = list(self.found.notes)
        of_groups: list[list[str]] = []
        if self.numbers is not None:
            notes += self.numbers.notes
            notes += [note for comparison in self.numbers.comparisons for note in comparison.notes]
            of_groups = verdicts(self.numbers, self.groups)
        first = [each.verdict for each in self.methods] or of_groups
        return Opening(
            title(self.groups) if self.groups else f"{topic}: {folders}",
            [*first, *(sentences for midrun in self.midruns for sentences in midrun.verdicts)],
            of_groups if self.methods else [],
            notes,
        )

    def as_json(self, files: list[str]) -> dict[str, Any]:
        found, groups, numbers, methods = self.found, self.groups, self.numbers, self.methods
        sentences = [each for midrun in self.midruns for each in midrun.verdicts]
        sentences += [each.verdict for each in methods]
        sentences += verdicts(numbers, groups) if numbers else []
        summary: dict[str, Any] = {
            "command": self.command,
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


# --- the folder


def refuse_other_folder(out: Path) -> None:
    """Raises a UserError unless `out` is new, empty, or a report."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder for the report")
    if out.is_dir() and any(out.iterdir()):
        page = out / "index.html"
        if not page.is_file() or GENERATOR not in page.read_text(errors="replace"):
            raise UserError(f"--out {out} has files but no report; name a new folder, so that nothing is overwritten")


def replace_report(out: Path, draft: Path, names: list[str]) -> None:
    """Moves the files of a new report into `out` and removes those that only the earlier report had."""
    stale = set(files_of_report(out)) - set(names)
    out.mkdir(exist_ok=True)
    for name in names:
        shutil.move(draft / name, out / name)
    for name in stale:
        (out / name).unlink(missing_ok=True)


def files_of_report(out: Path) -> list[str]:
    """The names of the files of the report in `out`, from its summary; none if there is no report."""
    try:
        names = json_of((out / "summary.json").read_text())["files"]
        return [name for name in names if isinstance(name, str) and name == Path(name).name]
    except (OSError, ValueError, KeyError, TypeError):
        return []


# --- the numbers, as JSON and CSV


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
    rows = []
    for group in groups:
        for run in group.runs:
            reach = numbers.reach_of(run, group)
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
                    **{f"lowest {metric}": run.lowest(metric)[0] for metric in numbers.validation_losses},
                    **{f"step of lowest {metric}": run.lowest(metric)[1] for metric in numbers.validation_losses},
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
