"""Shared by the training benchmarks: trains one network in three ways, in one run, and prints a table.

- ours: `Trainer.fit` with logging, checkpoints, curves, a progress bar and learning-rate monitor on;
- bare: the same network, optimizer, batches and speed options in a bare torch loop;
- draft: what one would write first: plain modules, autocast, a DataLoader with workers, `clip_grad_norm_`,
  `loss.item()`.
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

import mupscale
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.fast_loop import FastLoop
from mupscale.callbacks.summary import WidthBar
from mupscale.cuda_graph import CapturedStep
from mupscale.models.base import Growable

CLIP = 1.0

KERNELS = {  # kind: what the names of its kernels contain
    "attention": r"sdpa|flash|fmha|cudnn::fusion",
    "convolution": r"conv|dgrad|wgrad|fprop|implicit_gemm|nchwTo|nhwcTo",
    "matmul": r"nvjet|gemm|cutlass|cublas|splitk|gemv",
    "loss": r"softmax|nll|logsumexp",
    "activation": r"gelu|relu",
    "norm": r"norm",
    "optimizer and clipping": r"multi_tensor|adam|sgd|foreach",
    "copies": r"copy|memcpy|memset|fill",
    "sums and pointwise": r"triton|reduce|elementwise|index",
}


@dataclass(frozen=True)
class Case:
    """One network at one size."""

    name: str
    module: Callable[[], Growable]
    batches: Callable[[torch.device], Any]  # a loader of resident batches
    draft: Callable[[torch.device], Iterator[None]]  # a step each time it is asked
    unit: str
    units_per_step: int
    steps: int
    warm_up: int
    precision: str
    draft_steps: int
    clip: float | None = None


@dataclass
class Row:
    """One line of the table.

    Memory is in GB at its peak; `grown` in MB from the end of the warm-up to the last step. The bare loop also has the
    shares of the device's time.
    """

    case: str
    side: str
    steps_per_second: float
    units_per_second: float
    tflops: float
    memory: float
    grown: float
    first_step_seconds: float
    last_loss: float | None
    kernels: dict[str, float]


class Watch(Callback):
    """Reads clock and memory when the warm-up is over and at the last step, the device idle at both."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps
        self.started = time.perf_counter()
        self.first = self.seconds = self.grown = 0.0
        self.kernels: dict[str, float] = {}
        self._since, self._held = 0.0, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.after(trainer.global_step)

    def after(self, step: int) -> None:
        if step == 1:
            self.first = now() - self.started
        elif step == self.warm_up:
            self._since, self._held = now(), held()
        elif step == self.warm_up + self.steps:
            self.seconds = now() - self._since
            self.grown = (held() - self._held) / 1e6


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def held() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def fresh() -> None:
    """Frees everything that the previous side has left."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seed_everything(0, verbose=False)


def ours(case: Case, device: torch.device) -> tuple[Watch, float]:
    watch = Watch(case.warm_up, case.steps)
    module = case.module()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # the progress bar's
        trainer = Trainer(
            max_steps=case.warm_up + case.steps,
            accelerator=device.type,
            devices=1,
            precision=case.precision,
            gradient_clip_val=case.clip,
            callbacks=[
                Curves(),
                ExactResume(),
                LearningRateMonitor("step"),
                WidthBar(),
                FastLoop(cuda_graph=True, tf32=True),
                ModelCheckpoint(folder, every_n_train_steps=500, save_last="link"),
                watch,
            ],
            logger=TensorBoardLogger(folder),
            log_every_n_steps=50,
            enable_model_summary=False,
            benchmark=True,
        )
        trainer.fit(module, case.batches(device))
    assert module.train_loss is not None
    return watch, float(module.train_loss)


def bare(case: Case, device: torch.device) -> tuple[Watch, float]:
    watch = Watch(case.warm_up, case.steps)
    module = case.module()
    with device:
        module.configure_model()
    optimizer = module.configure_optimizers()
    torch.backends.cudnn.benchmark = True

    def gradients(batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16-mixed", cache_enabled=False):
            loss = module.loss(batch)
        loss.backward()
        if case.clip is not None:
            mupscale.clip_grad_norm_(module.net, case.clip)
        return loss

    step: Callable[[Any], Tensor]

    def eager(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = gradients(batch)
        optimizer.step()
        return loss.detach()

    step = eager
    for count, batch in enumerate(endless(case.batches(device)), start=1):
        if count == 4 and device.type == "cuda":
            step = CapturedStep(gradients, optimizer, batch)
        loss = step(batch)
        watch.after(count)
        if count == case.warm_up + case.steps:
            watch.kernels = kernel_shares(partial(step, batch)) if device.type == "cuda" else {}
            return watch, float(loss)
    raise AssertionError("no batches")


def kernel_shares(step: Callable[[], object]) -> dict[str, float]:
    """The fraction of the device's time that each kind of kernel takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profile.key_averages():
        kind = next((kind for kind, names in KERNELS.items() if re.search(names, event.key, re.IGNORECASE)), "other")
        spent[kind] = spent.get(kind, 0.0) + event.self_device_time_total
    total = sum(spent.values()) or 1.0
    return {kind: round(time / total, 3) for kind, time in sorted(spent.items(), key=lambda item: -item[1]) if time > 0}


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def draft(case: Case, device: torch.device) -> tuple[Watch, None]:
    watch = Watch(case.warm_up, case.draft_steps)
    steps = case.draft(device)
    for count in range(1, case.warm_up + case.draft_steps + 1):
        next(steps)
        watch.after(count)
    steps.close()  # type: ignore[attr-defined]
    return watch, None


