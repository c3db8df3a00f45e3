"""A report on runs: one page, its figures, and its numbers."""

import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

from mupscale.commands.reporting.draw import draw_figures, draw_midrun
from mupscale.commands.reporting.folders import Found, find_runs
from mupscale.commands.reporting.groups import Group, group_runs, refuse_other_tasks
from mupscale.commands.reporting.methods import Methods
from mupscale.commands.reporting.midrun import Midrun
from mupscale.commands.reporting.page import GENERATOR, Opening, render_page
from mupscale.commands.reporting.reach import Numbers, compute_numbers
from mupscale.commands.reporting.sections import (
    command_section,
    methods_section,
    midrun_section,
    result_sections,
    run_sections,
    sweep_sections,
    tiles,
    transfer_section,
)
from mupscale.commands.reporting.summary import as_json, run_rows
from mupscale.commands.reporting.words import title, verdicts
from mupscale.data_files import json_of
from mupscale.errors import UserError
from mupscale.text_tables import as_csv

__all__ = ["write_report"]

T = TypeVar("T")


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Writes a report on the runs in `folders` to `out`, and returns the paths of its files, the page first.

    UserError, with nothing written, if there is nothing to report, if the runs are of different tasks, or if `out` has
    files but no report. A report that is there already is replaced once the new one is complete.

    >>> write_report([Path("runs/quickstart")], Path("report"))[0]
    PosixPath('report/index.html')
    """
    refuse_other_folder(out)
    found = find_runs(folders)
    refuse_other_tasks(found.runs)
    groups = group_runs(found.runs, found.method_of)
    numbers = compute_numbers(found, groups) if groups else None
    midruns = [Midrun(experiment) for experiment in found.midruns]
    methods = []
    if numbers is not None:
        methods = [Methods(experiment, groups, numbers) for experiment in found.experiments if experiment.method_of]
    command = shlex.join(["python", "-m", "mupscale", "report", *map(str, folders), "--out", str(out)])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as name:
        draft = Path(name)
        sections = [methods_section(each) for each in methods]
        if numbers is not None:
            figures = draw_figures(draft, groups, numbers, methods)
            sections += result_sections(groups, numbers, figures, bool(methods))
            (draft / "summary.csv").write_text(as_csv(run_rows(groups, numbers)))
        sections += [transfer_section(experiment) for experiment in found.transfers]
        for name, midrun in numbered("midrun", midruns):
            sections.append(midrun_section(midrun, draw_midrun(midrun, draft, name)))
            (draft / f"{name}.csv").write_text(as_csv(midrun.rows()))
        for name, each in numbered("methods", methods):
            (draft / f"{name}.csv").write_text(as_csv(each.rows()))
        sections += sweep_sections(found)
        sections += run_sections(groups, numbers) if numbers is not None else []
        sections.append(command_section(found, command))
        page = render_page(opening_of(found, groups, numbers, methods, midruns), sections)
        names = [*sorted(path.name for path in draft.iterdir()), "summary.json", "index.html"]
        summary = as_json(found, groups, numbers, methods, midruns, names, command)
        (draft / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
        (draft / "index.html").write_text(page)
        replace_report(out, draft, names)
    return [out / each for each in reversed(names)]


def numbered(name: str, things: list[T]) -> list[tuple[str, T]]:
    """Things with names for their files: the name itself if there is one thing, and with numbers if there are more."""
    return [(name if len(things) == 1 else f"{name}_{index}", thing) for index, thing in enumerate(things, 1)]


def opening_of(
    found: Found, groups: list[Group], numbers: Numbers | None, methods: list[Methods], midruns: list[Midrun]
) -> Opening:
    """The top of the page: the verdicts, those on methods first, and notes on what is missing."""
    folders = " and ".join(experiment.folder.name for experiment in found.experiments)
    topic = "Growing in the middle" if midruns else "Transfer"
    notes = list(found.notes)
    of_groups: list[list[str]] = []
    if numbers is not None:
        notes += numbers.notes
        for comparison in numbers.comparisons:
            notes += comparison.notes
        of_groups = verdicts(numbers, groups)
    first = [each.verdict for each in methods] or of_groups
    return Opening(
        title(groups) if groups else f"{topic}: {folders}",
        [*first, *(sentences for midrun in midruns for sentences in midrun.verdicts)],
        of_groups if methods else [],
        tiles(groups, numbers) if numbers is not None else [],
        notes,
    )


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
