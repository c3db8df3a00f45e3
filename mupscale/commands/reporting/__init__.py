"""A report on runs: one page, its figures, and its numbers."""

import json
import shlex
import shutil
import tempfile
from pathlib import Path

from mupscale.commands.reporting.draw import draw_figures
from mupscale.commands.reporting.folders import find_runs
from mupscale.commands.reporting.groups import group_runs, refuse_other_tasks
from mupscale.commands.reporting.methods import Methods
from mupscale.commands.reporting.midrun import Midrun
from mupscale.commands.reporting.midrun_figures import write_midrun
from mupscale.commands.reporting.numbers import compute_numbers
from mupscale.commands.reporting.page import GENERATOR, render_page
from mupscale.commands.reporting.summary import as_csv, as_json
from mupscale.data_files import json_of
from mupscale.errors import UserError

__all__ = ["write_report"]


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
        figures = draw_figures(draft, groups, numbers, methods) if numbers is not None else []
        drawn = []
        for index, midrun in enumerate(midruns, 1):
            drawn.append(write_midrun(midrun, draft, "midrun" if len(midruns) == 1 else f"midrun_{index}"))
        page = render_page(found, groups, numbers, figures, methods, list(zip(midruns, drawn, strict=True)), command)
        for figure in figures:
            figure.dark.unlink()  # only the page shows it
        if numbers is not None:
            (draft / "summary.csv").write_text(as_csv(numbers))
        for index, each in enumerate(methods, 1):
            (draft / ("methods.csv" if len(methods) == 1 else f"methods_{index}.csv")).write_text(each.as_csv())
        names = [*sorted(path.name for path in draft.iterdir()), "summary.json", "index.html"]
        summary = as_json(found, groups, numbers, methods, midruns, names, command)
        (draft / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
        (draft / "index.html").write_text(page)
        replace_report(out, draft, names)
    return [out / each for each in reversed(names)]


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
