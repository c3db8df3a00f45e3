"""The protocol midrun: lengths that cost the same, schedules that stretch, the whole experiment, and its verdict."""

import csv
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import LR, NOISE, config_of, refused, swap_of
from experiments import ADDITIVE, described, file, finish, lr_of
from synthetic_runs import mlp_flops

from mupscale.__main__ import main
from mupscale.commands.lab.costs import CostPart, Costs, StepClock, batches_of, budget_steps, measured
from mupscale.commands.lab.driver import Driver, Inline
from mupscale.commands.lab.file import MidrunKeys, midrun_keys, read, stretched
from mupscale.commands.lab.protocols import Experiment, RunPart
from mupscale.commands.lab.run import result_of
from mupscale.commands.reporting.compare import rank
from mupscale.commands.reporting.folders import ExperimentFolder
from mupscale.commands.reporting.midrun import Midrun, lines_of
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.commands.widths import Growth
from mupscale.errors import UserError
from mupscale.models.mlp import MLP

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

CENTRED = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1, "centred": True}}
SWAP_LR = "UpscaleCallback.lr"
COSINE = {"class_path": "CosineAnnealingLR", "init_args": {"T_max": "100%"}}


def midrun(**keys: Any) -> dict[str, Any]:
    """An experiment whose runs take a second or less: a budget of 20 steps, 6 an epoch."""
    defaults = {
        "small": [8, 16],
        "target": [16, 32],
        "middle": 24,
        "seeds": [3],
        "metric": "last_10%",
        "shares": [0.5],
        "noises": {"paper": ADDITIVE, "centred": CENTRED},
        "schedules": {"cosine": {"model": {"init_args": {"lr_scheduler": COSINE}}}},
        "sweep_1": {LR: [0.001, 0.02]},
        "sweep_2": {SWAP_LR: [0.005, 0.01], NOISE: [0.1]},
        "timing_steps": 20,
    }
    return described("midrun", **{**defaults, **keys})


def keys_of(**keys: Any) -> MidrunKeys:
    content = midrun(**keys)
    return midrun_keys(content, Growth(*content["small"]), Growth(*content["target"]))


def best_of(sweep: Path, *keys: str) -> list[float]:
    with open(sweep / "trials.csv") as rows:
        best = min(csv.DictReader(rows), key=lambda row: float(row["last_10%"]))
    return [float(best[key]) for key in keys]


# --- lengths


def costs(**changes: Any) -> Costs:
    values: dict[str, Any] = {
        "steps": 1500, "steps_per_epoch": 600, "batches_per_step": 1,
        "flops": {"256": 1.0, "384": 2.0, "512": 3.0}, "seconds": {"256": 0.02, "384": 0.025, "512": 0.04},
        "start_seconds": {}, "device": "cpu", "timed_steps": 300, "batches_per_epoch": 600,
    }  # fmt: skip
    return Costs(**(values | changes))


def test_runs_of_one_budget_cost_the_same() -> None:
    known, growth = costs(), Growth(256, 512)
    assert [known.steps_of("flops", width, 512) for width in (512, 384, 256)] == [1500, 2250, 4500]
    assert [known.steps_of("seconds", width, 512) for width in (512, 384, 256)] == [1500, 2400, 3000]
    # a quarter of 4500 FLOPs is 1125 narrow steps, the rest 1125 wide ones
    assert known.steps_of_growth("flops", growth, 0.25) == (1125, 2250)
    assert known.steps_of_growth("seconds", growth, 0.1) == (300, 1650)
    for share in (0.1, 0.25, 0.5, 0.75):
        at_step, steps = known.steps_of_growth("flops", growth, share)
        assert at_step * 1.0 + (steps - at_step) * 3.0 == pytest.approx(4500, abs=2)
    assert costs(steps=1).steps_of_growth("flops", growth, 0.1) == (1, 2)  # a step of each at least


def test_the_last_step_of_an_epoch_takes_the_batches_that_are_left() -> None:
    """A validation is due after that many batches, and would be missed otherwise."""
    known = costs(steps_per_epoch=4, batches_per_step=3, batches_per_epoch=10)
    assert [known.batches_of(steps) for steps in (1, 3, 4, 5, 40)] == [3, 9, 10, 13, 100]


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ({"max_steps": 1500, "max_epochs": None}, 1500),
        ({"max_steps": -1, "max_epochs": 80}, 80 * 232),
        ({"max_steps": 100, "max_epochs": 80}, 100),
    ],
)
def test_the_budget_is_the_length_of_the_configuration(trainer: dict[str, Any], steps: int) -> None:
    assert budget_steps(trainer, 232) == steps
    data: Any = SimpleNamespace(train_dataloader=lambda: range(100))
    assert [batches_of(data, limit) for limit in (None, 1.0, 0.5, 7, 200)] == [100, 100, 50, 7, 100]


