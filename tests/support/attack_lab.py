"""Kills what makes a sweep, at random moments: its driver, a worker, or a node of a Ray cluster.

The results must be those of an undisturbed sweep, bit by bit; no finished run may begin again, and no other run before
its newest checkpoint. Runs one after another and in stacks must give one table, up to rounding.
"""

import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from command_line import LR, NOISE, small, upscale
from program_server import WITHOUT_FIGURES, Server
from programs import wait_until
from ray_cluster import ENVIRONMENT, LocalCluster, is_dead
from run_ends import differences, observed
from sweeps import numbers_of, process_in, starts

IN_A_ROW = {"driver": 4, "worker": 2, "node": 2}
"""What is killed, and how often in one sweep; the third death of a worker in one job is an error."""

RUNS = 24
"""Of a sweep: 12 trials with two seeds."""

STEPS, EVERY = 60, 10
"""Of a run, and from one of its checkpoints to the next."""

SPAN = 3.0
"""Seconds within which the victim of a kill dies, once it makes a run."""

OUT = Path("o")
"""The folder of every sweep: its name is in the files that are compared."""


def attack(folder: Path, kind: str, kills: int) -> Iterator[dict[str, Any]]:
    """Sweeps until there are so many kills; every other one trains its runs in stacks."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    chance = random.Random(f"{kind} {kills}")
    logged = {"max_steps": STEPS, "val_check_interval": 6, "precision": "64-true", "enable_progress_bar": False}
    config = small(Path("c.yaml"), upscale(STEPS // 2, 16), **logged)
    with ExitStack() as contexts:
        more = {**ENVIRONMENT, "INTERRUPTED_IMPORTS": "ray without_figures"} if kind == "node" else {}
        server = contexts.enter_context(Server(folder, **{**WITHOUT_FIGURES, **more}))
        cluster = contexts.enter_context(LocalCluster(folder)) if kind == "node" else None
        axes = ["--sweep", f"{LR}=0.003,0.01,0.03", "--sweep", f"{NOISE}=0.03,0.1,0.3,1", "--seeds", "0,1"]
        common = ["sweep", "--config", config, *axes, "--metric", "last_50%", "--out", str(OUT)]
        common.append(f"--checkpoint.every_n_train_steps={EVERY}")
        undisturbed: dict[str, Path] = {}
        while kills:
            for stack in ("off", "4"):
                arguments = [*common, "--stack", stack]
                if stack not in undisturbed:
                    server.run(*arguments)
                    undisturbed[stack] = OUT.rename(f"undisturbed-{stack}")
                if cluster is not None:
                    arguments += ["--ray", cluster.address]
                elif kind == "worker":
                    arguments += ["--workers", "2"]
                case = Attack(server, cluster, kind, chance)
                case.run(arguments, min(kills, IN_A_ROW[kind]))
                different = case.differences + unlike(OUT, undisturbed[stack])
                different += unlike_table(OUT, undisturbed["off"])
                shutil.rmtree(OUT)
                kills -= len(case.where)
                yield {"variant": f"{kind}, --stack {stack}", "where": case.where, "differences": different}
                if not kills:
                    break


class Attack:
    """The kills of one sweep, and what differs at its end."""

    def __init__(self, server: Server, cluster: LocalCluster | None, kind: str, chance: random.Random) -> None:
        self.server, self.cluster, self.kind, self.chance = server, cluster, kind, chance
        self.where: list[str] = []
        """What was done when it was killed."""
        self.differences: list[str] = []
        self.done: dict[Path, tuple[int, list[int]]] = {}
        """When the result of each finished run was written, and where it has begun, by folder."""
        self.begun: list[tuple[Path, int, int]] = []
        """Runs at a kill that were not finished: their folder, how often they have begun, their last checkpoint."""

    def run(self, arguments: list[str], kills: int) -> None:
        if self.cluster is not None:
            self.cluster.another()
        self.driver = self.server.start(*arguments)
        moments = [RUNS * number // kills for number in range(kills + 1)]
        while (number := len(self.where)) < kills:
            least = self.chance.randrange(*moments[number : number + 2])
            victim = wait_until(lambda least=least: is_dead(self.driver) or self.victim(least), self.server.log)
            time.sleep(self.chance.uniform(0, SPAN))
            if is_dead(self.driver):
                break
            if victim is not True and not is_dead(victim):
                self.kill(victim, arguments)
        self.conclude(self.server.answer())

    def kill(self, victim: int, arguments: list[str]) -> None:
        if self.kind == "node":
            assert self.cluster is not None
            node = self.cluster.node_of(victim)
            assert node
            self.cluster.kill(node)
        else:
            os.kill(victim, signal.SIGKILL)
        self.note()
        if self.kind == "driver":
            assert self.server.answer() == -signal.SIGKILL
            self.driver = self.server.start(*arguments)  # at once: its workers wait for those of the one before
        elif self.cluster is not None:
            self.cluster.another()

    def victim(self, least: int) -> int | None:
        """A process to be killed, once at least so many runs are done, and one has begun in it, or by it."""
        try:
            done, locks = list(OUT.rglob("result.json")), list(OUT.rglob("*/run.lock"))
        except FileNotFoundError:  # a folder of a run that begins again
            return None
        if len(done) < least:
            return None
        for lock in locks:
            process = process_in(lock)
            if process and not is_dead(process):
                if self.kind == "driver":
                    return self.driver
                if self.cluster is None or self.cluster.node_of(process):
                    return process
        return None

    def note(self) -> None:
        """Notes what is done."""
        folders = [path.parent for path in OUT.rglob("trials/*/config.yaml")]
        for run in folders:
            if (run / "result.json").exists():
                self.done.setdefault(run, ((run / "result.json").stat().st_mtime_ns, starts(run)))
            else:
                self.begun.append((run, len(starts(run)), newest_step(run)))
        self.where.append(f"{len(self.done)} runs done, {len(folders) - len(self.done)} begun")

    def conclude(self, status: int) -> None:
        found = self.differences
        if status:
            found.append(f"the command ends with {status}: {self.server.log.read_text()[-300:]}")
        for run, (when, where) in self.done.items():
            if (run / "result.json").stat().st_mtime_ns != when or starts(run) != where:
                found.append(f"{run} was finished, and was made again")
        for run, times, step in self.begun:
            if any(start < step for start in starts(run)[times : times + 1]):
                found.append(f"{run} began again at step {starts(run)[times]}, with a checkpoint of step {step}")


def newest_step(run: Path) -> int:
    names = " ".join(path.name for path in run.glob("checkpoints/*.ckpt"))
    return max(map(int, re.findall(r"step=(\d+)\.ckpt", names)), default=0)


def runs_in(out: Path) -> list[Path]:
    """The finished runs under a folder, by their paths in it."""
    return sorted(path.parent.relative_to(out) for path in out.rglob("result.json"))


def unlike(ours: Path, theirs: Path) -> list[str]:
    """What differs in the runs under two folders, bit by bit, and in the best values of sweeps, in words."""
    found: list[str] = []
    if runs_in(ours) != runs_in(theirs):
        return [f"the finished runs are {runs_in(ours)} instead of {runs_in(theirs)}"]
    for run in runs_in(theirs):
        for each in differences(observed(ours / run), observed(theirs / run), str(run)):
            # a worker whose driver was killed saves its step, after which another one is the newest but one
            is_older = "/resume/step=" in each and f"/resume/step={STEPS}.ckpt" not in each
            if not (is_older and each.endswith(("is missing", "is left behind"))):
                found.append(each)
    for best in theirs.rglob("best.yaml"):
        if (ours / best.relative_to(theirs)).read_text() != best.read_text():
            found.append(f"{best.relative_to(theirs)} is another one")
    return found


def unlike_table(ours: Path, theirs: Path) -> list[str]:
    """What differs in the tables of two sweeps by more than rounding."""
    rows = list(zip_longest(numbers_of(ours), numbers_of(theirs), fillvalue=[]))
    return [
        f"row {row}: {one} instead of {other}"
        for row, (one, other) in enumerate(rows)
        if len(one) != len(other) or not all(map(partial(math.isclose, rel_tol=1e-6), one, other))
    ]
