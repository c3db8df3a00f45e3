"""The nodes of a Ray cluster: their resources, and checks that they have the driver's code and folders."""

import argparse
import hashlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mupscale.commands.termination import raise_for
from mupscale.errors import UserError

PROBE_SECONDS = 60.0
"""How long a node has to start a process and to answer."""

SIGHT_SECONDS = 10.0
"""How long a file that another machine wrote may take to be seen: network file systems cache what is in a folder."""


# --- what they have


@dataclass(frozen=True)
class Node:
    """A living node of the cluster."""

    id: str
    name: str
    cpus: float
    gpus: float

    def room(self, needs: "Needs") -> int:
        """How many tasks it can make at a time."""
        by_cpus = int(self.cpus / needs.cpus)
        return by_cpus if not needs.gpus else min(by_cpus, int(self.gpus) * int(1 / needs.gpus))


@dataclass(frozen=True)
class Needs:
    """What a task asks for."""

    cpus: float
    gpus: float


def nodes() -> list[Node]:
    import ray

    answer = []
    for node in ray.nodes():
        if node["Alive"]:
            host, name, has = node["NodeManagerHostname"], node["NodeName"], node["Resources"]
            answer.append(Node(node["NodeID"], f"{host} ({name})", has.get("CPU", 0.0), has.get("GPU", 0.0)))
    return answer


def needs_of(options: argparse.Namespace, accelerator: str, there: list[Node]) -> Needs:
    """What a run needs of a node. Raises a UserError if no node has it."""
    most = max((node.gpus for node in there), default=0)
    gpus = options.gpus_per_run
    if accelerator == "cpu" and gpus:
        raise UserError(f"--gpus_per_run {gpus:g}: trainer.accelerator is cpu; leave --gpus_per_run out")
    if accelerator in ("gpu", "cuda") and (gpus == 0 or (gpus is None and not most)):
        has = "--gpus_per_run is 0" if gpus == 0 else "no node of the cluster has a GPU"
        raise UserError(f"trainer.accelerator is {accelerator}, and {has}")
    if gpus is None:
        gpus = 1.0 if most and accelerator != "cpu" else 0.0
    needs = Needs(options.cpus_per_run or 1.0, gpus)
    if gpus > most:
        raise UserError(f"--gpus_per_run {gpus:g}: the nodes of the cluster have at most {most:g} GPUs each")
    if not any(node.room(needs) for node in there):
        with_gpus = f" and {gpus:g} GPU" if gpus else ""
        cpus = max((node.cpus for node in there), default=0)
        raise UserError(
            f"--cpus_per_run: no node has {needs.cpus:g} CPUs{with_gpus} for a run; the nodes of the cluster have at "
            f"most {cpus:g} CPUs and {most:g} GPUs each"
        )
    return needs


# --- the same code and the same folders


@dataclass(frozen=True)
class Site:
    """What the driver has, and every node must have as well."""

    working_directory: Path
    out: Path
    code: dict[str, str]


def site_of(out: Path) -> Site:
    """The site of this process, which is the driver."""
    return Site(Path.cwd(), out.absolute(), code())


def misfit(site: Site) -> str | None:
    """On a node: goes to the working directory; what is wrong with the node, in words."""
    try:
        os.chdir(site.working_directory)
    except OSError:
        return (
            f"it does not see the working directory, {site.working_directory}; run the command from a folder on "
            "storage that all nodes share"
        )
    here = code()
    for name, version in site.code.items():
        if here.get(name) != version:
            return f"it has {name} {here.get(name)}, this process has {version}; install the same version on all nodes"
    return None


def refuse_nodes(there: list[Node], site: Site, seen: list[int]) -> None:
    """UserError, which names a node, if one has other code, or does not see the folder of the runs.

    `seen` are the signals that have asked this process to end.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probes = Path(tempfile.mkdtemp(prefix=".probe-", dir=folder_for_probes(site.out)))
    try:
        (probes / "driver").write_text(probes.name)
        task = ray.remote(max_retries=1, num_cpus=0)(probe)
        answers = {}
        for node in there:
            place = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options = {"name": f"check of node {node.name}", "scheduling_strategy": place}
            answers[node] = task.options(**options).remote(site, probes, node.id)
        until = time.monotonic() + PROBE_SECONDS
        for node, answer in answers.items():
            while not ray.wait([answer], timeout=1)[0] and time.monotonic() < until:
                raise_for(seen)
            try:
                problem = ray.get(answer, timeout=0)
            except ray.exceptions.GetTimeoutError:
                problem = f"it does not answer within {PROBE_SECONDS:.0f} seconds"
            except ray.exceptions.RayError as error:
                problem = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            if not problem and not is_seen(probes / node.id, node.id):
                problem = not_shared(probes.parent)
            if problem and node in nodes():  # and has not just died
                raise UserError(f"--ray: node {node.name}: {problem}")
    finally:
        shutil.rmtree(probes, ignore_errors=True)


def folder_for_probes(out: Path) -> Path:
    """The folder of the runs, or the nearest one around it: an empty one must stay empty if this process is killed."""
    return next(
        folder for folder in (out, *out.parents) if folder.is_dir() and (folder != out or any(folder.iterdir()))
    )


def probe(site: Site, probes: Path, node: str) -> str | None:
    """On a node: what is wrong with it, in words. Reads what the driver has written, and writes an answer."""
    problem = misfit(site)
    if problem:
        return problem
    if not is_seen(probes / "driver", probes.name):
        return not_shared(probes.parent)
    try:
        (probes / node).write_text(node)
    except OSError as error:
        return f"it cannot write to {probes.parent} ({error.strerror})"
    return None


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


def not_shared(folder: Path) -> str:
    return f"it does not see the files in {folder}; give --out a folder on storage that all nodes share"


def refuse_late_node(site: Site) -> None:
    """On a node that may have joined after the check: UserError if it has other code, or does not see the runs."""
    problem = misfit(site)
    if not problem and not site.out.is_dir():  # which the driver has made
        problem = not_shared(site.out)
    if problem:
        raise UserError(f"--ray: node {platform.node()}: {problem}")


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
