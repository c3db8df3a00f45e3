"""Figures: heatmaps, scatter plots, profiles and lines. Each is written as PNG and PDF."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from mupscale.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

STAR: dict[str, Any] = {"marker": "*", "color": "red", "edgecolors": "white", "linewidths": 0.8, "zorder": 5}
COLOURS = "viridis"

ABOVE = 3
"""Profiles are cut off at this multiple of the highest star."""


class Band(NamedTuple):
    """A line with the range about it. `colour` is a place in the palette; `marks` are places on the horizontal axis."""

    label: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    marks: Sequence[float] = ()


PALETTE = ("#0072b2", "#d55e00", "#7a7f87", "#009e73", "#aa4499", "#b8860b", "#332288", "#88ccee")
"""Colours of lines that colour-blind people can distinguish (after Okabe and Ito)."""

GRID = "#d9dde3"


def higher_is_better(metric: str) -> bool | None:
    """Whether a metric is to be maximised, judged by its name; None if the name does not say."""
    name = metric.lower()
    if any(part in name for part in ("loss", "error", "perplexity", "ppl", "bpb")):
        return False
    return True if "acc" in name or "f1" in name or "auc" in name else None


def panels(width: float = 5.2, height: float = 4.0, rows: int = 1, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure that needs no window system, and the axes of its panels, row by row."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(color=GRID, linewidth=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def save(drawn: "Figure", path: Path) -> list[Path]:
    """Writes `path`.png, in 256 colours, enough for lines and cells, because pages contain it; and `path`.pdf."""
    from PIL import Image

    png, pdf = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.pdf")
    whole = BytesIO()
    drawn.savefig(whole, format="png", dpi=200)
    with replacing(png) as stream:
        Image.open(whole).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    with replacing(pdf) as stream:
        drawn.savefig(stream, format="pdf")
    return [png, pdf]


def heatmap(
    path: Path,
    x: Sequence[Any],
    y: Sequence[Any],
    values: Mapping[tuple[Any, Any], float],
    x_label: str,
    y_label: str,
    label: str,
) -> list[Path]:
    """Draws values over a grid: the smallest starred, infinite ones (diverged) blank, missing ones hatched."""
    from matplotlib.patches import Rectangle

    drawn, (ax,) = panels(1.6 + 0.75 * max(4, len(x)), 1.4 + 0.55 * max(4, len(y)))
    cells = {(column, row): values.get((a, b)) for column, a in enumerate(x) for row, b in enumerate(y)}
    finite = {cell: number for cell, number in cells.items() if number is not None and math.isfinite(number)}
    rows = [[finite.get((column, row), math.nan) for column in range(len(x))] for row in range(len(y))]
    scale = loss_norm(list(finite.values()))
    ax.grid(visible=False)
    image = ax.imshow(rows, origin="lower", aspect="auto", cmap=f"{COLOURS}_r", norm=scale)
    for column, row in (cell for cell, number in cells.items() if number is None):
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", edgecolor="lightgrey", lw=0))
    best = min(finite, key=finite.__getitem__, default=None)
    if best is not None:
        ax.scatter([best[0]], [best[1] + 0.12], s=150, **STAR)
    for cell, number in finite.items():
        red, green, blue, _ = image.cmap(scale(number))
        colour = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
        offset = (0, -9 if cell == best else 0)  # in points: below the star
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
        ax.annotate(f"{number:.3g}", cell, offset, textcoords="offset points", **style)
    ax.set_xticks(range(len(x)), [tick(a) for a in x], **slanted(x))
    ax.set_yticks(range(len(y)), [tick(b) for b in y])
    ax.set(xlabel=x_label, ylabel=y_label)
    colour_bar(drawn, image, ax, label, list(finite.values()))
    return save(drawn, path)


def scatter(path: Path, points: Sequence[tuple[Any, Any, float]], x_label: str, y_label: str, label: str) -> list[Path]:
    """Draws points (x, y, value) of a plane: the smallest starred, diverged ones hollow.

    An axis whose values are all positive is logarithmic.
    """
    drawn, (ax,) = panels()
    is_log = [is_positive([point[axis] for point in points]) for axis in (0, 1)]
    points = [(x if is_log[0] else tick(x), y if is_log[1] else tick(y), value) for x, y, value in points]
    diverged = [(x, y) for x, y, value in points if not math.isfinite(value)]
    if diverged:
        x, y = zip(*diverged, strict=True)
        ax.scatter(x, y, s=45, facecolors="none", edgecolors="grey", label="diverged")
        ax.legend(loc="best", fontsize=8)
    x, y, values = zip(*(point for point in points if math.isfinite(point[2])), strict=True)
    dots = ax.scatter(x, y, c=values, s=45, cmap=f"{COLOURS}_r", norm=loss_norm(values))
    best = values.index(min(values))
    ax.scatter([x[best]], [y[best]], s=220, **STAR)
    for index, axis in enumerate((ax.xaxis, ax.yaxis)):
        if is_log[index]:
            make_log(axis, [point[index] for point in points])
    ax.set(xlabel=x_label, ylabel=y_label)
    colour_bar(drawn, dots, ax, label, values)
    return save(drawn, path)


def profile(
    path: Path, levels: Sequence[Any], values: Mapping[Any, Sequence[float]], x_label: str, label: str
) -> list[Path]:
    """Draws values over the levels of one axis."""
    drawn, (ax,) = panels()
    draw_profiles(ax, levels, {"": values})
    ax.set(xlabel=x_label, ylabel=label)
    return save(drawn, path)


def draw_profiles(ax: "Axes", levels: Sequence[Any], lines: Mapping[str, Mapping[Any, Sequence[float]]]) -> None:
    """Draws lines over levels: at each level the mean of some values, and their range; the lowest mean is starred.

    Levels with an infinite value (diverged) are left out. The axis of the levels is logarithmic if they are all
    positive. The vertical axis is cut at a few times the stars, where lines differ.
    """
    from matplotlib import colormaps

    is_log = is_positive(levels)
    place = dict(zip(levels, levels if is_log else range(len(levels)), strict=True))
    means: list[float] = []
    lowest: list[float] = []
    for index, (label, values) in enumerate(lines.items()):
        colour = colormaps[COLOURS](0.9 * index / max(1, len(lines) - 1))
        finite = [level for level in levels if level in values and math.isfinite(sum(values[level]))]
        x, y = [place[level] for level in finite], [fmean(values[level]) for level in finite]
        lows, highs = ([end(values[level]) for level in finite] for end in (min, max))
        ax.fill_between(x, lows, highs, color=colour, alpha=0.15, linewidth=0)
        ax.plot(x, y, marker="o", markersize=3.5, color=colour, label=label)
        best = y.index(min(y))
        ax.scatter([x[best]], [y[best]], s=150, **{**STAR, "color": colour})
        means += y
        lowest.append(y[best])
    low, high = min(means), max(means)
    if low > 0:
        high = min(high, ABOVE * max(lowest))
    ax.set_ylim(*with_margin(low, high))
    if is_log:
        ax.set_xscale("log")
        room = 1.02 * (max(levels) / min(levels)) ** 0.05  # also for levels that are left out
        ax.set_xlim(min(levels) / room, max(levels) * room)
    if len(levels) <= 12:
        ax.set_xticks(list(place.values()), [tick(level) for level in levels], **slanted(levels))
        ax.minorticks_off()


def bands(path: Path, lines: Sequence[Band], x_label: str, y_label: str) -> list[Path]:
    """Draws lines with their ranges and marks.

    Where the beginnings would hide the differences the vertical axis is cut, and its label says so.
    """
    from matplotlib.ticker import EngFormatter

    is_maximised = bool(higher_is_better(y_label))
    low, high, is_cut = worth_showing(lines, is_maximised)
    columns = max(1, 72 // (6 + max(len(band.label) for band in lines)))  # of the legend, which stands above the axes
    drawn, (ax,) = panels(5.4, 3.5 + 0.2 * math.ceil(len(lines) / columns))
    handles = [draw_band(ax, band) for band in lines]
    ax.set_ylim(low, high)
    if not is_maximised and low > 0 and high > 4 * low:
        make_log(ax.yaxis, (low, high))
    ax.set(xlabel=x_label, xlim=(0, max(max(band.x) for band in lines) * 1.02))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set_ylabel(f"{y_label} (axis cut)" if is_cut else y_label, parse_math=False)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.3}
    names = [band.label for band in lines]
    legend = ax.legend(handles, names, fontsize=9, frameon=False, ncols=columns, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)  # names of folders may have dollar signs
    return save(drawn, path)


def draw_band(ax: "Axes", band: Band) -> "Line2D":
    """Draws a line with its range and marks, and returns the line. Colours that return have another line style."""
    again, place = divmod(band.colour, len(PALETTE))
    colour, style = PALETTE[place], ("-", "--", ":", "-.")[again % 4]
    ax.fill_between(band.x, band.low, band.high, color=colour, alpha=0.22, linewidth=0)
    marker = "o" if len(band.x) == 1 else None
    (line,) = ax.plot(band.x, band.y, color=colour, linewidth=1.7, linestyle=style, marker=marker)
    for mark in band.marks:
        ax.axvline(mark, color=colour, linewidth=1.1, linestyle=":")
        where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
        ax.annotate("grows", (mark, 1), (3, -3), fontsize=8, color=colour, rotation=90, **where)
    return line


def make_log(axis: Any, values: Sequence[float]) -> None:
    """Makes an axis logarithmic; a short one, which has few powers of ten, gets plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    ratio = max(values) / min(values)
    if ratio < 1000:
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if ratio < 8 else (1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def slanted(values: Sequence[Any]) -> dict[str, Any]:
    """Options for labels below an axis: long ones are rotated."""
    return {"rotation": 20, "ha": "right"} if any(len(tick(value)) > 8 for value in values) else {}


def worth_showing(lines: Sequence[Band], is_maximised: bool) -> tuple[float, float, bool]:
    """The range of an axis from the best value to the worst after the first tenth of the lines; and whether it leaves
    anything out.
    """
    best, worst = (max, min) if is_maximised else (min, max)
    extremes = [value for band in lines for value in (*band.low, *band.high)]
    good, bad = best(extremes), worst(worst(band.y[len(band.y) // 10 :]) for band in lines)
    low, high = with_margin(min(good, bad), max(good, bad))
    if not is_maximised and good > 0:
        low = max(low, good / 1.15)
    return low, high, min(extremes) < low or max(extremes) > high


def with_margin(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def loss_norm(values: Sequence[float]) -> Any:
    """Colours by the logarithm of positive values, cut at ten times the smallest; otherwise by the values."""
    from matplotlib.colors import LogNorm, Normalize

    if not values:
        return Normalize()
    low, high = min(values), max(values)
    return LogNorm(low, max(min(high, 10 * low), 1.001 * low)) if low > 0 else Normalize(low, high)


def colour_bar(drawn: "Figure", coloured: Any, ax: "Axes", label: str, values: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    ends = "max" if values and coloured.norm.vmax < max(values) else "neither"
    style: dict[str, Any] = {"ticks": MaxNLocator(5), "format": ScalarFormatter(useOffset=False), "extend": ends}
    drawn.colorbar(coloured, ax=ax, label=label, **style).minorticks_off()


def is_positive(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)


def is_ordered(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def tick(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
