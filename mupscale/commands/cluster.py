"""Runs as tasks of a Ray cluster.

The folder holds the state of all work, as without Ray. The driver, which is the process of the command, looks for
waiting units of work and submits tasks for them. A task takes the leases of its units and runs them as any other
process does. If it dies, its leases lapse and the units wait again; the next task resumes them from their checkpoints.
The driver holds no lease: if it dies, run the same command again to continue.
"""

import argparse
import logging
import math
import os
import pickle
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.commands.cluster_nodes import Needs, Site, needs_of, nodes, refuse_late_node, refuse_nodes, site_of
from mupscale.commands.termination import Terminated, interruptions, raise_for
from mupscale.errors import UserError, needs_extra

if TYPE_CHECKING:
    from mupscale.commands.arguments import Size
    from mupscale.commands.stacks import Key, Work

WAIT = 1.0
"""Seconds between two checks of what other processes do."""

CONNECT_SECONDS = 5.0
"""How long the address of a cluster has to answer."""

SETTINGS = b"\x04"
"""The type of the frame with which a server of HTTP/2, such as Ray's, begins."""

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"
"""The beginning of a connection by HTTP/2: its preface, and a frame of settings without a setting."""

PATIENCE = 5.0
"""Seconds that a task has to end before its process is killed. Either way its runs can be resumed."""

MOST_DEATHS = 3
"""How often the process of a unit may die while its node stays up: the unit itself may be the cause."""

RAY_HELP = """run on a Ray cluster (docs/cluster.md): HOST:PORT, or auto for the cluster of which this machine is a
node"""

GPUS_HELP = """with --ray: the share of a GPU per task, such as 0.25 (default: 1, or 0 if the cluster has no GPU or
trainer.accelerator is cpu)"""

CPUS_HELP = """with --ray: the number of CPUs and threads per task (default: 1)"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ray", metavar="ADDRESS", help=RAY_HELP)
    parser.add_argument("--gpus_per_run", type=float, metavar="SHARE", help=GPUS_HELP)
    parser.add_argument("--cpus_per_run", type=float, metavar="N", help=CPUS_HELP)


def refuse_options(options: argparse.Namespace) -> None:
    """Raises a UserError if the options of a command do not fit together, or Ray is not installed."""
    gpus, cpus = options.gpus_per_run, options.cpus_per_run
    if options.ray is None:
        for name, value in (("gpus_per_run", gpus), ("cpus_per_run", cpus)):
            if value is not None:
                raise UserError(f"--{name} is for runs on a Ray cluster; give its address with --ray, or leave it out")
        return
    if getattr(options, "workers", None) is not None:
        raise UserError("--workers starts processes on this machine, and --ray makes the runs on a cluster; give one")
    if gpus is not None and not 0 <= gpus <= 1:
        raise UserError(f"--gpus_per_run {gpus:g}: a run is on one GPU; give 1, or a share such as 0.25")
    if cpus is not None and not (cpus > 0 and math.isfinite(cpus)):
        raise UserError(f"--cpus_per_run must be above 0, got {cpus:g}")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # would copy the working directory to the nodes
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of two tasks may be alike
    with needs_extra("cluster"):
        import ray  # noqa: F401


# --- the connection


@contextmanager
def connected(options: argparse.Namespace, accelerator: str, out: Path) -> Iterator["Cluster"]:
    """The cluster at an address, whose nodes have been checked. Raises a UserError if it cannot make the runs."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        connect(options.ray)
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own
        with interruptions() as seen:
            there = nodes()
            needs = needs_of(options, accelerator, there)
            site = site_of(out)
            refuse_nodes([node for node in there if node.room(needs)], site, seen)
            yield Cluster(needs, site, seen)
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


def connect(address: str) -> None:
    """Connects this process. UserError of one line if it cannot be."""
    import ray

    refuse_address(address)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if "ersion mismatch" in str(error):
            raise UserError(f"--ray {address}: the cluster has another version of Ray or Python: {error}") from error
        if address == "auto" and isinstance(error, ConnectionError):
            error = ConnectionError("this machine is not a node of a Ray cluster")
        raise UserError(
            f"--ray {address}: {str(error).strip().rstrip('.')}. Start the command on a node of the cluster; "
            "`ray start` makes this machine a node"
        ) from error


def refuse_address(address: str) -> None:
    """Raises a UserError if the address is invalid, or no server answers there."""
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


# --- the work