def plain_step(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    device: torch.device,
    clip: float | None,
) -> float:
    """A step as one would write it first, with the loss for the log."""
    with torch.autocast(device.type, torch.bfloat16):
        loss = loss_of()
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    return loss.item()


def measured(case: Case, side: Callable[[Case, torch.device], tuple[Watch, float | None]], device: torch.device) -> Row:
    fresh()
    watch, loss = side(case, device)
    steps = watch.steps / watch.seconds
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    module = case.module()
    flops = module.training_flops(next(iter(case.batches(torch.device("cpu")))))
    return Row(
        case.name,
        side.__name__,
        steps,
        steps * case.units_per_step,
        steps * flops / 1e12,
        memory,
        watch.grown,
        watch.first,
        loss,
        watch.kernels,
    )


def quieten() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def matmul_peak(device: torch.device) -> float:
    """bfloat16 TFLOP/s of an 8192³ product, sustained for a second: what the device gives in practice."""
    size = 8192 if device.type == "cuda" else 128  # a CPU without bfloat16 needs seconds for a larger one
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    start, count = now(), 0
    while time.perf_counter() < start + 1:
        for _ in range(20):
            a @ b
        count += 20
        torch.cuda.synchronize() if device.type == "cuda" else None
    return 2 * size**3 * count / (now() - start) / 1e12


def run(description: str, cases: Callable[[argparse.Namespace], list[Case]], arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--quick", action="store_true", help="a small size and a few steps, to test the benchmark itself"
    )
    parser.add_argument("--only", help="the cases whose names contain this")
    parser.add_argument("--sides", default="ours,bare,draft", help="a comma-separated part of ours,bare,draft")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    quieten()
    peaks = [matmul_peak(device)]
    rows: list[Row] = []
    print(
        f"{'case':<28} {'side':<6} {'steps/s':>9} {'units/s':>14} {'TFLOP/s':>8} {'÷ draft':>8} {'÷ bare':>7} {'GB':>7}"
        f" {'grown MB':>9} {'first s':>8}"
    )
    for case in cases(options):
        if options.only and options.only not in case.name:
            continue
        by_side: dict[str, Row] = {}
        for side in (draft, bare, ours):
            if side.__name__ in options.sides.split(","):
                by_side[side.__name__] = row = measured(case, side, device)
                rows.append(row)
                ratios = [
                    f"{row.steps_per_second / by_side[s].steps_per_second:.2f}" if s in by_side else ""
                    for s in ("draft", "bare")
                ]
                print(
                    f"{row.case:<28} {row.side:<6} {row.steps_per_second:>9.1f} {row.units_per_second:>10,.0f} "
                    f"{case.unit} "
                    f"{row.tflops:>8.1f} {ratios[0]:>8} {ratios[1]:>7} {row.memory:>7.2f} {row.grown:>9.2f} "
                    f"{row.first_step_seconds:>8.1f}",
                    flush=True,
                )
    for row in rows:
        if row.kernels:
            print(f"{row.case}: " + ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in row.kernels.items()))
    peaks.append(matmul_peak(device))
    print(f"bf16 matmul before and after: {peaks[0]:.0f} and {peaks[1]:.0f} TFLOP/s")
    if options.out:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        table = {
            "machine": machine,
            "torch": torch.__version__,
            "matmul_tflops": peaks,
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(table, indent=1) + "\n")
