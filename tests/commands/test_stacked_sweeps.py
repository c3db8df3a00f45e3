"""Trials that are trained as one program: the numbers of separate runs, ordinary runs, kills, and what goes apart."""

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import LR, NOISE, small, upscale
from extensions import Counting
from logged import curves, losses
from program_server import CORE_ONLY, Server
from signals import signalled_before
from sweeps import changed, numbers_of, starts, swept, unlike, values_of
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.callbacks.curves import Curves
from mupscale.commands.lab.stack_loop import StackedSteps
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.base import Growable

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01, "weight_decay": 0.1}}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR"


def long(path: Path, optimizer: dict[str, Any], **trainer: Any) -> str:
    """A configuration of 40 steps with clipping and a growth in the middle, in float64."""
    settings = {
        "max_steps": 40,
        "val_check_interval": 1.0,
        "precision": "64-true",
        "gradient_clip_val": 0.3,
        "log_every_n_steps": 4,
    }
    config = small(path, upscale(22, 16), **settings | trainer)
    return changed(config, optimizer=optimizer, checkpoint={"every_n_train_steps": 15})


# --- stacked = separate


SCHEDULE = [f"--model.lr_scheduler={COSINE}", "--model.lr_scheduler.T_max=40"]
DEEPER = ["--model.layers=2", "--model.base_layers=2", "--callback_args={UpscaleCallback: {layers: 4}}"]
WD, BETAS, MOMENTUM = (f"model.optimizer.{name}" for name in ("weight_decay", "betas", "momentum"))

SEARCHES: dict[str, tuple[int, dict[str, Any], list[str], list[str]]] = {
    "AdamW": (1, ADAMW, [f"{WD}=0.01:0.5", f"{BETAS}=[0.9, 0.99],[0.8, 0.95]"], []),
    "SGD, a schedule, wider and deeper": (1, SGD, [f"{MOMENTUM}=0.5:0.95"], [*SCHEDULE, *DEEPER]),
}
"""How many trials, the optimizer, further axes, and options."""


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_is_that_of_separate_runs(search: str, tmp_path: Path) -> None:
    trials, optimizer, further, options = SEARCHES[search]
    config = long(tmp_path / "c.yaml", optimizer)
    axes = [f"{LR}=0.001:0.01", f"{NOISE}=0.05:1", *further]
    options = [*options, *(part for axis in axes for part in ("--sweep", axis))]
    options += ["--sampler", "random", "--trials", str(trials), "--seeds", "3,4", "--metric", "last_50%"]
    stacked, apart = (
        swept(name, config, *options, "--stack", size) for name, size in (("stacked", "auto"), ("apart", "off"))
    )
    found = numbers_of(apart)
    assert numbers_of(stacked) == [pytest.approx(row, rel=1e-12) for row in found]
    assert len({value for row in found for value in row}) == 3 * trials
    assert best_of(stacked) == best_of(apart)
    assert unlike(stacked, apart)  # they were not trained one after another
    assert not unlike(stacked, apart, within=1e-12)


# --- what goes apart


def model(name: str) -> list[str]:
    return [f"--model=extensions.{name}"]


EMA = "lightning.pytorch.callbacks.EMAWeightAveraging"
LRS = [f"{LR}=0.01,0.02"]
APART = "runs are trained one after another: "
KINDS = "cannot step many models at once"

CASES: dict[str, tuple[list[str], list[str], str | None]] = {
    "an optimizer without a rule": (LRS, ["--model.optimizer=torch.optim.Adagrad"], f"{APART}Adagrad {KINDS}"),
    "accumulation": (
        LRS, ["--trainer.accumulate_grad_batches=2"], f"{APART}trainer.accumulate_grad_batches is 2"),
    "an operation that vmap does not know": (
        LRS, [*model("Recurrent"), "--trainer.precision=32-true"], f"{APART}lstm has no rule for many models"),
    "a loss that logs": (LRS, model("LoggingLoss"), f"{APART}`loss` of many models at once cannot call Lightning"),
    "a mask in the loss": (LRS, model("MaskedLoss"), f"{APART}__getitem__ has no rule for many models"),
    "a training step": (LRS, model("OwnStep"), f"{APART}OwnStep overrides training_step"),
    "widths": (["model.width=8,16", f"{LR}=0.01,0.02"], [], None),
    "batch sizes": (["data.batch_size=500,1000"], ["--metric=last_50%"], None),
    "a moving average": (LRS, [f"--trainer.callbacks+={EMA}"], None),
    "a callback": (LRS, ["--trainer.callbacks+=extensions.Counting"], None),
    "a run that is asked to stop, and may not yet": (
        LRS,
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss", "--trainer.callbacks.patience=1",
         "--trainer.callbacks.min_delta=10", "--trainer.max_steps=20", "--trainer.min_steps=20"],
        None),
}  # fmt: skip
"""Axes, options, and the one line that says why the trials are not trained together."""

