"""Draws noise.png, the curves of plain and centred noise in docs/growing.md, from the folder of this sweep:

python -m mupscale sweep --config configs/quickstart.yaml --trainer.max_steps 1500 --seeds 0,1,2,3,4 --metric last_2% \
    --sweep UpscaleCallback.noise.centred=true,false --sweep UpscaleCallback.noise.std=0.1,0.4,1.6 --out OUT
python docs/noise_figure.py OUT
"""

import csv
import sys
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from mupscale.commands.event_files import read_log

SHOWN = {"0.1": 0.45, "0.4": 0.7, "1.6": 1.0}
"""The noise levels, and how strong their lines are."""


def main(folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for row in csv.DictReader((folder / "trials.csv").open()):
        level, centred = row["UpscaleCallback.noise.std"], row["UpscaleCallback.noise.centred"] == "True"
        if level not in SHOWN:
            continue
        stem = row["run"].rpartition("seed=")[0]
        curves = [read_log(path).loss for path in sorted(folder.glob(f"{stem}seed=*"))]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        losses = [fmean(curve[step] for curve in curves) for step in steps]
        name = f"{'centred' if centred else 'plain'}, std {level}"
        axes.plot(steps, losses, color="C0" if centred else "C3", alpha=SHOWN[level], label=name)
    axes.set(xlabel="step", ylabel="training loss, mean of 5 seeds", yscale="log")
    axes.set_yticks([0.2, 0.4, 0.6, 1, 2, 6], labels=["0.2", "0.4", "0.6", "1", "2", "6"])
    axes.minorticks_off()
    axes.axvline(300, color="0.6", linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("noise.png"), dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
