"""Draws the figures of these pages, all but that of the theory.

python docs/figures.py concepts     # widening.svg and equivalence.svg of concepts.md, in half a minute on one CPU core
python docs/figures.py module       # module.svg of grow_your_module.md: examples/lightning_module.py, with growth
python docs/figures.py noise OUT    # noise.png of growing.md, from the folder of this sweep:

python -m mupscale sweep --config configs/quickstart.yaml --trainer.max_steps 1500 --seeds 0,1,2,3,4 --metric last_2% \
    --sweep UpscaleCallback.noise.centred=true,false --sweep UpscaleCallback.noise.std=0.1,0.4,1.6 --out OUT
"""

import csv
import json
import runpy
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import mupscale

# isort: split
import matplotlib

matplotlib.use("Agg")
from lightning.pytorch import Trainer, seed_everything
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from mupscale.callbacks.plain import run_settings
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.event_files import read_log
from mupscale.datamodules.fineweb import FineWeb

matplotlib.rcParams["svg.hashsalt"] = "concepts"  # the same file every time
DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"

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


# --- training losses


def training_losses(axes: Axes, grows_at: int, path: Path, **options: Any) -> None:
    """The finished figure of curves that were drawn."""
    axes.axvline(grows_at, color="0.6", linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.get_figure().savefig(path, **options)


def module() -> None:
    """The curves of grow_your_module.md."""
    steps, grows_at, wide = 600, 300, {"width": 64, "heads": 8}
    noise = mupscale.AdditiveNoise(0.3, centred=True)
    arms = {
        "stays at width 32": [],
        "grows to 64, without noise": [UpscaleCallback(grows_at, hparams=wide)],
        "grows to 64, with centred noise": [UpscaleCallback(grows_at, hparams=wide, noise=noise)],
    }
    writer = runpy.run_path(str(EXAMPLES / "lightning_module.py"))["Writer"]
    _, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for index, (name, growth) in enumerate(arms.items()):
        with tempfile.TemporaryDirectory() as folder:
            seed_everything(0, verbose=False)
            settings = run_settings(folder, *growth, progress_bar=False)
            trainer = Trainer(accelerator="cpu", max_steps=steps, limit_val_batches=0, **settings)
            trainer.fit(writer(), FineWeb(batch_size=8, context=32))
            losses = read_log(Path(folder)).loss
        style: dict[str, Any] = {"linestyle": (0, (2, 2)), "linewidth": 2.5} if index == 1 else {}
        axes.plot(list(losses), list(losses.values()), color=f"C{index}", label=name, **style)
    axes.set(xlabel="step", ylabel="training loss, mean of 10 steps", ylim=(5.4, 7.6))
    training_losses(axes, grows_at, DOCS / "module.svg", metadata={"Date": None})


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
    training_losses(axes, 300, DOCS / "noise.png", dpi=130)


if __name__ == "__main__":
    {"concepts": concepts, "module": module, "noise": noise}[sys.argv[1]](*map(Path, sys.argv[2:]))
