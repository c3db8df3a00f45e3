"""Reports: what runs and sweeps they read, the comparison at equal compute, the page, and mistakes."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from paths import ROOT
from PIL import Image
from synthetic_runs import (
    Page,
    accuracy,
    base,
    epochs,
    report,
    scratch,
    upscaled,
    write_run,
    write_sweep,
)

from mupscale.__main__ import main
from mupscale.commands import figures
from mupscale.commands.reporting import breakable, flops_text, interval, load_curves, load_runs
from mupscale.commands.reporting.compare import compare
from mupscale.commands.reporting.frames import Comparison, Results
from mupscale.commands.reporting.runs import LoggedRun, windows_of

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.commands.reporting.draw_figures", lambda *_: [])


def three_arms() -> None:
    """Two seeds. A step costs 1 TFLOP of a base, and 10 of the others; an epoch is 20 steps."""
    for seed in (0, 1):
        base(epochs(3.0, 2.0 + seed / 10), seed)
        scratch([4.0 - 0.2 * epoch + seed / 10 for epoch in range(10)], seed)
        upscaled([2.0 - 0.1 * epoch for epoch in range(10)], seed)


def compared() -> list[Comparison]:
    return Results.read(["runs"]).comparisons


# --- tables


def test_a_row_for_each_run() -> None:
    three_arms()
    runs = load_runs("runs")
    assert runs.arm.tolist() == ["upscaled"] * 2 + ["from scratch"] * 2 + ["base"] * 2
    assert runs["size"].tolist() == ["500 → 2000"] * 2 + ["2000"] * 2 + ["500"] * 2
    assert runs.seed.tolist() == [0, 1] * 3
    assert runs.flops.tolist() == [2000e12] * 4 + [200e12] * 2
    assert runs.base_flops.tolist() == [200e12] * 2 + [0.0] * 4
    assert runs.samples.tolist() == [200 * 2000.0] * 6
    assert runs.final_loss.tolist() == pytest.approx([1.1, 1.1, 2.2, 2.3, 2.0, 2.1])
    assert not runs.is_tuning.any()
    assert set(runs.state) == {"finished"}


def test_a_row_for_each_point_of_a_curve() -> None:
    three_arms()
    curves = load_curves("runs/scratch")
    assert len(curves) == 2 * 200 / 5
    first = curves.iloc[0]
    assert (first.arm, first.seed, first.step, first.samples, first.flops) == ("scratch", 0, 5, 1e4, 5e13)
    assert first.loss == pytest.approx(4.0)


def test_a_recorded_metric_is_the_final_loss() -> None:
    judge = {"class_path": "x.TrialMetric", "init_args": {"metric": "last_2%"}}
    scratch(epochs(1.0), values={"trainer.callbacks": [judge]}, result=0.75)
    scratch(epochs(1.0), 1, values={"trainer.callbacks": [judge]}, result=math.inf)
    runs = load_runs("runs")
    assert runs.final_loss[0] == 0.75
    assert math.isnan(runs.final_loss[1])
    assert runs.state[1].startswith("diverged")


def test_trials_of_a_sweep_are_tuning_and_seeds_of_one_configuration_are_runs() -> None:
    for lr in (0.1, 0.2):
        values = {"model.init_args.optimizer.init_args.lr": lr}
        write_run(Path(f"runs/sweep_1/trials/lr={lr}"), epochs(2.0), flops=lambda step: step * 1e9, values=values)
    write_sweep(
        "runs/sweep_1", {"model.optimizer.lr": [0.1, 0.2]}, "lr=0.1: best", ["trial,model.optimizer.lr,last_epoch,run"]
    )
    for seed in (0, 1):
        write_run(Path(f"runs/last/trials/000_run,seed={seed}"), epochs(1.0), seed=seed)
    write_sweep("runs/last", {})
    runs = load_runs("runs")
    assert runs.is_tuning.tolist() == [False, False, True, True]
    assert runs.role.tolist() == ["other", "other", "tuning", "tuning"]
    assert set(runs.arm) == {"last", "runs/sweep_1"}
    assert Results.read(["runs"]).tuning_flops == 400e9


def test_windows_are_epochs_or_a_fiftieth_of_the_steps() -> None:
    run = LoggedRun(scratch(lambda step: float(step)))
    assert windows_of([run]).of(run)[1].tolist()[:2] == [12.5, 32.5], "means of the steps 5 to 20, and 25 to 40"
    long = {"trainer.max_steps": 1000, "trainer.max_epochs": -1, "trainer.log_every_n_steps": 1}
    run = LoggedRun(write_run(Path("long"), lambda step: float(step), values=long, steps_per_epoch=900))
    ends, means = windows_of([run]).of(run)
    assert (windows_of([run]).size, ends[-1], means[-1]) == (20, 1000, 990.5)


# --- at equal compute


def test_arms_are_compared_where_the_cheaper_one_ends() -> None:
    """From scratch ends at 2,000 TFLOPs; with its base the upscaled run has then 1,800 of its own."""
    three_arms()
    (found,) = compared()
    assert (found.arm.name, found.reference.name, found.at_flops) == ("upscaled", "from scratch", 2000e12)
    assert list(found.ours.values()) == pytest.approx([1.2, 1.2]), "the mean of its ninth epoch"
    assert list(found.theirs.values()) == pytest.approx([2.2, 2.3])
    assert found.equal.mean == pytest.approx(1.05)
    assert found.final.mean == pytest.approx(1.15)


def test_the_cost_of_reaching_the_lowest_loss_from_scratch() -> None:
    """2.0 in the first epoch is below 2.2 and 2.3: 200 TFLOPs; tuning cost 400, the base 200."""
    three_arms()
    write_run(Path("runs/sweep_1/trials/0"), epochs(2.0), flops=lambda step: step * 2e12)
    write_sweep("runs/sweep_1", {"model.optimizer.lr": [0.1, 0.2]})
    (found,) = compared()
    assert list(found.reached.values()) == [200e12, 200e12]
    assert [(flops / 1e12, factor) for _, flops, factor in found.costs] == [
        (2000, 1), (200, 10), (600, pytest.approx(10 / 3)), (400, 5), (800, 2.5),
    ]  # fmt: skip


def test_a_loss_that_is_never_reached_has_no_cost() -> None:
    for seed in (0, 1):
        base(epochs(3.0), seed)
        scratch(epochs(1.0), seed)
        upscaled(epochs(2.0, 1.5 - seed), seed)
    (found,) = compared()
    assert found.reached == {0: math.inf, 1: 200e12 + 200e12}
    assert found.costs == []


def test_seeds_without_a_partner_are_in_no_comparison() -> None:
    three_arms()
    upscaled(epochs(0.1), 7)
    base(epochs(3.0), 7)
    (found,) = compared()
    assert list(found.ours) == [0, 1]
    assert found.final.seeds == [0, 1]


def test_without_its_base_a_run_is_not_compared_at_equal_compute() -> None:
    scratch(epochs(1.0))
    upscaled(epochs(0.5))
    (found,) = compared()
    assert found.ours == {}
    assert found.final.mean == pytest.approx(0.5)


def test_arms_are_corrected_for_their_number() -> None:
    """Plain runs: the reference is the arm that ends lowest."""
    for seed in (0, 1, 2):
        for lr, loss in ((0.1, 1.0), (0.2, 1.2), (0.4, 1.5)):
            values = {"model.init_args.optimizer.init_args.lr": lr}
            folder = Path(f"runs/lr-{lr}/seed={seed}")
            write_run(folder, epochs(loss + seed * lr / 10), seed=seed, values=values, flops=lambda step: step * 1e12)
    found = compared()
    assert [(each.arm.name, each.reference.name, each.equal.pairs) for each in found] == [
        ("lr-0.2", "lr-0.1", 6), ("lr-0.4", "lr-0.1", 6),
    ]  # fmt: skip
    assert found[0].equal.mean == pytest.approx(-0.21)
    single = compare(found[0].ours, found[0].theirs)
    assert found[0].equal.high - found[0].equal.low > single.high - single.low


def test_diverged_and_unfinished_runs_are_named_and_left_out() -> None:
    three_arms()
    scratch(lambda step: 1.0 if step < 100 else math.nan, 2)
    upscaled(epochs(1.0), 3, steps=100)
    results = Results.read(["runs"])
    notes = " ".join(results.notes)
    assert "from scratch, seed 2 (runs/scratch/seed=2): diverged at step 100" in notes
    assert "upscaled, seed 3 (runs/upscale/seed=3): in progress, 100 of 200 steps" in notes
    assert list(results.comparisons[0].final.seeds) == [0, 1]


# --- words


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (3.29e9, "3.29 GFLOPs"), (598e12, "598 TFLOPs"), (0.99996e12, "1.00 TFLOPs"), (6.7e15, "6.70 PFLOPs"),
        (12, "12.0 FLOPs"), (0.0, "0.00 FLOPs"), (math.nan, "—"), (None, "—"),
    ],
)  # fmt: skip
def test_flops_in_a_unit_that_fits(flops: float | None, text: str) -> None:
    assert flops_text(flops) == text


def test_intervals() -> None:
    assert interval(compare({0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.3, 1: 1.4, 2: 1.6})) == "+0.333 (+0.19 to +0.48)"
    assert interval(compare({0: 1.5}, {0: 1.0})) == "-0.5"
    assert interval(compare({}, {})) == "—"
    assert interval(compare({0: 1.0, 1: 30.0}, {0: 1.0, 1: 1.0})) == "-14.5 (-199 to +170)"


def test_cells_break_before_brackets_and_the_last_folder() -> None:
    cells = "0.5 (0.4 to 0.6)", "runs/a/<b>"
    assert [breakable(cell) for cell in cells] == ["0.5 <wbr>(0.4 to 0.6)", "runs/a/<wbr>&lt;b&gt;"]


# --- the page


@pytest.mark.usefixtures("rendered_figures")
def test_the_page() -> None:
    three_arms()
    for seed in (0, 1):
        scratch([4.0 - 0.2 * epoch + seed / 10 for epoch in range(10)], seed, validation=accuracy(0.75))
    page = Page(report())
    rows = page.table("")
    assert rows[0][:2] == ["upscaled", "2"]
    assert rows[0][2] == "2.00 PFLOPs"
    keys = [row[0] for row in page.table("key")]
    assert "model.optimizer.lr" in keys
    assert "UpscaleCallback.lr" not in keys, "it is None, and others do not have it"
    names = sorted(path.name for path in Path("report").iterdir())
    plots = [f"training_loss_{axis}.{kind}" for axis in ("flops", "samples", "steps") for kind in ("pdf", "png")]
    assert {"comparisons.csv", "curves.csv", "index.html", "runs.csv", *plots, "val_accuracy_steps.png"} <= set(names)
    with Image.open("report/training_loss_flops.png") as image:
        assert image.width > 600
    (row,) = csv.DictReader(Path("report/comparisons.csv").read_text().splitlines())
    assert (row["arm"], row["reference"], float(row["equal_compute_mean"])) == (
        "upscaled",
        "from scratch",
        pytest.approx(1.05),
    )
    assert 'src="http' not in Path("report/index.html").read_text()


@pytest.mark.usefixtures("_without_figures")
def test_a_sweep_alone_shows_its_table() -> None:
    lines = [
        "trial,model.optimizer.lr,last_epoch,run",
        "0,0.1,0.51234567,trials/0",
        "1,0.2,0.6,trials/1",
        "2,0.4,diverged,x",
    ]
    write_run(Path("swept/trials/0"), epochs(1.0))
    write_sweep("swept", {"model.optimizer.lr": [0.1, 0.2, 0.4]}, "lr=0.1: last_epoch 0.5", lines)
    page = Page(report("swept"))
    assert page.table("trial") == [["0", "0.1", "0.51235"], ["1", "0.2", "0.6"], ["2", "0.4", "diverged"]]
    assert "3 trials" in page.text


@pytest.mark.usefixtures("_without_figures")
def test_names_are_escaped() -> None:
    name = "runs/<script>alert(1)</script>"
    write_run(Path(name), epochs(1.0))
    assert "<script>" not in report()


def test_growth_is_marked_on_every_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        figures, "bands", lambda path, bands, *_: drawn.append((path.name, bands)) or [figures_file(path)] * 2
    )
    swap = {"class_path": "mupscale.callbacks.upscale.UpscaleCallback", "init_args": {"at_step": 100, "width": 2000}}
    values = {"trainer.callbacks": [swap], "trainer.max_steps": 200, "trainer.max_epochs": -1}
    once = {"steps_per_epoch": 200, "validation": accuracy(0.75)}
    write_run(Path("runs/a"), [1.0], flops=lambda step: step * 1e12, values=values, grown={100: 2000}, **once)
    report()
    marks = {name: bands[0].marks for name, bands in drawn}  # none of a metric that has one value
    assert marks == {
        "training_loss_steps": [100.0], "training_loss_samples": [200_000.0], "training_loss_flops": [1e14],
    }  # fmt: skip


def figures_file(path: Path) -> Path:
    Path(f"{path}.png").write_bytes(b"")
    return Path(f"{path}.png")


# --- mistakes


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.init_args.batch_size", 100, "data.batch_size is 2000 in the one and 100 in the other"),
        (
            "data.class_path",
            "x.CIFAR100",
            "data.class_path is 'mupscale.datamodules.covertype.Covertype' in the one and",
        ),
        ("model.init_args.hidden_layers", 5, "model.hidden_layers is 3 in the one and 5 in the other"),
        (
            "model.init_args.optimizer.class_path",
            "torch.optim.SGD",
            "model.optimizer.class_path is 'torch.optim.AdamW'",
        ),
    ],
)
def test_runs_of_different_tasks(key: str, value: Any, message: str) -> None:
    base(epochs(1.0))
    scratch(epochs(1.0), values={key: value})
    with pytest.raises(ValueError, match="runs/base/seed=0 and runs/scratch/seed=0 are of different tasks") as error:
        report()
    assert message in str(error.value)
    assert not Path("report").exists()
    assert not list(Path().glob(".report-*"))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "empty holds no runs"),
        (["runs", "empty"], "empty holds no runs"),
        (["begun"], "there is nothing to report in begun. begun has logged no training loss"),
    ],
)
def test_folders_that_hold_nothing(folders: list[str], message: str) -> None:
    base(epochs(1.0))
    Path("empty/inner").mkdir(parents=True)
    write_run(Path("begun"), [], steps=0)
    with pytest.raises(SystemExit) as end:
        main(["report", *folders, "--out", "report"])
    assert str(end.value.code).startswith(f"error: {message}")
    assert not Path("report").exists()


@pytest.mark.usefixtures("_without_figures")
def test_only_a_report_is_overwritten() -> None:
    base(epochs(1.0))
    Path("mine").mkdir()
    Path("mine/index.html").write_text("<p>mine</p>")
    with pytest.raises(ValueError, match="--out mine has files but no report"):
        report(out="mine")
    assert report() == report()


def test_the_notebook_goes_on_from_the_tables() -> None:
    """Its cells run on runs of three arms, with tuning."""
    three_arms()
    write_run(Path("runs/sweep_1/trials/0"), epochs(2.0), flops=lambda step: step * 2e12)
    write_sweep("runs/sweep_1", {"model.optimizer.lr": [0.1, 0.2]})
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    for cell in json.loads((ROOT / "examples" / "results.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    names["plt"].close("all")
    assert names["costs"]["upscaled"] == pytest.approx(2.2)
    assert names["tuning"] == pytest.approx(0.4)
    assert names["reached"]["upscaled", 0] == 5 * 10e12
