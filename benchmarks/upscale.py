"""Time and peak memory of `upscale` for GPT-2 shapes with AdamW state, and of the swap in a fit.

    python -m benchmarks upscale [--quick] [--device cuda] [--sizes 125M,630M,2.3B] [--out upscale.json]

Each size doubles the width of a half-size model that has AdamW state, with the wide model on the meta device. The final
footprint is weights plus both moments. "copy" is one contiguous device-to-device copy of that many bytes. "in fit" is
the pause of UpscaleCallback without noise; it includes two evaluations of the loss, but neither the checkpoint before
it nor compilation.
"""

import argparse
import gc
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import mupscale
from benchmarks.training import quieten
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.gpt2 import GPT2, GPT2Net

# target parameters: width and layers of the wide model; vocabulary 50,304, context 1024, tied embedding
SIZES = {"tiny": (48, 2), "125M": (768, 12), "630M": (1920, 12), "2.3B": (3840, 12)}
HEADS = 12


def build(width: int, layers: int) -> nn.Module:
    return GPT2Net(width, layers=layers, heads=HEADS)


def on_meta(width: int, layers: int) -> nn.Module:
    with torch.device("meta"):
        return build(width, layers)


def prepared(width: int, layers: int, device: torch.device) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A narrow model with AdamW state, and its wide target, both muP."""
    base, delta = on_meta(HEADS * 2, layers), on_meta(HEADS * 4, layers)
    with torch.device(device):
        narrow = build(width // 2, layers)
    mupscale.set_base_shapes(narrow, base, delta, init=None)
    wide = mupscale.set_base_shapes(on_meta(width, layers), base, delta, init=None)
    optimizer = mupscale.apply_mup(torch.optim.AdamW(narrow.parameters(), lr=1e-3), narrow)
    for parameter in narrow.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(100.0),
            "exp_avg": torch.randn_like(parameter).mul_(1e-3),
            "exp_avg_sq": torch.rand_like(parameter).mul_(1e-6),
        }
    return narrow, wide, optimizer


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_bytes(device: torch.device) -> int:
    """Device memory at its peak; on the CPU the resident size of the process at its peak, which never falls."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(*arguments: object) -> dict[str, object]:
    """One row, on the CPU in a process of its own, whose peak memory is then this row's."""
    if arguments[1].type == "cuda":
        return measure(*arguments)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def copy_seconds(count: int, device: torch.device) -> float:
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, device: torch.device, noise: float | None, consume: bool) -> dict[str, object]:
    width, layers = SIZES[name]
    before = peak_bytes(device) if device.type == "cpu" else 0  # the interpreter and its libraries
    narrow, wide, optimizer = prepared(width, layers, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    synchronize(device)
    start = time.perf_counter()
    added = None if noise is None else mupscale.AdditiveNoise(noise)
    report = mupscale.upscale(narrow, wide, optimizer, noise=added, consume=consume)
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = peak_bytes(device) - before
    tensors = [*wide.parameters(), *(v for s in report.optimizer.state.values() for v in s.values() if v.ndim)]
    footprint = sum(t.numel() * t.element_size() for t in tensors)
    row = {
        "size": name,
        "parameters": sum(p.numel() for p in wide.parameters()),
        "noise": noise,
        "consume": consume,
        "seconds": seconds,
        "footprint_gb": footprint / 1e9,
        "peak_gb": peak / 1e9,
        "peak_over_footprint": peak / footprint,
    }
    del narrow, wide, optimizer, report, tensors
    gc.collect()
    row["copy_seconds"] = copy_seconds(footprint, device)
    return row


class Weighed(UpscaleCallback):
    """An upscale that records its peak memory, and the memory of weights and state afterwards."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.is_due(trainer, pl_module):
            return
        gc.collect()
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.peak = peak_bytes(pl_module.device)
        states = (
            v for state in trainer.optimizers[0].state.values() for v in state.values() if isinstance(v, torch.Tensor)
        )
        self.footprint = sum(t.numel() * t.element_size() for t in (*pl_module.parameters(), *states))


def swapped(name: str, device: torch.device) -> dict[str, object]:
    """The same growth in the middle of a fit."""
    width, layers = SIZES[name]
    swap = Weighed(3, width)
    tokens = ResidentLoader((torch.randint(50304, (8, 129), device=device),), 1, shuffle=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=5, accelerator=device.type, devices=1, precision="bf16-mixed", callbacks=[swap], logger=False,
            default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(GPT2(width // 2, layers=layers, heads=HEADS), tokens)
    return {
        "size": name,
        "in_fit": True,
        "parameters": swap.summary["parameters"],
        "seconds": swap.summary["seconds"],
        "footprint_gb": swap.footprint / 1e9,
        "peak_gb": swap.peak / 1e9,
        "peak_over_footprint": swap.peak / swap.footprint,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny size, to test the benchmark itself")
    parser.add_argument("--sizes", default="125M,630M,2.3B", help="a comma-separated part of 125M,630M,2.3B")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    quieten()
    options.sizes = "tiny" if options.quick else options.sizes
    unknown = set(options.sizes.split(",")) - set(SIZES)
    if unknown:
        parser.error(f"--sizes: no such size {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    if device.type == "cuda":
        measure(options.sizes.split(",")[0], device, 0.1, True)  # warm up kernels and the allocator
    rows = []
    print(
        f"{'size':>5} {'params':>14} {'noise':>6} {'consume':>8} {'seconds':>8} {'copy s':>8} {'footprint':>10} "
        f"{'peak':>9} {'ratio':>6}"
    )
    for name in options.sizes.split(","):
        for noise, consume in ((None, True), (0.1, True), (None, False)):
            row = measured(name, device, noise, consume)
            rows.append(row)
            print(
                f"{name:>5} {row['parameters']:>14,} {noise or 0:>6} {consume!s:>8} {row['seconds']:>8.3f} "
                f"{row['copy_seconds']:>8.4f} "
                f"{row['footprint_gb']:>7.2f} GB {row['peak_gb']:>6.2f} GB {row['peak_over_footprint']:>6.3f}",
                flush=True,
            )
        rows.append(swapped(name, device))
        numbers = {
            key: rows[-1][key] for key in ("parameters", "seconds", "footprint_gb", "peak_gb", "peak_over_footprint")
        }
        print(f"{name:>5} in fit: " + ", ".join(f"{key} {value:,.3f}" for key, value in numbers.items()), flush=True)
    if options.out:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        options.out.write_text(
            json.dumps({"machine": machine, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )
