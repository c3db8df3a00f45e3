"""Shared by the training benchmarks: trains one network in several ways, in one run, and prints a table.

- ours: `Trainer.fit` with logging, checkpoints, curves, a progress bar and learning-rate monitor on;
- bare: the same network, optimizer, batches and speed options in a bare torch loop;
- the others of a case, such as the authors' code.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

import mupscale
from benchmarks.harness import Row, clear_memory, now, peak_gb, rate
from mupscale.callbacks.captured_steps import CapturedSteps
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.run_defaults import default_callbacks
from mupscale.callbacks.tensorboard import LossFirstLogger
from mupscale.cuda_graph import CapturedStep
from mupscale.models.base import Growable


@dataclass(frozen=True)
class Case:
    """One network at one size."""

    name: str
    module: partial[Growable]
    batches: Callable[[torch.device], Any]  # a loader of resident batches
    unit: str
    units_per_step: int
    steps: int
    warm_up: int
    precision: str
    clip: float | None = None
    others: dict[str, Callable[[torch.device], Iterator[Any]]] = field(default_factory=dict)
    """Other sides, by name: a step, and its loss if it is to be shown, each time it is asked for one."""


class Clock(Callback):
    """Reads clock and memory at the ends of some steps, or the next ends with hooks after them, the device idle."""

    needs_every_step = False

    def __init__(self, *steps: int) -> None:
        self.started = time.perf_counter()
        self.at = dict.fromkeys(steps, 0.0)
        self.held = dict.fromkeys(steps, 0)
        self.ends = dict.fromkeys(steps, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.after(trainer.global_step)

    def after(self, step: int) -> None:
        for wanted in (wanted for wanted, end in self.ends.items() if not end and wanted <= step):
            self.at[wanted], self.ends[wanted] = now(), step
            self.held[wanted] = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    def rate(self, first: int, last: int) -> float:
        """Steps a second."""
        return (self.ends[last] - self.ends[first]) / (self.at[last] - self.at[first])


def ours(case: Case, device: torch.device) -> tuple[Clock, float]:
    clock = Clock(1, case.warm_up, case.warm_up + case.steps)
    return clock, fit(case, device, clock)


def fit(case: Case, device: torch.device, *callbacks: Callback) -> float:
    """Trains as a configuration of ours does; the last loss."""
    module = case.module()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # the progress bar's
        trainer = Trainer(
            max_steps=case.warm_up + case.steps,
            accelerator=device.type,
            devices=1,
            precision=case.precision,
            gradient_clip_val=case.clip,
            callbacks=[
                *default_callbacks([]),
                CapturedSteps(cuda_graph=True, tf32=True),
                RunCheckpoint(folder, every_n_train_steps=500, save_last="link"),
                *callbacks,
            ],
            logger=LossFirstLogger(folder),
            log_every_n_steps=50,
            enable_model_summary=False,
            benchmark=True,
        )
        trainer.fit(module, case.batches(device))
    assert module.train_loss is not None
    return float(module.train_loss)


class BareStep:
    """A step of a bare loop: the loss of a batch, its gradients, which `clip` may change, and the optimizer's step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
        clip: Callable[[], Any],
        device: torch.device,
        bfloat16: bool,
    ) -> None:
        self.optimizer, self._loss, self._clip = optimizer, loss, clip
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False)
        self._captured: CapturedStep | None = None

    def __call__(self, batch: Any) -> Tensor:
        if self._captured is not None:
            return self._captured(batch)
        self.optimizer.zero_grad()
        loss = self._gradients(batch)
        self.optimizer.step()
        return loss.detach()

    def capture(self, batch: Any) -> None:
        """Makes a CUDA graph of all further steps."""
        self._captured = CapturedStep(self._gradients, self.optimizer, batch)

    def loss(self, batch: Any) -> Tensor:
        with self._autocast():
            return self._loss(batch)

    def _gradients(self, batch: Any) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        self._clip()
        return loss


