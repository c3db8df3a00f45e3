"""Reports: the page and its figures, mistakes after which nothing is written, and runs made by `fit`."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from programs import run_program
from synthetic_runs import (
    Page,
    accuracy,
    base,
    epochs,
    report,
    scratch,
    upscale,
    upscaled,
    write_experiment,
    write_run,
    write_sweep,
)

from mupscale.__main__ import main
from mupscale.commands import figures

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


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
def test_runs_of_different_tasks(key: str, value: Any, message: str):
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
        (["swept"], "there is nothing to report in swept. To show the trials of a sweep, name swept/trials."),
        (["broken"], "broken/experiment.json is damaged"),
    ],
)
def test_folders_that_hold_nothing(folders: list[str], message: str):
    base(epochs(1.0))
    Path("empty/inner").mkdir(parents=True)
    write_run(Path("begun"), [], steps=0)
    write_run(Path("swept/trials/0"), epochs(1.0))
    write_sweep("swept", {})
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
    report(out="again")
    Path("again/summary.json").unlink()
    report(out="again")
    assert Path("again/summary.json").is_file()
    Path("file").write_text("")
    with pytest.raises(ValueError, match="--out file is not a folder"):
        report(out="file")


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
    values = {"data.init_args.data_dir": "<script>alert(1)</script>"}
    scratch(epochs(1.0, 0.5), validation=accuracy(0.7), values=values, flops=None)
    text, summary = report()
    assert not re.search(r"<(script|link|iframe|object|embed)|url\(|@import|https?://", text)
    sources = re.findall(r'(?:src|srcset|href|data|action|poster)="([^"]*)"', text)
    assert len(sources) == 2  # loss and accuracy, against steps
    for source in sources:
        kind, _, content = source.partition(",")
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(content, validate=True))).convert("RGB").width >= 700
    files = {path.name for path in Path("report").iterdir()}
    assert files == {*summary["files"]}
    assert {name for name in files if name.endswith(".pdf")} == {"training_loss_steps.pdf", "val_accuracy_steps.pdf"}
    assert Path("report/training_loss_steps.pdf").read_bytes().startswith(b"%PDF")


def test_names_are_text_and_not_markup():
    """Names of folders, groups, sweeps, experiments and metrics, values of configurations, and descriptions."""
    marks = {name: f"<script>{name}" for name in ("folder", "std", "sweep", "experiment", "description", "command")}
    scratch(epochs(0.5))
    for std in (0.5, marks["std"]):
        upscaled(epochs(0.4), values={"trainer.callbacks": [upscale(std)]}, name=f"upscale-{std}")
    metric = {'val/"><script>': lambda step: 0.5}
    narrow = {"model.init_args.width": 3}
    write_run(Path("runs") / marks["folder"], epochs(1.0), values=narrow, validation=metric)
    write_run(Path("sweeps") / marks["sweep"] / "trials/0", epochs(1.0), values=narrow)
    write_sweep(f"sweeps/{marks['sweep']}", {})
    write_experiment(marks["experiment"], command=marks["command"], experiment=marks["description"])
    text, summary = report("runs", f"sweeps/{marks['sweep']}", marks["experiment"])
    page = Page(text)
    assert {group["name"] for group in summary["groups"]} >= {marks["folder"], f"upscaled, std {marks['std']}"}
    assert summary["sweeps"][0]["name"] == marks["sweep"]
    assert "<script" not in text
    for mark in marks.values():
        assert mark in page.text
    assert 'Validation "><script>, against steps.' in page.text


def test_transfer():
    write_sweep("wide/8-16/lr", {"model.optimizer.lr": [0.1, 0.2]}, best="lr=0.2: it is.")
    for name in ("wide/transfer.png", "wide/8-16/lr/profile.png"):
        Image.new("RGB", (4, 4)).save(name)
    Path("wide/transfer.csv").write_text("sweep,width,value,optimum\nlr,16,0.5,\nlr,16,0.2512345678,*\n")
    Path("wide/drift.csv").write_text("sweep,exponent\nlr,0.5\n")
    write_experiment("wide", protocol="transfer", sweeps={"8-16/lr": "8-16/lr"})
    text, summary = report("wide")
    page = Page(text)
    assert page.tables[0] == [["sweep", "width", "value"], ["lr", "16", "0.25123"]]
    assert page.tables[1] == [["sweep", "exponent"], ["lr", "0.5"]]
    assert len(page.tables[2]) == 3
    assert text.count("<img") == 2
    assert "Best: lr=0.2: it is." in page.text
    assert summary["experiments"] == [{"folder": "wide", "protocol": "transfer"}]


@pytest.mark.slow
def test_the_command_loads_no_torch():
    scratch(epochs(0.5), flops=None)
    heavy = "{'torch', 'lightning', 'optuna'}"
    code = f"import sys, mupscale.__main__ as m; m.main(['report', 'runs']); print(sorted({heavy} & {{*sys.modules}}))"
    done = run_program("-c", code)
    assert done.stdout.splitlines() == [
        "Scratch ends at 0.5000 (1 seed).",
        "wrote report/index.html and 4 more files",
        "[]",
    ]


def test_a_label_is_drawn_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """It is neither mathematics nor hidden: a folder may have any name."""
    saved: list[Any] = []
    monkeypatch.setattr("mupscale.commands.figures.save", lambda drawn, path: saved.append(drawn))
    figures.bands(Path("named"), [figures.Band("_$x$", 0, [0, 1], [2, 1], [2, 1], [2, 1])], "steps", "_$y$")
    (ax,) = saved[0].axes
    texts = [*ax.get_legend().get_texts(), ax.yaxis.label]
    assert [(text.get_text(), text.get_parse_math(), text.get_visible()) for text in texts] == [
        ("_$x$", False, True), ("_$y$", False, True),
    ]  # fmt: skip
