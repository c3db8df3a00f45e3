"""Reports: the page and its figures, mistakes after which nothing is written, and runs made by `fit`."""

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from programs import run_program
from synthetic_runs import Page, accuracy, base, epochs, mlp_flops, report, scratch, upscale, upscaled, write_run

from mupscale.__main__ import main
from mupscale.commands import figures
from mupscale.commands.cli import parsed
from mupscale.commands.reporting.page import GENERATOR

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


# --- mistakes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.init_args.batch_size": 100}, "data.batch_size is 2000 in the one and 100 in the other"),
        (
            {"data.class_path": "x.CIFAR100"},
            "data.class_path is 'mupscale.datamodules.covertype.Covertype' in the one and 'x.CIFAR100' in",
        ),
        ({"model.init_args.hidden_layers": 5}, "model.hidden_layers is 3 in the one and 5 in the other"),
        (
            {"model.init_args.optimizer.class_path": "torch.optim.SGD"},
            "model.optimizer.class_path is 'torch.optim.AdamW' in the one",
        ),
    ],
)
def test_runs_of_different_tasks(values: dict[str, Any], message: str):
    base(epochs(1.0))
    scratch(epochs(1.0), values=values)
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
        (["swept"], "there is nothing to report in swept. To show the trials of a sweep, name swept/trials."),
        (["broken"], "broken/experiment.json is damaged"),
    ],
)
def test_folders_that_hold_nothing(folders: list[str], message: str):
    base(epochs(1.0))
    Path("empty/inner").mkdir(parents=True)
    write_run(Path("begun"), [], steps=0)
    write_run(Path("swept/trials/0"), epochs(1.0))
    Path("swept/sweep.json").write_text('{"sweep": []}')
    Path("broken").mkdir()
    Path("broken/experiment.json").write_text("[]")
    with pytest.raises(SystemExit) as end:
        main(["report", *folders, "--out", "report"])
    assert str(end.value.code).startswith(f"error: {message}")
    assert not Path("report").exists()


def test_other_files_are_not_overwritten():
    base(epochs(1.0))
    Path("report").mkdir()
    Path("report/index.html").write_text("<p>mine</p>")
    with pytest.raises(ValueError, match="--out report has files but no report"):
        report()
    assert [path.name for path in Path("report").iterdir()] == ["index.html"]
    Path("file").write_text("")
    with pytest.raises(ValueError, match="--out file is a file"):
        report(out="file")