def test_schedules_stretch_to_the_steps_of_a_run() -> None:
    assert stretched({"a": ["100%", {"b": "2.5%"}, "5 %", 7]}, 400) == {"a": [400, {"b": 10}, "5 %", 7]}
    assert stretched({"warm_up": "0.1%"}, 20) == {"warm_up": 1}
    late = "20% of the budget"
    assert stretched(late, 400) == 0.2
    # 300 steps for a quarter of the budget, 100 for the rest
    assert stretched(late, 400, (300, 0.25)) == pytest.approx(0.2 / 0.75 * 100 / 400)
    assert stretched("85% of the budget", 400, (300, 0.25)) == pytest.approx((100 + 0.1 / 0.25 * 300) / 400)
    assert keys_of(schedules={"constant": None}).schedules == {"constant": {}}
    two = keys_of(shares=[0.75, 0.1, 0.3], tuned_at=[0.25, 0.75])
    assert [two.nearest_tuned(share) for share in two.shares] == [0.25, 0.25, 0.75]
    assert keys_of(shares=[0.75, 0.1]).tuned_at == [0.1, 0.75]


def test_a_clock_takes_the_median_of_its_stretches() -> None:
    clock, module = StepClock(warm_up=4, steps=24), MLP(8)
    for step in range(1, 25):
        clock.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, 0)  # type: ignore[arg-type]
    assert [step for step, _ in clock._marks] == [4, 8, 12, 16, 20, 24]
    assert clock.device == "cpu"
    clock._begin, clock._marks = 100.0, [(4, 103.0), (8, 103.4), (12, 103.8), (16, 109.0), (20, 109.4), (24, 109.8)]
    assert clock.seconds == pytest.approx(0.1)  # not the stretch of five seconds
    assert clock.start_seconds == pytest.approx(3.0 - 0.4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"middle": 40}, "middle: give a width between 16 and 32"),
        ({"middle": 17}, "1?6 of it, is a whole number too; got 17"),
        ({"middle": "wide"}, "middle: give a width"),
        ({"middle": 32}, "middle: give a width between 16 and 32"),
        ({"shares": [0.5, 1.0]}, "shares: give shares of the budget between 0 and 1"),
        ({"shares": [10, 50]}, "shares: give shares of the budget between 0 and 1"),
        ({"shares": [0.5, 0.5]}, "shares: a share is given twice"),
        ({"shares": [0.1234567, 0.1234568]}, "shares: a share is given twice"),
        ({"tuned_at": []}, "tuned_at: give shares"),
        ({"noises": {}}, "noises: give a mapping by name"),
        ({"noises": {"../x": ADDITIVE}}, "noises: a name is made of letters"),
        ({"noises": {True: ADDITIVE}}, "noises: YAML reads a name as True, which is no text; quote it"),
        ({"schedules": {"cosine": 3}}, "schedules.cosine: give a mapping"),
        ({"budgets": ["time"]}, "budgets: give a list of flops and seconds"),
        ({"budgets": ["flops", "flops"]}, "budgets: give a list of flops and seconds"),
        ({"timing_steps": 2}, "timing_steps: give a whole number of at least 10"),
    ],
)
def test_mistakes_name_their_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keys_of(**keys)


ONE_CYCLE_RATES = {
    "class_path": "torch.optim.lr_scheduler.OneCycleLR",
    "init_args": {"max_lr": 0.1, "total_steps": "100%"},
}
ONE_CYCLE = {"model": {"init_args": {"lr_scheduler": ONE_CYCLE_RATES}}}
DROPS = {"class_path": "lightning.pytorch.cli.ReduceLROnPlateau", "init_args": {"monitor": "val/loss"}}
PLATEAU = {"model": {"init_args": {"lr_scheduler": DROPS}}}


