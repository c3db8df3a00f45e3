"""Experiments: the protocol end to end, killed and resumed to the same numbers; workers; transfer; bad files."""

import csv
import json
import math
import os
import re
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import LR, NOISE, config_of, refused, small, swap_of
from command_line import trials as table
from experiments import ADDITIVE, described, file, finish, lr_in, lr_of, upscale
from logged import losses
from paths import ROOT
from programs import wait_until
from sweeps import process_in, starts
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.commands import figures
from mupscale.commands.lab import workers as lab_workers
from mupscale.commands.lab.driver import Driver, Ending, Job
from mupscale.commands.lab.file import Description, Growth, check, growths_of, read
from mupscale.commands.lab.protocols import Experiment
from mupscale.commands.lab.run import Run, Trial, result_of
from mupscale.commands.lab.stack_loop import Apart
from mupscale.commands.lab.sweep import Sweep
from mupscale.commands.lab.transfer import Panel, WidthCurve, draw
from mupscale.commands.process import Terminated
from mupscale.errors import UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def transfer(**keys: Any) -> dict[str, Any]:
    defaults = {
        "growths": [[8, 16], [16, 32]], "seeds": [3, 4], "noise": ADDITIVE, "sweeps": {"noise": {NOISE: [0.05, 5.0]}},
    }  # fmt: skip
    return described("transfer", **{**defaults, **keys})


def values(out: Path) -> dict[str, float]:
    """The metric of every run under a folder, by its path."""
    return {str(path.parent.relative_to(out)): result_of(path.parent)[0] for path in out.rglob("result.json")}


class Idle:
    """An executor that refuses to make a job; the message names its first run."""

    slots, has_room = 1, True

    def submit(self, job: Job) -> None:
        raise UserError(f"{job} would be made")

    def wait(self) -> list[Any]:
        raise AssertionError


