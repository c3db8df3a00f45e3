"""Many trials as one program, with validation, curves and checkpoints, compared with one trial after another.

    python -m benchmarks stack --data_dir data/covertype
    python -m benchmarks stack bare                         # ResNet-18 and GPT-2: steps alone, by size of the stack

The first epochs of the paper's 500 are timed and the others extrapolated; set-up, the first epoch (which compiles) and
checkpoints count as they are. Without a GPU, or with --quick, sizes are tiny and the times mean nothing.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ONLY, Options, Row, clear_memory, peak_gb, rate
from benchmarks.training import Case, bare, timed
from mupscale.commands.cli import described
from mupscale.commands.config import at, temporary_file
from mupscale.commands.lab.run import Run, open_stacked, with_run, without_announcements
from mupscale.commands.lab.space import for_trials
from mupscale.commands.lab.stack_loop import StackLoop
from mupscale.models.base import Growable
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18
from mupscale.stacking.stack import CapturedStack, Stack

EPOCHS, TIMED = 500, 8
"""Of the paper's runs, and of those that are timed here."""
EPOCH = 232
"""Steps of an epoch of the full Covertype, by batches of 2000."""


def make_runs(case: dict[str, Any], options: argparse.Namespace, folder: Path, epochs: int = EPOCHS) -> list[Run]:
    """The paper's MLP on Covertype at a width, or grown to it after two steps; by seed, or by learning rate."""
    epoch = 3 if options.quick else EPOCH
    changes: dict[str, Any] = {
        "trainer": {
            "max_epochs": epochs, "limit_train_batches": epoch, "precision": case["precision"],
            "log_every_n_steps": 2 if options.quick else 58,
        },
        "model": {"init_args": {"width": case["base"]}},
        "data": {"init_args": {"data_dir": options.data_dir}},
        "checkpoint": {"every_n_train_steps": TIMED // 2 * epoch},
    }  # fmt: skip
    if case["base"] != case["width"]:
        noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.3}}
        swap = {"at_step": 2, "width": case["width"], "noise": noise}
        changes["trainer"]["callbacks"] = [{"class_path": "UpscaleCallback", "init_args": swap}]
    with temporary_file(changes) as file:
        files = ["--config", "configs/mlp/adamw/base.yaml", "--config", file]
        config = for_trials(described(files, "sweep")[0])
    answer = []
    for index in range(case["trials"]):
        seed = index if case["seeds"] else 0
        point = {} if case["seeds"] else {"model.optimizer.lr": 0.02 * 1.02**index}
        name = f"trial={index}"  # a text, as in sweeps: the number alone would be parsed anew for each run
        answer.append(Run(with_run(at(config, point), "last_epoch", seed, folder / name), folder / name, name))
    return answer


class Enough(Exception):
    """Ends a run that has been timed for long enough."""


def time_stack(case: dict[str, Any], options: argparse.Namespace) -> Row:
    """The trials of a case as one program: seconds of each part, and the whole extrapolated."""
    epoch = 3 if options.quick else EPOCH
    last, saved_at = TIMED * epoch, TIMED // 2 * epoch
    moments: dict[int, float] = {}

    def note(step: int, steps: int, count: int) -> None:
        moments.setdefault(step, time.perf_counter())  # the first time that a step is reached
        if step >= last:
            raise Enough

    with tempfile.TemporaryDirectory() as folder, without_announcements(), suppress(Enough):
        start = time.perf_counter()
        runs = make_runs(case, options, Path(folder))
        openings = [open_stacked(each, {}, lambda: len(runs)) for each in runs]
        StackLoop(openings, progress=note).run()
    steps = sorted(moments)
    first = next(step for step in steps if step >= epoch)
    before = max(step for step in steps if step < saved_at)
    after = next(step for step in steps if step > saved_at)
    speed = (before - first) / (moments[before] - moments[first]) if before > first else math.nan
    seconds = {
        "set-up": moments[steps[0]] - start,
        "first epoch": moments[first] - moments[steps[0]],
        "epoch": epoch / speed,
        "a checkpoint": moments[after] - moments[before] - (after - before) / speed,
    }
    whole = seconds["set-up"] + seconds["first epoch"] + (EPOCHS - 1) * seconds["epoch"] + 6 * seconds["a checkpoint"]
    flops = len(runs) * flops_of_step(case["width"], 8 if options.quick else 2000)
    return {
        **seconds,
        "steps/s": speed,
        "TFLOP/s": flops * speed / 1e12,
        "minutes for 500 epochs": whole / 60,
        "peak GB": peak_gb(),
    }


def flops_of_step(width: int, rows: int) -> float:
    module = MLP(width)
    module.configure_model()
    return module.training_flops((torch.zeros(rows, 54), torch.zeros(rows, dtype=torch.long)))