@pytest.mark.slow
def test_mistakes_are_reported_before_the_first_run() -> None:
    for keys, message in (
        ({"noises": {"loud": {"class_path": "mupscale.Loud"}}}, "Loud"),
        ({"sweep_2": {"UpscaleCallback.noise.sdt": [0.1]}}, "sweep_2, noises.paper: UpscaleCallback.noise.sdt"),
        ({"schedules": {"a": {"model": {"init_args": {"lr_sched": 1}}}}}, "lr_sched"),
        ({"schedules": {"drops": PLATEAU}}, "schedules.drops: model.lr_scheduler: ReduceLROnPlateau monitors val/loss"),
        ({"schedules": {"one": ONE_CYCLE}}, "error: schedules.one: model.lr_scheduler: OneCycleLR sets absolute rates"),
        ({"middle": None}, "protocol midrun needs the key 'middle'"),
        ({"noise": ADDITIVE}, "protocol midrun has no key 'noise'"),
    ):
        short = {"noises": {"paper": ADDITIVE}, "sweep_1": {LR: [0.02]}, "sweep_2": {NOISE: [0.1]}}
        assert message in refused("experiment", file(midrun(**{**short, **keys})), "--out", "o")
    endless = ["--trainer.max_steps=-1", "--trainer.max_epochs=-1"]
    assert "give the length of a run" in refused("experiment", file(midrun()), "--out", "o", *endless)
    assert not Path("o").exists()


# --- the whole experiment


def test_nothing_is_made_while_the_time_is_measured() -> None:
    whole = Experiment(Path("o"), read(Path(file(midrun())), []))
    assert [part.name for part in whole.stages[0]] == ["costs"]
    (trial,) = whole.stages[0][0].trials()
    (run,) = trial.runs
    assert run.kind is None  # it cannot become one of a stack
    assert run.known_result() is None
    assert not whole.parts[0].finished
    Path("o").mkdir()
    Path("o/costs.json").touch()
    assert run.known_result() == (0.0, 0.0)
    assert Driver(Inline(), "auto", 1, 2).have_finished({0: trial})  # another part, which waits for it
    assert whole.parts[0].finished


def test_a_model_whose_flops_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = MLP.loss
    monkeypatch.setattr(MLP, "loss", lambda self, batch: loss(self, batch) * loss(self, batch).item())
    monkeypatch.setattr("mupscale.commands.lab.file.check", lambda description: None)
    message = r"^model: protocol midrun compares runs at equal FLOPs, but the FLOPs of MLP cannot be counted.*item\(\)"
    with pytest.raises(UserError, match=message):
        measured(read(Path(file(midrun())), []), Path("t"))


