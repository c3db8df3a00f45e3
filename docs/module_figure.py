"""Draws module.svg of docs/grow_your_module.md: the module of examples/lightning_module.py, with and without growth.

python docs/module_figure.py
"""

import runpy
import tempfile
from pathlib import Path
from typing import Any

import mupscale

# isort: split
import matplotlib

matplotlib.use("Agg")
from lightning.pytorch import Trainer, seed_everything
from matplotlib import pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mupscale.callbacks.plain import run_settings
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.fineweb import FineWeb

STEPS, GROWS_AT = 600, 300
WIDE: dict[str, Any] = {"hparams": {"width": 64, "heads": 8}}
ARMS: dict[str, list[Any]] = {
    "stays at width 32": [],
    "grows to 64, without noise": [UpscaleCallback(GROWS_AT, **WIDE)],
    "grows to 64, with centred noise": [
        UpscaleCallback(GROWS_AT, noise=mupscale.AdditiveNoise(0.3, centred=True), **WIDE)
    ],
}


def main() -> None:
    module = runpy.run_path(str(Path(__file__).parents[1] / "examples/lightning_module.py"))["Writer"]
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for index, (name, growth) in enumerate(ARMS.items()):
        with tempfile.TemporaryDirectory() as folder:
            seed_everything(0, verbose=False)
            settings = run_settings(folder, *growth, progress_bar=False)
            trainer = Trainer(accelerator="cpu", max_steps=STEPS, limit_val_batches=0, **settings)
            trainer.fit(module(), FineWeb(batch_size=8, context=32))
            points = EventAccumulator(folder).Reload().Scalars("train/loss")
        style: dict[str, Any] = {"linestyle": (0, (2, 2)), "linewidth": 2.5} if index == 1 else {}
        axes.plot([p.step for p in points], [p.value for p in points], color=f"C{index}", label=name, **style)
    axes.axvline(GROWS_AT, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="training loss, mean of 10 steps", ylim=(5.4, 7.6))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("module.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