@pytest.fixture
def _trained_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures, and without the check of the file, which the test of shipped files has: they take seconds."""
    monkeypatch.setattr("mupscale.commands.reporting.draw_figures", lambda *_: [])
    monkeypatch.setattr("mupscale.commands.lab.protocols.check", lambda description: None)


# --- the protocol


@pytest.mark.slow
@pytest.mark.usefixtures("_trained_only")
def test_the_whole_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    out = Path("runs/experiments/e")
    options = ["--data.batch_size=900"]
    main(["experiment", file(upscale(trainer={"precision": "64-true"})), *options])
    output = capfd.readouterr().out
    units = ["sweep_1, lr=0.001", "sweep_1, lr=0.02", "sweep_2, lr=0.005, std=0.05", "sweep_2, lr=0.005, std=5"]
    units += [f"{role}, seed {seed}" for role in ("base", "scratch", "upscale") for seed in (3, 4)]
    assert Counter(re.findall(r"^(.*): begins$", output, re.MULTILINE)) == dict.fromkeys(units, 1)
    ends = re.findall(r"^(.*): (?:training loss )?[\d.]+ in \d+ s; ", output, re.MULTILINE)
    assert Counter(ends) == dict.fromkeys(units, 1)
    assert "10 of 10 runs left; watch them with tensorboard --logdir runs/experiments/e\n" in output
    left = [int(number) for number in re.findall(r"(\d+) of 10 runs left$", output, re.MULTILINE)]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0

    best = {name: min(table(out / name), key=lambda row: float(row["last_epoch"])) for name in ("sweep_1", "sweep_2")}
    assert [len(table(out / name)) for name in best] == [2, 2]
    lr, std = float(best["sweep_1"][LR]), float(best["sweep_2"][NOISE])
    assert (lr, std) == (0.02, 0.05)
    for trial in (out / "sweep_2/trials").iterdir():  # from the best trial of sweep 1
        model = config_of(trial)["model"]["init_args"]
        assert model["init_from"] == f"{out}/sweep_1/{best['sweep_1']['run']}/checkpoints/last.ckpt"
        assert (model["width"], swap_of(trial)["width"], swap_of(trial)["at_step"]) == (8, 16, 0)
    for seed in (3, 4):
        base, scratch, upscaled = (out / role / f"seed={seed}" for role in ("base", "scratch", "upscale"))
        assert [config_of(run)["seed_everything"] for run in (base, scratch, upscaled)] == [seed] * 3
        assert [config_of(run)["model"]["init_args"]["width"] for run in (base, scratch, upscaled)] == [16, 32, 16]
        assert [lr_of(run) for run in (base, scratch, upscaled)] == [lr, lr, 0.005]
        assert config_of(upscaled)["model"]["init_args"]["init_from"] == f"{base}/checkpoints/last.ckpt"
        assert (swap_of(upscaled)["width"], swap_of(upscaled)["noise"]["init_args"]["std"]) == (32, std)
        assert [config_of(run)["data"]["init_args"]["batch_size"] for run in (base, scratch, upscaled)] == [900] * 3
        assert result_of(upscaled)[0] == pytest.approx(math.fsum(losses(upscaled)[-6:]) / 6, rel=1e-6)
    described = json.loads((out / "experiment.json").read_text())
    assert described["runs"][0] == {"role": "base", "seed": 3, "folder": "base/seed=3"}
    assert [run["role"] for run in described["runs"]] == ["base", "base", "scratch", "upscale", "scratch", "upscale"]
    assert described["sweeps"] == {"sweep_1": "sweep_1", "sweep_2": "sweep_2"}
    assert "Upscaled ends" in (out / "report/index.html").read_text()

    kept = (
        path for path in out.rglob("*") if path.is_file() and path.name != "run.lock" and path.parent.name != "report"
    )
    before = {path: path.stat().st_mtime_ns for path in kept}
    (out / ".report-of-the-dead").mkdir()
    main(["experiment", "e.yaml", *options])
    again = capfd.readouterr().out
    assert not list(out.glob(".report-*"))
    assert f"{out}: all 10 runs are done" in again
    assert "begins" not in again
    assert again.splitlines()[1:] == output.splitlines()[-2:]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    of = values(out)
    mean = sum(of[f"upscale/seed={seed}"] for seed in (3, 4)) / 2
    assert f"Upscaled ends at {mean:#.4g} (" in again

    assert is_stacked(output)
    main(["experiment", "e.yaml", *options, "--out", "apart", "--stack", "off"])
    assert not is_stacked(capfd.readouterr().out)
    assert values(Path("apart")) == pytest.approx(of, rel=1e-10)


def is_stacked(output: str) -> bool:
    """Whether the second seed of the base begins before the first one ends."""
    base = [line for line in output.splitlines() if line.startswith("base, ")]
    return all(line.endswith(": begins") for line in base[:2])


@pytest.mark.slow
def test_what_is_laid_over_the_upscaled_runs_only() -> None:
    laid = {"model": {"init_args": {"optimizer": {"init_args": {"lr": 0.004}}}}}
    description = read(Path(file(upscale(upscaled=laid))), ["--trainer.max_steps=30", "--model.optimizer.lr=0.02"])
    grown = description.config(description.grown(description.growths[1], Path("b.ckpt")), description.upscaled)
    rates = [config["model"]["init_args"]["optimizer"]["init_args"]["lr"] for config in (description.config(), grown)]
    assert rates == [0.02, 0.004]  # an option is laid over the configuration, and under what the experiment says
    assert grown["trainer"]["max_steps"] == 30
    inline = read(Path(file(upscale(config=["c.yaml", {"data": {"init_args": {"batch_size": 77}}}]))), [])
    assert inline.config()["data"]["init_args"]["batch_size"] == 77
    assert inline.config({"data": {"init_args": {"batch_size": 78}}})["data"]["init_args"]["batch_size"] == 78


@pytest.mark.slow
def test_a_base_that_diverges_is_an_error_and_other_runs_are_results() -> None:
    message = refused("experiment", file(upscale(sweep_1=None)), "--out", "o", "--model.optimizer.lr=1e7")
    parts = ("o/small_base/seed=3 diverged", "model.optimizer.lr", "sweep_1", "--out")
    assert all(part in message for part in parts), message
    assert "small_base/seed=3 diverged" in refused("experiment", "e.yaml", "--out", "o", "--model.optimizer.lr=1e7")
    whole = Experiment(Path("p"), read(Path("e.yaml"), []))
    for part, value in zip(whole.parts, (1, 1, 1, None, *[math.inf] * 4), strict=True):
        part.folder.mkdir(parents=True)
        (part.folder / "best.yaml").touch()
        if value is not None:
            finish(part.folder, value)
    assert whole.make(Driver(Idle(), "off"))
    finish(whole.parts[1].folder, math.inf)
    with pytest.raises(ValueError, match="p/base/seed=3 diverged"):
        whole.make(Driver(Idle(), "off"))
    assert "all 1 trials diverged" in refused("experiment", file(upscale(sweep_1={LR: [1e7]})), "--out", "q")
    assert not Path("q/base").exists()


@pytest.mark.slow
def test_the_plan_shows_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    main(["experiment", file(upscale()), "--out", "o", "--plan"])
    assert not Path("o").exists()
    assert "10 of 10 runs left" in capsys.readouterr().out
    Path("o/sweep_1").mkdir(parents=True)
    Path("o/experiment.json").write_text(json.dumps(read(Path("e.yaml"), []).identity()))
    finish(Path("o/base/seed=3"), 0.5)
    Path("o/sweep_1/trials.csv").write_text("trial,last_epoch\n0,0.5\n")
    main(["experiment", "e.yaml", "--out", "o", "--plan"])
    *rows, left = (line.strip() for line in capsys.readouterr().out.splitlines()[2:])
    assert [re.split("  +", row) for row in rows] == [
        ["1", "sweep_1", "2", "1"],
        ["2", "base, seed 3", "1", "1"], ["2", "base, seed 4", "1", "0"], ["2", "sweep_2", "2", "0"],
        ["3", "scratch, seed 3", "1", "0"], ["3", "upscale, seed 3", "1", "0"],
        ["3", "scratch, seed 4", "1", "0"], ["3", "upscale, seed 4", "1", "0"],
    ]  # fmt: skip
    assert left == "8 of 10 runs left"


# --- transfer


@pytest.mark.slow
def test_transfer_from_end_to_end(capfd: pytest.CaptureFixture[str]) -> None:
    main(["experiment", file(transfer()), "--out", "o"])
    output = capfd.readouterr().out
    assert output.count(": begins\n") == 4 + 4
    for growth, base in (("8-16", 8), ("16-32", 16)):
        runs = list(Path("o", growth, "noise/trials").iterdir())
        assert len(runs) == 4
        for run in runs:
            seed = run.name.rpartition("=")[2]
            init_from = config_of(run)["model"]["init_args"]["init_from"]
            assert init_from == f"o/{base}/base/seed={seed}/checkpoints/last.ckpt"
            assert swap_of(run)["width"] == 2 * base
    with open("o/transfer.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 4
    of = values(Path("o"))
    for row in rows:
        name = f"std={float(row['value']):g}"
        folder = f"{row['before']}-{row['after']}/{row['sweep']}/trials"
        pair = []
        for seed in (3, 4):
            (run,) = (run for run in of if run.startswith(folder) and run.endswith(f"_{name},seed={seed}"))
            pair.append(of[run])
        assert [float(row["seed 3"]), float(row["seed 4"]), float(row["last_epoch"])] == [*pair, sum(pair) / 2]
    assert {(row["sweep"], row["value"]) for row in rows if row["optimum"]} == {("noise", "0.05")}
    assert (
        f"noise: the optimum of {NOISE} stays in its cell (0.05 at 8 → 16, 0.05 at 16 → 32): it transfers\n" in output
    )
    assert Path("o/transfer.pdf").exists()
    described = json.loads(Path("o/experiment.json").read_text())
    assert described["runs"][0] == {"role": "base", "seed": 3, "folder": "8/base/seed=3"}
    assert list(described["sweeps"]) == ["8-16/noise", "16-32/noise"]


def panel(*optima: int) -> Panel:
    """Made up: five values, the optimum of each width at the given index."""
    levels = [0.1, 0.2, 0.4, 0.8, 1.6]
    curves = []
    for index, best in enumerate(optima):
        values = {level: [1.0 + abs(i - best), 1.2 + abs(i - best)] for i, level in enumerate(levels)}
        curves.append(WidthCurve(Growth(2**index, 2 ** (index + 1)), values))
    return Panel("lr", LR, levels, curves)


@pytest.mark.slow
def test_the_verdict_of_transfer() -> None:
    assert [panel(*optima).moved for optima in ((2, 2, 2), (1, 2, 1), (1, 2, 3), (3, 1))] == [0, 1, 2, 2]
    assert "moves by 1 cell of the grid (0.2 at 1 → 2, 0.4 at 2 → 4): it transfers" in panel(1, 2).verdict()
    assert "moves by 2 cells of the grid (0.2 at 1 → 2, 0.8 at 2 → 4): it does not transfer" in panel(1, 3).verdict()
    assert "edge" not in panel(1, 3).verdict()
    assert "at 1 of 2 widths it is at the edge of the grid" in panel(0, 1).verdict()
    assert "with the optimum" not in panel(1, 3, 1).verdict()
    assert "; with the optimum of 1 → 2, 2 → 4 ends 182 % above its best" in panel(1, 3).verdict()  # 3.1 against 1.1
    uneven = panel(1, 3)  # each seed has the best value of the other, 1.4 and 2.0; another level diverges
    uneven.curves[1].values.update({0.4: [1.0, 2.0], 0.8: [1.4, 1.2], 1.6: [math.inf]})
    assert "; with the optimum of 1 → 2, 2 → 4 ends 108 % above its best" in uneven.verdict()
    moving = panel(1, 3)
    moving.curves[1].values[0.2] = [math.inf]
    assert "; with the optimum of 1 → 2, 2 → 4 diverges" in moving.verdict()
    moving.curves[0].values[1.6] = [math.inf]
    moving.curves[1].values[0.1] = [1000.0, 1000.0]
    assert [curve.optimum for curve in moving.curves] == [0.2, 0.8]
    _, (ax,) = figures.panels(5, 4)
    figures.draw_profiles(ax, moving.levels, {str(curve.growth): curve.values for curve in moving.curves})
    low, high = ax.get_ylim()
    assert low < 1.1
    assert 3.2 < high < 3.6  # three times the optima, 1.1; not the thousand
    assert [path.name for path in draw(Path("t"), [moving, panel(2, 2)], "loss")] == ["t.png", "t.pdf"]


# --- processes


def fake_worker(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Workers that do what a shell script says."""
    Path("worker").write_text(f"#!/bin/sh\n{script}\n")
    Path("worker").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(Path("worker").absolute()))


