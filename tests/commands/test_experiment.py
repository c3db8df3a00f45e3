"""The paper's procedure: from one command, killed and continued to the same numbers, and mistakes in its file."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import LR, NOISE, config_of, refused, swap_of
from command_line import trials as table
from experiment_files import described, file
from logged import losses
from paths import ROOT
from programs import start_fork, wait_until

from mupscale.__main__ import main
from mupscale.commands.checkpoints import read_result
from mupscale.commands.experiment import OPTIONAL, REQUIRED, Study, as_values, growths_of, procedure, read
from mupscale.commands.sweep_folder import SweepFolder

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

OUT = Path("runs/experiments/e")


def run_of(name: str, seed: int, out: Path = OUT) -> Path:
    """The folder of a run of several seeds."""
    (folder,) = (out / name / "trials").glob(f"*seed={seed}")
    return folder


def values(out: Path) -> dict[str, float]:
    """The metric of every run."""
    return {str(path.parent.relative_to(out)): read_result(path.parent)["value"] for path in out.rglob("result.json")}


@pytest.mark.slow
def test_the_whole_procedure_and_again_killed_twice(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--data.batch_size=900"]
    main(["experiment", file(described(trainer={"precision": "64-true"})), *options])
    output = capfd.readouterr().out
    assert f"the report is {OUT / 'report' / 'index.html'}" in output
    best = {name: min(table(OUT / name), key=lambda row: float(row["last_epoch"])) for name in ("sweep_1", "sweep_2")}
    assert [len(table(OUT / name)) for name in best] == [2, 2]
    lr, std = float(best["sweep_1"][LR]), float(best["sweep_2"][NOISE])
    assert (lr, std) == (0.02, 0.05)
    for trial in (OUT / "sweep_2/trials").iterdir():  # from the best trial of sweep 1
        model = config_of(trial)["model"]["init_args"]
        assert model["init_from"] == f"{OUT}/sweep_1/{best['sweep_1']['run']}/checkpoints/last.ckpt"
        assert (model["width"], swap_of(trial)["width"], swap_of(trial)["at_step"]) == (8, 16, 0)
    for seed in (3, 4):
        runs = base, _, upscaled = [run_of(name, seed) for name in ("base", "scratch", "upscale")]
        models = [config_of(run)["model"]["init_args"] for run in runs]
        assert [config_of(run)["seed_everything"] for run in runs] == [seed] * 3
        assert [model["width"] for model in models] == [16, 32, 16]
        assert [model["optimizer"]["init_args"]["lr"] for model in models] == [lr, lr, 0.005]
        assert models[2]["init_from"] == f"{base}/checkpoints/last.ckpt"
        assert (swap_of(upscaled)["width"], swap_of(upscaled)["noise"]["init_args"]["std"]) == (32, std)
        assert [config_of(run)["data"]["init_args"]["batch_size"] for run in runs] == [900] * 3
        assert read_result(upscaled)["value"] == pytest.approx(math.fsum(losses(upscaled)[-6:]) / 6, rel=1e-6)

    before = {path: path.stat().st_mtime_ns for path in OUT.rglob("*") if path.is_file() and "report" not in path.parts}
    main(["experiment", "e.yaml", *options])
    assert "begins" not in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert refused("experiment", "e.yaml", "--data.batch_size=800").startswith(
        f"error: --out {OUT} holds another experiment"
    )
    main(["experiment", "e.yaml", *options, "--plan"])
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"{name}: finished" for name in ("sweep_1", "base", "scratch", "sweep_2", "upscale")]

    # one run after another, and killed in a sweep, and in the last runs: nothing that is finished is made again
    arguments, apart = ["experiment", "e.yaml", *options, "--out", "apart", "--stack", "off"], Path("apart")
    done: dict[Path, int] = {}
    for part in ("sweep_2/trials", "upscale/trials"):
        process = start_fork(lambda: main(arguments))
        wait_until(lambda folder=apart / part: any(folder.glob("*/checkpoints/*.ckpt")))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert {path: path.stat().st_mtime_ns for path in done} == done
        done = {path: path.stat().st_mtime_ns for path in apart.rglob("result.json")}
    main(arguments)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert values(apart) == pytest.approx(values(OUT), rel=1e-10)


def test_without_sweep_1_a_small_base_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    content = read(Path(file(described(sweep_1=None))), REQUIRED, OPTIONAL)
    study, calls = Study(Path("out"), content["config"], only_checks=True), []
    monkeypatch.setattr("mupscale.commands.sweep.sweep_settings", lambda options, rest: calls.append(options.sweep))
    procedure(study, content)
    assert study.checked == ["small_base", "base", "scratch", "sweep_2", "upscale"]
    assert [len(axes) for axes in calls] == [0, 0, 0, 2, 0]


def test_a_sweep_in_its_folder() -> None:
    folder = Path("s")
    folder.mkdir()
    swept = SweepFolder(folder)
    assert not swept.is_finished
    (folder / "sweep.json").write_text(json.dumps({"trials": 2, "metric": "m", "seeds": [3, 4]}))
    rows = "trial,m,run\n0,diverged,trials/000_a,seed=3\n"
    (folder / "trials.csv").write_text(rows.replace("trials/000_a,seed=3", '"trials/000_a,seed=3"'))
    assert not swept.is_finished
    assert not swept.has_diverged
    (folder / "trials.csv").write_text("trial,m,run\n0,diverged,x\n1,diverged,x\n")
    assert swept.has_diverged
    (folder / "trials.csv").write_text('trial,m,run\n0,2.0,x\n1,0.5,"trials/001_a,seed=3"\n')
    assert str(swept.checkpoint) == "s/trials/001_a,seed={seed}/checkpoints/last.ckpt"


def test_values_as_a_sweep_takes_them() -> None:
    assert as_values("0.1:4:6") == "0.1:4:6"
    assert as_values([0.1, 2, "text", None, True, [1, 2]]) == '0.1,2,"text",null,true,[1, 2]'


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"sweep": {}}, "e.yaml: an experiment has no key 'sweep'; its keys are config, small"),
    "missing key": ({"sweep_2": None}, "e.yaml: an experiment needs the key 'sweep_2'"),
    "no list of seeds": ({"seeds": 3}, "seeds: give a list of different whole numbers, got 3"),
    "a seed twice": ({"seeds": [3, 3]}, "base: --seeds 3,3: a seed is given twice"),
    "no file": ({"config": "nowhere.yaml"}, "sweep_1: "),
    "other factors": ({"target": [16, 64]}, "target grows from 16 → 64, small from 8 → 16; give one factor"),
    "a table that is a list": ({"sweep_2": [1]}, "sweep_2: give keys and their values"),
    "a key that fit has not": ({"sweep_2": {"model.nothing": [1]}}, "sweep_2: --sweep "),
    "a noise that is none": ({"noise": {"class_path": "torch.nn.Linear"}}, "sweep_2: "),
    "a width that is refused": ({"target": [-16, -32]}, "target: give two widths"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported_before_the_first_run(name: str) -> None:
    keys, message = MISTAKES[name]
    assert refused("experiment", file(described(**keys))).startswith(f"error: {message}")
    assert not OUT.exists()


SHIPPED = sorted((ROOT / "configs" / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    content = read(path, REQUIRED, OPTIONAL)
    small, target = growths_of(content)
    assert small.factors == target.factors
    assert f"python -m mupscale experiment configs/experiments/{path.name}" in path.read_text()
    assert yaml.safe_load(path.read_text()).keys() <= {*REQUIRED, *OPTIONAL}
