"""Sweeps: keys and values, the metric to the last digit, divergence, processes that share a study and die, results."""

import json
import math
import shlex
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from command_line import LR, NOISE, config_of, refused, small, swap_of, upscale
from command_line import trials as table
from experiment_files import finish
from logged import losses
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mupscale.__main__ import main
from mupscale.callbacks import trial_metric
from mupscale.callbacks.trial_metric import TrialMetric
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands import figures
from mupscale.commands.checkpoints import FolderLock, newest_checkpoint
from mupscale.commands.cli import run_cli
from mupscale.commands.config import Point, apply_point, brief, labels
from mupscale.commands.lab.run import Result, Run, with_run
from mupscale.commands.lab.space import SweptAxis, grid, parse_axis
from mupscale.commands.lab.sweep import Sweep, tuned_values
from mupscale.commands.sweep import parser as sweep_parser
from mupscale.commands.sweep import sweep_settings, without_sizes
from mupscale.errors import UserError
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def checked_values() -> None:
    """All values are checked before the first trial."""


@pytest.fixture(autouse=True)
def _unchecked_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check takes a second. Only tests with the fixture above are about it."""
    if "checked_values" not in request.fixturenames:
        monkeypatch.setattr("mupscale.commands.lab.space.refuse_invalid", lambda *_: None)


def run(config: dict[str, Any], folder: Path) -> Result:
    """The result of a run, which is made if it is not finished."""
    return Run(config, folder, "").make()


# --- keys and values


def test_axes() -> None:
    assert parse_axis(f"{LR}=1e-3,0.002,3") == SweptAxis(LR, (0.001, 0.002, 3))
    assert parse_axis("a.b=0.25:4:5") == SweptAxis("a.b", (0.25, 0.5, 1.0, 2.0, 4.0))
    assert [type(value) for value in parse_axis("a=2:16:4").values] == [int] * 4  # hidden layers, say
    assert [type(value) for value in parse_axis("a=2.0:16:4").values] == [float] * 4
    assert parse_axis("a=010,2e1").values == (10.0, 20.0)
    assert parse_axis("a=1e-4:1e-2") == SweptAxis("a", bounds=(1e-4, 1e-2))
    assert parse_axis("a.betas=[0.9, 0.95],[0.9, 0.99]").values == ([0.9, 0.95], [0.9, 0.99])
    assert parse_axis("a=true,false,null,x").values == (True, False, None, "x")
    assert parse_axis("a=2026-01-31,cuda:0").values == ("2026-01-31", "cuda:0")
    assert parse_axis("a='00:00:10:00','00:00:20:00'").values == ("00:00:10:00", "00:00:20:00")
    assert list(grid([SweptAxis("a", (1, 2)), SweptAxis("b", ("x", "y"))])) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    assert labels([LR, "UpscaleCallback.lr", NOISE]) == {
        LR: "optimizer.lr", "UpscaleCallback.lr": "UpscaleCallback.lr", NOISE: "std",
    }  # fmt: skip
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-4}}
    assert [brief(value) for value in (0.12345, [1, 2], sgd)] == ["0.1235", "[1, 2]", "SGD(lr=0.0001)"]


@pytest.mark.parametrize("values", ["0.001,1:10:5", "[1, 2],[3:40, 4]"])
def test_a_range_among_values_is_refused(values: str) -> None:
    """YAML 1.1 reads 1:10:5 as a number to the base 60, which is 4205."""
    with pytest.raises(UserError, match=r": [^ ]*:[^ ]* is not a value; a range LOW:HIGH:N has no other values"):
        parse_axis(f"{LR}={values}")


def test_values_are_set_where_they_stand() -> None:
    noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}}
    swaps = [
        {"class_path": "x.UpscaleCallback", "init_args": {"width": width, "noise": dict(noise)}} for width in (16, 32)
    ]
    config = {
        "trainer": {"max_steps": 3, "callbacks": [*swaps, {"class_path": "x.Other", "init_args": {}}]},
        "model": {"class_path": "MLP", "init_args": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 1}}}},
    }
    other = {"class_path": "N", "init_args": {"t": 1}}
    answer = apply_point(config, {LR: 5, "trainer.max_steps": 7, "UpscaleCallback.noise": other})
    assert answer["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 5
    assert answer["trainer"]["max_steps"] == 7
    noises = [callback["init_args"].get("noise") for callback in answer["trainer"]["callbacks"]]
    assert noises == [other, other, None]
    assert config["trainer"]["max_steps"] == 3
    for key, message in {
        "Foo.lr": "Foo.*UpscaleCallback",
        "model.optimiser.lr": "optimiser.*optimizer",
        "trainer.max_steps.x": "is 3",
        "UpscaleCallback.init_args": "there is no",
        "UpscaleCallback.class_path": "there is no",
    }.items():
        with pytest.raises(ValueError, match=message):
            apply_point(config, {key: 1})


# --- the metric


@pytest.mark.slow
def test_the_metric_is_the_mean_of_the_last_losses(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(10, 16))
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.02", "--metric", "last_20%", "--out", "s", "--stack", "off"])
    (folder,) = Path("s/trials").iterdir()
    expected = losses(folder)
    assert len(expected) == 20
    assert float(table(Path("s"))[0]["last_20%"]) == pytest.approx(math.fsum(expected[-4:]) / 4, rel=1e-6)
    value, _ = run({}, folder)
    (folder / "result.json").unlink()  # a process that died between the last checkpoint and the result
    assert run({}, folder)[0] == value
    assert losses(folder) == expected


@pytest.mark.slow
def test_the_metric_of_accumulated_batches_and_of_seeds(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", accumulate_grad_batches=2, val_check_interval=1.0, max_steps=9)
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.02", "--seeds", "3,4", "--out", "s"])
    runs = sorted(Path("s/trials").iterdir())
    assert [run.name for run in runs] == ["000_lr=0.02,seed=3", "000_lr=0.02,seed=4"]
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed_everything"] for run in runs] == [3, 4]
    expected = [math.fsum(losses(run)[-3:]) / 3 for run in runs]
    assert expected[0] != expected[1]
    (row,) = table(Path("s"))
    assert [float(row["seed 3"]), float(row["seed 4"])] == pytest.approx(expected, rel=1e-6)
    assert float(row["last_epoch"]) == pytest.approx(sum(expected) / 2, rel=1e-6)


@pytest.mark.slow
def test_a_logged_metric_is_its_last_value(tmp_path: Path) -> None:
    main(
        ["sweep", "--config", small(tmp_path / "c.yaml"), "--sweep", f"{LR}=0.02", "--metric", "val/loss", "--out", "s"]
    )
    events = EventAccumulator(str(next(Path("s/trials").iterdir())))
    events.Reload()
    assert float(table(Path("s"))[0]["val/loss"]) == pytest.approx(events.Scalars("val/loss")[-1].value, rel=1e-6)


# --- divergence


def fed(metric: TrialMetric, values: list[float], monkeypatch: pytest.MonkeyPatch, swap_at: int | None = None) -> int:
    """Feeds losses to a metric as a run would; how many it took."""

    class Trainer:
        global_step, should_stop, callbacks, log_dir, accumulate_grad_batches = 0, False, (), None, 1
        fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace())

    monkeypatch.setattr(trial_metric, "untrained_loss", lambda *_: 2.0)
    monkeypatch.setattr(trial_metric, "accumulates", lambda _: False)
    trainer: Any = Trainer()
    module: Any = MLP(8)
    module.trainer = trainer
    metric.score.steps, metric.score.window = 1000, 100
    for value in values:
        metric.on_train_batch_start(trainer, module, None, 0)
        if trainer.global_step == swap_at:
            module.hparams["width"] = 16
        trainer.global_step += 1
        metric.on_train_batch_end(trainer, module, {"loss": torch.tensor(value)}, None, 0)
        if trainer.should_stop:
            break
    return trainer.global_step


def test_only_divergence_stops_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(values: list[float], swap_at: int | None = None) -> int | None:
        metric = TrialMetric()
        steps = fed(metric, values, monkeypatch, swap_at)
        assert metric.score.diverged == (steps < len(values) or not math.isfinite(values[-1]))
        return steps if metric.score.diverged else None

    assert stops([0.01] * 10 + [19.0] * 990) is None  # far above its start, but not above what no training gives
    assert stops([2.0] * 10 + [21.0] * 990) == 60  # five checks of ten steps
    assert stops([2.0] * 10 + [21.0] * 40 + [1.0] * 950) is None  # it recovers
    assert stops([2.0] * 15 + [math.nan] + [2.0] * 984) == 20
    assert stops([2.0] * 999 + [math.inf]) == 1000
    noisy_start = [500.0 - step for step in range(300)]
    assert stops([0.1] * 100 + noisy_start + [0.05] * 600, swap_at=100) is None
    assert stops([0.1] * 100 + [50.0] + [600.0] * 899, swap_at=100) == 150


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_sweeps")
def test_diverged_trials_end_early_and_are_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        figures, "heatmap", lambda path, x, y, values, *_: drawn.append([[values[a, b] for a in x] for b in y]) or []
    )
    config = small(tmp_path / "c.yaml", upscale(2, 16), max_steps=60)
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.01,1e6", "--sweep", f"{NOISE}=0,0.1", "--out", "s"])
    metrics = [row["last_epoch"] for row in table(Path("s"))]
    assert metrics[2:] == ["diverged", "diverged"]
    good = [float(metric) for metric in metrics[:2]]
    assert drawn == [[[good[0], math.inf], [good[1], math.inf]]]
    steps = {run.name: len(losses(run)) for run in Path("s/trials").iterdir()}
    assert steps["000_lr=0.01,std=0"] == 60
    assert steps["002_lr=1e+06,std=0"] < 60
    kept = [run.name for run in Path("s/trials").iterdir() if list(run.rglob("*.ckpt"))]
    assert kept == ["000_lr=0.01,std=0" if good[0] < good[1] else "001_lr=0.01,std=0.1"]
    left = Path("s/trials/002_lr=1e+06,std=0/checkpoints")
    left.mkdir()  # by a process that died before it could tidy up
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.01,1e6", "--sweep", f"{NOISE}=0,0.1", "--out", "s"])
    assert not left.exists()


@pytest.mark.slow
def test_a_network_that_is_not_finite_is_not_widened(tmp_path: Path) -> None:
    swap = upscale(3, 16)  # before the first check
    swap["init_args"]["noise"] = {"class_path": "mupscale.SignalNoise", "init_args": {"t": 0.1}}
    config = small(tmp_path / "c.yaml", swap, min_steps=10)
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.01,1e25,1e30", "--out", "s"])
    assert [row["last_epoch"] for row in table(Path("s"))][1:] == ["diverged", "diverged"]
    assert [len(losses(run)) for run in sorted(Path("s/trials").iterdir())] == [20, 3, 3]


@pytest.mark.slow
def test_a_diverged_run_is_not_resumed(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(3, 16))
    options, rest = sweep_parser().parse_known_args(["--config", config, "--sweep", f"{LR}=1e30", "--out", "s"])
    settings, folder = sweep_settings(options, rest), Path("s/run")
    whole = with_run(apply_point(settings.config, {LR: 1e30}), settings.metric, 0, folder)
    assert run(whole, folder)[0] == math.inf
    (folder / "result.json").unlink()  # a process that died between the last checkpoint and the result
    assert run(whole, folder)[0] == math.inf
    assert len(losses(folder)) == 3


# --- kills, parts and draws


def test_a_part_has_one_command(tmp_path: Path) -> None:
    arguments = ["--config", small(tmp_path / "c.yaml"), "--sweep", f"{LR}=0.01", "--out", "s", "--part", "0/2"]
    with FolderLock(Path("s/part-0-of-2")):
        assert "s/part-0-of-2 is already in use" in refused("sweep", *arguments)
    assert not Path("s/trials").exists()


def sweep_of(*arguments: str) -> Sweep:
    options, rest = sweep_parser().parse_known_args(arguments)
    return Sweep(options.out, sweep_settings(options, rest))


def finish_sweep(sweep: Sweep, loss: Callable[[Point], float], rounds: int = 100) -> list[Point]:
    """Writes results as if the trials of some rounds had run; the points of all that are drawn."""
    for _, trials in zip(range(rounds), sweep.rounds(), strict=False):
        for cell, trial in trials.items():
            for each in trial.runs:
                finish(each.folder, loss(sweep.points[cell]))
    return sweep.points


@pytest.mark.slow
def test_draws_follow_the_seed_and_a_tpe_the_results(tmp_path: Path) -> None:
    axes = ["--sweep", f"{LR}=0.001:0.1", "--sweep", "data.batch_size=100:1000", "--sampler"]
    arguments = ["--config", small(tmp_path / "c.yaml"), "--trials", "12", *axes]

    def loss(point: Point) -> float:
        return abs(math.log(point[LR] / 0.01))

    points = [finish_sweep(sweep_of(*arguments, sampler, "--out", sampler), loss) for sampler in ("random", "tpe")]
    assert [point[LR] for point in points[0][:2]] == [0.0125207, 0.0160519]
    assert points[0][:10] == points[1][:10]  # tpe starts at random, then does not
    assert points[0][10:] != points[1][10:]
    assert all(0.001 <= p[LR] <= 0.1 and 100 <= p["data.batch_size"] <= 1000 for p in points[0])
    assert all(isinstance(p["data.batch_size"], int) for p in points[0])
    assert len({p[LR] for p in points[0]}) == 12
    # killed after three of six rounds, it draws the same
    again = sweep_of(*arguments, "tpe", "--out", "again")
    assert finish_sweep(again, loss, rounds=3) == points[1][:6]
    again = sweep_of(*arguments, "tpe", "--out", "again")
    assert finish_sweep(again, loss) == points[1]


@pytest.mark.slow
def test_damaged_files_are_named() -> None:
    config = small(Path("c.yaml"))
    arguments = ["--config", config, "--sweep", f"{LR}=0.01,0.02", "--out", "s"]
    sweep = sweep_of(*arguments)
    finish_sweep(sweep, lambda point: point[LR])
    assert [(outcome.cell, outcome.value) for outcome in sweep.outcomes] == [(0, 0.01), (1, 0.02)]
    next(Path("s/trials").iterdir()).joinpath("result.json").write_text("{}")
    assert "result.json is damaged" in refused("sweep", *arguments)
    Path("s/sweep.json").write_text("")
    assert "s/sweep.json is damaged" in refused("sweep", *arguments)


# --- what it ends in


@pytest.mark.slow
def test_best_composes_with_another_width(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(10, 16))
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.001,0.02", "--sweep", f"{NOISE}=0.05,5", "--out", "s"])
    noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.05, "centred": False}}
    assert yaml.safe_load(Path("s/best.yaml").read_text()) == {
        "model": {"init_args": {"optimizer": {"init_args": {"lr": 0.02}}}},
        "callback_args": {"UpscaleCallback": {"noise": noise}},
    }
    target = small(tmp_path / "target.yaml", upscale(10, 64), width=32)
    cli = run_cli(["--config", target, "--config", "s/best.yaml", "--trainer.enable_progress_bar=false"], "fit")
    (swap,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, UpscaleCallback)]
    assert (swap.width, swap.noise.std, cli.model.width) == (64, 0.05, 64)
    assert cli.trainer.optimizers[0].defaults["lr"] == 0.02
    assert "std: 0.05" in Path("runs/default/version_0/config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("checked_values")
def test_a_growth_that_the_model_refuses_ends_a_sweep_before_its_trials(tmp_path: Path) -> None:
    """A method is planned with the values of the other axes, with which it may be right."""
    config = small(tmp_path / "c.yaml", upscale(2, 24))
    sweep = ["sweep", "--config", config, "--out", "s", "--model.hidden_layers=2"]
    message = refused(*sweep, "--sweep", "UpscaleCallback.method=ZeroPadding,AKI")
    assert "--sweep UpscaleCallback.method=AKI: UpscaleCallback.width = 24 does not fit" in message
    assert "AKI: no layer of MLPNet has a next one of the same shape" in message
    message = refused(*sweep, "--sweep", "UpscaleCallback.method=ZeroPadding", "--sweep", "model.width=16,8")
    assert "ZeroPadding: axis 0 of parameter 'layers.0.weight' does not grow by a whole factor (16 → 24)" in message
    message = refused(*sweep, "--sweep", "model.width=8,32")
    assert "--sweep model.width=32: UpscaleCallback.width = 24 does not fit the width before it, 32" in message
    assert "narrower in the wide model (24 < 32)" in message
    assert not Path("s").exists()
    message = refused(*sweep, "--seeds", "0,1", "--model.width=32")  # one configuration, with several seeds
    assert "UpscaleCallback.width = 24 does not fit the width before it, 32" in message
    assert not Path("s").exists()
    both = ["--sweep", "UpscaleCallback.method=ZeroPadding", "--sweep", "model.width=8"]
    wider = small(tmp_path / "w.yaml", upscale(2, 24), width=16)
    assert sweep_settings(*sweep_parser().parse_known_args(["--out", "s", *both, "--config", wider])).axes


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    """/proc takes no files, not even from root."""
    sweep = ["sweep", "--config", small(tmp_path / "c.yaml"), "--sweep", f"{LR}=0.01,0.02"]
    assert "--out: /proc cannot be written to" in refused(*sweep, "--out", "/proc/s")


def test_arguments_for_callbacks_that_are_not_there(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(10, 16))
    assert "callback_args.Foo" in refused("fit", "--config", config, "--callback_args={Foo: {x: 1}}")
    assert "UpscaleCallback" in refused("fit", "--config", config, "--callback_args={UpscaleCallback: {x: 1}}")
    assert not Path("runs").exists()


def test_best_leaves_the_noise_of_other_growths_alone(tmp_path: Path) -> None:
    """Also if a swept argument differs between them in what is not swept."""
    swaps = [upscale(5, 16), upscale(10, 32)]
    signal = {"class_path": "mupscale.SignalNoise", "init_args": {"t": 0.1}}
    config = {"model": {}, "trainer": {"callbacks": deepcopy(swaps)}}
    config["trainer"]["callbacks"][1]["init_args"]["noise"] = signal
    recorded = {"class_path": "mupscale.RecordedNoise", "init_args": {"path": str(tmp_path / "noise.json")}}

    def best(config: Any, **point: Any) -> Any:
        keys = {f"UpscaleCallback.{key}": value for key, value in point.items()}
        tuned = tuned_values(apply_point(config, keys), keys, tmp_path / "noise.json")
        return tuned["callback_args"]["UpscaleCallback"]

    assert best(config) == [{}, {"noise": recorded}]
    config["trainer"]["callbacks"][0]["init_args"]["noise"] = "auto"
    assert best(config) == [{}, {"noise": recorded}]
    config["trainer"]["callbacks"][0] = deepcopy(swaps[0])
    tuned = best(config, lr=0.1)
    assert tuned == [{"lr": 0.1}, {"lr": 0.1, "noise": recorded}]
    config["trainer"]["callbacks"] = swaps
    assert best(config, lr=0.1) == {"lr": 0.1}
    centred = [deepcopy(swap["init_args"]["noise"]) for swap in swaps]
    for each, is_centred in zip(swaps, (True, False), strict=True):
        each["init_args"]["noise"]["init_args"]["centred"] = is_centred
    for each, is_centred in zip(centred, (True, False), strict=True):
        each["init_args"] |= {"std": 0.3, "centred": is_centred}
    assert best(config, **{"noise.std": 0.3}) == [{"noise": noise} for noise in centred]

    target = small(tmp_path / "target.yaml", upscale(5, 16), upscale(10, 32))
    (tmp_path / "best.yaml").write_text(yaml.safe_dump({"callback_args": {"UpscaleCallback": [{"lr": 0.1}, {}]}}))
    cli = run_cli(["--config", target, "--config", str(tmp_path / "best.yaml")])
    rates = [callback.lr for callback in cli.trainer.callbacks if isinstance(callback, UpscaleCallback)]
    assert rates == [0.1, None]
    single = small(tmp_path / "single.yaml", upscale(5, 16))
    message = refused("fit", "--config", single, "--config", str(tmp_path / "best.yaml"))
    assert "callback_args.UpscaleCallback: a list for 2 callbacks, but trainer.callbacks has 1" in message


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_sweeps")
def test_best_may_be_a_class_or_another_step(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(10, 16))
    classes = [{"class_path": f"mupscale.{name}", "init_args": {level: value}}
               for name, level, value in (("AdditiveNoise", "std", 50.0), ("SignalNoise", "t", 0.1))]  # fmt: skip
    noise, betas = f"UpscaleCallback.noise={','.join(map(json.dumps, classes))}", "model.optimizer.betas=[0.8, 0.9]"
    axes = ["--sweep", noise, "--sweep", betas, "--sweep", "UpscaleCallback.init_args.at_step=6"]
    main(["sweep", "--config", config, *axes, "--out", "s"])
    recorded = {"class_path": "mupscale.RecordedNoise", "init_args": {"path": "s/noise.json"}}
    assert yaml.safe_load(Path("s/best.yaml").read_text()) == {
        "callback_args": {"UpscaleCallback": {"noise": recorded, "at_step": 6}},
        "model": {"init_args": {"optimizer": {"init_args": {"betas": [0.8, 0.9]}}}},
    }
    best = Path("s/trials/001_noise=SignalNoise-t=0.1-,betas=-0.8,-0.9-,at_step=6")
    assert Path("s/noise.json").read_bytes() == (best / "noise-6.json").read_bytes()
    assert all(Path(f"s/{name}.png").exists() for name in ("profile", "curves"))
    target = small(tmp_path / "target.yaml", upscale(10, 64), width=32)
    cli = run_cli(["--config", target, "--config", "s/best.yaml", "--trainer.enable_progress_bar=false"], "fit")
    (wide,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, UpscaleCallback)]
    assert (wide.at_step, wide.summary["step"], wide.width) == (6, 6, 64)
    assert cli.trainer.optimizers[0].defaults["betas"] == (0.8, 0.9)


# --- bad input


@pytest.mark.slow
@pytest.mark.usefixtures("checked_values")
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--sweep", "empty"]),
        (["--sweep", f"{LR}=1", "--metric", "val/accuracy"], ["metric val/accuracy", "minimised", "val/loss"]),
        (["--sweep", LR], ["--sweep", LR, "KEY=VALUE"]),
        (["--sweep", f"{LR}=1", "--sweep", f"{LR}=2"], [LR, "twice"]),
        (["--sweep", f"{LR}=0.1:0.5"], [LR, "range", "--sampler"]),
        (["--sweep", f"{LR}=0.1:0.5", "--sampler", "tpe"], ["--trials"]),
        (["--sweep", f"{LR}=1:2", "--sampler=tpe", "--trials=4", "--part=0/2"], ["--part: --sampler tpe draws points"]),
        (["--sweep", f"{LR}=0.1,fast"], [LR, "fast"]),
        (["--sweep", f"{NOISE}=0.1"], [NOISE, "trainer.callbacks"]),
        (["--sweep", "seed_everything=0,1"], ["give --seeds, or the key seeds"]),
        (["--sweep", f"{LR}=0.1", "--trainer.devices=2"], ["trainer.devices", "--workers N"]),
    ],
)  # fmt: skip
def test_mistakes_are_reported_before_the_first_trial(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    message = refused("sweep", "--config", small(tmp_path / "c.yaml"), "--out", "s", *arguments)
    assert all(part in message for part in parts), message
    assert not Path("s").exists()


@pytest.mark.slow
def test_another_sweep_is_left_alone(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml")
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.01", "--out", "s"])
    before = {path: path.read_bytes() for path in Path("s").rglob("*") if path.is_file() and path.name != "run.lock"}
    for other in (
        [f"{LR}=0.02"],
        [f"{LR}=0.01", "--model.width=16"],
        [f"{LR}=0.01", "--metric", "last_2%"],
        [f"{LR}=0.01", "--seeds", "1"],
    ):
        message = refused("sweep", "--config", config, "--out", "s", "--sweep", *other)
        assert "--out s holds another sweep" in message
    assert "model.init_args.width is 8 there and 16 here" in refused(
        "sweep", "--config", config, "--out", "s", "--sweep", f"{LR}=0.01", "--model.width=16"
    )
    assert {path: path.read_bytes() for path in before} == before
    Path("mine").mkdir()
    Path("mine/file").touch()
    assert "not empty" in refused("sweep", "--config", config, "--out", "mine", "--sweep", f"{LR}=0.01")
    assert [path.name for path in Path("mine").iterdir()] == ["file"]
    times = {path: path.stat().st_mtime_ns for path in Path("s/trials").rglob("*")}
    main(["sweep", "--config", config, "--sweep", f"{LR}=0.01", "--out", "s"])  # the same once more: nothing to run
    assert {path: path.stat().st_mtime_ns for path in Path("s/trials").rglob("*")} == times


@pytest.mark.slow
def test_a_metric_that_is_never_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path / "c.yaml")
    message = refused("sweep", "--config", config, "--sweep", f"{LR}=0.01,0.02", "--metric", "val/los", "--out", "s")
    assert "metric val/los is never logged" in message
    assert "val/loss" in message
    assert not list(Path("s").rglob("*.ckpt"))  # before the first step
    late = ("sweep", "--config", config, "--sweep", f"{LR}=0.01", "--metric", "train/los", "--out", "t")
    with monkeypatch.context() as patch:
        patch.setattr("mupscale.commands.checkpoints.Leftovers.remove", lambda _: None)
        assert "never logged" in refused(*late)
    assert len(losses(next(Path("t/trials").iterdir()))) == 6  # after the first epoch
    shutil.rmtree("t")
    assert "never logged" in refused(*late)
    assert not Path("t").exists()  # nothing that is finished would be in it
    short = ["--trainer.max_steps=5", "--trainer.val_check_interval=5"]
    message = refused("sweep", "--config", config, *short, "--sweep", f"{LR}=0.01", "--out", "u")
    assert "an epoch has 6 steps" in message


# --- what it prints


@pytest.mark.slow
def test_the_printed_command_trains_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    """The growth 8 → 32 of the file, not that of the small model; and, with its callbacks left out, from scratch."""
    config = small(Path("c.yaml"), upscale(3, 32), max_steps=6, enable_progress_bar=False)
    options = ["--config", config, "--callback_args={UpscaleCallback: {width: 16}}", "--model.base_width=4"]
    axes = ["--sweep", f"{NOISE}=0.1,0.5", "--sweep", f"{LR}=0.01,0.03"]
    main(["sweep", *options, "--out", "s", "--stack", "off", *axes])
    printed = capsys.readouterr().out
    assert "from scratch: with --model.width and --trainer.callbacks null at its end" in printed
    words = shlex.split(printed.partition("train the target with the best values: ")[2].splitlines()[0])
    assert words == f"python -m mupscale fit --config {config} --model.base_width=4 --config s/best.yaml".split()
    main(words[3:])
    best = min(table(Path("s")), key=lambda row: float(row["last_epoch"]))
    run = Path("runs/default/version_0")
    assert newest_checkpoint(run)[1]["hyper_parameters"]["width"] == 32
    assert swap_of(run)["noise"]["init_args"]["std"] == float(best[NOISE])
    main([*words[3:], "--model.width=32", "--trainer.callbacks", "null"])
    alone = config_of(Path("runs/default/version_1"))
    assert not alone["trainer"]["callbacks"]
    assert alone["model"]["init_args"]["optimizer"]["init_args"]["lr"] == float(best[LR])
    assert without_sizes(["--config", "c.yaml"]) == ["--config", "TARGET.yaml"]
    assert without_sizes(["--config", "c.yaml", "--model.width", "8"]) == ["--config", "c.yaml"]
