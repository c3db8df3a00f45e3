"""The options of `sweep` and `experiment` that say where their runs are made, and the driver that makes them so."""

import argparse
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.commands.checkpoints import LOCK, Claim
from mupscale.commands.config import read_json, refuse_difference
from mupscale.commands.process import Terminated, refuse_output_folder
from mupscale.errors import UserError, as_user_errors, needs_extra

if TYPE_CHECKING:
    from mupscale.commands.lab.driver import Driver, Size

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
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("run the same command again to continue") from interrupt
    except Terminated as ending:
        raise Terminated("run the same command again to continue") from ending


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help=WORKERS_HELP)
    parser.add_argument("--part", metavar="I/N", help=PART_HELP)
    parser.add_argument("--stack", metavar="auto|N|off", default="auto", help=STACK_HELP)
    parser.add_argument("--ray", metavar="ADDRESS", help=RAY_HELP)
    parser.add_argument("--gpus_per_run", type=float, metavar="SHARE", help=GPUS_HELP)
    parser.add_argument("--cpus_per_run", type=float, metavar="N", help=CPUS_HELP)


def refuse_options(options: argparse.Namespace) -> None:
    stack_size(options.stack)
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers must be at least 1, got {options.workers}")
    if options.part is not None:
        read_part(options.part)
        if options.ray is not None:
            raise UserError("--part divides the runs among commands, and --ray among the nodes of a cluster; give one")
    gpus, cpus = options.gpus_per_run, options.cpus_per_run
    if options.ray is None:
        for name, value in (("gpus_per_run", gpus), ("cpus_per_run", cpus)):
            if value is not None:
                raise UserError(f"--{name} is for runs on a Ray cluster; give its address with --ray, or leave it out")
        return
    if options.workers is not None:
        raise UserError("--workers starts processes on this machine, and --ray makes the runs on a cluster; give one")
    if gpus is not None and not 0 <= gpus <= 1:
        raise UserError(f"--gpus_per_run {gpus:g}: a run is on one GPU; give 1, or a share such as 0.25")
    if cpus is not None and not (cpus > 0 and math.isfinite(cpus)):
        raise UserError(f"--cpus_per_run must be above 0, got {cpus:g}")
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


def read_part(text: str) -> tuple[int, int]:
    """The index and the number of the parts in `0/4`."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--part {text}: give I/N, the number of this part, from 0, and how many there are: 0/4 to 3/4")
    return int(found[1]), int(found[2])


@contextmanager
def open_driver(options: argparse.Namespace, accelerator: str, out: Path) -> Iterator["Driver"]:
    """The driver that the options ask for, which alone works on the folder `out`, or on its part of the runs."""
    from mupscale.commands.lab.driver import Driver, Executor, Inline

    refuse_output_folder("--out", out)
    part, parts = (0, 1) if options.part is None else read_part(options.part)
    executor: Executor
    with ExitStack() as stack:
        if options.ray is not None:
            from mupscale.commands.lab.on_ray import connected

            executor = stack.enter_context(connected(options, accelerator, out))
        stack.enter_context(Claim(out if options.part is None else out / f"part-{part}-of-{parts}"))
        gpus = [] if accelerator == "cpu" or options.ray is not None else visible_gpus()
        count = options.workers or max(1, len(gpus))
        if count > 1:
            from mupscale.commands.lab.workers import workers

            executor = stack.enter_context(workers(count, gpus))
        elif options.ray is None:
            executor = Inline()
        yield Driver(executor, stack_size(options.stack), part, parts)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()  # does not start CUDA in this process
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def refuse_other_content(out: Path, what: str, settings: dict[str, Any]) -> None:
    """Raises a UserError if a folder holds another sweep or experiment, by its WHAT.json, or something else."""
    path = out / f"{what}.json"
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder for the {what}")
    if path.exists():
        there = read_json(path)
        refuse_difference({key: there.get(key) for key in settings}, settings, f"--out {out} holds another {what}")
    elif out.is_dir() and any(out.iterdir()):
        # one that has begun; a run has a lock, too
        is_begun = any(out.glob("part-*-of-*")) or ((out / LOCK).exists() and not (out / "config.yaml").exists())
        if not is_begun:
            raise UserError(f"--out {out} is not empty and has no {what}; name a new folder")
