"""Time and peak memory of `upscale` for GPT-2 shapes with AdamW state.

    python -m benchmarks upscale [--quick] [--device cuda] [--only 630M] [--out upscale.json]

Each size doubles the width of a half-size model that has AdamW state, with the wide model on the meta device. The final
footprint is weights plus both moments. "copy" is one contiguous device-to-device copy of that many bytes.
"""

import argparse
import gc
import multiprocessing
import resource
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import mupscale
from benchmarks.harness import ONLY, Row, clear_memory, now, quieten
from mupscale.models.gpt2 import GPT2Net

# target parameters: width and layers of the wide model; vocabulary 50,304, context 1024, tied embedding
SIZES = {"125M": (768, 12), "630M": (1920, 12), "2.3B": (3840, 12)}
QUICK = {"tiny": (48, 2)}
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


def peak_bytes(device: torch.device) -> int:
    """Device memory at its peak; on the CPU the resident size of the process at its peak, which never falls."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(*arguments: Any) -> Row:
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
        start = now()
        target.copy_(source)
        times.append(now() - start)
    return statistics.median(times)


def measure(name: str, device: torch.device, noise: float | None, consume: bool) -> Row:
    quieten()  # in a process of its own
    width, layers = (SIZES | QUICK)[name]
    before = peak_bytes(device) if device.type == "cpu" else 0  # the interpreter and its libraries
    narrow, wide, optimizer = prepared(width, layers, device)
    clear_memory()
    start = now()
    added = None if noise is None else mupscale.AdditiveNoise(noise)
    report = mupscale.upscale(narrow, wide, optimizer, noise=added, consume=consume)
    seconds = now() - start
    peak = peak_bytes(device) - before
    tensors = [*wide.parameters(), *(v for s in report.optimizer.state.values() for v in s.values() if v.ndim)]
    footprint = sum(t.numel() * t.element_size() for t in tensors)
    parameters = sum(p.numel() for p in wide.parameters())
    del narrow, wide, optimizer, report, tensors
    gc.collect()
    way = f"noise {noise or 0}{', consume' if consume else ''}"
    return {
        "size": name, "way": way, "parameters": parameters, "seconds": seconds,
        "copy s": copy_seconds(footprint, device), "footprint GB": footprint / 1e9,
        "peak GB": peak / 1e9, "peak ÷ footprint": peak / footprint,
    }  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[Row]:
    sizes = [name for name in (QUICK if options.quick else SIZES) if options.only in name]
    if options.device.type == "cuda":
        measure(sizes[0], options.device, 0.1, True)  # warm up kernels and the allocator
    for name in sizes:
        for noise, consume in ((None, True), (0.1, True), (None, False)):
            yield measured(name, options.device, noise, consume)


OPTIONS = ONLY
