"""Jobs in processes of a pool: which GPU they see, deaths, signals, and a driver that is killed."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import LR, small
from programs import wait_until
from sweeps import process_in, starts, values_of
from worker_jobs import Dies, Interrupts, Refuses, Sees

from mupscale.commands.lab import workers as lab_workers
from mupscale.commands.lab.jobs import Job
from mupscale.commands.lab.run import Run, Trial
from mupscale.commands.lab.workers import workers
from mupscale.commands.process import Terminated
from mupscale.errors import UserError

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def trial(name: str) -> list[Trial]:
    return [Trial(name, [Run({}, Path(name), name)])]


def made(slots: int, gpus: list[str], *jobs: Job) -> list[str]:
    """The names of jobs that have ended."""
    with workers(slots, gpus) as executor:
        return [path.name.rpartition("-")[2] for results in executor.make(list(jobs)) for path in results]


def test_workers_share_the_gpus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert sorted(made(2, ["4", "7"], *(Sees(trial(name), "off") for name in "ab"))) == ["a", "b"]
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert sorted(path.read_text() for path in Path().glob("seen-*")) == [f"4 {threads}", f"7 {threads}"]


def test_a_process_that_dies_is_replaced_until_the_last_death(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third in use. A mistake is the same line as without workers."""
    assert lab_workers.MOST_DEATHS == 3
    monkeypatch.setattr(lab_workers, "MOST_DEATHS", 2)
    with workers(1, []) as executor:
        results = executor.make([Dies(trial("a"), "off", times=1), Dies(trial("b"), "off", times=2)])
        assert [path.name for path in next(results)] == ["deaths-a"]
        with pytest.raises(UserError, match=r"^b: its process died, 2 times. If the memory is too small"):
            next(results)
        assert capsys.readouterr().err.count("a: its process died; the runs continue") == 1
        with pytest.raises(UserError, match=r"^lr must be positive$"):
            next(executor.make([Refuses(trial("c"), "off")]))


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interrupted_command_stops_its_workers(number: int, ending: type[BaseException]) -> None:
    with pytest.raises(ending):
        made(1, [], Interrupts(trial("a"), "off", number=number, process=os.getpid()))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("child").read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_workers_end_with_their_driver_and_the_next_one_goes_on(tmp_path: Path, start_server: Any) -> None:
    """A killed driver, and a killed worker: the results of an uninterrupted run, and no finished run made again."""
    config = small(tmp_path / "c.yaml", max_steps=800, val_check_interval=800, check_val_every_n_epoch=None)
    # one run: each worker takes many seconds to start
    arguments = ["sweep", "--config", config, "--sweep", f"{LR}=0.01", "--metric", "last_100%", "--stack", "off"]
    arguments += ["--checkpoint.every_n_train_steps=100", "--workers", "2", "--out", "s"]
    server = start_server(tmp_path)

    def files(pattern: str) -> list[Path]:
        with suppress(FileNotFoundError):  # a worker that looks at a run makes its folder, and deletes it again
            return list(Path("s/trials").glob(pattern))
        return []

    def processes() -> list[int]:
        return [process for lock in files("*/run.lock") if (process := process_in(lock))]

    driver = server.start(*arguments)
    wait_until(lambda: files("*/checkpoints/resume/*") and processes(), server.log)
    os.kill(driver, signal.SIGKILL)
    assert server.answer() == -signal.SIGKILL
    orphans = processes()
    server.start(*arguments)  # at once: its workers wait for the runs until the others have left them
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), server.log)
    os.kill(min(wait_until(lambda: {*processes()} - {*orphans}, server.log)), signal.SIGKILL)
    assert server.answer() == 0, server.log.read_text()[-3000:]
    assert "its process died; the runs continue" in server.log.read_text()
    server.run(*arguments[:-4], "--out", "whole")
    assert values_of(Path("s")) == values_of(Path("whole"))
    for run in Path("s/trials").iterdir():
        assert starts(run)[0] == 0
        assert all(step > 0 for step in starts(run)[1:])
