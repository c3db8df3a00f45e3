"""Tune learning rate and noise on a small growth, 16 → 32, and use them for a larger one, 64 → 128.

    pip install '.[sweep]'                       # `sweep` needs it
    python examples/sweep_and_transfer.py

In a terminal the two commands are `python -m mupscale sweep …` and `python -m mupscale fit …`; here one process runs
both. Both sizes have the same `base_width`, from which muP scales the learning rate. The data is the included sample of
Covertype.
"""

import contextlib
import csv
import shlex
import tempfile
from pathlib import Path

from mupscale.__main__ import main as mupscale

TARGET = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_steps: 200
  enable_progress_bar: false
  log_every_n_steps: 10
  val_check_interval: 100
  check_val_every_n_epoch: null
  logger: {init_args: {name: target, version: tuned}}
  callbacks:
    - class_path: UpscaleCallback
      init_args:
        at_step: 100
        width: 128
        noise: {class_path: mupscale.AdditiveNoise, init_args: {std: 1.0}}
model:
  class_path: MLP
  init_args: {width: 64, base_width: 64, optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001}}}
data: {class_path: Covertype, init_args: {batch_size: 200}}
"""

SWEEP = """
sweep --config target.yaml --model.width=16 --callback_args='{UpscaleCallback: {width: 32}}' --out sweep
    --metric val/loss --sweep model.optimizer.lr=0.004,0.016,0.064 --sweep UpscaleCallback.noise.std=0.01,0.1,1
"""

FIT = "fit --config target.yaml --config sweep/best.yaml"


def run(command: str) -> None:
    words = shlex.split(command)
    print(f"\n$ python -m mupscale {shlex.join(words)}", flush=True)
    mupscale(words)


def print_table(path: Path) -> None:
    """The loss of every trial of a sweep: a row for each learning rate, a column for each noise level."""
    with path.open() as file:
        trials = list(csv.DictReader(file))
    rates = sorted({float(trial["model.optimizer.lr"]) for trial in trials})
    noises = sorted({float(trial["UpscaleCallback.noise.std"]) for trial in trials})
    losses = {
        (float(trial["model.optimizer.lr"]), float(trial["UpscaleCallback.noise.std"])): float(trial["val/loss"])
        for trial in trials
    }
    print("\nvalidation loss after growing 16 → 32")
    print("learning rate" + "".join(f"{f'noise {noise:g}':>12}" for noise in noises))
    for rate in rates:
        print(f"{rate:<13g}" + "".join(f"{losses[rate, noise]:>12.4f}" for noise in noises))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("target.yaml").write_text(TARGET)
        run(SWEEP)
        print_table(Path("sweep/trials.csv"))
        run(FIT)


if __name__ == "__main__":
    main()