def time_single(case: dict[str, Any], options: argparse.Namespace) -> Row:
    """The time of trials one after another, extrapolated from single runs of two lengths."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder, without_announcements():
        make_runs(case, options, Path(folder), epochs=2)[0].make()  # reads the data, and compiles
        for epochs in (TIMED, 3 * TIMED):
            run = make_runs(case, options, Path(folder) / str(epochs), epochs)[1]
            start = time.perf_counter()
            run.make()
            seconds.append(time.perf_counter() - start)
    epoch = (seconds[1] - seconds[0]) / (2 * TIMED)
    fixed = seconds[0] - TIMED * epoch
    minutes = case["trials"] * (fixed + EPOCHS * epoch) / 60
    return {"set-up and end": fixed, "epoch": epoch, "minutes for 500 epochs": minutes, "peak GB": peak_gb()}


def bare_steps(
    name: str, make: Callable[..., Growable], batch: Any, sizes: list[int], device: torch.device
) -> Iterator[Row]:
    """Trials × steps a second of a compiled and captured single step, and of captured stacks."""
    on_gpu = device.type == "cuda"
    context = partial(torch.autocast, "cuda", torch.bfloat16) if on_gpu else nullcontext

    def make_step(size: int, compiled: bool) -> Callable[[], Any]:
        modules = [make() for _ in range(size)]
        for module in modules:
            module.configure_model()
            module.to(device)
        optimizers = [module.configure_optimizers() for module in modules]
        losses = modules[0].stacked_losses()
        stack = Stack(modules, optimizers, Growable.mappable_loss, losses, compiled=compiled, fused=on_gpu)
        stack.step(batch, context=context)
        step = CapturedStack(stack, batch, context=context) if on_gpu else stack.advance
        return partial(step, batch)

    precision, steps = ("bf16-mixed", 500) if on_gpu else ("32-true", 5)
    single = Case(name, partial(make, compile=on_gpu), lambda _: [batch], None, "", 1, steps, 10, precision, 0)
    clear_memory()
    clock, _ = timed(bare(single, device), 10, steps)
    yield {"case": name, "way": "1, by itself", "trials × steps/s": clock.rate(10, 10 + steps), "peak GB": peak_gb()}
    ways = [(size, False) for size in sizes] + ([(sizes[-1], True)] if on_gpu else [])
    for size, compiled in ways:
        clear_memory()
        row: Row = {"case": name, "way": f"{size} stacked{', compiled' if compiled else ''}"}
        try:
            step = make_step(size, compiled)
            for _ in range(3):
                step()
            yield row | {"trials × steps/s": size * rate(step, 2.0, at_once=5), "peak GB": peak_gb()}
        except Exception as error:
            yield row | {"failed": f"{type(error).__name__}: {str(error)[:150]}"}
        torch.compiler.reset()


def steps_alone(options: argparse.Namespace) -> Iterator[Row]:
    quick, device = options.quick, options.device
    sizes = [2] if quick else [4, 16]
    size = 2 if quick else 128
    images = torch.randn(size, 3, 32, 32, device=device), torch.randint(0, 100, (size,), device=device)
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
    resnet = partial(ResNet18, 8 if quick else 32, base_width=64, optimizer=sgd)
    if options.only in "ResNet-18, 0.25×":
        yield from bare_steps("ResNet-18, 0.25×", resnet, images, sizes, device)
    rows, context, vocabulary = (2, 16, 4096) if quick else (16, 1024, 50304)
    width, base_width, layers = (8, 8, 2) if quick else (64, 24, 12)
    gpt2 = partial(GPT2, width, base_width=base_width, layers=layers, heads=4, vocabulary=vocabulary, context=context)
    tokens = torch.randint(0, vocabulary, (rows, context + 1), device=device)
    if options.only in "GPT-2, width 64":
        yield from bare_steps("GPT-2, width 64", gpt2, tokens, sizes, device)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    options.quick |= options.device.type != "cuda"
    if options.part == "bare":
        yield from steps_alone(options)
        return
    many, seeds = (3, 2) if options.quick else (100, 5)
    small, wide, widest = (4, 16, 8) if options.quick else (100, 400, 2000)
    cases = {
        "sweep 1": {"trials": many, "base": small, "width": small, "precision": "32-true", "seeds": False},
        "sweep 2": {"trials": many, "base": small, "width": wide, "precision": "32-true", "seeds": False},
        "sweep 2, bf16": {"trials": many, "base": small, "width": wide, "precision": "bf16-mixed", "seeds": False},
        "5 seeds": {"trials": seeds, "base": widest, "width": widest, "precision": "32-true", "seeds": True},
    }
    for name in (name for name in cases if options.only in name):
        clear_memory()
        yield {"case": name, **cases[name], **time_stack(cases[name], options)}
        if options.separate:
            clear_memory()
            yield {"case": f"{name}, one by one", **cases[name], **time_single(cases[name], options)}


OPTIONS: Options = ONLY | {
    "part": {"nargs": "?", "choices": ["fits", "bare"], "default": "fits"},
    "--data_dir": {"help": "the folder of the full Covertype"},
    "--separate": {"action": "store_true", "help": "also one trial by itself"},
}
