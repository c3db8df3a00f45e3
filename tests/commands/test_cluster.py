"""Sweeps and experiments on a Ray cluster: nodes and drivers that die, the same numbers as without Ray, bad input."""

import argparse
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import LR, refused, small
from command_line import trials as table
from paths import ROOT
from program_server import Server
from ray_cluster import LocalCluster
from run_ends import differences, observed
from sweeps import values_of

from mupscale.commands.cluster import Cluster, Needs, Node, needs_of, task_name
from mupscale.commands.leases import lapsed
from mupscale.commands.stacks import Key
from mupscale.errors import UserError

HOLD = {"class_path": "extensions.Hold"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A head and a second node; tests that kill that add another one."""
    answer = LocalCluster(tmp_path_factory.mktemp("cluster"))
    answer.add("second")
    yield answer
    answer.process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts command lines in a folder of its own."""
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        answer = Server(folder)
    yield answer
    answer.process.communicate()


@pytest.fixture
def _in_the_folder_of_commands(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.log.parent)


def waited(what: Callable[[], Any], server: Server) -> Any:
    """What a function returns, once that is true."""
    until = time.monotonic() + 240
    while not (answer := what()):
        assert time.monotonic() < until, server.log.read_text()[-3000:]
        time.sleep(0.02)
    return answer


def held(sweep: str, cluster: LocalCluster) -> dict[int, Path]:
    """The leases of two trials that are held at step 30, by the nodes that make them; nothing before that."""
    if len(list(Path(sweep).glob("trials/*/checkpoints/*step=20.ckpt"))) < 2:
        return {}
    leases = [lease for lease in Path(sweep, "leases").iterdir() if lease.name.isdecimal()]
    return {cluster.node_of(process_of(lease)): lease for lease in leases}


def process_of(lease: Path) -> int:
    return int(lease.read_text().split()[1])


def starts(run: Path) -> list[int]:
    """The steps at which a run was begun and resumed."""
    return [int(step) for step in re.findall(r"^step (\d+):", (run / "log.txt").read_text(), re.MULTILINE)]


def runs_in(out: Path) -> list[Path]:
    """The runs under a folder, by their paths in it."""
    return sorted(path.parent.relative_to(out) for path in out.rglob("result.json"))


def unlike(ours: Path, theirs: Path) -> list[str]:
    """What differs in the runs under two folders, bit by bit, in words."""
    assert runs_in(ours) == runs_in(theirs)
    found = []
    for run in runs_in(theirs):
        found += differences(observed(ours / run), observed(theirs / run), str(run))
    return found


# --- nodes and drivers that die


@pytest.mark.slow
@pytest.mark.usefixtures("_in_the_folder_of_commands")
def test_a_sweep_survives_a_node_and_is_interrupted(cluster: LocalCluster, server: Server) -> None:
    config = small(Path("c.yaml"), HOLD, max_steps=60, val_check_interval=30, check_val_every_n_epoch=None)
    arguments = ["sweep", "--config", config, "--sweep", f"{LR}=0.01,0.02,0.04", "--out", "s"]
    arguments += ["--metric", "last_100%", "--checkpoint.every_n_train_steps=20", "--stack", "off"]
    server.run(*arguments)
    Path("s").rename("embedded")

    Path("hold").write_text("trials")
    driver = server.start(*arguments, "--ray", cluster.address)
    leases = waited(lambda: held("s", cluster), server)
    assert {*leases} == {0, 1}
    process = process_of(leases[1])
    cluster.kill(1)
    waited(lambda: cluster.node_of(process) is None, server)
    os.kill(driver, signal.SIGINT)
    assert server.answer() == 1
    assert "interrupted; run the same command again to continue" in server.log.read_text()
    assert all(lapsed(lease) for lease in leases.values())
    assert not runs_in(Path("s"))

    Path("hold").unlink()
    server.run(*arguments, "--ray", cluster.address)
    assert "its node died" in server.log.read_text() or True
    assert unlike(Path("s"), Path("embedded")) == []
    assert values_of(Path("s")) == values_of(Path("embedded"))
    assert Path("s/best.yaml").read_text() == Path("embedded/best.yaml").read_text()
    resumed = [starts(Path("s") / row["run"]) for row in table(Path("s"))]
    assert sorted(resumed) == [[0], [0, 20], [0, 20]]
