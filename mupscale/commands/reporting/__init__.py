"""A report on runs: one page, its figures, and its numbers as CSV files.

`load_runs` and `load_curves` give the same numbers as pandas tables.
"""

import base64
import math
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mupscale.atomic import write_text
from mupscale.commands import figures
from mupscale.commands.config import brief
from mupscale.commands.process import command_line, refuse_output_folder
from mupscale.commands.reporting.arms import Arm, differing
from mupscale.commands.reporting.compare import ArmDifference, spread_of
from mupscale.commands.reporting.frames import Comparison, Results, load_curves, load_runs
from mupscale.commands.reporting.runs import FloatArray, Line, LoggedRun
from mupscale.data_files import refuse_odd_name
from mupscale.errors import UserError
from mupscale.text_tables import read_csv

__all__ = ["load_curves", "load_runs", "write_report"]

GENERATOR = '<meta name="generator" content="mupscale report">'
"""The line in the head of every page, as the template has it."""

POINTS = 600
"""The most points that a line is drawn with: more than a screen shows."""

AXES: dict[str, tuple[str, Callable[[LoggedRun, FloatArray], FloatArray]]] = {
    "steps": ("steps", lambda run, steps: steps),
    "samples": ("samples", LoggedRun.samples_over),
    "flops": ("training FLOPs", LoggedRun.flops_over),
}
"""The horizontal axes: their labels, and where a run is on them after steps."""

Cell = str | float | int | None


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Writes a report on the runs in `folders` to `out`, and returns the paths of its files, the page first.

    UserError, with nothing written, if there is nothing to report, if the runs are of different tasks, or if `out` has
    files but no report. The files of a report that is there already are replaced.

    >>> write_report([Path("runs/quickstart")], Path("report"))[0]
    PosixPath('report/index.html')
    """
    refuse_odd_name(out)
    refuse_output_folder("--out", out)
    page = out / "index.html"
    is_report = page.is_file() and GENERATOR in page.read_text("utf-8", errors="replace")
    if out.exists() and any(out.iterdir()) and not is_report:
        raise UserError(f"--out {out} has files but no report; name a new folder, so that nothing is overwritten")
    results = Results.read(folders)
    comparisons = results.comparisons
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_figures(out, results)
    tables = {
        "runs.csv": results.table,
        "curves.csv": results.curves,
        "comparisons.csv": pd.DataFrame([row_of(each) for each in comparisons]),
    }
    for name, table in tables.items():
        write_text(out / name, table.to_csv(index=False))
    text = render_page(
        results=results,
        comparisons=comparisons,
        pictures=pictures,
        command=command_line("report", *folders, "--out", out),
        files=list(tables),
        title=title(results),
    )
    write_text(page, text)
    drawn = [each.path.with_suffix(suffix) for each in pictures for suffix in (".png", ".pdf")]
    return [page, *(out / name for name in tables), *drawn]


def title(results: Results) -> str:
    """The task, and the sizes between which arms grow; or the sweeps."""
    if not results.arms:
        return f"Sweeps: {', '.join(sweep.folder.name for sweep in results.found.sweeps)}"
    growths = dict.fromkeys(f"width {arm.runs[0].width_range}" for arm in results.arms if arm.role == "upscaled")
    return ": ".join(filter(None, [results.arms[0].runs[0].task, ", ".join(growths)]))


def row_of(comparison: Comparison) -> dict[str, Any]:
    """A comparison as a row of comparisons.csv."""
    return {
        "arm": comparison.arm.name,
        "reference": comparison.reference.name,
        "seeds": len(comparison.equal.seeds),
        "flops": comparison.at_flops,
        "loss": mean(list(comparison.ours.values())),
        "reference_loss": mean(list(comparison.theirs.values())),
        **{f"equal_compute_{key}": getattr(comparison.equal, key) for key in ("mean", "low", "high")},
        **{f"final_{key}": getattr(comparison.final, key) for key in ("mean", "low", "high")},
        "pairs": comparison.equal.pairs,
        "reach_flops": mean(list(comparison.reached.values())),
    }


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


# --- figures


class Picture(NamedTuple):
    path: Path
    alt: str
    caption: str = ""

    @property
    def source(self) -> str:
        """The picture itself, so that the page needs no other file."""
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode()}"


def draw_figures(folder: Path, results: Results) -> list[Picture]:
    """Draws training loss and validation metrics, against steps, samples and FLOPs, as far as these were logged."""
    curves: dict[str, tuple[str, Callable[[LoggedRun], Line]]] = {
        "training_loss": (f"Training loss, {results.windows.words}", results.windows.of)
    }
    for metric in results.metrics:
        curves[metric] = metric_name(metric).capitalize(), partial(LoggedRun.validations, metric=metric)
    has_seeds = any(len(arm.not_diverged) > 1 for arm in results.arms)
    seeds = ": mean over seeds, and the range from the lowest to the highest" if has_seeds else ""
    drawn = []
    for name, (words, curve_of) in curves.items():
        for axis, (label, _) in AXES.items():
            bands = [band for arm in results.arms if (band := mean_band(arm, curve_of, axis)) is not None]
            if any(len(band.x) > 1 for band in bands):  # a single point is in the table
                path = folder / f"{name.replace('/', '_')}_{axis}"
                (png, _) = figures.bands(path, bands, label, metric_name(name))
                drawn.append(Picture(png, f"{words}, against {label}", f"{words}, against {label}{seeds}."))
    return drawn


def mean_band(arm: Arm, curve_of: Callable[[LoggedRun], Line], axis: str) -> figures.Band | None:
    """The mean curve of the runs that have not diverged, as far as all of them go, and their range, with the growth
    marked. None if there is no common part, or if one has not logged what the axis shows."""
    _, place_at = AXES[axis]
    curves = [(place_at(run, steps), values) for run in arm.not_diverged for steps, values in [curve_of(run)]]
    curves = [(x, y) for x, y in curves if len(x)]
    start, end = max((x[0] for x, _ in curves), default=1.0), min((x[-1] for x, _ in curves), default=0.0)
    if not start <= end or not all(np.isfinite(x).all() for x, _ in curves):
        return None
    x = np.unique(np.concatenate([x[(x >= start) & (x <= end)] for x, _ in curves]))
    kept = np.unique(np.append(np.arange(0, len(x), math.ceil(len(x) / POINTS)), len(x) - 1))
    values = np.stack([np.interp(x[kept], *curve) for curve in curves])
    first = arm.not_diverged[0]
    marks = place_at(first, np.array([step for step in first.growths if step > 0], dtype=float)).tolist()
    line, low, high = (each(0).tolist() for each in (values.mean, values.min, values.max))
    return figures.Band(arm.name, arm.place, x[kept].tolist(), line, low, high, marks)


# --- the page: one HTML file that needs no other. Its template has the tables and the fixed texts.


def render_page(**content: Any) -> str:
    environment = Environment(
        loader=PackageLoader("mupscale.commands.reporting", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = (
        *(number, flops_text, ranged, interval, times, breakable),
        *(metric_name, brief, differing, read_table, read_pictures),
    )
    environment.filters |= {each.__name__: each for each in named}
    return environment.get_template("page.html.jinja").render(content, palette=figures.PALETTE).lstrip()


def read_pictures(folder: Path, *names: str) -> list[Picture]:
    """The pictures with these names, as far as a folder has them."""
    return [Picture(path, path.stem) for name in names if (path := folder / f"{name}.png").is_file()]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, with short numbers; none if there is no file."""
    return [{key: shorten(cell) for key, cell in row.items()} for row in read_csv(path)]


