"""Many trials as one program, with validation, curves and checkpoints, compared with one trial after another.

    python -m benchmarks stack --data_dir data/covertype
    python -m benchmarks stack bare                         # ResNet-18 and GPT-2: steps alone, by size of the stack

The first epochs of the paper's 500 are timed and the others extrapolated; set-up, the first epoch (which compiles) and
checkpoints count as they are. Without a GPU, or with --quick, sizes are tiny and the times mean nothing.
"""

import argparse
import gc
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from mupscale.callbacks.joint_steps import JointSteps
from mupscale.commands.config import Config, at
from mupscale.commands.configured import described
from mupscale.commands.lab.run import Run, fit_run, with_run, without_announcements
from mupscale.commands.lab.trial import for_trials
from mupscale.commands.pattern import Pattern
from mupscale.cuda_graph import CapturedStep
from mupscale.models.base import Growable
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18
from mupscale.stacking.captured import CapturedStack
from mupscale.stacking.stack import Stack

EPOCHS = 500
EPOCH = 232
"""Steps of an epoch of the full Covertype, by batches of 2000."""


def config(case: dict[str, Any], options: argparse.Namespace) -> Config:
    """The paper's MLP on Covertype at a width, or grown to it after three steps."""
    epoch = 3 if options.quick else EPOCH
    changes: dict[str, Any] = {
        "trainer": {
            "max_epochs": case.get("epochs", EPOCHS), "limit_train_batches": epoch, "precision": case["precision"],
            "log_every_n_steps": 2 if options.quick else 58,
        },
        "model": {"init_args": {"width": case["base"]}},
        "data": {"init_args": {"data_dir": options.data_dir}},
        "checkpoint": {"every_n_train_steps": options.epochs // 2 * epoch},
    }  # fmt: skip
    if case["base"] != case["width"]:
        noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.3}}
        swap = {"at_step": 2, "width": case["width"], "noise": noise}
        changes["trainer"]["callbacks"] = [{"class_path": "UpscaleCallback", "init_args": swap}]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(changes, file)
        file.flush()
        return for_trials(described(["--config", "configs/mlp/adamw/base.yaml", "--config", file.name], "sweep")[0])


def runs(case: dict[str, Any], options: argparse.Namespace, folder: Path) -> list[Run]:
    whole = config(case, options)
    answer = []
    for index in range(case["trials"]):
        seed = index if case["seeds"] else 0
        point = {} if case["seeds"] else {"model.optimizer.lr": 0.02 * 1.02**index}
        name = f"trial={index}"  # a text, as in sweeps: the number alone would be parsed anew for each run
        answer.append(Run(with_run(at(whole, point), "last_epoch", seed, folder / name), folder / name, name))
    return answer


class Enough(Exception):
    """Ends a run that has been timed for long enough."""


