"""Draws the figures of these pages, all but that of the theory.

python docs/figures.py concepts     # widening.svg and equivalence.svg of concepts.md, in half a minute on one CPU core
python docs/figures.py results      # results.svg of the README, from docs/results/ladder/runs.csv
python docs/figures.py noise OUT    # noise.png of growing.md, from the folder of this sweep:

python -m mupscale sweep --config configs/quickstart.yaml --trainer.max_steps 1500 --seeds 0,1,2,3,4 --metric last_2% \
    --sweep UpscaleCallback.noise.centred=true,false --sweep UpscaleCallback.noise.std=0.1,0.4,1.6 --out OUT
"""

import csv
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from mupscale.commands.event_files import read_log

matplotlib.rcParams["svg.hashsalt"] = "concepts"  # the same file every time
DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
ON_A_PHONE = 5, 3.2
"""The size in inches of a figure that can be read at a width of 350 pixels; `stylesheets/site.css` shows it whole."""

# --- concepts.md

COLOURS = ("#2f6f9f", "#d9822b")
"""One for each unit of the narrow layer; its copies have the same."""


def concepts() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    network(axes[0], copies=1, title="narrow: two hidden units")
    network(axes[1], copies=2, title="wide: two copies of each")
    figure.savefig(DOCS / "widening.svg", metadata={"Date": None})
    plt.close(figure)
    # the last picture of the notebook, whose code is executed
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / "growing.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(line for line in cell["source"] if not line.startswith("%")), names)
    names["figure"].set_size_inches(*ON_A_PHONE)
    names["figure"].savefig(DOCS / "equivalence.svg", metadata={"Date": None})


def network(ax: Axes, copies: int, title: str) -> None:
    """Two inputs, hidden units in as many copies, and one output, with the weights of the two layers."""
    inputs = [(0.0, 0.65), (0.0, -0.65)]
    names = [name for name in ("a", "b") for _ in range(copies)]
    top = 0.5 * (len(names) - 1)
    hidden = [(1.0, (top - place) * 1.3 / copies) for place in range(len(names))]
    output = (2.0, 0.0)
    for name, unit in zip(names, hidden, strict=True):
        colour = COLOURS["ab".index(name)]
        for source in inputs:
            ax.plot(*zip(source, unit, strict=True), color=colour, lw=1.6, zorder=1)
        ax.plot(*zip(unit, output, strict=True), color=colour, lw=1.6 / copies, zorder=1)
        label = f"$w_{name}$" if copies == 1 else f"$w_{name}/{copies}$"
        ax.text(1.36, 0.64 * unit[1], label, ha="center", va="center", fontsize=11, bbox={"color": "white", "pad": 1})
    for place, name, colour in (
        *zip(inputs, ("", ""), ("0.75", "0.75"), strict=True),
        *((unit, name, COLOURS["ab".index(name)]) for unit, name in zip(hidden, names, strict=True)),
        (output, "", "0.75"),
    ):
        ax.scatter(*place, s=520, color=colour, edgecolor="white", zorder=2)
        ax.text(*place, name, ha="center", va="center", color="white", fontsize=12, zorder=3)
    ax.text(0.0, 1.15, "input", ha="center")
    ax.text(2.0, 1.15, "output", ha="center")
    ax.set(title=title, xlim=(-0.25, 2.25), ylim=(-1.3, 1.4))
    ax.axis("off")


# --- results


def finish(axes: Axes, path: Path, **options: Any) -> None:
    """Saves the figure of curves that were drawn."""
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.get_figure().savefig(path, **options)


def results() -> None:
    """GPT-2 of width 256 and 8 layers, from scratch and grown after a quarter of the compute."""
    _, axes = plt.subplots(figsize=ON_A_PHONE, layout="constrained")
    for name, layers in (("from scratch", ""), ("grown from 2 layers", "2")):
        ends: dict[float, list[float]] = {}
        for row in csv.DictReader((DOCS / "results/ladder/runs.csv").open()):
            size = row["width"], row["layers"], row["lr"], row["base_layers"], row["from_width"], row["from_layers"]
            is_shown = float(row["budget"]) > -2 and row["grown_at"] in ("", f"{float(row['budget']) - 2:g}")
            if size == ("256", "8", "0.0078", "", "256" if layers else "", layers) and is_shown:
                ends.setdefault(round(float(row["flops"]) / 1e15, 1), []).append(float(row["loss"]))
        axes.plot(sorted(ends), [fmean(ends[compute]) for compute in sorted(ends)], label=name)
        for compute, losses in ends.items():
            axes.plot([compute] * len(losses), losses, "k.", markersize=4)
    axes.set(xlabel="training compute, PFLOP", ylabel="validation loss at the end")
    finish(axes, DOCS / "results.svg", metadata={"Date": None})


def noise(folder: Path) -> None:
    """Curves of plain and centred noise; the higher its level, the stronger the line."""
    shown = {"0.1": 0.45, "0.4": 0.7, "1.6": 1.0}
    _, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for row in csv.DictReader((folder / "trials.csv").open()):
        level, centred = row["UpscaleCallback.noise.std"], row["UpscaleCallback.noise.centred"] == "True"
        if level not in shown:
            continue
        stem = row["run"].rpartition("seed=")[0]
        curves = [read_log(path).loss for path in sorted(folder.glob(f"{stem}seed=*"))]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        losses = [fmean(curve[step] for curve in curves) for step in steps]
        name = f"{'centred' if centred else 'plain'}, std {level}"
        axes.plot(steps, losses, color="C0" if centred else "C3", alpha=shown[level], label=name)
    axes.set(xlabel="step", ylabel="training loss, mean of 5 seeds", yscale="log")
    axes.set_yticks([0.2, 0.4, 0.6, 1, 2, 6], labels=["0.2", "0.4", "0.6", "1", "2", "6"])
    axes.minorticks_off()
    axes.axvline(300, color="0.6", linewidth=0.8, linestyle=":")
    finish(axes, DOCS / "noise.png", dpi=130)


if __name__ == "__main__":
    {"concepts": concepts, "results": results, "noise": noise}[sys.argv[1]](*map(Path, sys.argv[2:]))