@pytest.mark.slow
def test_a_report_is_replaced_once_the_new_one_is_there(monkeypatch: pytest.MonkeyPatch):
    base(epochs(1.0), validation=accuracy(0.5))
    report()
    Path("report/notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in Path("report").iterdir()}
    assert "val_accuracy_steps.png" in before
    scratch(epochs(1.0), values={"data.init_args.batch_size": 1})
    with pytest.raises(ValueError, match="different tasks"):
        report()

    def fails(*_: Any) -> str:
        raise RuntimeError("in the last moment")

    with monkeypatch.context() as patch:
        patch.setattr("mupscale.commands.reporting.as_csv", fails)
        with pytest.raises(RuntimeError):
            report("runs/base")
    assert {path.name: path.read_bytes() for path in Path("report").iterdir()} == before
    assert not list(Path().glob(".report-*"))
    base(epochs(1.0))
    report("runs/base")
    after = {path.name for path in Path("report").iterdir()}
    names = {f"val_accuracy_{axis}.{kind}" for axis in ("steps", "flops") for kind in ("png", "pdf")}
    assert set(before) - after == names
    assert Path("report/notes.txt").read_text() == "mine"


# --- the page


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_figures")
def test_the_page_needs_nothing_else():
    base(epochs(1.0), validation=accuracy(0.7))
    scratch(epochs(1.0, 0.5), validation=accuracy(0.7), values={"data.init_args.data_dir": "<script>alert(1)</script>"})
    text, summary = report()
    page = Page(text)
    assert GENERATOR in text
    assert not {"script", "link", "iframe", "object", "embed"} & {*page.tags}
    assert not re.search(r"url\(|@import|https?://", text)
    assert len(page.resources) == 4  # loss and accuracy, against steps and FLOPs
    for resource in page.resources:
        kind, _, content = resource.partition(",")
        assert kind == "data:image/png;base64"
        picture = Image.open(io.BytesIO(base64.b64decode(content, validate=True))).convert("RGB")
        assert picture.width >= 700
    files = {path.name for path in Path("report").iterdir()}
    assert files == {*summary["files"]}
    pdfs = {f"{quantity}_{axis}.pdf" for quantity in ("training_loss", "val_accuracy") for axis in ("steps", "flops")}
    assert {name for name in files if name.endswith(".pdf")} == pdfs
    assert Path("report/training_loss_steps.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(("interval", "words"), [(1, "logged, at every step."), (5, "logged, every 5 steps.")])
def test_how_often_losses_were_logged_in_words(interval: int, words: str):
    base(epochs(1.0, 0.5), values={"trainer.log_every_n_steps": interval})
    page, _ = report("runs")
    assert words in page


@pytest.mark.slow
def test_names_are_text_and_not_markup():
    """Names of folders, groups, sweeps, experiments and metrics, values of configurations, and descriptions."""
    marks = {name: f"<script>{name}" for name in ("folder", "std", "sweep", "experiment", "description", "command")}
    scratch(epochs(0.5))
    for std in (0.5, marks["std"]):
        noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": std}}
        upscaled(epochs(0.4), values={"trainer.callbacks": [upscale(noise=noise)]}, name=f"upscale-{std}")
    metric = {'val/"><script>': lambda step: 0.5}
    write_run(Path("runs") / marks["folder"], epochs(1.0), values={"model.init_args.width": 3}, validation=metric)
    write_run(Path("sweeps") / marks["sweep"] / "trials/0", epochs(1.0), values={"model.init_args.width": 3})
    (Path("sweeps") / marks["sweep"] / "sweep.json").write_text("{}")
    experiment = Path(marks["experiment"])
    experiment.mkdir()
    described = {"runs": [], "command": marks["command"], "experiment": marks["description"]}
    (experiment / "experiment.json").write_text(json.dumps(described))
    text, summary = report("runs", f"sweeps/{marks['sweep']}", marks["experiment"])
    page = Page(text)
    assert {group["name"] for group in summary["groups"]} >= {marks["folder"], f"upscaled, std {marks['std']}"}
    assert summary["sweeps"][0]["name"] == marks["sweep"]
    assert "<script" not in text
    assert not {"script"} & {*page.tags}
    for mark in marks.values():
        assert mark in page.text
    assert 'Validation "><script>, against steps.' in page.text


def test_a_report_says_what_it_is_made_of_as_data():
    base(epochs(1.0))
    scratch(epochs(1.0, 0.4))
    upscaled(epochs(0.6, 0.3))
    (comparison,) = report()[1]["comparisons"]
    assert [(cost["kind"], cost["flops"], cost["speedup"]) for cost in comparison["costs"]] == [
        ("scratch", 2000e12, 1.0),
        ("upscaled", 400e12, 5.0),
        ("base", 600e12, pytest.approx(10 / 3)),
    ]


def test_transfer():
    Path("wide/8-16/lr").mkdir(parents=True)
    Path("wide/8-16/lr/sweep.json").write_text(
        json.dumps({"sweep": [{"key": "model.optimizer.lr", "values": [0.1, 0.2]}]})
    )
    Path("wide/8-16/lr/best.yaml").write_text("# lr=0.2: it is.\n")
    for name in ("wide/transfer.png", "wide/8-16/lr/profile.png"):
        Image.new("RGB", (4, 4)).save(name)
    Path("wide/transfer.csv").write_text("sweep,width,value,optimum\nlr,16,0.5,\nlr,16,0.2512345678,*\n")
    described = {
        "protocol": "transfer",
        "command": ["x"],
        "experiment": {},
        "runs": [],
        "sweeps": {"8-16/lr": "8-16/lr"},
    }
    Path("wide/experiment.json").write_text(json.dumps(described))
    text, summary = report("wide")
    page = Page(text)
    assert page.tables[0] == [["sweep", "width", "value"], ["lr", "16", "0.25123"]]
    assert len(page.tables[1]) == 3
    assert page.tags.count("img") == 2
    assert "Best: lr=0.2: it is." in page.text
    assert summary["experiments"] == [{"folder": "wide", "protocol": "transfer"}]


@pytest.mark.slow
def test_the_command_loads_no_torch():
    scratch(epochs(0.5), validation=accuracy(0.8))
    heavy = "{'torch', 'lightning', 'optuna'}"
    code = f"import sys, mupscale.__main__ as m; m.main(['report', 'runs']); print(sorted({heavy} & {{*sys.modules}}))"
    done = run_program("-c", code)
    assert done.stdout.splitlines() == [
        "Scratch ends at 0.5000 (1 seed).",
        "wrote report/index.html and 10 more files",
        "[]",
    ]


def fit(folder: str, *options: str) -> None:
    common: Sequence[str] = [
        "--model=MLP", "--model.base_width=4", "--data=Covertype", "--data.batch_size=500", "--trainer.max_epochs=3",
        "--trainer.log_every_n_steps=4", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
        "--trainer.logger.save_dir=.", "--trainer.logger.name=runs", f"--trainer.logger.version={folder}",
    ]  # fmt: skip
    parsed(["fit", *common, *options])


@pytest.mark.slow
def test_real_runs():
    """Base, from scratch and upscaled runs of `fit`. Their FLOPs are the paper's less the gradient of the data."""
    fit("base", "--model.width=4")
    fit("scratch", "--model.width=16")
    grow = '[{"class_path": "UpscaleCallback", "init_args": {"at_step": 0, "width": 16}}]'
    start = "--model.init_from=runs/base/checkpoints/last.ckpt"
    fit("upscale", "--model.width=4", start, f"--trainer.callbacks={grow}")
    text, summary = report()
    assert {run["group"]: run["width"] for run in summary["runs"]} == {"upscaled": 16, "from scratch": 16, "base": 4}
    assert summary["window"] == {"steps": 12, "epochs": True, "final_loss": None}
    samples = 3 * 6000
    for run in summary["runs"]:
        paper = samples * mlp_flops(run["width"])
        assert run["flops"] == pytest.approx(paper - samples * 2 * 54 * run["width"], abs=2e6)
    (comparison,) = summary["comparisons"]
    assert comparison["reach"][0]["epoch"] in (None, 1, 2, 3)
    assert "MLP on Covertype: width 4 → 16" in text


# --- figures


def band(values: list[float], spread: float = 0.0) -> figures.Band:
    x = [float(index) for index in range(len(values))]
    return figures.Band("a", 0, x, values, [value - spread for value in values], [value + spread for value in values])


def test_an_axis_is_cut_where_the_beginning_would_hide_the_rest():
    loss = [100.0, *[2 - index / 10 for index in range(11)]]  # 100, then from 2 to 1
    low, high, cut = figures.worth_showing([band(loss, 0.1)], False)
    assert (low, high) == pytest.approx((0.9 - 0.06 * 1.1, 2 + 0.06 * 1.1))
    assert cut
    low, high, cut = figures.worth_showing([band([-value for value in loss], 0.1)], True)
    assert (low, high) == pytest.approx((-2 - 0.06 * 1.1, -0.9 + 0.06 * 1.1))
    assert cut
    assert not figures.worth_showing([band(loss[3:])], False)[2]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered_figures")
@pytest.mark.parametrize("label", ["_$\nothing$"])
def test_a_label_is_drawn_as_it_is(tmp_path: Path, label: str):
    """It is neither mathematics nor hidden: a folder may have any name."""
    png, _ = figures.bands(tmp_path / "named", [band([2.0, 1.0])._replace(label=label)], "steps", label)
    blank, _ = figures.bands(tmp_path / "blank", [band([2.0, 1.0])._replace(label=" ")], "steps", label)
    assert png.read_bytes() != blank.read_bytes()
