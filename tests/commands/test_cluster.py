"""Sweeps and experiments on a Ray cluster: nodes and drivers that die, the same numbers as without Ray, bad input."""

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import LR, NOISE, refused, small
from paths import ROOT
from program_server import Server
from programs import wait_until
from ray_cluster import ENVIRONMENT, LocalCluster, is_dead
from sweeps import process_in, starts, unlike

from mupscale.commands.lab import on_ray
from mupscale.commands.lab.jobs import Job
from mupscale.commands.lab.on_ray import Resources, Site, code, needs_of, refuse_node, result_of_task
from mupscale.commands.lab.run import Run, Trial
from mupscale.errors import UserError

HOLD = {"class_path": "extensions.Hold"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as answer:
        yield answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts command lines in a folder of its own."""
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        answer = Server(folder, INTERRUPTED_IMPORTS="ray without_figures", **ENVIRONMENT)
    with answer:
        yield answer


@pytest.fixture
def _in_the_folder_of_commands(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(server.log.parent)
    yield
    Path("hold").unlink(missing_ok=True)  # of a test that failed: its runs must end


def held(sweep: str, cluster: LocalCluster) -> dict[int, Path]:
    """The runs of two trials that are held at step 30, by the nodes that make them; nothing before that."""
    runs = {path.parent.parent for path in Path(sweep).glob("trials/*/checkpoints/*step=20.ckpt")}
    return {cluster.node_of(process_in(run / "run.lock")): run for run in runs} if len(runs) == 2 else {}


# --- bad input: one line before anything starts, and nothing written


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--gpus_per_run", "0.5"], ["--gpus_per_run", "--ray"]),
        (["--cpus_per_run", "2"], ["--cpus_per_run", "--ray"]),
        (["--ray", "auto", "--gpus_per_run", "2"], ["--gpus_per_run", "from 0 to 1", "0.25"]),
        (["--ray", "auto", "--cpus_per_run", "0"], ["--cpus_per_run", "got 0"]),
        (["--ray", "auto", "--workers", "2"], ["--workers and --ray: give one"]),
        (["--ray", "auto", "--part", "0/2"], ["--part and --ray: give one"]),
        (["--ray", "head"], ["--ray head", "auto", "HOST:PORT"]),
        (["--ray", "ray://head:10001"], ["--ray ray://head:10001", "auto", "HOST:PORT"]),
        (["--ray", "127.0.0.1:1"], ["--ray 127.0.0.1:1", "no Ray cluster answers there"]),
        (["--ray", "127.0.0.1:99999999"], ["--ray 127.0.0.1:99999999"]),
    ],
)
def test_options_and_addresses(options: list[str], parts: list[str]) -> None:
    message = refused("sweep", "--config", small(Path("c.yaml")), "--sweep", f"{LR}=0.01", "--out", "r", *options)
    assert all(part in message for part in parts), message
    assert not Path("r").exists()


def options_of(gpus: float | None, cpus: float | None) -> argparse.Namespace:
    return argparse.Namespace(gpus_per_run=gpus, cpus_per_run=cpus)


SMALL, LARGE = Resources(2, 0), Resources(8, 2)


@pytest.mark.parametrize(
    ("given", "accelerator", "there", "needs"),
    [
        ((None, None), "auto", [SMALL], (1, 0)),
        ((None, None), "auto", [SMALL, LARGE], (1, 1)),
        ((None, None), "cpu", [SMALL, LARGE], (1, 0)),
        ((0.25, 2), "auto", [LARGE], (2, 0.25)),
        ((1, None), "auto", [SMALL], "no node has 1 CPUs and 1 GPUs for a run; the nodes of the cluster have 2 and 0"),
        ((None, 9), "auto", [SMALL, LARGE], "no node has 9 CPUs and 1 GPUs .* have 2 and 0, 8 and 2"),
    ],
)
def test_what_a_run_asks_for(given: Any, accelerator: str, there: list[Resources], needs: Any) -> None:
    if isinstance(needs, str):
        with pytest.raises(UserError, match=needs):
            needs_of(options_of(*given), accelerator, there)
    else:
        assert needs_of(options_of(*given), accelerator, there) == needs


def test_room_on_a_node() -> None:
    assert [LARGE.room(Resources(*needs)) for needs in ((1, 0), (1, 1), (1, 0.25), (2, 0.25))] == [8, 2, 8, 4]
    assert [SMALL.room(Resources(*needs)) for needs in ((1, 0), (1, 0.5), (3, 0))] == [2, 0, 0]


# --- nodes and drivers that die


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_node_is_checked_by_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "SIGHT_SECONDS", 0)
    site = Site(Path.cwd(), Path("o").absolute(), "process 7 on head\n", code())
    for lock in (None, "process 7 on another\n"):
        if lock:  # in a folder of its own that has the same name
            Path("o").mkdir()
            Path("o/run.lock").write_text(lock)
        with pytest.raises(UserError, match=r"node .*: it does not see the files in .*/o; give --out a folder on sto"):
            refuse_node(site)
    Path("o/run.lock").write_text(site.lock)
    refuse_node(site)
    with pytest.raises(UserError, match=r"node .*: it does not see the working directory, /nowhere; start in"):
        refuse_node(site._replace(working_directory=Path("/nowhere")))
    with pytest.raises(UserError, match=r"node .*: it has torch .*, this process has 0; install the same"):
        refuse_node(site._replace(code={"torch": "0"}))


def test_what_a_task_ends_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import ray
    from ray.exceptions import NodeDiedError, RayTaskError

    job = Job([Trial("sweep_1, lr=1", [Run({}, Path("7"), "7")])], "off")

    def end(error: Exception) -> None:
        def get(task: str) -> None:
            raise error

        monkeypatch.setattr(ray, "get", get)
        result_of_task("task", job)

    with pytest.raises(UserError, match=r"^sweep_1, lr=1: .*gone.*; run the same command again to continue$"):
        end(NodeDiedError("gone"))
    with pytest.raises(UserError, match=r"^lr must be positive$"):
        end(RayTaskError("f", "Traceback …", UserError("lr must be positive")).as_instanceof_cause())
    text = 'Traceback (most recent call last):\n  File "f.py", line 1, in f\nZeroDivisionError: by zero'
    with pytest.raises(UserError, match=r"^sweep_1, lr=1 failed with the error above; fix it, then run"):
        end(RayTaskError("f", text, ZeroDivisionError()).as_instanceof_cause())
    assert "ZeroDivisionError: by zero" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("_in_the_folder_of_commands")
def test_the_quickstart_experiment_survives_a_node_and_its_driver(cluster: LocalCluster, server: Server) -> None:
    content = yaml.safe_load((ROOT / "configs/experiments/quickstart.yaml").read_text())
    first, second = content["config"]
    second["trainer"] |= {"max_steps": 40, "callbacks": [HOLD]}
    content |= {"config": [str(ROOT / first), second], "metric": "last_100%", "seeds": [0]}
    content["sweep_2"] = {NOISE: [0.1]}
    Path("e.yaml").write_text(yaml.safe_dump(content))
    arguments = ["experiment", "e.yaml", "--out", "o", "--checkpoint.every_n_train_steps=20"]
    server.run(*arguments)
    Path("o").rename("embedded_experiment")

    node = cluster.another()
    Path("hold").write_text("sweep_1")
    driver = server.start(*arguments, "--ray", cluster.address)
    runs = wait_until(lambda: held("o/sweep_1", cluster), server.log)
    assert {*runs} == {0, node}
    process = process_in(runs[node] / "run.lock")
    cluster.kill(node)
    wait_until(lambda: is_dead(process), server.log)
    Path("hold").write_text("upscale")
    wait_until(lambda: list(Path("o/upscale/trials").glob("*/checkpoints/*step=20.ckpt")), server.log)
    done = {path: path.stat().st_mtime_ns for path in Path("o").rglob("result.json")}
    os.kill(driver, signal.SIGKILL)
    assert server.answer() == -signal.SIGKILL
    server.start(*arguments, "--ray", cluster.address)
    Path("hold").unlink()  # the task of the driver that was killed may still be there
    assert server.answer() == 0, server.log.read_text()[-3000:]

    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert unlike(Path("o"), Path("embedded_experiment")) == []
    assert starts(runs[node]) == [0, 20]
    for run in done:
        assert starts(run.parent) in ([0], [0, 20])