def bare(case: Case, device: torch.device) -> Iterator[Tensor]:
    """The losses of a bare loop's steps, each taken when it is asked for."""
    module = case.module()
    with device:
        module.configure_model()
    torch.backends.cudnn.benchmark = True
    clip = partial(mupscale.clip_grad_norm_, module.net, case.clip) if case.clip is not None else lambda: None
    step = BareStep(module.configure_optimizers(), module.loss, clip, device, case.precision == "bf16-mixed")
    for count, batch in enumerate(endless(case.batches(device)), start=1):
        if count == 4 and device.type == "cuda":
            step.capture(batch)
        yield step(batch)


def timed(steps: Iterator[Any], warm_up: int, count: int) -> tuple[Clock, Any]:
    """A clock of so many steps, and what the last one gave."""
    clock, last = Clock(1, warm_up, warm_up + count), None
    for number in range(1, warm_up + count + 1):
        last = next(steps)
        clock.after(number)
    steps.close()  # type: ignore[attr-defined]  # stops its workers, and frees its memory
    return clock, last


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def measured(case: Case, name: str, device: torch.device) -> Row:
    """Memory is in GB at its peak; `grown` in MB from the end of the warm-up to the last step."""
    clear_memory()
    seed_everything(0, verbose=False)
    loss: Any = None
    if name == "ours":
        clock, loss = ours(case, device)
    else:
        steps_of = {**case.others, "bare": partial(bare, case)}
        clock, loss = timed(steps_of[name](device), case.warm_up, case.steps)
    first, last = case.warm_up, max(clock.at)
    steps = clock.rate(first, last)
    flops = case.module().training_flops(next(iter(case.batches(torch.device("cpu")))))
    return {
        "case": case.name,
        "side": name,
        "steps/s": steps,
        f"{case.unit}/s": steps * case.units_per_step,
        "TFLOP/s": steps * flops / 1e12,
        "GB": peak_gb(),
        "grown MB": (clock.held[last] - clock.held[first]) / 1e6,
        "first s": clock.at[1] - clock.started,
        "last loss": float(loss) if loss is not None else "",
    }


def matmul_peak(device: torch.device) -> float:
    """bfloat16 TFLOP/s of an 8192³ product, sustained for a second: what the device gives in practice."""
    # a CPU without bfloat16 needs seconds for a larger one
    size, seconds = (8192, 1.0) if device.type == "cuda" else (128, 0.1)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 * rate(lambda: a @ b, seconds, at_once=20) / 1e12


def compare_sides(given: argparse.Namespace, cases: list[Case]) -> Iterator[Row]:
    """Measures the sides of all cases, each beside those before it."""
    torch.set_float32_matmul_precision("high")
    yield {"case": "bf16 matmul", "TFLOP/s": matmul_peak(given.device)}
    for case in (case for case in cases if given.only in case.name):
        measurements: list[Row] = []
        sides = [*case.others, "bare", "ours"]
        for _ in range(given.repeat):
            before: dict[str, float] = {}
            for side in sides:
                if given.repeat == 1 or not measurements:  # repetitions need not compile again
                    torch.compiler.reset()
                row = measured(case, side, given.device)
                row |= {f"÷ {other}": row["steps/s"] / speed for other, speed in before.items()}
                before[side] = row["steps/s"]
                measurements.append(row)
                yield row
        if given.repeat > 1:
            yield from (summary(measurements, side) for side in sides)
    yield {"case": "bf16 matmul", "TFLOP/s": matmul_peak(given.device)}


def summary(measurements: list[Row], side: str) -> Row:
    """The medians of a side's measurements, and how far they are apart: largest less smallest, of the median."""
    rows = [row for row in measurements if row["side"] == side]
    kept = [title for title in rows[0] if title.endswith("/s") or title.startswith("÷")]
    medians = {title: statistics.median(row[title] for row in rows) for title in kept}
    speeds = [row["steps/s"] for row in rows]
    spread = {"spread %": 100 * (max(speeds) - min(speeds)) / medians["steps/s"]}
    return {"case": rows[0]["case"], "median of": f"{len(rows)} {side}"} | medians | spread
