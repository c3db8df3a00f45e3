"""Jobs as tasks of a Ray cluster.

The driver, which is the process of the command, submits a task for each job and holds nothing but their list: if it
dies, Ray ends its tasks, and the same command continues. If a task dies, the driver submits its job again.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskCancelledError

from mupscale.commands.checkpoints import LOCK
from mupscale.commands.process import Terminated, interruptions, raise_for
from mupscale.errors import UserError, one_line

if TYPE_CHECKING:
    from mupscale.commands.lab.driver import Ending, Job

WAIT = 1.0
"""Seconds between two looks at the signals that ask this process to end."""

CONNECT_SECONDS = 5.0
"""How long the address of a cluster has to answer."""

SIGHT_SECONDS = 10.0
"""How long a file that another machine wrote may take to be seen: network file systems cache what is in a folder."""

SETTINGS = b"\x04"
"""The type of the frame with which a server of HTTP/2, such as Ray's, begins."""

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
"""The beginning of a connection by HTTP/2: its preface, and a frame of settings without a setting."""

PATIENCE = 5.0
"""Seconds that a task has to end before its process is killed. Either way its runs can be resumed."""

# --- the connection


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
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdecimal():
        raise UserError(f"--ray {address}: give auto, or the HOST:PORT of the head of the cluster, such as head:6379")
    try:
        with socket.create_connection((host, int(port)), CONNECT_SECONDS) as connection:
            connection.sendall(GREETING)
            is_server = os.environ.get("RAY_USE_TLS", "0") != "0" or connection.recv(4)[3:] == SETTINGS
    except (OSError, OverflowError) as error:
        raise UserError(f"--ray {address}: no Ray cluster answers there ({error})") from error
    if not is_server:  # Ray itself would try for minutes
        raise UserError(f"--ray {address}: what answers there is not a Ray cluster; give the HOST:PORT of its head")


# --- nodes


@dataclass(frozen=True)
class Resources:
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
    """What a run needs of a node. Raises a UserError if no node has it."""
    cpus, most = (max((getattr(node, name) for node in there), default=0) for name in ("cpus", "gpus"))
    gpus = options.gpus_per_run
    if accelerator == "cpu" and gpus:
        raise UserError(f"--gpus_per_run {gpus:g}: trainer.accelerator is cpu; leave --gpus_per_run out")
    if accelerator in ("gpu", "cuda") and (gpus == 0 or (gpus is None and not most)):
        has = "--gpus_per_run is 0" if gpus == 0 else "no node of the cluster has a GPU"
        raise UserError(f"trainer.accelerator is {accelerator}, and {has}")
    if gpus is None:
        gpus = 1.0 if most and accelerator != "cpu" else 0.0
    needs = Resources(options.cpus_per_run or 1.0, gpus)
    if not any(node.room(needs) for node in there):
        raise UserError(
            f"--cpus_per_run, --gpus_per_run: no node has {needs.cpus:g} CPUs and {gpus:g} GPUs for a run; the nodes "
            f"of the cluster have at most {cpus:g} CPUs and {most:g} GPUs each"
        )
    return needs


@dataclass(frozen=True)
class Site:
    """What the driver has, and every node must have as well."""

    working_directory: Path
    out: Path
    lock: str
    """The text of the lock that the driver has on the folder `out`."""
    code: dict[str, str]


def refuse_node(site: Site) -> None:
    """On a node: goes to the working directory. UserError if the node has other code, or does not see the folders."""
    problem = None
    try:
        os.chdir(site.working_directory)
    except OSError:
        problem = (
            f"it does not see the working directory, {site.working_directory}; run the command from a folder on "
            "storage that all nodes share"
        )
    here = code()
    for name, version in site.code.items():
        if here.get(name) != version:
            problem = f"it has {name} {here.get(name)}, this process has {version}; install the same on all nodes"
            break
    if not problem and not is_seen(site.out / LOCK, site.lock):
        problem = f"it does not see the files in {site.out}; give --out a folder on storage that all nodes share"
    elif not problem and not os.access(site.out, os.W_OK):
        problem = f"it cannot write to {site.out}"
    if problem:
        raise UserError(f"--ray: node {platform.node()}: {problem}")


