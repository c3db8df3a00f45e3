"""Draws widening.svg and equivalence.svg of docs/concepts.md. Takes half a minute on one CPU core.

python docs/concepts_figures.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

matplotlib.rcParams["svg.hashsalt"] = "concepts"  # the same file every time
COLOURS = ("#2f6f9f", "#d9822b")
"""One for each unit of the narrow layer; its copies have the same."""


def widening(path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    network(axes[0], copies=1, title="narrow: two hidden units")
    network(axes[1], copies=2, title="wide: two copies of each")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


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


def equivalence(path: Path) -> None:
    """The last picture of the notebook, whose code is executed."""
    notebook = json.loads((Path(__file__).parents[1] / "examples" / "growing.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(line for line in cell["source"] if not line.startswith("%")), names)
    names["figure"].savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    folder = Path(__file__).parent
    widening(folder / "widening.svg")
    equivalence(folder / "equivalence.svg")
