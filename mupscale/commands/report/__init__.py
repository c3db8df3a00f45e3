"""report: curves, costs and savings of runs, on one page.

RUNS are folders of runs, folders that hold some at any depth, sweeps (what tuning has cost) and experiments. Writes
index.html, which needs no other file, the figures as PNG and PDF, and the numbers as summary.json and summary.csv.
"""

import argparse
import json
import shlex
import shutil
import tempfile
from pathlib import Path

from mupscale.errors import UserError, as_user_errors, needs_extra

GENERATOR = '<meta name="generator" content="mupscale report">'
"""What tells a page of ours from others."""


def main(command: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mupscale report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders of runs, sweeps and experiments")
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="the folder of the report (%(default)s)"
    )
    options = parser.parse_args(arguments)
    with needs_extra("report"):
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    with as_user_errors(OSError):
        paths = write_report(options.runs, options.out)
    for verdict in json.loads((options.out / "summary.json").read_text())["verdicts"]:
        print(verdict)
    print(f"wrote {paths[0]} and {len(paths) - 1} more files")


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Writes a report on the runs in `folders` and gives the paths of its files, the page first.

    UserError, with nothing written, if there is nothing to report, if the runs are of different
    tasks, or if `out` has files but no report. A report that is there already is replaced once the new one is complete.
    """
    refuse_other_folder(out)
    from mupscale.commands.report.draw import draw
    from mupscale.commands.report.groups import find, grouped, refuse_other_tasks
    from mupscale.commands.report.numbers import computed
    from mupscale.commands.report.page import page
    from mupscale.commands.report.summary import as_csv, as_json

    found = find(folders)
    refuse_other_tasks(found.runs)
    groups = grouped(found.runs)
    numbers = computed(found, groups) if groups else None
    command = shlex.join(["python", "-m", "mupscale", "report", *map(str, folders), "--out", str(out)])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".report-") as name:
        draft = Path(name)
        drawn = draw(draft, groups, numbers) if numbers is not None else []
        text = page(found, groups, numbers, drawn, command, GENERATOR)
        for figure in drawn:
            figure.dark.unlink()  # it is for the page alone
        if numbers is not None:
            (draft / "summary.csv").write_text(as_csv(numbers))
        names = [*sorted(path.name for path in draft.iterdir()), "summary.json", "index.html"]
        (draft / "summary.json").write_text(
            json.dumps(as_json(found, groups, numbers, names, command), indent=1, allow_nan=False) + "\n"
        )
        (draft / "index.html").write_text(text)
        stale = set(files_of(out)) - set(names)
        out.mkdir(exist_ok=True)
        for each in names:
            shutil.move(draft / each, out / each)
        for each in stale:
            (out / each).unlink(missing_ok=True)
    return [out / each for each in reversed(names)]


def refuse_other_folder(out: Path) -> None:
    """UserError unless `out` is new, empty, or a report of ours."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder for the report")
    if out.is_dir() and any(out.iterdir()):
        page = out / "index.html"
        if not page.is_file() or GENERATOR not in page.read_text(errors="replace"):
            raise UserError(f"--out {out} has files but no report; name a new folder, so that nothing is overwritten")


def files_of(out: Path) -> list[str]:
    """What the report in a folder consists of, so that a figure of an earlier one does not stay; nothing else is
    touched.
    """
    try:
        names = json.loads((out / "summary.json").read_text())["files"]
        return [name for name in names if isinstance(name, str) and name == Path(name).name]
    except (OSError, ValueError, KeyError, TypeError):
        return []