OFTEN = ("an operation that vmap does not know", "a training step", "widths", "a callback",
         "a run that is asked to stop, and may not yet")  # fmt: skip
"""A case of each kind: refused by a look at it, refused by trying it, several stacks, a callback, an early stop."""


@pytest.mark.filterwarnings(
    "ignore:You're using the WeightAveraging callback", "ignore:the run has no curves against FLOPs"
)
@pytest.mark.parametrize("case", slow_except(CASES, kept=OFTEN))
def test_what_does_not_stack_is_trained_all_the_same(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes, options, line = CASES[case]
    config = small(tmp_path / "c.yaml", max_steps=8, precision="64-true", log_every_n_steps=4)
    options = [*(part for axis in axes for part in ("--sweep", axis)), *options]
    Counting.steps.clear()
    stacked = swept("stacked", config, *options)
    output = capsys.readouterr().out
    if case == "a callback":
        assert sorted(Counting.steps) == sorted([*range(1, 9)] * 2)
    said = [text for text in output.splitlines() if "one after another" in text]
    assert len(said) == (line is not None), output
    assert line is None or line in said[0]
    apart = swept("apart", config, *options, "--stack", "off")
    assert not unlike(stacked, apart, within=1e-12)
    assert bool(unlike(stacked, apart)) == (line is None)


def test_the_order_of_an_epoch_is_drawn_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, drawn = ResidentLoader._draw_plan, []

    def noted(loader: ResidentLoader, epoch: int) -> Any:
        if loader._shuffle:
            drawn.append(epoch)
        return draw(loader, epoch)

    monkeypatch.setattr(ResidentLoader, "_draw_plan", noted)
    config = small(tmp_path / "c.yaml", upscale(5, 16), max_steps=9, val_check_interval=1.0)
    options = ["--data.batch_size=2000", "--stack", "auto"]  # three steps an epoch
    swept("stacked", config, "--sweep", f"{LR}=0.01,0.02,0.03", *options)
    assert drawn == [0, 1, 2]


# --- trials that end early


@pytest.mark.slow
def test_trials_that_diverge_touch_no_other(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(30, 16), max_steps=60)
    options = ["--sweep", f"{LR}=0.01,0.02,1e6,1e30", "--sweep", f"{NOISE}=0.1"]
    beside = swept("beside", config, *options)
    without = swept("without", config, "--sweep", f"{LR}=0.01,0.02", "--sweep", f"{NOISE}=0.1")
    assert not unlike(beside, without)
    assert numbers_of(beside)[:2] == numbers_of(without)
    assert numbers_of(beside)[2:] == [[math.inf], [math.inf]]
    steps = {run.name[:3]: len(losses(run)) for run in (beside / "trials").iterdir()}
    assert steps["000"] == steps["001"] == 60
    assert steps["003"] <= steps["002"] < 60


# --- ordinary runs


@pytest.mark.slow
def test_a_trial_is_an_ordinary_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(tmp_path / "c.yaml", upscale(5, 16), max_steps=9)
    options = ["--sweep", f"{LR}=0.01", "--seeds", "3,4", "--stack"]
    stacked, apart = (swept(name, config, *options, size) for name, size in (("stacked", "auto"), ("apart", "off")))
    runs = sorted((stacked / "trials").iterdir())
    assert [run.name for run in runs] == ["000_lr=0.01,seed=3", "000_lr=0.01,seed=4"]
    for run in runs:
        other = apart / "trials" / run.name
        assert (run / "config.yaml").read_text() == (other / "config.yaml").read_text()
        assert sorted(map(str, relative(run))) == sorted(map(str, relative(other)))
        for checkpoint in relative(run, "*.ckpt"):
            sizes = [(folder / checkpoint).stat().st_size for folder in (run, other)]
            assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    run = runs[1]
    capsys.readouterr()
    last = str(run / "checkpoints" / "last.ckpt")
    main(["validate", "--config", str(run / "config.yaml"), "--ckpt_path", last, "--trainer.logger=false"])
    assert "val/loss" in capsys.readouterr().out
    main(["upscale", last, "--width", "32", "--out", "wide.ckpt"])
    assert torch.load("wide.ckpt", weights_only=True)["state_dict"]["net.readout.weight"].shape == (7, 32)
    main(["report", *map(str, runs), "--out", "report"])
    assert Path("report/index.html").exists()


def relative(run: Path, pattern: str = "*") -> list[Path]:
    """The files of a run, event files aside, whose names hold a time."""
    return [path.relative_to(run) for path in run.rglob(pattern) if path.is_file() and "tfevents" not in path.name]


# --- interruptions


def best_of(out: Path) -> Any:
    return yaml.safe_load((out / "best.yaml").read_text())


def assert_same_sweep(ours: Path, theirs: Path) -> None:
    """Two sweeps have the same results and curves, to the bit."""
    assert values_of(ours) == values_of(theirs)
    assert best_of(ours) == best_of(theirs)
    for run in (theirs / "trials").iterdir():
        our, their = (
            {tag: points for tag, points in curves(path).items() if tag != "config/text_summary"}  # it has the folder
            for path in (ours / "trials" / run.name, run)
        )
        assert our == their


KILLS: dict[str, list[tuple[tuple[str, int], tuple[str, int]]]] = {
    "set-up": [(("main", 10), ("main", 40)), (("main", 0), ("main", 55)), (("main", 30), ("main", 20)),
               (("main", 48), ("main", 14))],
    "steps": [(("main", 96), ("main", 130)), (("main", 75), ("main", 65)), (("main", 60), ("others", 40)),
              (("main", 85), ("main", 2))],
    "the end": [(("main", 262), ("main", 230)), (("main", 6), ("main", 90))],
}  # fmt: skip
"""At which file operations two parts are killed, again and again: 20 of them, by --all; or the first of each kind."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), **CORE_ONLY) as made:
        yield made


def shared_sweep(folder: Path, out: Path) -> list[str]:
    """The command line of a sweep that processes share, but for the size of its stacks."""
    config = small(folder / "c.yaml", upscale(8, 16), max_steps=18)
    changed(config, checkpoint={"every_n_train_steps": 4})
    axes = ["--sweep", f"{LR}=0.003,0.01", "--sweep", f"{NOISE}=0.1,0.5"]
    return ["sweep", "--config", config, *axes, "--metric", "last_100%", "--out", str(out), "--stack"]


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    out = folder / "s"
    server.start(*shared_sweep(folder, out), "auto", folder=str(out))
    assert server.answer() == 0, server.log.read_text()[-3000:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(KILLS, kept=["steps", "the end"]))
def test_killed_processes_leave_no_trace(
    kind: str, server: Server, undisturbed: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    out = Path("s").resolve()
    arguments = shared_sweep(tmp_path, out)
    rounds = KILLS[kind]
    if not pytestconfig.getoption("--all"):
        rounds = [*(KILLS["set-up"][:1] if kind == "steps" else []), *rounds[:1]]
    killed = 0
    for size, points in zip(("2", "auto", "1", "2"), rounds, strict=False):
        parts = [
            {"arguments": [*arguments, size, "--part", f"{index}/2"], "folder": str(out), "point": point}
            for index, point in enumerate(points)
        ]
        server.start_together(*parts)
        killed += [server.answer() for _ in parts].count(-signal.SIGKILL)
    assert killed == 2 * len(rounds)
    server.start(*arguments, "3", folder=str(out))
    assert server.answer() == 0, server.log.read_text()[-3000:]
    assert_same_sweep(out, undisturbed)


@pytest.mark.slow
def test_signals_end_a_sweep_and_it_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = small(tmp_path / "c.yaml", upscale(8, 16), max_steps=14)
    options = ["--sweep", f"{LR}=0.01", "--seeds", "3,4"]
    whole = swept("whole", config, *options)
    moments = [
        (Growable, "configure_model", 2, signal.SIGTERM),
        (StackedSteps, "_launched", 1, signal.SIGINT),
        (Curves, "on_save_checkpoint", 4, signal.SIGTERM),
    ]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for owner, name, call, number in moments:
        capfd.readouterr()
        with signalled_before(owner, name, number, call=call), pytest.raises(SystemExit) as exit:
            swept("signalled", config, *options)
        line = str(exit.value.code) if number == signal.SIGINT else capfd.readouterr().err.strip().splitlines()[-1]
        assert exit.value.code == 143 or number == signal.SIGINT
        word = "interrupted" if number == signal.SIGINT else "terminated"
        assert line == f"{word}; run the same command again to continue"
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    resumed = swept("signalled", config, *options)
    assert_same_sweep(resumed, whole)
    assert all(starts(run)[-1] >= 5 for run in (resumed / "trials").iterdir())