class Cluster:
    """A connected cluster on which the tasks that carry out a work have these needs.

    `seen` are the signals that have asked this process to end.
    """

    def __init__(self, needs: Needs, site: Site, seen: list[int]) -> None:
        self.needs, self.site, self._seen = needs, site, seen
        self._tasks: dict[Any, list[Key]] = {}
        """The units of each task that has not ended."""
        self._deaths: Counter[Key] = Counter()

    def carry_out(self, work: "Work", opened: Callable[[], "Work"], size: "Size") -> None:
        """Submits tasks until all units are finished, by these or by other processes.

        Args:
            work: What there is to do.
            opened: Opens the same work on another node.
            size: How many runs a task makes together.
        """
        import ray

        from mupscale.commands.stacks import shared_out

        waiting = False
        try:
            while self._tasks or not work.finished:
                raise_for(self._seen)
                submitted = {key for keys in self._tasks.values() for key in keys}
                slots = max(1, sum(node.room(self.needs) for node in nodes()))
                left = [key for key in work.waiting() if key not in submitted]
                for keys in shared_out(left, slots, size, work.most_together):
                    self._tasks[self._submit(keys, opened, size)] = keys
                if not self._tasks:
                    if not waiting and not work.finished:
                        print("waiting for other processes", flush=True)
                        waiting = True
                    time.sleep(WAIT)
                    continue
                waiting = False
                ended, _ = ray.wait(list(self._tasks), timeout=WAIT)
                for task in ended:
                    for name, end in self._ends(task, self._tasks.pop(task)):
                        print(f"{name}: {end}; {work.progress()}", flush=True)
        finally:
            self._stop()

    def _submit(self, keys: list["Key"], opened: Callable[[], "Work"], size: "Size") -> Any:
        import ray

        task = ray.remote(max_retries=0, num_cpus=self.needs.cpus, num_gpus=self.needs.gpus)(make_units)
        pickled = pickle.dumps((opened, keys, size))  # loads torch where it is unpickled, which a check comes before
        return task.options(name=task_name(keys)).remote(self.site, self.needs, pickled)

    def _ends(self, task: Any, keys: list["Key"]) -> list[tuple[str, str]]:
        """The names and results of a task's units. Raises a UserError if it failed, unless its process died."""
        import ray
        from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskCancelledError

        name = task_name(keys)
        try:
            return ray.get(task)
        except TaskCancelledError as error:
            raise UserError(f"the task {name} was cancelled; run the same command again to continue") from error
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            print(error, file=sys.stderr, flush=True)
            raise UserError(
                f"the task {name} failed with the error above, and the other tasks were stopped; fix it, then run the "
                "same command again to continue"
            ) from error
        except NodeDiedError:
            print(f"{name}: its node died; the runs continue elsewhere", file=sys.stderr, flush=True)
        except RayError as error:
            reason = str(error).strip().splitlines()[0]
            self._deaths.update(keys)
            if max(self._deaths[key] for key in keys) >= MOST_DEATHS:
                raise UserError(
                    f"the process of {name} died {MOST_DEATHS} times: {reason} If it runs out of memory, ask for more "
                    "with --gpus_per_run or --cpus_per_run, or give a smaller --stack; then run the same command again"
                ) from error
            print(f"{name}: its process died; the runs continue ({reason})", file=sys.stderr, flush=True)
        return []

    def _stop(self) -> None:
        """Asks the tasks that run to end, and kills those that do not."""
        import ray

        tasks = list(self._tasks)
        for force in (False, True):
            for task in tasks:
                with suppress(ray.exceptions.RayError, ValueError):
                    ray.cancel(task, force=force)
            if tasks:
                _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE)


def task_name(keys: list["Key"]) -> str:
    """What Ray's dashboard calls a task."""
    if len(keys) == 1:
        return str(keys[0])
    return f"{keys[0].group}/{keys[0].kind}s {', '.join(str(key.number) for key in keys)}"


def make_units(site: Site, needs: Needs, pickled: bytes) -> list[tuple[str, str]]:
    """In a process of Ray: makes one stack of the units, or one unit if they do not stack; their names and ends.

    What it does not take waits again once it has ended, and the driver shares it out anew. `pickled` has the function
    that opens the work, the keys of the units, and how many runs are made together.
    """
    refuse_late_node(site)
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as mupscale.__main__ does, before torch is loaded
    opened, keys, size = pickle.loads(pickled)
    from mupscale.commands.runs import without_announcements
    from mupscale.commands.stacks import Batch

    keep_to(needs)
    with without_announcements():
        batch = Batch(opened(), keys, size, lambda line: print(line, flush=True))
        try:
            return [(unit.name, end) for unit, end in batch.carry_out()]
        except Terminated as ending:
            raise SystemExit(1) from ending  # as Ray ends a process on SIGTERM


def keep_to(needs: Needs) -> None:
    """Keeps this process to the threads and to the share of a GPU that its task has asked for."""
    import torch

    torch.set_num_threads(max(1, int(needs.cpus)))
    if 0 < needs.gpus < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(needs.gpus)
