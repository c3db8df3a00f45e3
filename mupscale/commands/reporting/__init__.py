"""A report on runs: one page, its figures, and its numbers."""

import json
import math
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mupscale.commands.config import brief
from mupscale.commands.figures import PALETTE
from mupscale.commands.process import command_line, refuse_output_folder
from mupscale.commands.reporting import words
from mupscale.commands.reporting.draw import Picture, draw_figures, picture
from mupscale.commands.reporting.folders import EDGE, Found
from mupscale.commands.reporting.groups import Group, differing, group_runs
from mupscale.commands.reporting.methods import Methods, draw_methods
from mupscale.commands.reporting.midrun import Midrun, draw_midrun
from mupscale.commands.reporting.reach import Comparison, Numbers
from mupscale.data_files import json_of
from mupscale.errors import UserError
from mupscale.text_tables import as_csv, read_csv

GENERATOR = '<meta name="generator" content="mupscale report">'
"""In the head of every page, as the template has it."""


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Writes a report on the runs in `folders` to `out`, and returns the paths of its files, the page first.

    UserError, with nothing written, if there is nothing to report, if the runs are of different tasks, or if `out` has
    files but no report. A report that is there already is replaced once the new one is complete.

    >>> write_report([Path("runs/quickstart")], Path("report"))[0]
    PosixPath('report/index.html')
    """
    stale = files_of_report(out)
    report = Report(folders, command_line("report", *folders, "--out", out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as draft:
        names = report.write(Path(draft))
        out.mkdir(exist_ok=True)
        for name in names:
            shutil.move(Path(draft, name), out / name)
    for name in {*stale} - {*names}:
        (out / name).unlink(missing_ok=True)
    return [out / each for each in reversed(names)]


def files_of_report(out: Path) -> list[str]:
    """The names of the files of the report in `out`, from its summary; none if it has no summary, is new or empty.

    Raises a UserError if it cannot be written to, or has other files but no report.
    """
    refuse_output_folder("--out", out)
    if not out.exists() or not any(out.iterdir()):
        return []
    try:
        names = json_of((out / "summary.json").read_text())["files"]
        if "index.html" in names:
            return [name for name in names if name == Path(name).name]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if (out / "index.html").is_file() and GENERATOR in (out / "index.html").read_text(errors="replace"):
        return []
    raise UserError(f"--out {out} has files but no report; name a new folder, so that nothing is overwritten")


class Report:
    """What a report on the runs in folders holds; `command` makes it."""

    def __init__(self, folders: list[Path], command: str) -> None:
        self.command, self.found = command, Found(folders)
        self.numbers = Numbers(self.found, group_runs(self.found.runs))
        self.midruns = [Midrun(experiment) for experiment in self.found.of_protocol("midrun")]
        compared = [experiment for experiment in self.found.experiments if experiment.method_of]
        self.methods = [Methods(experiment, self.numbers) for experiment in compared]
        self.verdicts = words.verdicts(self.numbers)
        """Those on groups, each a list of sentences."""
        self.notes = [*self.found.notes, *self.numbers.notes]

    def write(self, draft: Path) -> list[str]:
        """Writes all files to an empty folder; their names, the page last."""
        parts: list[tuple[str, Any, list[Picture]]] = []
        if self.numbers.groups:
            parts.append(("summary", self.numbers, draw_figures(draft, self.numbers)))
        parts += [(name, each, draw_methods(each, draft / name)) for name, each in numbered("methods", self.methods)]
        parts += [(name, each, draw_midrun(each, draft / name)) for name, each in numbered("midrun", self.midruns)]
        for name, part, _ in parts:
            (draft / f"{name}.csv").write_text(as_csv(part.rows))
        names = [*sorted(path.name for path in draft.iterdir()), "summary.json", "index.html"]
        summary = {"command": self.command, "files": names, **self.summary()}
        (draft / "summary.json").write_text(json.dumps(as_plain(summary), indent=1, allow_nan=False) + "\n")
        pictures = {part: drawn for _, part, drawn in parts}
        (draft / "index.html").write_text(render_page(**vars(self), title=title(self), pictures=pictures))
        return names

    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        found, numbers, windows = self.found, self.numbers, self.numbers.windows
        sentences = [each for midrun in self.midruns for each in midrun.verdicts]
        sentences += [*(each.verdict for each in self.methods), *self.verdicts]
        answer: dict[str, Any] = {
            "notes": self.notes,
            "verdicts": [" ".join(each) for each in sentences],
            "experiments": [{"folder": each.folder, "protocol": each.protocol} for each in found.experiments],
            "sweeps": [{"name": each.name, "folder": each.folder, "best": each.best} for each in found.sweeps],
        }
        if not numbers.groups:
            return answer
        answer["window"] = {"steps": windows.size, "epochs": windows.epochs, "final_loss": numbers.recorded}
        answer["groups"] = [group_summary(group, numbers) for group in numbers.groups]
        answer["comparisons"] = [comparison_summary(comparison) for comparison in numbers.comparisons]
        answer["tuning"] = [{**vars(each), "sweep": each.sweep.name} for each in numbers.tuning]
        tables = [{"folder": each.folder, "verdict": each.verdict, "table": each.rows} for each in self.methods]
        return answer | ({"methods": tables} if tables else {}) | {"runs": numbers.rows}


def numbered(name: str, things: list[Any]) -> list[tuple[str, Any]]:
    """Things with names for their files: the name itself if there is one thing, and with numbers if there are more."""
    return [(name if len(things) == 1 else f"{name}_{index}", thing) for index, thing in enumerate(things, 1)]


def title(report: Report) -> str:
    """The task, and the widths between which groups grow; or the experiments."""
    groups = report.numbers.groups
    if not groups:
        topic = "Growing in the middle" if report.midruns else "Transfer"
        return f"{topic}: {' and '.join(experiment.folder.name for experiment in report.found.experiments)}"
    growths = dict.fromkeys(f"width {group.runs[0].width_range}" for group in groups if group.role == "upscaled")
    return ": ".join(filter(None, [groups[0].runs[0].task, ", ".join(growths)]))


# --- the page: one HTML file that needs no other. Its template has the tables and the fixed texts.

LONG_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]{5,}(e-?[0-9]+)?")


def render_page(**content: Any) -> str:
    """The page with what the template asks for."""
    environment = Environment(
        loader=PackageLoader("mupscale.commands.reporting", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: each for name, each in vars(words).items() if callable(each)}
    environment.filters |= {"brief": brief, "differing": differing}
    environment.filters |= {"read_table": read_table, "read_pictures": read_pictures}
    environment.filters["as_json"] = partial(json.dumps, indent=2, ensure_ascii=False)
    template = environment.get_template("page.html.jinja")
    return template.render(content, palette=PALETTE, edge=EDGE).lstrip()


def read_pictures(folder: Path, *names: str) -> list[Picture]:
    """Those of the pictures with these names that are in a folder."""
    paths = [folder / f"{name}.png" for name in names]
    return [picture(path, path.stem) for path in paths if path.is_file()]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, with short numbers; none if there is no file."""
    return [{key: short(cell) for key, cell in row.items()} for row in read_csv(path)]


def short(cell: str) -> str:
    return f"{float(cell):.5g}" if LONG_DECIMAL.fullmatch(cell) else cell


# --- the numbers, as JSON


def group_summary(group: Group, numbers: Numbers) -> dict[str, Any]:
    return {
        "name": group.name,
        "role": group.role,
        "seeds": [run.seed for run in group.runs],
        "final_loss": group.mean("final_loss"),
        "flops": group.mean("flops"),
        "validation": {metric: group.mean(metric) for metric in numbers.metrics},
    }


def comparison_summary(comparison: Comparison) -> dict[str, Any]:
    difference = comparison.difference()
    return {
        "upscaled": comparison.upscaled.name,
        "scratch": comparison.scratch.name,
        "difference": {**difference._asdict(), "outcome": difference.outcome},
        "reach": comparison.reaches,
        "all_reach": comparison.reached,
        "reach_step": comparison.reached_at("step"),
        "reach_epoch": comparison.reached_at("epoch"),
        "costs": list(comparison.costs.values()) or None,
        "notes": comparison.notes,
    }


def as_plain(value: Any) -> Any:
    """A value as JSON has it: named tuples as dictionaries, paths as texts, nothing for numbers that are not finite."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: as_plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
