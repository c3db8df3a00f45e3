"""How long a fit of GPT-2 pauses when it grows, wider or deeper, and how fast it goes on.

    python -m benchmarks pause [--quick] [--only "layers, ahead"] [--out pause.json]

The pause lasts from the end of the last step before the growth to the end of the first one after it, minus an ordinary
step: the checkpoint before the growth, its checks, two evaluations of the loss, compilation and the capture of a CUDA
graph included. "growth s" is the part that the callback spends on growing, and "total s" the time from the start of the
fit to its last step. In the way "then" the wide network is compiled after the swap, in the way "ahead" before it, in
another process: the fit waits for it before its last narrow step, as if it had trained for longer, and "total s" is
without this wait. "ahead s" is how long the process takes, or that it failed. Every way begins without compiled code on
disk. The rates are
those of steps before and after, and of a run that has the large size from the beginning. The footprint is weights and
both moments of AdamW, and the peak is that of the memory while the model grows.
"""

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.cases import token_rows
from benchmarks.harness import ONLY, Row, clear_memory, now, peak_gb
from benchmarks.training import Case, Clock, fit, ours
from mupscale.callbacks import growth_schedule
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.models.gpt2 import GPT2

Shape = tuple[int, int, int]
"""Width, layers, rows of a batch."""
GROWTHS: dict[str, tuple[Shape, Shape]] = {
    "width 768 → 1536": ((768, 12, 16), (1536, 12, 16)),
    "6 → 12 layers": ((768, 6, 16), (768, 12, 16)),
    "6 → 12 layers, 768 → 1536": ((768, 6, 16), (1536, 12, 16)),
    "width 1920 → 3840": ((1920, 12, 4), (3840, 12, 4)),
}
QUICK: dict[str, tuple[Shape, Shape]] = {"32 → 64, 1 → 2 layers": ((32, 1, 2), (64, 2, 2))}

WARM_UP = 15

PATIENCE = 180.0
"""Seconds that a fit waits for the process that compiles."""


class Weighed(UpscaleCallback):
    """An upscale that records its peak memory, and the memory of weights and state afterwards, in GB."""

    ahead_text = ""
    waited = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ahead = None if self.schedule is None else self.schedule.ahead
        if trainer.global_step == self.at_step - 1 and ahead is not None:
            before = now()
            with suppress(subprocess.TimeoutExpired):
                ahead.wait(PATIENCE)
            self.waited = now() - before
            took = {None: "too long", 0: f"{now() - self.began:.1f}"}
            self.ahead_text = took.get(ahead.returncode, "failed")
        if trainer.global_step == self.at_step - 1:
            clear_memory()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.is_due(trainer):
            if trainer.global_step == 0:
                self.began = now()
                super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            return
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.peak = peak_gb()
        states = (v for state in trainer.optimizers[0].state.values() for v in state.values() if torch.is_tensor(v))
        self.footprint = sum(t.numel() * t.element_size() for t in (*pl_module.parameters(), *states)) / 1e9


def case(name: str, shape: Shape, options: argparse.Namespace) -> Case:
    width, layers, rows = shape
    vocabulary, context = (256, 32) if options.quick else (50304, 1024)

    module = partial(
        GPT2, width, layers=layers, heads=2 if options.quick else 12, vocabulary=vocabulary, context=context,
        compile=not options.quick,
    )  # fmt: skip
    steps, warm_up = (4, 5) if options.quick else (30, WARM_UP)
    batches = partial(token_rows, vocabulary, context, rows)
    return Case(name, module, batches, "tok", rows * context, steps, warm_up, "bf16-mixed", 0)


def measure(name: str, way: str, small: Shape, large: Shape, options: argparse.Namespace) -> Row:
    torch.compiler.reset()
    clear_memory()
    begin = case(name, small, options)
    grown_at = begin.warm_up + begin.steps
    settled = grown_at + begin.warm_up
    last = settled + begin.steps
    clock = Clock(begin.warm_up, grown_at - 1, grown_at, grown_at + 1, settled, last)
    depth = {"layers": large[1], "depth": "stack"} if large[1] != small[1] else {}
    swap = Weighed(grown_at, large[0], **depth)
    started = now()
    fit(replace(begin, steps=last - begin.warm_up), options.device, swap, clock)
    after = clock.rate(settled, last)
    row: Row = {
        "case": name,
        "compiled": way,
        "ahead s": swap.ahead_text,
        "pause s": clock.at[grown_at + 1] - clock.at[grown_at] - 1 / after,
        "growth s": swap.summary["seconds"],
        "total s": clock.at[last] - started - swap.waited,
        "before /s": clock.rate(begin.warm_up, grown_at - 1),
        "after /s": after,
        "footprint GB": swap.footprint,
        "peak GB": swap.peak,
        "parameters": swap.summary["parameters"],
    }
    torch.compiler.reset()
    clear_memory()
    fresh, _ = ours(case(name, large, options), options.device)
    return {**row, "fresh /s": fresh.rate(begin.warm_up, grown_at)}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    should_precompile = growth_schedule.should_precompile
    for name, (small, large) in (QUICK if options.quick else GROWTHS).items():
        for way in ("then", "ahead"):
            if options.only not in f"{name}, {way}":
                continue
            growth_schedule.should_precompile = should_precompile if way == "ahead" else lambda trainer, module: False
            with tempfile.TemporaryDirectory() as folder:
                os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton")
                yield measure(name, way, small, large, options)


OPTIONS = ONLY