def in_fits(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The trials of a case as one program: seconds of each part, and the whole extrapolated."""
    epoch = 3 if options.quick else EPOCH
    last, saved_at = options.epochs * epoch, options.epochs // 2 * epoch
    moments: dict[int, float] = {}

    def note(step: int, steps: int, count: int) -> None:
        moments.setdefault(step, time.perf_counter())  # the first time that a step is reached
        if step >= last:
            raise Enough

    with tempfile.TemporaryDirectory() as folder, without_announcements():
        start, pattern = time.perf_counter(), Pattern()
        alike = runs(case, options, Path(folder))
        joint = JointSteps([partial(fit_run, run, pattern=pattern) for run in alike], print, progress=note)
        with suppress(Enough):
            joint.run()
        del joint
    steps = sorted(moments)
    first = next(step for step in steps if step >= epoch)
    before = max(step for step in steps if step < saved_at)
    after = next(step for step in steps if step > saved_at)
    rate = (before - first) / (moments[before] - moments[first]) if before > first else math.nan
    seconds = {
        "set-up": moments[steps[0]] - start,
        "first epoch": moments[first] - moments[steps[0]],
        "epoch": epoch / rate,
        "a checkpoint": moments[after] - moments[before] - (after - before) / rate,
    }
    whole = seconds["set-up"] + seconds["first epoch"] + (EPOCHS - 1) * seconds["epoch"] + 6 * seconds["a checkpoint"]
    flops = len(alike) * flops_of_step(case["width"], 8 if options.quick else 2000)
    return {**seconds, "steps/s": rate, "TFLOP/s": flops * rate / 1e12, "minutes for 500 epochs": whole / 60, **peak()}


def flops_of_step(width: int, rows: int) -> float:
    module = MLP(width)
    module.configure_model()
    return module.training_flops((torch.zeros(rows, 54), torch.zeros(rows, dtype=torch.long)))


def one_by_one(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The time of trials one after another, extrapolated from single runs of two lengths."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder, without_announcements():
        fit_run(runs({**case, "epochs": 2}, options, Path(folder))[0])  # reads the data, and compiles
        for epochs in (options.epochs, 3 * options.epochs):
            run = runs({**case, "epochs": epochs}, options, Path(folder) / str(epochs))[1]
            start = time.perf_counter()
            fit_run(run)
            seconds[epochs] = time.perf_counter() - start
    epoch = (seconds[3 * options.epochs] - seconds[options.epochs]) / (2 * options.epochs)
    fixed = seconds[options.epochs] - options.epochs * epoch
    minutes = case["trials"] * (fixed + EPOCHS * epoch) / 60
    return {"set-up and end": fixed, "epoch": epoch, "minutes for 500 epochs": minutes, **peak()}


def peak() -> dict[str, float]:
    gc.collect()
    if not torch.cuda.is_available():
        return {}
    answer = {"peak GB": torch.cuda.max_memory_allocated() / 1e9}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return answer


# --- steps alone


def bare(name: str, make: Callable[[], Growable], batch: Any, sizes: list[int], device: torch.device) -> None:
    """Prints trials × steps a second of a captured single step, and of captured stacks."""

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()

    def one() -> Callable[[], Any]:
        module = make().to(device)
        module.configure_model()
        assert module.net is not None
        module.to(device)
        module.compile_network(module.net)
        optimizer = module.configure_optimizers()

        def gradients(inputs: Any) -> torch.Tensor:
            with context():
                loss = module.loss(inputs)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.zero_grad()
            gradients(batch)
            optimizer.step()
        if device.type != "cuda":
            return lambda: gradients(batch)
        step = CapturedStep(gradients, optimizer, batch)
        return lambda: step(batch)

    def many(size: int, compiled: bool) -> Callable[[], Any]:
        modules = [make() for _ in range(size)]
        for module in modules:
            module.configure_model()
            module.to(device)
        stack = Stack(
            modules,
            [module.configure_optimizers() for module in modules],
            lambda model, inputs: model.mappable_loss(inputs),
            modules[0].stacked_losses(),
            compiled=compiled,
            fused=device.type == "cuda",
        )
        stack.optimizer.read_numbers()
        stack.advance(batch, context=context)
        if device.type != "cuda":
            return lambda: stack.advance(batch)
        step = CapturedStack(stack, batch, context=context)
        return lambda: step(batch)

    ways = {"1, by itself": (1, one)}
    for size in sizes:
        ways[f"{size} stacked"] = size, partial(many, size, False)
    if device.type == "cuda":
        ways[f"{sizes[-1]} stacked, compiled"] = sizes[-1], partial(many, sizes[-1], True)
    for way, (size, make_step) in ways.items():
        try:
            rate = size * rate_of(make_step(), device)
            print(
                f"{name:<24} {way:<24} {rate:>10,.1f} trials × steps/s  {peak().get('peak GB', 0):.1f} GB", flush=True
            )
        except Exception as error:
            print(f"{name:<24} {way:<24} failed: {type(error).__name__}: {str(error)[:150]}", flush=True)
        torch.compiler.reset()


def rate_of(step: Callable[[], Any], device: torch.device) -> float:
    for _ in range(3):
        step()
    synchronize(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 2.0:
        for _ in range(5):
            step()
        synchronize(device)
        count += 5
    return count / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks stack", description=__doc__)
    parser.add_argument("part", nargs="?", choices=["fits", "bare"], default="fits")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the benchmark itself")
    parser.add_argument("--data_dir", help="the folder of the full Covertype")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--sizes", default="2,4,8", help="of the stacks whose steps alone are timed")
    parser.add_argument("--cases", default="", help="the names of cases, separated by semicolons")
    parser.add_argument("--separate", action="store_true", help="also one trial by itself")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.quick |= device.type != "cuda"
    if options.part == "bare":
        sizes = [2] if options.quick else [int(size) for size in options.sizes.split(",")]
        size = 2 if options.quick else 128
        images = torch.randn(size, 3, 32, 32, device=device), torch.randint(0, 100, (size,), device=device)
        width = 8 if options.quick else 32
        bare("ResNet-18, 0.25×", lambda: ResNet18(width, base_width=64, optimizer=sgd), images,
             sizes, device)  # fmt: skip
        rows, context = (2, 16) if options.quick else (16, 1024)
        tokens = torch.randint(0, 4096 if options.quick else 50304, (rows, context + 1), device=device)
        bare("GPT-2, width 64", lambda: GPT2(8 if options.quick else 64, base_width=24 if not options.quick else 8,
             layers=2 if options.quick else 12, heads=4, vocabulary=4096 if options.quick else 50304,
             context=context), tokens, sizes, device)  # fmt: skip
        return
    many = 3 if options.quick else 100
    small, wide = (4, 16) if options.quick else (100, 400)
    cases = [
        {"name": "sweep 1", "trials": many, "base": small, "width": small, "precision": "32-true", "seeds": False},
        {"name": "sweep 2", "trials": many, "base": small, "width": wide, "precision": "32-true", "seeds": False},
        {"name": "sweep 2, bf16", "trials": many, "base": small, "width": wide, "precision": "bf16-mixed",
         "seeds": False},
        {"name": "5 seeds", "trials": 2 if options.quick else 5, "base": 8 if options.quick else 2000,
         "width": 8 if options.quick else 2000, "precision": "32-true", "seeds": True},
    ]  # fmt: skip
    rows_: list[dict[str, Any]] = []
    for case in cases:
        if options.cases and case["name"] not in options.cases.split(";"):
            continue
        row = {**case, **in_fits(case, options)}
        print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}),
              flush=True)  # fmt: skip
        rows_.append(row)
        if options.separate:
            rows_.append({**case, "name": f"{case['name']}, one by one", **one_by_one(case, options)})
            print(json.dumps(rows_[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows_, indent=1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


if __name__ == "__main__":
    main([])
