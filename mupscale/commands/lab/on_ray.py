"""Jobs as tasks of a Ray cluster.

If the driver, which is the process of the command, dies, Ray ends its tasks, and the same command continues. If the
process or the node of a task dies, Ray makes the task again, which goes on from the newest checkpoint.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import logging
import os
import pickle
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from mupscale.commands.checkpoints import LOCK
from mupscale.commands.lab import MOST_DEATHS
from mupscale.commands.process import Terminated, interruptions, raise_for
from mupscale.errors import UserError, one_line

if TYPE_CHECKING:
    from mupscale.commands.lab.jobs import Job
    from mupscale.commands.lab.run import Result

    Results = dict[Path, Result]

WAIT = 1.0
"""Seconds between two looks at the signals that ask this process to end."""

CONNECT_SECONDS = 5.0
"""How long the address of a cluster has to answer."""

SIGHT_SECONDS = 10.0
"""How long a file that another machine wrote may take to be seen: network file systems cache what is in a folder."""

PATIENCE = 5.0
"""Seconds that a task has to end before its process is killed. Either way its runs can be resumed."""


@contextmanager
def connected(options: argparse.Namespace, accelerator: str, out: Path) -> Iterator["Cluster"]:
    """The cluster at an address. Raises a UserError if it cannot make the runs."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        connect(options.ray)
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own
        with interruptions() as seen:
            there = Cluster(needs_of(options, accelerator, nodes()), out, seen)
            try:
                yield there
            finally:
                there.stop()
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


def connect(address: str) -> None:
    refuse_address(address)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"--ray {address}: {one_line(error).rstrip('.')}. Start the command on a node of the cluster, "
            "with its versions; `ray start` makes this machine a node"
        ) from error


def refuse_address(address: str) -> None:
    """Raises a UserError for an address at which nothing answers: Ray would try for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise UserError(f"--ray {address}: give auto, or the HOST:PORT of the head of the cluster, such as head:6379")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--ray {address}: no Ray cluster answers there ({error})") from error


class Resources(NamedTuple):
    """The CPUs and GPUs that a node has, or that a task needs."""

    cpus: float
    gpus: float

    def room(self, needs: "Resources") -> int:
        """How many tasks a node can make at a time."""
        by_cpus = int(self.cpus / needs.cpus)
        return by_cpus if not needs.gpus else min(by_cpus, int(self.gpus) * int(1 / needs.gpus))


def nodes() -> list[Resources]:
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Resources(has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in found]


def needs_of(options: argparse.Namespace, accelerator: str, there: list[Resources]) -> Resources:
    """What a run needs of a node. Raises a UserError if no node has it: Ray would wait for one."""
    gpus = options.gpus_per_run
    if gpus is None:
        gpus = float(accelerator != "cpu" and any(node.gpus for node in there))
    needs = Resources(options.cpus_per_run or 1.0, gpus)
    if not any(node.room(needs) for node in there):
        have = ", ".join(f"{node.cpus:g} and {node.gpus:g}" for node in sorted({*there}))
        raise UserError(
            f"--cpus_per_run, --gpus_per_run: no node has {needs.cpus:g} CPUs and {gpus:g} GPUs for a run; the nodes "
            f"of the cluster have {have}"
        )
    return needs


# --- on a node


class Site(NamedTuple):
    """What the driver has, and every node must have as well."""

    working_directory: Path
    out: Path
    lock: str
    """The text of the lock that the driver has on the folder `out`."""
    code: dict[str, str]


def refuse_node(site: Site) -> None:
    """Goes to the working directory. Raises a UserError if the node has other code, or does not see the folders."""
    try:
        os.chdir(site.working_directory)
        problem = None
    except OSError:
        problem = f"it does not see the working directory, {site.working_directory}; start in one that all nodes share"
    here = code()
    other = next((name for name, version in site.code.items() if here.get(name) != version), None)
    if other is not None:
        problem = f"it has {other} {here.get(other)}, this process has {site.code[other]}; install the same"
    elif problem is None and not is_seen(site.out / LOCK, site.lock):
        problem = f"it does not see the files in {site.out}; give --out a folder on storage that all nodes share"
    if problem is not None:
        raise UserError(f"--ray: node {platform.node()}: {problem}")


def is_seen(path: Path, text: str) -> bool:
    """Whether a file with this text is there, or comes up soon."""
    until = time.monotonic() + SIGHT_SECONDS
    while True:
        with suppress(OSError):
            if path.read_text("utf-8") == text:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


@cache
def code() -> dict[str, str]:
    """What decides the numbers of a run: versions, and a digest of this package's files."""
    files, digest = {}, hashlib.sha256()
    for package in ("mupscale", "mupscale.models", "mupscale.callbacks", "mupscale.datamodules"):
        for root in map(Path, importlib.import_module(package).__path__):
            for path in root.rglob("*.py"):  # by name, so that a checkout and an installed package are alike
                files["/".join((*package.split("."), *path.relative_to(root).parts))] = path
    for name in sorted(files):
        digest.update(name.encode() + files[name].read_bytes())
    versions = {name: importlib.metadata.version(name) for name in ("mupscale", "torch", "lightning")}
    return {"Python": platform.python_version(), **versions, "files of mupscale": digest.hexdigest()[:12]}