def job(name: str) -> Job:
    return Job([Trial(name, [Run({}, Path(name), name)])], "off")


def test_workers_share_the_gpus_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fake_worker(monkeypatch, 'echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS $1 $2" > started-$$; kill -9 $$')
    with lab_workers.workers(5, ["4", "7"]) as executor:
        for index in range(5):
            assert executor.has_room
            executor.submit(job(f"job {index}"))
        assert not executor.has_room
        endings = []
        while len(endings) < 5:
            endings += executor.wait()
    assert {str(ending.job): ending.death for ending in endings} == {
        f"job {index}": "its process died (signal 9)" for index in range(5)
    }
    threads = max(1, (os.cpu_count() or 1) // 5)
    started = sorted(path.read_text() for path in Path().glob("started-*"))
    assert started == [f"{gpu} {threads} -m mupscale.commands.lab.workers\n" for gpu in (4, 4, 4, 7, 7)]


@pytest.mark.parametrize(
    ("end", "cause"), [("exit 130", "signal 2"), ("exit 143", "signal 15"), ("exit 3", "exit status 3")]
)
def test_a_worker_that_ends_is_replaced(end: str, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, end)
    with lab_workers.workers(1, []) as executor:
        for _ in range(2):
            executor.submit(job("a"))
            endings = executor.wait() or executor.wait() or executor.wait()
            assert [ending.death for ending in endings] == [f"its process died ({cause})"]


def wait_for_one_job() -> None:
    with lab_workers.workers(1, []) as executor:
        executor.submit(job("a"))
        while not executor.wait():
            pass


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interrupted_command_stops_its_workers(
    number: int, ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    # for a minute, and not for ever, should nobody stop it
    fake_worker(
        monkeypatch,
        f"trap '' TERM; echo $$ > child; kill -{number} {os.getpid()}; for i in $(seq 60); do sleep 1; done",
    )
    monkeypatch.setattr(lab_workers, "PATIENCE", 0.3)
    with pytest.raises(ending):
        wait_for_one_job()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("child").read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def answers(content: Any) -> Any:
    """What a worker that answers so ends with."""
    worker = object.__new__(lab_workers.Worker)
    worker.connection, theirs = lab_workers.Pipe()
    worker.job = job("base, seed 0")
    theirs.send(content)
    return worker.answer()


def test_what_a_worker_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(job("a"), {Path("a"): (1.0, 2.0)})
    assert answers(ending) == ending
    with pytest.raises(UserError, match=r"^lr must be positive$"):
        answers("lr must be positive")
    with pytest.raises(UserError, match=r"^base, seed 0 failed with the error above, and the other runs were stopped"):
        answers(None)

    def fail(error: Exception) -> Any:
        def make_apart(trials: list[Trial]) -> None:
            raise error

        monkeypatch.setattr("mupscale.commands.lab.driver.make_apart", make_apart)
        return lab_workers.carry_out(job("a"))

    assert fail(Apart("an LSTM")).apart == "an LSTM"
    assert fail(UserError("lr must be positive")) == "lr must be positive"
    assert capsys.readouterr().err == ""
    assert fail(ZeroDivisionError("by zero")) is None
    assert "ZeroDivisionError: by zero" in capsys.readouterr().err


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
    assert "its process died (signal 9); the runs continue" in server.log.read_text()
    server.run(*arguments[:-4], "--out", "whole")
    assert values(Path("s")) == values(Path("whole"))
    for run in Path("s/trials").iterdir():
        assert starts(run)[0] == 0
        assert all(step > 0 for step in starts(run)[1:])


# --- files


SHIPPED = sorted(path.stem for path in (ROOT / "configs/experiments").glob("*.yaml"))
OFTEN = ("quickstart", "midrun_quickstart", "transfer_mlp_sgd")
"""One of each protocol; with `--all`, all of them are checked, and run with `--quick`."""


@pytest.mark.parametrize("name", slow_except(SHIPPED, kept=OFTEN))
def test_shipped_experiments_are_accepted_without_data(name: str) -> None:
    path = ROOT / "configs/experiments" / f"{name}.yaml"
    Path("configs").symlink_to(ROOT / "configs")
    description = read(Path("configs/experiments", path.name), ["--trainer.accelerator=cpu"])
    check(description)
    assert f"python -m mupscale experiment configs/experiments/{path.name}" in path.read_text()
    assert not Path("data").exists()
    if description.protocol == "transfer":  # what the sweep of the rate holds fixed lies within the sweep of the noise
        levels, fixed = description.sweeps["noise"][0].values, description.content["noise"]["init_args"]["std"]
        assert min(levels) < fixed < max(levels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"protocol": "grow"}, ["protocol", "upscale or transfer", "grow"]),
        ({"sweep_3": {}}, ["sweep_3", "sweep_2"]),
        ({"config": "nope.yaml"}, ["config", "nope.yaml"]),
        ({"small": [8, 20]}, ["small", "multiple", "8 → 20"]),
        ({"target": [16, 64]}, ["target grows by 4", "small by 2"]),
        ({"small": [[8, 8], [16, 16]], "target": [[16, 16], [32, 32]]}, ["widths [8, 8] → [16, 16]"]),
        ({"sweep_1": {}}, ["sweep_1", "empty"]),
        ({"sweep_1": {LR: "0.1:0.2"}}, ["sweep_1", LR, "LOW:HIGH:N"]),
        ({"sweep_1": {NOISE: [0.1]}}, ["sweep_1:", NOISE]),
        ({"sweep_2": {LR: [0.1, "fast"]}}, ["sweep_2:", LR, "fast"]),
        ({"upscaled": [1]}, ["upscaled", "mapping"]),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_the_first_run(keys: dict[str, Any], parts: list[str]) -> None:
    message = refused("experiment", file(upscale(**keys)), "--out", "o")
    assert all(part in message for part in parts), message
    assert not Path("o").exists()


def test_numbers_are_decimal() -> None:
    """In YAML 1.1 1e-3 is a text, 1:30 is 90 and 010 is 8."""
    path = Path(file(upscale(sweep_1={LR: "VALUES"}, seeds="SEEDS")))
    text = path.read_text()

    def content(values: str, seeds: str = "[0, 1_000]") -> Description:
        path.write_text(text.replace("VALUES", values).replace("SEEDS", seeds))
        return read(path, [])

    assert content("[1e-3, 2E-2, 3.5]").content["sweep_1"] == {LR: [0.001, 0.02, 3.5]}
    whole = content("2:16:4")
    assert (whole.sweeps["sweep_1"][0].values, whole.seeds) == ((2, 4, 8, 16), [0, 1000])
    with pytest.raises(UserError, match=r"^sweep_1.model.optimizer.lr: 1:30 is not a value; a range LOW:HIGH:N has"):
        content("[1:30, 2:30]")
    for seeds in ("[010]", "[1:30]", "[1e0]", "[on]"):
        with pytest.raises(UserError, match=r"^seeds: give a list of different whole numbers, got"):
            content("[0.1]", seeds)


@pytest.mark.slow
def test_more_mistakes() -> None:
    assert "there is no file nope.yaml" in refused("experiment", "nope.yaml")
    away = refused("experiment", file(upscale(config="c/no.yaml")))
    assert f"there is no file c/no.yaml; paths begin where the command is started, in {Path.cwd()}" in away
    Path("e.yaml").write_text("a: [")
    assert "e.yaml is not YAML" in refused("experiment", "e.yaml")
    assert "trainer.devices" in refused("experiment", file(upscale()), "--trainer.devices=2")
    assert "--workers" in refused("experiment", "e.yaml", "--workers=0")
    assert "nope" in refused("experiment", "e.yaml", "--nope=1")
    grows = {"trainer": {"callbacks": [{"class_path": "UpscaleCallback", "init_args": {"at_step": 1, "width": 16}}]}}
    assert "UpscaleCallback already" in refused("experiment", file(upscale(config=["c.yaml", grows])))
    assert "growths: give at least two" in refused("experiment", file(transfer(growths=[[8, 16]])))
    assert "sweeps.both: give one key" in refused("experiment", file(transfer(sweeps={"both": {LR: [1], NOISE: [1]}})))
    assert "sweeps.lr: model.lr" in refused("experiment", file(transfer(sweeps={"lr": {"model.lr.x": [1]}})))
    assert "a growth is given twice" in refused("experiment", file(transfer(growths=[[8, 16], [8, 16]])))
    assert growths_of(transfer(growths=[[[8, 16], [16, 32]], [[16, 16], [32, 32]]]))[0].name == "8x16-16x32"
    assert not Path("runs").exists()


@pytest.mark.slow
def test_damaged_files_are_named_and_written_again() -> None:
    whole = Experiment(Path("o"), read(Path(file(upscale())), []))
    whole.begin(["command"])
    sweep, base = whole.parts[:2]
    assert isinstance(sweep, Sweep)
    for trial, value in zip(sweep.trials(), (0.2, 0.1), strict=True):
        finish(trial.runs[0].folder, value)
    with pytest.raises(UserError, match="base, seed 3 and 1 more would be made"):
        whole.make(Driver(Idle(), "auto"))
    best = Path("o/sweep_1/best.yaml").read_text()
    assert "lr: 0.02" in best
    Path("o/sweep_1/best.yaml").unlink()
    with pytest.raises(UserError, match="base, seed 3 and 1 more would be made"):
        whole.make(Driver(Idle(), "auto"))
    assert Path("o/sweep_1/best.yaml").read_text() == best
    Path("o/sweep_1/best.yaml").write_text("{}")  # it is written for users, and not read
    assert lr_in(base.trials()[0].runs[0].config) == 0.02

    base.folder.mkdir(parents=True)
    (base.folder / "result.json").write_text("")
    with pytest.raises(ValueError, match=r"^o/base/seed=3/result.json is damaged .*; delete it"):
        whole.make(Driver(Idle(), "auto"))
    described = Path("o/experiment.json").read_text()
    Path("o/run.lock").touch()  # of the command that made it
    for bad in ("", "{}", "[1]", described[:100]):
        Path("o/experiment.json").write_text(bad)
        with pytest.raises(ValueError, match=r"^o/experiment.json is damaged .*; delete it"):
            whole.begin(["command"])
    Path("o/experiment.json").unlink()
    whole.begin(["command"])
    assert Path("o/experiment.json").read_text() == described


@pytest.mark.slow
def test_another_experiment_is_left_alone() -> None:
    description = read(Path(file(upscale())), [])
    Experiment(Path("o"), description).begin(["command"])
    before = Path("o/experiment.json").read_bytes()
    for keys, options, different in (
        ({"seeds": [1]}, [], "experiment.seeds is [3, 4] there and [1] here"),
        ({}, ["--trainer.max_steps=7"], "trainer.max_steps is 20 there and 7 here"),
        # the file of the configuration has changed
        ({"trainer": {"max_steps": 8}}, [], "trainer.max_steps is 20 there and 8 here"),
    ):
        message = refused("experiment", file(upscale(**keys)), "--out", "o", *options)
        assert "--out o holds another experiment" in message
        assert different in message
        assert "holds another experiment" in refused("experiment", "e.yaml", "--out", "o", *options, "--plan")
    assert Path("o/experiment.json").read_bytes() == before
    assert sorted(path.name for path in Path("o").iterdir()) == ["experiment.json"]
    Path("mine").mkdir()
    Path("mine/file").touch()
    assert "not empty" in refused("experiment", file(upscale()), "--out", "mine")
    assert "is a file" in refused("experiment", "e.yaml", "--out", "mine/file")
