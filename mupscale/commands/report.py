"""report: write a page with the curves of runs, and how they compare at equal compute.

RUNS are folders of runs, sweeps (for the cost of tuning) and experiments, or folders that contain them at any depth.
Writes index.html, which needs no other file, the figures as PNG and PDF, and the numbers as runs.csv, curves.csv and
comparisons.csv.
"""

import argparse
from pathlib import Path

from mupscale.commands.process import ArgumentParser
from mupscale.errors import as_user_errors, needs_extra


def main(command: str, arguments: list[str]) -> None:
    parser = ArgumentParser(
        prog="python -m mupscale report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="folders of runs, sweeps and experiments")
    parser.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="the folder of the report (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    with needs_extra("report"):
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import pandas  # noqa: F401

        from mupscale.commands.reporting import write_report
    with as_user_errors(OSError):
        paths = write_report(options.runs, options.out)
    print(f"wrote {paths[0]} and {len(paths) - 1} more files")
