"""Memory of each rank while a run that is sharded by FSDP2 grows.

    python -m benchmarks swap_memory [--quick] [--device cpu] [--processes 2,4] [--width 1024] [--only none]

A GPT-2 doubles its width in the middle of a fit under `torchrun`. Memory is in bytes: "shard" is what a rank holds
afterwards, its part of the weights and both moments of AdamW. "whole" is the largest tensor of the wide model. "peak"
is the peak memory of a rank between the last step of the narrow model and the first of the wide one, without the two
evaluations of the loss (which need less than a step). It is what torch has allocated. "over" is peak minus shard, in
units of the whole tensor.
"seconds" is the time of the growth, without the evaluations of the loss and the checkpoint before it; on the CPU it
includes the profiler that counts the bytes.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.distributed.checkpoint import state_dict  # noqa: F401  before the processes are forked
from torch.distributed.fsdp import fully_shard  # noqa: F401
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.profiler import ProfilerActivity, profile, record_function

import mupscale
from benchmarks.harness import ONLY, Options, Row, quieten
from mupscale.callbacks.growth_schedule import GrowthSchedule
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.datamodules.resident import ResidentLoader
from mupscale.methods.noise import Noise
from mupscale.models.fsdp2 import FSDP2
from mupscale.models.gpt2 import GPT2
from mupscale.sharding import local_part

GROWTH = "growth"
PERFORM = GrowthSchedule.perform
LAYERS, HEADS, VOCABULARY, CONTEXT = 4, 8, 4096, 32

NOISE: dict[str, Noise | None] = {
    "none": None,
    "additive": mupscale.AdditiveNoise(0.1),
    "centred": mupscale.AdditiveNoise(0.1, centred=True),
    "signal": mupscale.SignalNoise(0.1),
}


def held(trainer: Trainer, module: LightningModule) -> int:
    """Bytes of weights, gradients and optimizer state on this rank."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    states: list[Tensor] = []
    for state in (state for optimizer in trainer.optimizers for state in optimizer.state.values()):
        states += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(local_part(tensor).nbytes for tensor in (*module.parameters(), *gradients, *states))


def alive() -> int:
    """Bytes of all tensors that anything in Python still refers to on this rank."""
    tensors = [local_part(thing) for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class Weighing:
    """Records the memory of this rank while a swap is performed."""

    def perform(self, schedule: GrowthSchedule, *arguments: Any) -> Any:
        trainer, module = schedule.trainer, schedule.module
        gc.collect()
        before, on_gpu = held(trainer, module), module.device.type == "cuda"
        if on_gpu:
            batch = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with record_function(GROWTH):
            answer = PERFORM(schedule, *arguments)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.row = {
            "narrow": before,
            "shard": held(trainer, module),
            "whole": max(parameter.numel() * parameter.element_size() for parameter in module.parameters()),
            "seconds": seconds,
        }
        if on_gpu:
            self.row["peak"] = torch.cuda.max_memory_allocated() - batch
        else:
            self.left = alive()
        return answer


def peak_on_cpu(recorded: profile, left: int) -> int:
    """Most bytes of tensors at one moment of the growth, after which `left` bytes are left.

    torch keeps no count on the CPU, and resident memory says little: allocators keep what was freed, in some runs more
    than in others. The profiler misses what gloo's threads free, so that its sum becomes too large. What it is too
    large by at the end is subtracted everywhere: exact if the peak comes last, as it does; too small before.
    """
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    growth = next(event for event in events if event.name() == GROWTH)
    totals, total = [], 0
    for event in events:
        if event.start_ns() > growth.end_ns():
            break
        if event.name() == "[memory]":
            total += event.nbytes()
            totals += [total] if event.start_ns() >= growth.start_ns() else []
    return max(totals) - (total - left)


def measure(noise: str, width: int, device: str) -> dict[str, Any]:
    """What this rank measures; all ranks call it."""
    seed_everything(0, verbose=False)
    ranks = int(os.environ["WORLD_SIZE"])
    swap, weighing = UpscaleCallback(2, width, noise=NOISE[noise]), Weighing()
    module = GPT2(width // 2, layers=LAYERS, heads=HEADS, vocabulary=VOCABULARY, context=CONTEXT, base_width=64)
    tokens = torch.randint(VOCABULARY, (2 * ranks, CONTEXT + 1))
    share = {"rank": int(os.environ["RANK"]), "world_size": ranks}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=3, accelerator=device, devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=FSDP2(),
            callbacks=[swap], logger=False, default_root_dir=folder, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        on_cpu = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if device == "cpu" else nullcontext()
        with on_cpu as recorded, mock.patch.object(GrowthSchedule, "perform", lambda *given: weighing.perform(*given)):
            trainer.fit(module, ResidentLoader((tokens,), ranks, shuffle=False, drop_last=True, **share))
    if recorded is not None:
        weighing.row["peak"] = peak_on_cpu(recorded, weighing.left)
    return weighing.row


def on_rank(noises: list[str], width: int, device: str) -> dict[str, dict[str, Any]]:
    """What one of the processes measures, for each noise."""
    torch.set_num_threads(1)
    quieten()
    return {noise: measure(noise, width, device) for noise in noises}


def launched(processes: int, noises: list[str], width: int, device: str) -> Iterator[Row]:
    """A row for each noise: the rank that needed the most."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id="swap_memory", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
        start_method="fork" if device == "cpu" else "spawn",
    )  # fmt: skip
    ranks = elastic_launch(config, on_rank)(noises, width, device)
    for noise in noises:
        most = max((rank[noise] for rank in ranks.values()), key=lambda row: row["peak"] - row["shard"])
        yield {"processes": processes, "noise": noise, **most, "over": (most["peak"] - most["shard"]) / most["whole"]}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    noises = [noise for noise in NOISE if options.only in noise]
    for processes in map(int, options.processes.split(",")):
        yield from launched(processes, noises, 64 if options.quick else options.width, options.device.type)


OPTIONS: Options = ONLY | {
    "--device": {"type": torch.device, "default": "cpu"},
    "--processes": {"default": "2,4", "help": "comma-separated"},
    "--width": {"type": int, "default": 1024, "help": "the wide one"},
}