def shorten(cell: str) -> str:
    return f"{float(cell):.5g}" if re.fullmatch(r"-?[0-9]+\.[0-9]{5,}(e-?[0-9]+)?", cell) else cell


def number(value: float | None, form: str = "#.4g") -> str:
    """Four digits, for a loss or an accuracy. What is missing or not finite is a dash."""
    return f"{value:{form}}".removesuffix(".") if value is not None and math.isfinite(value) else "—"


def flops_text(flops: float | None) -> str:
    """FLOPs in the unit that fits: 3.29 GFLOPs, 598 TFLOPs.

    >>> flops_text(3.29e9), flops_text(598e12)
    ('3.29 GFLOPs', '598 TFLOPs')
    """
    if flops is None or not math.isfinite(flops):
        return "—"
    power = min(6, max(0, math.floor(math.log10(float(f"{flops:.3g}")) / 3))) if flops > 0 else 0
    return f"{number(flops / 1000**power, '#.3g')} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}FLOPs"


def ranged(values: Any) -> str:
    """The mean of finite values, with their range."""
    found = spread_of([float(value) for value in values if value is not None])
    if found is None:
        return "—"
    return f"{number(found.mean)} ({number(found.min)}–{number(found.max)})" if found.runs > 1 else number(found.mean)


def interval(difference: ArmDifference) -> str:
    """How much lower, with its interval: 0.0201 (0.01 to 0.03)."""
    if not difference.seeds or not math.isfinite(difference.mean):
        return "—"
    mean = f"{difference.mean:+.3g}"
    low, high = (f"{end:+.2g}" if abs(end) < 99.5 else f"{end:+,.0f}" for end in (difference.low, difference.high))
    return f"{mean} ({low} to {high})" if math.isfinite(difference.low) else mean


def times(factor: float) -> str:
    return f"{factor:,.1f}×" if factor < 1000 else f"{factor:,.0f}×"


def breakable(cell: Any) -> Markup:
    """A cell that a narrow table breaks before its bracket, or before the last part of its path, only."""
    return Markup(re.sub(r" (?=\()|/(?=[^/]*$)", r"\g<0><wbr>", str(escape(cell))))


def metric_name(metric: str) -> str:
    return metric.replace("val/", "validation ", 1).replace("_", " ")