def make_job(site: Site, needs: Resources, pickled: bytes) -> "Results":
    """Makes a job, in a process of Ray."""
    refuse_node(site)
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as mupscale.__main__ does, before torch is loaded
    job = pickle.loads(pickled)
    import torch

    from mupscale.commands.lab.run import prepare_process

    torch.set_num_threads(max(1, int(needs.cpus)))
    if 0 < needs.gpus < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(needs.gpus)
    prepare_process()
    try:
        return job.carry_out()
    except Terminated as ending:
        raise SystemExit(1) from ending  # as Ray ends a process on SIGTERM


# --- in the driver


class Cluster:
    """Makes jobs as tasks of a connected cluster, with these needs; `seen` are the signals that ask it to end."""

    def __init__(self, needs: Resources, out: Path, seen: list[int]) -> None:
        self.needs, self.out, self._seen = needs, out.absolute(), seen
        self._tasks: dict[Any, Job] = {}
        """The jobs of the tasks that have not ended."""

    @property
    def slots(self) -> int:
        return max(1, sum(node.room(self.needs) for node in nodes()))

    def make(self, jobs: "list[Job]") -> "Iterator[Results]":
        cpus, gpus = self.needs
        remote = ray.remote(max_retries=MOST_DEATHS - 1, num_cpus=cpus, num_gpus=gpus)(make_job)
        site = Site(Path.cwd(), self.out, (self.out / LOCK).read_text("utf-8"), code())
        for job in jobs:
            pickled = pickle.dumps(job)  # loads torch where it is unpickled, which a check comes before
            self._tasks[remote.options(name=str(job)).remote(site, self.needs, pickled)] = job
        while self._tasks:
            raise_for(self._seen)
            ended, _ = ray.wait(list(self._tasks), timeout=WAIT)
            for task in ended:
                yield result_of_task(task, self._tasks.pop(task))

    def stop(self) -> None:
        tasks = list(self._tasks)
        for force in (False, True):
            for task in tasks:
                with suppress(RayError, ValueError):
                    ray.cancel(task, force=force)
            if tasks:
                _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE)


def result_of_task(task: Any, job: "Job") -> "Results":
    """The results of a task. Raises a UserError if a run failed, or its process died again and again."""
    try:
        return ray.get(task)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from error
        print(error, file=sys.stderr, flush=True)
        raise UserError(f"{job} failed with the error above; fix it, then run the same command again") from error
    except RayError as error:  # it was cancelled, or its process or node died, again and again
        raise UserError(f"{job}: {one_line(error)}; run the same command again to continue") from error
