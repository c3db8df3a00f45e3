"""The numbers of reports against numbers worked out by hand; groups of runs; runs that diverged or are in progress."""

import math
import shutil
from pathlib import Path

import pytest
from PIL import Image
from synthetic_runs import (
    UPSCALED,
    WIDE,
    Page,
    accuracy,
    base,
    epochs,
    mlp_flops,
    report,
    scratch,
    upscale,
    upscaled,
    write_experiment,
    write_run,
    write_sweep,
)

from mupscale.commands.reporting.folders import Found
from mupscale.commands.reporting.groups import group_runs
from mupscale.commands.reporting.reach import Windows
from mupscale.commands.reporting.runs import LoggedRun

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and is tested elsewhere."""
    monkeypatch.setattr("mupscale.commands.reporting.draw_figures", lambda *_: [])


# --- numbers


def test_the_papers_figures():
    """The MLP with SGD: 740 TFLOPs for the base, 11,326 from scratch, 598 until the upscaled run reaches its minimum.
    With the base model that is 8.5 times cheaper.
    """
    epoch = 464_809
    options = {"steps_per_epoch": 2, "values": {"trainer.max_epochs": 500, "trainer.log_every_n_steps": 2}}
    wide = {**options, "flops": lambda step: step / 2 * epoch * mlp_flops(2000)}
    for seed, reached in enumerate([24, 25, 26, 27, 30]):  # 26.4 on average
        base(epochs(0.2, count=500), seed, flops=lambda step: step / 2 * epoch * mlp_flops(500), **options)
        scratch([0.3, *[0.2] * 250, 0.1 + seed / 1000, *[0.15] * 248], seed, **wide)
        upscaled(epochs(*[0.25] * (reached - 1), 0.1 - seed / 1000, count=40), seed, steps=80, has_ended=True, **wide)
    text, summary = report()
    page = Page(text)
    assert page.table("charged") == [
        ["from scratch", "11,326", "1.0×"],
        ["upscaled, until it reaches that minimum", "598", "18.9×"],
        ["… and the base model", "1,338", "8.5×"],
    ]
    assert page.table("seed")[4] == ["4", "0.1040", "30", "60", f"{30 * epoch * mlp_flops(2000) / 1e12:,.0f}"]
    reach = "It reaches from scratch's minimum after 26.4 epochs (24–30)"
    assert f"{reach}, 18.9× cheaper than training from scratch" in page.text
    assert "; 8.5× cheaper with the base model charged." in page.text
    (comparison,) = summary["comparisons"]
    assert comparison["reach_epoch"] == {"mean": 26.4, "min": 24, "max": 30, "runs": 5}
    charged = 26.4 / 500 + mlp_flops(500) / mlp_flops(2000)
    assert [cost["speedup"] for cost in comparison["costs"]] == pytest.approx([1, 500 / 26.4, 1 / charged], rel=1e-6)


def test_the_verdict_and_the_ends():
    for seed in (0, 1):
        base(epochs(1.0), seed, validation=accuracy(0.7))
        scratch(epochs(1.0, 0.5, 0.4 + seed / 10), seed, validation=accuracy(0.8))
        upscaled(epochs(0.6, 0.3, 0.2), seed, validation=accuracy(0.75 + seed / 100))
    text, summary = report()
    page = Page(text)
    assert "MLP on Covertype: width 500 → 2000" in page.text
    ends = "Upscaled ends at 0.2000 (0.2000–0.2000, 2 seeds), from scratch at 0.4500 (0.4000–0.5000, 2 seeds)"
    difference = "lower by 0.25, 56 % (95 % interval -0.39 to 0.89, 2 seeds): they cannot be told apart"
    assert f"{ends}: {difference}." in page.text
    accuracies = "Validation accuracy ends at 0.7550 (0.7500–0.7600) against 0.8000 (0.8000–0.8000)"
    assert f"{accuracies}: lower by 0.045 (95 % interval -0.019 to 0.11, 2 seeds): they cannot" in page.text
    assert summary["comparisons"][0]["difference"]["outcome"] == "cannot be told apart"
    assert "It reaches from scratch's minimum after 2 epochs, 5.0× cheaper" in page.text  # of 10
    assert page.table("")[0] == ["upscaled", "2", "0.2000 (0.2000–0.2000)", "0.7550 (0.7500–0.7600)", "2,000"]
    assert [group["final_loss"]["mean"] for group in summary["groups"]] == pytest.approx([0.2, 0.45, 1.0])
    assert [run["reach_step"] for run in summary["runs"]] == [40, 40, None, None, None, None]
    first_run = Path("report/summary.csv").read_text().splitlines()[1]
    assert first_run.startswith("upscaled,0,runs/upscale/seed=0,500,2000,200,200 steps,0.2")


def test_the_lowest_validation_loss_of_runs_that_overfit():
    for seed in (0, 1):
        scratch(epochs(0.5), seed, validation={"val/loss": lambda step, seed=seed: 0.3 + abs(step - 100) / 1000 + seed})
    text, summary = report()
    losses = ["0.9000 (0.4000–1.400)", "0.8000 (0.3000–1.300)"]
    assert Page(text).table("")[0] == ["scratch", "2", "0.5000 (0.5000–0.5000)", *losses, "2,000"]
    assert [(run["lowest val/loss"], run["step of lowest val/loss"]) for run in summary["runs"]] == [
        (pytest.approx(0.3), 100),
        (pytest.approx(1.3), 100),
    ]


def test_plainly_when_it_does_not_pay():
    scratch(epochs(1.0, 0.4), validation=accuracy(0.8))
    upscaled(epochs(0.6, 0.5), validation=accuracy(0.9))
    text, summary = report()
    page = Page(text)
    ends = "Upscaled ends at 0.5000 (1 seed), from scratch at 0.4000 (1 seed)"
    assert f"{ends}: higher by 0.1, 25 % (one seed proves nothing)." in page.text
    assert "It does not reach from scratch's minimum within 10 epochs: no savings can be stated." in page.text
    assert "Validation accuracy ends at 0.9000 against 0.8000: higher by 0.1 (one seed proves nothing)." in page.text
    assert page.table("seed") == [["0", "0.4000", "not within 10 epochs", "—", "—"]]
    assert summary["comparisons"][0]["costs"] is None


def test_tuning_is_every_trial_of_the_sweeps():
    base(epochs(1.0), validation=accuracy(0.7))
    scratch(epochs(1.0, 0.4), validation=accuracy(0.8))
    upscaled(epochs(0.6, 0.5, 0.3), validation=accuracy(0.75))
    narrow = {"model.init_args.width": 100}
    small = {**UPSCALED, **narrow, "trainer.callbacks": [upscale(width=400)]}
    for name, values, cost in (("sweep_1", narrow, 0.1e12), ("sweep_2", small, 0.5e12)):
        for cell in range(4):
            options: dict = {"values": values, "flops": lambda step, cost=cost: step * cost}
            steps = 50 if cell == 3 else 200  # one was given up
            write_run(Path(f"runs/{name}/trials/{cell:03d}_lr=0.1"), lambda step: 1.0, steps=steps, **options)
        write_sweep(f"runs/{name}", {"model.optimizer.lr": [0.1, 0.2]}, best=f"lr=0.1: best of {name}.")
        Image.new("RGB", (4, 4)).save(f"runs/{name}/heatmap.png")
    plain, there = report()
    assert "Tuning" not in Page(plain).text  # nobody has named the sweeps
    assert len(there["runs"]) == 3  # and their trials are no runs of their own
    runs = [{"role": role, "seed": 0, "folder": f"{role}/seed=0"} for role in ("base", "scratch", "upscale")]
    sweeps = {"sweep_1": "sweep_1", "sweep_2": "sweep_2"}
    write_experiment("runs", command=["mupscale", "experiment", "x y.yaml"], runs=runs, sweeps=sweeps)
    text, summary = report()
    page = Page(text)
    assert [sweep["flops"] for sweep in summary["tuning"]] == [65e12, 325e12]  # 650 steps each
    assert [sweep["speedup"] for sweep in summary["tuning"]] == [None, 20.0]
    assert page.table("sweep") == [["sweep_1", "100", "4", "65.0", "—"], ["sweep_2", "100 → 400", "4", "325", "20.0×"]]
    assert page.table("charged") == [
        ["from scratch", "2,000", "1.0×"],
        ["upscaled, until it reaches that minimum", "600", "3.3×"],
        ["… and tuning", "990", "2.0×"],
        ["… and the base model", "800", "2.5×"],
        ["… and both", "1,190", "1.7×"],
    ]
    assert "Best: lr=0.1: best of sweep_2." in page.text
    assert "mupscale experiment 'x y.yaml'" in page.text
    assert {run["group"] for run in summary["runs"]} == {"base", "from scratch", "upscaled"}  # no trials
    named, _ = report("runs/base", "runs/scratch", "runs/upscale", "runs/sweep_2")
    assert Page(named).table("charged")[2] == ["… and tuning", "925", "2.2×"]
    assert len(report("runs/sweep_2/trials", out="trials")[1]["runs"]) == 4


def test_trials_cost_what_they_ran_and_a_note_counts_those_that_are_gone():
    scratch(epochs(1.0, 0.4), validation=accuracy(0.8))
    upscaled(epochs(0.6, 0.3), validation=accuracy(0.75))
    rarely = {"model.init_args.width": 100, "trainer.log_every_n_steps": 30}  # the last time at 180 of 200 steps
    options = {"values": rarely, "flops": lambda step: step * 1e12, "validation": accuracy(0.7)}
    write_run(Path("s/trials/000"), lambda step: 1.0, result=0.5, **options)
    write_run(Path("s/trials/001"), lambda step: 1.0, result=math.inf, steps=100, **options)  # known of until 90
    write_run(Path("s/trials/002"), lambda step: 1.0, steps=70, **options)  # runs: known of until 60
    write_sweep("s", {}, table=["trial,last_epoch,run", "0,0.5,trials/000", "1,diverged,trials/001"])
    text, summary = report("runs", "s")
    assert [(sweep["trials"], sweep["flops"]) for sweep in summary["tuning"]] == [(3, (200 + 90 + 60) * 1e12)]
    assert "or are gone" not in text
    shutil.rmtree("s/trials/000")
    text, summary = report("runs", "s")
    assert [(sweep["trials"], sweep["flops"]) for sweep in summary["tuning"]] == [(3, (90 + 60) * 1e12)]
    assert "1 of 3 trials of s have logged no FLOPs, or are gone: tuning cost more than is said." in text


def test_windows_where_steps_are_counted():
    """400 steps: a running mean over 2 %, which is 8 steps, at every logged one."""
    by_steps = {"trainer.max_steps": 400, "trainer.max_epochs": None, "trainer.log_every_n_steps": 1}
    scratch(lambda step: 1.0 if step <= 200 else 0.5, values=by_steps, steps_per_epoch=1000)
    upscaled(lambda step: 0.75 if step <= 100 else 0.25, values=by_steps, steps_per_epoch=1000)
    text, summary = report()
    assert summary["window"]["steps"] == 8
    # (0.75 + 0.25) / 2 is from scratch's minimum
    assert [(reach["step"], reach["epoch"]) for reach in summary["comparisons"][0]["reach"]] == [(104, None)]
    assert Page(text).table("seed") == [["0", "0.5000", "104", "1,040"]]


@pytest.mark.parametrize(("steps", "last"), [(200, 200), (193, 180), (181, 180), (179, 160)])
def test_an_epoch_counts_when_no_more_of_it_would_be_logged(steps: int, last: int):
    """Epochs of 20 steps, a loss every 6."""
    run = LoggedRun(scratch(epochs(0.5), steps=steps, values={"trainer.log_every_n_steps": 6}))
    ends, losses = Windows(20, 20, True).of(run)
    assert ends.tolist() == list(range(20, last + 1, 20))
    assert losses == pytest.approx(0.5)


def test_a_run_that_grows_in_the_middle():
    swaps = [upscale(at_step=60, width=1000), upscale(at_step=100)]
    growing = {"trainer.callbacks": swaps, "model.init_args.init_from": None}

    def flops(step: float) -> float:
        return min(step, 60) * 1e12 + min(max(step - 60, 0), 40) * 3e12 + max(step - 100, 0) * 10e12

    scratch(epochs(1.0, 0.4))
    upscaled(epochs(1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 0.4, 0.3), values=growing, flops=flops)
    text, summary = report()
    (comparison,) = summary["comparisons"]
    assert comparison["reach"][0]["epoch"] == 7
    assert comparison["reach"][0]["flops"] == pytest.approx(60e12 + 40 * 3e12 + 40 * 10e12)
    assert "The base model's training is part of the upscaled runs" in Page(text).text
    assert [cost["kind"] for cost in comparison["costs"]] == ["scratch", "upscaled"]
    assert LoggedRun(Path("runs/upscale/seed=0")).growths == [60, 100]


def test_final_losses_are_the_recorded_ones_where_every_run_has_them():
    judge = {"class_path": "mupscale.callbacks.trial_metric.TrialMetric", "init_args": {"metric": "last_epoch"}}
    scratch(epochs(0.5), values={"trainer.callbacks": [judge]}, result=0.51, validation=accuracy(0.8))
    upscaled(epochs(0.4), values={"trainer.callbacks": [upscale(), judge]}, result=0.41, validation=accuracy(0.8))
    text, summary = report()
    assert [group["final_loss"]["mean"] for group in summary["groups"]] == [0.41, 0.51]
    assert "Final losses are means over every step of the last epoch, as the runs recorded them." in text
    Path("runs/scratch/seed=0/result.json").unlink()
    assert [group["final_loss"]["mean"] for group in report()[1]["groups"]] == pytest.approx([0.4, 0.5])


# --- groups


def names(*folders: str) -> dict[str, list[int]]:
    groups = group_runs(Found([Path(folder) for folder in folders]).runs)
    return {group.name: [run.seed for run in group.runs] for group in groups}


def test_groups_and_their_names():
    for seed in (1, 0):
        base(epochs(1.0), seed)
        scratch(epochs(1.0), seed)
        for std in (0.1, 0.5):
            upscaled(epochs(1.0), seed, {"trainer.callbacks": [upscale(std)]}, name=f"upscale-{std}")
    write_run(Path("runs/tiny"), epochs(1.0), values={"model.init_args.width": 3})
    two = ["upscaled, std 0.1", "upscaled, std 0.5", "from scratch", "base"]
    assert names("runs") == {**{key: [0, 1] for key in two}, "tiny": [0]}
    assert list(names("runs")) == [*two, "tiny"]
    assert names("runs/tiny") == {"tiny": [0]}
    assert names("runs/base", "runs/tiny") == {"base": [0, 1], "tiny": [0]}
    pairs = [(each["upscaled"], each["scratch"]) for each in report()[1]["comparisons"]]
    assert pairs == [(name, "from scratch") for name in two[:2]]


def test_the_better_one_of_two_baselines_is_a_choice():
    slow = {**WIDE, "model.init_args.optimizer.init_args.lr": 0.001}
    for seed in (0, 1, 2):
        scratch(epochs(0.5 + seed / 50), seed)
        write_run(Path(f"runs/slow/seed={seed}"), epochs(0.6), seed=seed, values=slow)
        upscaled(epochs(0.4 + seed / 40), seed)
    text, summary = report()
    (comparison,) = summary["comparisons"]
    assert (comparison["scratch"], comparison["difference"]["pairs"]) == ("from scratch, lr 0.1", 2)
    assert "97.5 % interval" in text


def test_the_table_of_differences_shows_what_differs_and_nothing_else():
    base(epochs(1.0))
    scratch(epochs(1.0), values={"data.init_args.data_dir": "elsewhere", "trainer.devices": 4})
    upscaled(epochs(1.0))
    rows = {key: values for key, *values in Page(report()[0]).table("configuration key")}
    assert rows["model.width"] == ["500", "2000", "500"]
    assert rows["model.optimizer.lr"] == ["0.013", "0.1", "0.1"]
    assert rows["model.init_from"] == ["a checkpoint", "None", "None"]
    assert rows["UpscaleCallback.noise.std"] == ["1", "—", "—"]
    swap = {f"UpscaleCallback.{key}" for key in ("at_step", "width", "lr", "noise.class_path", "noise.std")}
    assert set(rows) == {"model.width", "model.optimizer.lr", "model.init_from"} | swap


# --- runs that are not as they should be


def test_runs_in_progress_diverged_unpaired_twice_and_without_a_loss():
    scratch(epochs(0.5), 0, validation=accuracy(0.8))
    scratch(lambda step: math.inf if step > 100 else 0.1, 1, validation=accuracy(0.8))
    upscaled(epochs(0.4), 0, validation=accuracy(0.8))
    upscaled(epochs(0.3), 1, steps=90, validation=accuracy(0.8))
    upscaled(epochs(0.2), 2, validation=accuracy(0.8))
    write_run(Path("runs/begun"), [], steps=0)
    write_run(Path("runs/again"), epochs(0.5), values=WIDE)
    path = next(Path("runs/upscale/seed=2").glob("events*"))
    path.write_bytes(path.read_bytes()[:-3])
    text, summary = report()
    assert "from scratch, seed 1 (runs/scratch/seed=1): diverged at step 105: it is left out of means." in text
    assert "upscaled, seed 1 (runs/upscale/seed=1): in progress, 90 of 200 steps." in text
    assert "1 of 3 runs of from scratch diverged, and did not count." in text
    assert "Seed 2 of upscaled has no partner from scratch" in text
    assert "An event file of runs/upscale/seed=2 is damaged or cut off" in text
    assert "runs/begun has logged no training loss to TensorBoard, and is left out." in text
    assert "ends at 0.3000 (0.2000–0.4000, 2 seeds), from scratch at 0.5000 (0.5000–0.5000, 2 seeds)" in text
    assert "from scratch has several runs of seed 0: all count, and the first is compared by seed." in text
    assert [reach["seed"] for reach in summary["comparisons"][0]["reach"]] == [0]
    assert summary["runs"][-1]["final_loss"] is None
