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
from sweeps import changed, numbers_of, swept, unlike, values_of
from tiers import slow_except

from mupscale.__main__ import main
from mupscale.commands.lab.stack import StackFiles
from mupscale.models.base import Growable
from mupscale.models.stacked import StackedModule

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
    "a moving average": (
        LRS, [f"--trainer.callbacks+={EMA}"], f"{APART}trainer.callbacks has EMAWeightAveraging"),
    "a callback": (LRS, ["--trainer.callbacks+=extensions.Counting"], f"{APART}trainer.callbacks has Counting"),
    "widths": (["model.width=8,16", f"{LR}=0.01,0.02"], [], None),
    "batch sizes": (["data.batch_size=500,1000"], ["--metric=last_50%"], None),
}  # fmt: skip
"""Axes, options, and the one line that says why the trials are not trained together."""

OFTEN = ("an operation that vmap does not know", "a training step", "widths", "a callback")
"""A case of each kind: refused by a look at it, refused by trying it, several stacks, a callback."""


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
    assert not (stacked / "stacks").exists()
    if line is None:
        apart = swept("apart", config, *options, "--stack", "off")
        assert not unlike(stacked, apart, within=1e-12)
        assert unlike(stacked, apart)  # they were not trained one after another


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
    stacked = swept("stacked", config, "--sweep", f"{LR}=0.01", "--seeds", "3,4")
    runs = sorted((stacked / "trials").iterdir())
    assert [run.name for run in runs] == ["000_lr=0.01,seed=3", "000_lr=0.01,seed=4"]
    run = runs[1]
    capsys.readouterr()
    last = str(run / "checkpoints" / "last.ckpt")
    main(["validate", "--config", str(run / "config.yaml"), "--ckpt_path", last, "--trainer.logger=false"])
    assert "val/loss" in capsys.readouterr().out
    main(["upscale", last, "--width", "32", "--out", "wide.ckpt"])
    assert torch.load("wide.ckpt", weights_only=True)["state_dict"]["net.readout.weight"].shape == (7, 32)
    main(["report", *map(str, runs), "--out", "report"])
    assert Path("report/index.html").exists()
    main(["resume", str(run), "--trainer.max_steps", "12"])
    assert losses(run)[11] > 0


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
    "set-up": [(("main", 10), ("main", 20)), (("main", 0), ("main", 25)), (("main", 15), ("main", 5))],
    "steps": [(("main", 45), ("main", 50)), (("main", 40), ("main", 35))],
    "the end": [(("main", 60), ("main", 65))],
}  # fmt: skip
"""At which file operations two parts are killed, again and again; or the first of each kind."""


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


class Killed(BaseException):
    pass


def taken(monkeypatch: pytest.MonkeyPatch, dies: int | None) -> list[int]:
    """The steps that stacks take from now on; the process is ended, as far as they see, after so many."""
    steps: list[int] = []
    take = StackedModule._take_step

    def noted(self: StackedModule, batch: Any) -> Any:
        if len(steps) == dies:
            raise Killed
        steps.append(self.global_step)
        return take(self, batch)

    monkeypatch.setattr(StackedModule, "_take_step", noted)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_a_killed_sweep_goes_on_from_its_last_checkpoint(
    sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path / "c.yaml", upscale(8, 16), max_steps=14)
    changed(config, checkpoint={"every_n_train_steps": 4})
    options = ["--sweep", f"{LR}=0.003,0.01", "--seeds", "3,4"]
    if sampler == "tpe":
        options = ["--sweep", f"{LR}=0.001:0.1", "--sampler", "tpe", "--trials", "4"]
    whole = swept("whole", config, *options)
    for dies in (3, 10):
        with monkeypatch.context() as patch:
            taken(patch, dies)
            with pytest.raises(Killed):
                swept("killed", config, *options)
    with monkeypatch.context() as patch:
        steps = taken(patch, None)
        resumed = swept("killed", config, *options)
    rounds = 4 if sampler == "tpe" else 1
    assert steps == [*range(8, 14), *([*range(14)] * (rounds - 1))]
    assert_same_sweep(resumed, whole)


@pytest.mark.slow
def test_signals_end_a_sweep_and_it_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = small(tmp_path / "c.yaml", upscale(8, 16), max_steps=14)
    options = ["--sweep", f"{LR}=0.01", "--seeds", "3,4"]
    whole = swept("whole", config, *options)
    moments = [
        (Growable, "configure_model", 2, signal.SIGTERM),
        (StackedModule, "_take_step", 7, signal.SIGINT),
        (StackFiles, "_save", 2, signal.SIGTERM),
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
    assert_same_sweep(swept("signalled", config, *options), whole)