def is_seen(path: Path, text: str) -> bool:
    """Whether a file with this text is there, or comes up soon."""
    until = time.monotonic() + SIGHT_SECONDS
    while True:
        with suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


@cache
def code() -> dict[str, str]:
    """What decides the numbers of a run: versions, and a digest of this package's files."""
    files = {}
    for package in ("mupscale", "mupscale.models", "mupscale.callbacks", "mupscale.datamodules"):
        for root in importlib.import_module(package).__path__:
            for path in Path(root).rglob("*.py"):
                files["/".join((*package.split("."), *path.relative_to(root).parts))] = path
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + files[name].read_bytes())
    versions = {name: importlib.metadata.version(name) for name in ("mupscale", "torch", "lightning")}
    return {"Python": platform.python_version(), **versions, "files of mupscale": digest.hexdigest()[:12]}


# --- the work


class Cluster:
    """Makes jobs as tasks of a connected cluster, with these needs.

    `seen` are the signals that have asked this process to end.
    """

    has_room = True  # tasks that cannot run yet wait in the cluster

    def __init__(self, needs: Resources, out: Path, seen: list[int]) -> None:
        self.needs, self.out, self._seen = needs, out.absolute(), seen
        self._tasks: dict[Any, Job] = {}
        """The jobs of the tasks that have not ended."""

    @property
    def slots(self) -> int:
        return max(1, sum(node.room(self.needs) for node in nodes()))

    def submit(self, job: "Job") -> None:
        task = ray.remote(max_retries=0, num_cpus=self.needs.cpus, num_gpus=self.needs.gpus)(make_job)
        site = Site(Path.cwd(), self.out, (self.out / LOCK).read_text(), code())
        pickled = pickle.dumps(job)  # loads torch where it is unpickled, which a check comes before
        self._tasks[task.options(name=str(job)).remote(site, self.needs, pickled)] = job

    def wait(self) -> list["Ending"]:
        raise_for(self._seen)
        ended, _ = ray.wait(list(self._tasks), timeout=WAIT)
        return [self._ending(task, self._tasks.pop(task)) for task in ended]

    def _ending(self, task: Any, job: "Job") -> "Ending":
        """How a task ended. Raises a UserError if a run failed, unless its process died."""
        from mupscale.commands.lab.driver import Ending, failed_words

        try:
            return ray.get(task)
        except TaskCancelledError as error:
            raise UserError(f"the task {job} was cancelled; run the same command again to continue") from error
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            print(error, file=sys.stderr, flush=True)
            raise UserError(failed_words(job)) from error
        except NodeDiedError:
            return Ending(job, death="its node died", is_own_fault=False)
        except RayError as error:
            return Ending(job, death=f"its process died ({str(error).strip().splitlines()[0]})")

    def stop(self) -> None:
        tasks = list(self._tasks)
        for force in (False, True):
            for task in tasks:
                with suppress(RayError, ValueError):
                    ray.cancel(task, force=force)
            if tasks:
                _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE)


def make_job(site: Site, needs: Resources, pickled: bytes) -> "Ending":
    """In a process of Ray: makes a job."""
    refuse_node(site)
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as mupscale.__main__ does, before torch is loaded
    job = pickle.loads(pickled)
    import torch

    from mupscale.commands.lab.run import without_announcements

    torch.set_num_threads(max(1, int(needs.cpus)))
    if 0 < needs.gpus < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(needs.gpus)
    with without_announcements():
        try:
            return job.carry_out()
        except Terminated as ending:
            raise SystemExit(1) from ending  # as Ray ends a process on SIGTERM
