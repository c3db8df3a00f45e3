"""The scripts that compare methods, growth in mid-run, and optima over widths: whole, at a tiny size, and continued."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

import mupscale
from experiments import methods, midrun, transfer
from experiments.midrun import Costs, stretch
from experiments.transfer import Optimum, drift_of, optimum_of, width_number
from mupscale.commands.experiment import Study

NOISE = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
LR = "model.optimizer.lr"


def write(tmp_path: Path, **keys: Any) -> list[str]:
    """The arguments of a script; runs have 12 steps."""
    trainer = {"max_steps": 12, "callbacks": [], "log_every_n_steps": 2}
    config = [str(ROOT / "configs" / "quickstart.yaml"), {"trainer": trainer}]
    content = {"config": config, "seeds": [0, 1], "metric": "last_50%", **keys}
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(content))
    return [str(tmp_path / "e.yaml"), "--out", str(tmp_path / "out"), "--data.seed=1"]


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def trials(out: Path) -> dict[Path, int]:
    """When each run ended."""
    return {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}


@pytest.mark.slow
def test_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = {name: {"class_path": f"mupscale.methods.{name}"} for name in ("Duplication", "ZeroPadding")}
    sizes = {"small": [4, 8], "target": [8, 16]}
    arguments = write(tmp_path, **sizes, noise=NOISE, methods=compared, sweep_2={"UpscaleCallback.noise.std": [0.1, 0]})
    methods.main(arguments)
    out = tmp_path / "out"
    rows = read(out / "methods.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [(name, seed) for name in compared for seed in "01"]
    for row in rows:
        config = yaml.safe_load(
            next((out / "upscale" / row["method"]).glob(f"trials/*seed={row['seed']}/config.yaml")).read_text()
        )
        (swap,) = (each for each in config["trainer"]["callbacks"] if "UpscaleCallback" in each["class_path"])
        assert swap["init_args"]["method"]["class_path"] == f"mupscale.methods.{row['method']}"
        base = Path(config["model"]["init_args"]["init_from"])
        assert f"seed={row['seed']}" in str(base)
        assert base.is_relative_to(out / "base")
        assert float(row["loss_before"]) == pytest.approx(float(row["loss_just_after"]), rel=0.2)
    ended = trials(out)
    assert len(ended) == 1 + 2 + 2 + 2 * (2 + 2), (
        "small base, bases, from scratch, and for each method a sweep and runs"
    )
    methods.main(arguments)
    assert trials(out) == ended
    assert capsys.readouterr().out.count("wrote ") >= 2


@pytest.mark.slow
def test_transfer(tmp_path: Path) -> None:
    arguments = write(tmp_path, growths=[[4, 8], [8, 16]], noise=NOISE, sweeps={"lr": {LR: [0.001, 0.01, 0.1]}})
    transfer.main(arguments)
    out = tmp_path / "out"
    rows = read(out / "transfer.csv")
    assert [(row["before"], float(row["value"])) for row in rows] == [
        (n, lr) for n in "48" for lr in (0.001, 0.01, 0.1)
    ]
    for before in "48":
        of = [row for row in rows if row["before"] == before]
        best = min(of, key=lambda row: float(row["last_50%"]))
        assert [row["optimum"] for row in of] == ["*" if row is best else "" for row in of]
    for row in rows:
        seeds = [float(row[f"seed {seed}"]) for seed in (0, 1)]
        assert float(row["last_50%"]) == pytest.approx(sum(seeds) / 2)
    assert len({row["exponent"] for row in read(out / "drift.csv")}) == 1
    assert (out / "transfer.png").is_file()


@pytest.mark.slow
def test_midrun(tmp_path: Path) -> None:
    schedule = {"class_path": "mupscale.schedules.WarmupStableDecay"}
    schedule["init_args"] = {"warmup": 1, "steps": "100%", "decay": "20% of the budget"}  # type: ignore[assignment]
    sizes = {"small": [4, 8], "target": [8, 16], "middle": 12, "small_middle": 6}
    tuned = {"sweep_1": {LR: [0.003]}, "sweep_2": {"UpscaleCallback.lr": [0.003]}}
    schedules = {"decay": {"model": {"init_args": {"lr_scheduler": schedule}}}}
    midrun.main(
        write(tmp_path, **sizes, shares=[0.25, 0.5], tuned_at=[0.5], noises={"n": NOISE}, schedules=schedules, **tuned)
    )
    rows = read(tmp_path / "out" / "midrun.csv")
    arms = ["narrow", "middle", "wide", "grown at 25 % (n)", "grown at 50 % (n)"]
    assert [(row["arm"], row["seed"]) for row in rows] == [(arm, seed) for arm in arms for seed in "01"]
    budget = float(rows[4]["flops"])
    steps = {row["arm"]: int(row["steps"]) for row in rows}
    assert steps["wide"] == 12
    for row in rows:  # to half of a step of the wide network, and half of a narrow one
        assert float(row["flops"]) == pytest.approx(budget, rel=1 / 12)
    config = json.loads((tmp_path / "out" / "decay" / "n-0.25" / "sweep.json").read_text())["config"]
    assert config["trainer"]["max_steps"] == steps["grown at 25 % (n)"]
    assert config["model"]["init_args"]["lr_scheduler"]["init_args"]["steps"] == steps["grown at 25 % (n)"]


@pytest.mark.parametrize(
    ("text", "grows", "expected"),
    [
        ("20%", None, 200),
        ("20% of the budget", None, 0.2),
        ("20% of the budget", (600, 0.5), 0.16),  # two fifths of the 400 wide steps
        ("60% of the budget", (600, 0.5), 0.52),  # all of the wide ones, and a fifth of the narrow ones
    ],
)
def test_schedules_stretch(text: str, grows: tuple[int, float] | None, expected: float) -> None:
    assert stretch({"a": {"steps": text, "b": 3}}, 1000, grows) == {"a": {"steps": pytest.approx(expected), "b": 3}}


def test_lengths_of_equal_cost() -> None:
    costs = Costs({"8": 1e6, "16": 4e6}, steps=100, batches_per_step=2, batches_per_epoch=25)
    assert costs.steps_of(8, 16) == 400
    assert costs.steps_of_growth(8, 16, 0.25) == (100, 175)
    assert costs.length({}, 30)["trainer"]["val_check_interval"] == 2 * 25 + 4 * 2, "13 steps an epoch, the last of one"


def test_an_optimum_is_the_lowest_point_of_a_parabola() -> None:
    levels = [1.0, 2.0, 4.0, 8.0]
    assert optimum_of(levels, [3.0, 1.0, 1.0, 3.0]) == (pytest.approx(8**0.5), False)
    assert optimum_of(levels, [1.0, 2.0, 3.0, 4.0]) == Optimum(1.0, True)
    assert optimum_of(levels, [3.0, 2.0, float("inf"), float("inf")]) == Optimum(2.0, True)


def test_a_drift_is_a_power_of_the_width() -> None:
    def curve(best: float) -> dict[float, list[float]]:
        return {
            level: [abs(i - best) ** 2 + seed for seed in (0, 1)] for i, level in enumerate((1.0, 2.0, 4.0, 8.0, 16.0))
        }

    optima, exponent, error = drift_of([64, 128, 256], [curve(1), curve(2), curve(3)])
    assert [optimum.value for optimum in optima] == pytest.approx([2, 4, 8])
    assert (exponent, error) == (pytest.approx(1), pytest.approx(0, abs=1e-12))
    assert width_number({"width": [4, 9], "layers": 2}) == pytest.approx(12)


FILES = sorted(
    path for name in ("methods", "midrun", "transfer") for path in (ROOT / "experiments" / name).glob("*.yaml")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_files(path: Path) -> None:
    """They have the keys of their script, and name their own command."""
    content = yaml.safe_load(path.read_text())
    required = {
        "methods": {"small", "target", "methods", "sweep_2"},
        "midrun": {"small", "target", "middle", "small_middle", "shares", "noises", "sweep_1", "sweep_2"},
        "transfer": {"growths", "sweeps"},
    }[path.parent.name]
    assert required | {"config", "seeds"} <= content.keys()
    assert f"python -m experiments.{path.parent.name} experiments/{path.parent.name}/{path.name}" in path.read_text()
    for file in content["config"] if isinstance(content["config"], list) else [content["config"]]:
        assert isinstance(file, dict) or (ROOT / file).is_file()
    for method in content.get("methods", {}).values():
        getattr(mupscale.methods, method["class_path"].rpartition(".")[2])
    assert Study(Path("x"), content["config"]).metric == "last_epoch"