def test_a_run_follows_another_only_as_long_as_both_are_the_same() -> None:
    def part(role: str, *, lr: float = 0.1, at_step: int = 7, first: RunPart | None = None) -> RunPart:
        swap = {"class_path": "UpscaleCallback", "init_args": {"at_step": at_step, "noise": role}}
        config = {"trainer": {"callbacks": [swap]}, "model": {"init_args": {"lr": lr}}}
        return RunPart(Path("o"), role, 3, lambda: config, "last_10%", keeps_checkpoints=False, first=first)

    first = part("first")
    follower = part("second", first=first)
    assert first._start() is None
    assert follower._start() is None  # the other one diverged before it grew, say
    saved = first.folder / "checkpoints" / "pre-upscale-7.ckpt"
    saved.parent.mkdir(parents=True)
    torch.save({"state_dict": {"w": torch.arange(1000)}}, saved)
    assert follower._start() == saved
    assert part("third", lr=0.2, first=first)._start() is None
    assert part("fourth", at_step=8, first=first)._start() is None
    finish(first.folder, 1.0)
    first.conclude()
    assert saved.exists()  # the others are not finished
    content = bytearray(saved.read_bytes())
    content[len(content) // 2] ^= 1
    saved.write_bytes(content)
    assert follower._start() is None


@pytest.mark.slow
def test_the_whole_protocol(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("file", "protocols"):  # the test of all shipped files has it, and it takes seconds
        monkeypatch.setattr(f"mupscale.commands.lab.{module}.check", lambda description: None)
    path = file(midrun(sweep_1={LR: [0.02]}, timing_steps=10))
    described = read(Path(path), [])
    main(["experiment", path, "--out", "o"])
    output = capfd.readouterr().out
    assert output.count(": begins\n") == 17
    measured = CostPart(Path("o"), described).costs
    assert (measured.steps, measured.steps_per_epoch, measured.batches_per_step) == (20, 6, 1)
    for width in (8, 12, 16, 24, 32):  # data need no gradient: two operations less per weight of the first layer
        assert measured.flops[str(width)] == 1000 * (mlp_flops(width) - 2 * 54 * width)
    assert set(measured.seconds) == {"16", "24", "32"}
    assert all(seconds > 0 for seconds in measured.seconds.values())

    tuned = {fixed: best_of(Path("o/cosine/sweep_1", fixed), LR)[0] for fixed in ("wide", "middle", "narrow")}
    after, std = best_of(Path("o/cosine/sweep_2/centred-0.5"), SWAP_LR, NOISE)
    for budget in ("flops", "seconds"):
        widths = {"wide": 32, "middle": 24, "narrow": 16}
        for fixed, width in widths.items():
            run = Path("o/cosine/wide/seed=3" if fixed == "wide" else f"o/cosine/{budget}/{fixed}/seed=3")
            config = config_of(run)
            steps = measured.steps_of(budget, width, 32)
            assert (config["model"]["init_args"]["width"], config["trainer"]["max_steps"]) == (width, steps)
            assert config["model"]["init_args"]["lr_scheduler"]["init_args"]["T_max"] == steps
            assert lr_of(run) == tuned[fixed]
        grown = Path(f"o/cosine/{budget}/centred-0.5/seed=3")
        at_step, steps = measured.steps_of_growth(budget, Growth(16, 32), 0.5)
        swap, config = swap_of(grown), config_of(grown)
        assert (swap["at_step"], swap["width"], config["trainer"]["max_steps"]) == (at_step, 32, steps)
        assert (swap["lr"], swap["noise"]["init_args"]["std"]) == (after, std)
        assert swap["noise"]["init_args"]["centred"] is True
        assert lr_of(grown) == tuned["narrow"]
        assert config["model"]["init_args"]["lr_scheduler"]["init_args"]["T_max"] == steps
    trial = next(Path("o/cosine/sweep_2/centred-0.5/trials").iterdir())
    assert (swap_of(trial)["at_step"], swap_of(trial)["width"]) == (
        measured.steps_of_growth("flops", Growth(8, 16), 0.5)[0], 16,
    )  # fmt: skip

    with open("o/report/midrun.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["budget"], row["arm"]) for row in rows] == [
        (budget, arm)
        for budget in ("flops", "seconds")
        for arm in ("width 32", "width 24", "width 16", "grown at 50 % (centred)", "grown at 50 % (paper)")
    ]
    budget_flops = 20 * measured.flops["32"]
    for row in rows[:5]:
        assert float(row["flops"]) == pytest.approx(budget_flops, abs=measured.flops["32"])
        assert math.isfinite(float(row["validation_loss"]))  # there is one after the very last step
    assert float(rows[3]["training_loss"]) == result_of(Path("o/cosine/flops/centred-0.5/seed=3"))[0]
    assert float(rows[3]["pause_seconds"]) > 0
    assert rows[0]["training_loss"] == rows[5]["training_loss"]  # one run
    assert rows[3]["training_loss"] != rows[4]["training_loss"]
    page = Path("o/report/index.html").read_text()
    assert "At equal seconds, schedule cosine" in page
    assert "At equal seconds, schedule cosine" in output
    for budget in ("flops", "seconds"):
        for figure in ("training", "validation", "curves"):
            assert Path(f"o/report/midrun_cosine_{budget}_{figure}.pdf").exists()
    comparison = Midrun(ExperimentFolder(Path("o"))).comparisons[0]
    lines = lines_of(comparison)
    spent = {band.label: (round(band.x[0]), round(band.x[-1])) for band in lines}
    best = rank(comparison.losses("validation", grown=True))[0]
    # curves begin at the first of 20, 31 and 57 steps; and at the first of 10 after the growth
    assert spent == {"width 32": (5, 100), "width 24": (3, 100), "width 16": (2, 100), best: (55, 100)}

    # until they grow, both are one run
    at_step, steps = measured.steps_of_growth("flops", Growth(16, 32), 0.5)
    first, follower = (Path(f"o/cosine/flops/{noise}-0.5/seed=3") for noise in ("paper", "centred"))
    assert list(LoggedRun(first).log.loss) == list(range(1, steps + 1))
    assert list(LoggedRun(follower).log.loss) == list(range(at_step + 1, steps + 1))
    assert not list(Path("o/cosine").glob("**/seed=3/checkpoints"))  # there are many runs, and nothing starts from them
    kept = {path: path.stat().st_mtime_ns for path in Path("o").rglob("*.json") if path.parent.name != "report"}
    before = result_of(follower)[0]
    for folder in (Path("o/cosine/flops/middle/seed=3"), follower):
        del kept[folder / "result.json"], kept[folder / "run.json"]
        (folder / "result.json").unlink()
    main(["experiment", "e.yaml", "--out", "o"])
    again = re.findall(r"^(.*): begins$", capfd.readouterr().out, re.MULTILINE)
    assert again == ["cosine/flops/middle, seed 3", "cosine/flops/centred-0.5, seed 3"]
    # the first run's checkpoint is gone, so this time it has trained from its beginning: to the same end
    assert list(LoggedRun(follower).log.loss) == list(range(1, steps + 1))
    assert result_of(follower)[0] == before
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing is measured a second time
