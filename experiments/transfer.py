"""Do the best learning rate and noise of upscaled runs stay the same as the width grows?

    python -m experiments.transfer experiments/transfer/mlp_adamw_reduced.yaml --data.data_dir data/covertype

A base of every width and seed, and a sweep of each of the `sweeps` on each of the `growths`. Writes transfer.csv, with
a row for each value, drift.csv, with the power of the width by which the optimum moves, and the figure transfer.
docs/results/transfer.md has the results.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from experiments.study import run
from mupscale.commands import figures
from mupscale.commands.experiment import Study, checkpoint_of, growing, of_size, refuse_diverged
from mupscale.commands.sweep_folder import SweepFolder
from mupscale.commands.widths import Size, SizePair, folder_name, growth_of
from mupscale.errors import UserError

Losses = dict[float, list[float]]
"""The losses of every seed, by value; infinite if a run diverged."""


class Optimum(NamedTuple):
    """The value at which a curve over a grid is lowest. At the edge of the grid the true optimum may lie beyond it."""

    value: float
    at_edge: bool


def optimum_of(levels: Sequence[float], losses: Sequence[float]) -> Optimum:
    """The lowest point of the parabola through the best point and its neighbours, over the logarithm of the levels.

    >>> optimum_of([1, 2, 4], [1.0, 0.0, 1.0])
    Optimum(value=2.0, at_edge=False)
    """
    best = min(range(len(levels)), key=lambda index: losses[index])
    around = range(best - 1, best + 2)
    if best in (0, len(levels) - 1) or not all(math.isfinite(losses[index]) for index in around):
        return Optimum(levels[best], True)  # beside a run that diverged it is at the edge of what trains
    x = [math.log(levels[index]) for index in around]
    y = [losses[index] for index in around]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curvature = (right - left) / (x[2] - x[0])
    if curvature <= 0:
        return Optimum(levels[best], False)  # all three are equal
    return Optimum(math.exp((x[0] + x[1]) / 2 - left / (2 * curvature)), False)


def drift_of(widths: Sequence[float], curves: Sequence[Losses]) -> tuple[list[Optimum], float, float]:
    """The optima by width, the power of the width that they follow, and its standard error: of the mean over the powers
    of single seeds or, with one seed, of the fit; NaN if it is unknown."""
    levels = sorted(curves[0])
    seeds = max(len(losses) for curve in curves for losses in curve.values())
    optima = [optimum_of(levels, [statistics.fmean(curve[level]) for level in levels]) for curve in curves]
    exponent, error = fit_power(widths, optima)
    if seeds == 1:
        return optima, exponent, error
    slopes = []
    for seed in range(seeds):
        of_seed = [[dict(enumerate(curve[level])).get(seed, math.inf) for level in levels] for curve in curves]
        slopes.append(fit_power(widths, [optimum_of(levels, losses) for losses in of_seed])[0])
    return optima, exponent, statistics.stdev(slopes) / math.sqrt(seeds)


def fit_power(widths: Sequence[float], optima: Sequence[Optimum]) -> tuple[float, float]:
    """The slope of the logarithm of the optima over that of the widths, and its standard error; NaN of two widths."""
    x, y = [math.log(width) for width in widths], [math.log(optimum.value) for optimum in optima]
    fit = statistics.linear_regression(x, y)
    residuals = [b - fit.slope * a - fit.intercept for a, b in zip(x, y, strict=True)]
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    freedom = len(x) - 2
    return fit.slope, math.sqrt(sum(r * r for r in residuals) / freedom / spread) if freedom else math.nan


def width_number(width: Size) -> float:
    """A width as one number: of a list, the geometric mean; of a size, times its layers."""
    if isinstance(width, dict):
        return width_number(width["width"]) * width_number(width["layers"])
    return math.prod(width) ** (1 / len(width)) if isinstance(width, list) else float(width)


def losses_of(swept: SweepFolder, key: str) -> Losses:
    """The metric of every seed; seeds after one that diverged are not run."""
    metric, seeds = swept.settings["metric"], swept.settings["seeds"]
    columns = [f"seed {seed}" for seed in seeds] if len(seeds) > 1 else [metric]
    return {
        float(row[key]): [float(row[name].replace("diverged", "inf")) for name in columns if row[name]]
        for row in swept.rows
    }


def measure(study: Study, content: dict[str, Any]) -> None:
    growths = [growth_of(f"growths.{index}", pair) for index, pair in enumerate(content["growths"])]
    seeds, noise, upscaled = content["seeds"], content["noise"], content.get("upscaled")
    bases = {}
    for width in {folder_name(growth.before): growth.before for growth in growths}.values():
        bases[folder_name(width)] = study.sweep(f"{folder_name(width)}/base", {}, seeds, of_size(width))
        refuse_diverged(bases[folder_name(width)])
    found: dict[str, dict[SizePair, Losses]] = {}
    for name, axes in content["sweeps"].items():
        if len(axes) != 1:
            raise UserError(f"sweeps.{name}: give one key, the others keep their values, got {', '.join(axes)}")
        found[name] = {}
        for growth in growths:
            grown = growing(growth, checkpoint_of(study, bases[folder_name(growth.before)]), noise=noise)
            swept = study.sweep(f"{growth.name}/{name}", axes, seeds, grown, upscaled)
            if not study.only_checks:
                refuse_diverged(swept)
                found[name][growth] = losses_of(swept, next(iter(axes)))
    if not study.only_checks:
        write(study, content, found)


def write(study: Study, content: dict[str, Any], found: dict[str, dict[SizePair, Losses]]) -> None:
    """Writes the tables and the figure, and prints the drifts."""
    rows, drifts = [], []
    figure, axes = figures.panels(5.2 * len(found), 4.5, columns=len(found))
    for ax, (name, curves) in zip(axes, found.items(), strict=True):
        key = next(iter(content["sweeps"][name]))
        for growth, losses in curves.items():
            means = {level: statistics.fmean(values) for level, values in losses.items()}
            shared = {"sweep": name, "key": key, "before": growth.before, "after": growth.after}
            for level, values in losses.items():
                seeds = {f"seed {seed}": value for seed, value in zip(content["seeds"], values, strict=False)}
                best = "*" if means[level] == min(means.values()) else ""
                rows.append({**shared, "value": level, study.metric: means[level], **seeds, "optimum": best})
        optima, exponent, error = drift_of([width_number(each.before) for each in curves], list(curves.values()))
        for growth, optimum in zip(curves, optima, strict=True):
            shared = {"sweep": name, "key": key, "before": growth.before, "after": growth.after}
            drifts.append(
                {**shared, "optimum": optimum.value, "at edge": optimum.at_edge, "exponent": exponent, "error": error}
            )
        print(f"{name}: the optimum goes as width^({exponent:.2f} ± {error:.2f})")
        figures.draw_profiles(ax, sorted(next(iter(curves.values()))), {str(each): curves[each] for each in curves})
        ax.set(xlabel=key, ylabel=study.metric, title=f"{name}: width^({exponent:.2f} ± {error:.2f})")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figures.save(figure, study.out / "transfer")
    pd.DataFrame(rows).to_csv(study.out / "transfer.csv", index=False)
    pd.DataFrame(drifts).to_csv(study.out / "drift.csv", index=False)
    print(f"wrote {study.out / 'transfer.csv'}, drift.csv, transfer.png and transfer.pdf")


def main(arguments: list[str] | None = None) -> None:
    required = ("config", "growths", "seeds", "noise", "sweeps")
    run("transfer", __doc__, measure, required, ("metric", "upscaled"), arguments)


if __name__ == "__main__":
    main()
