"""The options of `sweep` and `experiment` that say where their runs are made, and the executor that makes them so."""

import argparse
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mupscale.commands.checkpoints import FolderLock
from mupscale.commands.process import Terminated
from mupscale.errors import UserError, as_user_errors, needs_extra

if TYPE_CHECKING:
    from mupscale.commands.lab.jobs import Executor, Size

STACK_HELP = """how many runs to train at once as one program, if they differ only in numbers (learning rate, weight
decay, noise, seed): auto (the default), as many as fit into memory; N, at most N; off, one after another"""

WORKERS_HELP = """the number of processes on this machine (default: one per GPU; for small networks, several per GPU are
faster)"""

RAY_HELP = """run on a Ray cluster (docs/cluster.md): HOST:PORT, or auto for the cluster of which this machine is a
node"""

GPUS_HELP = """with --ray: the share of a GPU per task, such as 0.25 (default: 1, or 0 if the cluster has no GPU or
trainer.accelerator is cpu)"""

CPUS_HELP = """with --ray: the number of CPUs and threads per task (default: 1)"""

PART_HELP = """make only a fixed share of the runs, part I of N, from 0; start all N parts, for example as a SLURM array
(docs/cluster.md)"""


@contextmanager
def goes_on_when_repeated() -> Iterator[None]:
    """What ends a sweep or an experiment says how to continue it; errors of the file system are the user's."""
    try:
        with as_user_errors(OSError):
            yield
    except (KeyboardInterrupt, Terminated) as ending:
        raise type(ending)("run the same command again to continue") from ending


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help=WORKERS_HELP)
    parser.add_argument("--part", metavar="I/N", help=PART_HELP)
    parser.add_argument("--stack", metavar="auto|N|off", default="auto", help=STACK_HELP)
    parser.add_argument("--ray", metavar="ADDRESS", help=RAY_HELP)
    parser.add_argument("--gpus_per_run", type=float, metavar="SHARE", help=GPUS_HELP)
    parser.add_argument("--cpus_per_run", type=float, metavar="N", help=CPUS_HELP)


def refuse_options(options: argparse.Namespace) -> None:
    stack_size(options.stack)
    part_of(options)
    places = [f"--{name}" for name in ("workers", "part", "ray") if getattr(options, name) is not None]
    if options.ray is not None and len(places) > 1:
        raise UserError(f"{' and '.join(places)}: give one; each says where runs are made")
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers must be at least 1, got {options.workers}")
    for name, limits in (("gpus_per_run", (0, 1)), ("cpus_per_run", (1e-4, math.inf))):
        value = getattr(options, name)
        if value is not None and options.ray is None:
            raise UserError(f"--{name} is for runs on a Ray cluster; give its address with --ray, or leave it out")
        if value is not None and not (limits[0] <= value <= limits[1] and math.isfinite(value)):
            raise UserError(f"--{name} must be from {limits[0]:g} to {limits[1]:g}, such as 0.25, got {value:g}")
    if options.ray is not None:
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # would copy the working directory to the nodes
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of two tasks may be alike
        with needs_extra("cluster"):
            import ray  # noqa: F401


def stack_size(text: str) -> "Size":
    if text in ("auto", "off"):
        return text  # type: ignore[return-value]
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--stack {text}: give auto, off, or how many runs to train as one program")
    return int(text)


def part_of(options: argparse.Namespace) -> tuple[int, int]:
    """The index and the number of the parts in `--part 0/4`; (0, 1) without it."""
    text = options.part or "0/1"
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--part {text}: give I/N, the number of this part, from 0, and how many there are: 0/4 to 3/4")
    return int(found[1]), int(found[2])


@contextmanager
def open_executor(options: argparse.Namespace, accelerator: str, out: Path) -> Iterator["Executor"]:
    """The executor that the options ask for, which alone works on the folder `out`, or on its part of the runs."""
    part, parts = part_of(options)
    with ExitStack() as stack:
        if options.ray is not None:
            from mupscale.commands.lab.on_ray import connected

            executor: Executor = stack.enter_context(connected(options, accelerator, out))
        stack.enter_context(FolderLock(out if options.part is None else out / f"part-{part}-of-{parts}"))
        gpus = [] if accelerator == "cpu" or options.ray is not None else visible_gpus()
        count = options.workers or max(1, len(gpus))
        if count > 1:
            from mupscale.commands.lab.workers import workers

            executor = stack.enter_context(workers(count, gpus))
        elif options.ray is None:
            from mupscale.commands.lab.jobs import Inline

            executor = Inline()
        yield executor


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()  # does not start CUDA in this process
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]
