"""Steps per second of a GPT-2 inside `Trainer.fit`, with curves and clipping on, beside a bare loop over the same network; and the
pause of a swap.

    python -m benchmarks.loop [--device cuda] [--width 768] [--layers 12] [--batch 16] [--context 1024] [--steps 50] [--compile]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

import mupscale
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.models.gpt2 import GPT2

WARM_UP = 20


class Tokens:
    """The same few batches of random tokens, resident on the device."""

    def __init__(self, options: argparse.Namespace, count: int) -> None:
        shape = 4, options.batch, options.context + 1
        self.batches = torch.randint(options.vocabulary, shape, device=options.device)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        return (self.batches[i % 4] for i in range(self.count))


class Clock(Callback):
    """Seconds from the end of the warm-up to the last step, the device idle at both."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop, self.seconds, self._since = start, stop, 0.0, 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.start:
            self._since = now()
        elif trainer.global_step == self.stop:
            self.seconds = now() - self._since


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def module(options: argparse.Namespace) -> GPT2:
    fused = options.device == "cuda"
    return GPT2(
        options.width, layers=options.layers, heads=options.heads, vocabulary=options.vocabulary, context=options.context,
        compile=options.compile, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=fused),
    )  # fmt: skip


def bare(options: argparse.Namespace) -> float:
    seed_everything(0, verbose=False)
    model = module(options)
    with torch.device(options.device):
        model.configure_model()
    optimizer = model.configure_optimizers()
    since = 0.0
    for step, batch in enumerate(Tokens(options, WARM_UP + options.steps)):
        if step == WARM_UP:
            since = now()
        with torch.autocast(options.device, torch.bfloat16):
            loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        mupscale.clip_grad_norm_(model.net, 1.0)
        optimizer.step()
    return now() - since


def trainer(options: argparse.Namespace, folder: str, steps: int, *callbacks: Callback) -> Trainer:
    return Trainer(
        max_steps=steps, accelerator="gpu" if options.device == "cuda" else "cpu", devices=1, precision="bf16-mixed", gradient_clip_val=1.0,
        callbacks=[Curves(), LearningRateMonitor("step"), *callbacks], logger=TensorBoardLogger(folder), log_every_n_steps=10,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip


def fitted(options: argparse.Namespace) -> float:
    seed_everything(0, verbose=False)
    clock = Clock(WARM_UP, WARM_UP + options.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer(options, folder, WARM_UP + options.steps, clock).fit(module(options), Tokens(options, WARM_UP + options.steps))
    return clock.seconds


def swapped(options: argparse.Namespace) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    swap = UpscaleCallback(3, 2 * options.width)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(options, folder, 6, swap)
        run.fit(module(options), Tokens(options, 6))
    return swap.summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in (
        ("width", 768),
        ("layers", 12),
        ("heads", 12),
        ("vocabulary", 50304),
        ("context", 1024),
        ("batch", 16),
        ("steps", 50),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    rounds = [(bare(options), fitted(options)) for _ in range(2)]  # twice: a difference below the spread is noise
    tokens = options.steps * options.batch * options.context
    for bare_seconds, fit_seconds in rounds:
        print(
            f"bare {options.steps / bare_seconds:8.2f} steps/s {tokens / bare_seconds:12,.0f} tok/s   "
            f"Trainer.fit {options.steps / fit_seconds:8.2f} steps/s   overhead {100 * (fit_seconds / bare_seconds - 1):+.1f} %"
        )
    swap = swapped(options)
    print(f"swap {swap['before']} → {swap['after']}, {swap['parameters']:,} parameters: pause {swap['seconds']:.3f} s")
    if options.out:
        options.out.write_text(json.dumps({"rounds": rounds, "swap": swap, "torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
