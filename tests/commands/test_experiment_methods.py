"""The experiments that compare growth methods: each is tuned by itself, and each grows the bases of the target size."""

import csv
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import LR, NOISE, refused, small
from paths import ROOT
from synthetic_runs import Page, base, epochs, report, scratch, upscale, upscaled, write_run

from mupscale.commands import figures
from mupscale.commands.lab.file import read
from mupscale.commands.lab.parts import RunPart, SweepPart
from mupscale.commands.lab.protocols import Experiment, trials_of
from mupscale.commands.lab.run import Trial
from mupscale.commands.reporting.draw import draw_ends
from mupscale.methods import METHODS

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

METHOD = "UpscaleCallback.method"

FILES = sorted((ROOT / "configs/experiments").glob("methods_*.yaml"))

THREE = {
    "duplication": {"class_path": "mupscale.methods.Duplication"},
    "net2net": {"class_path": "mupscale.methods.Net2Net"},
    "diagonal": {"class_path": "mupscale.methods.HyperCloning", "init_args": {"variant": "diagonal"}},
}


def class_of(described: dict[str, Any]) -> str:
    return str(described["class_path"]).rpartition(".")[2]


def file(**keys: Any) -> str:
    """An experiment of three methods, each with two trials."""
    small(Path("c.yaml"))
    content = {
        "protocol": "upscale",
        "config": "c.yaml",
        "small": [8, 16],
        "target": [16, 32],
        "seeds": [3, 4],
        "noise": {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 0.1}},
        "methods": THREE,
        "sweep_2": {LR: [0.005, 0.01], NOISE: [0.0]},
        **keys,
    }
    Path("e.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return "e.yaml"


# --- the files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_method_is_in_the_file(path: Path) -> None:
    """With rates and noise levels to tune, the same for all; a second HyperCloning is the diagonal one."""
    content = yaml.safe_load(path.read_text())
    listed = Counter(class_of(method) for method in content["methods"].values())
    refused = {"AKI"} if path.stem == "methods_resnet" else set()  # no layer has a next one of the same shape
    assert set(listed) == {type(make()).__name__ for make in METHODS.values()} - refused
    assert {name: count for name, count in listed.items() if count > 1} == {"HyperCloning": 2}
    for name, method in content["methods"].items():
        assert type(METHODS[name]()).__name__ == class_of(method)
    sweep = content["sweep_2"]
    assert sweep.keys() == {LR, NOISE}
    assert len(sweep[LR]) > 1
    assert sweep[NOISE][0] == 0 < max(sweep[NOISE])
    assert len(content["seeds"]) == 2


# --- the protocol


def test_all_methods_are_tuned_alike_and_seeds_are_whole() -> None:
    whole = Experiment(Path("o"), read(Path(file()), []))
    names = [part.name for part in whole.parts]
    assert names == [
        "small_base, seed 3", "base, seed 3", "base, seed 4",
        "sweep_2/duplication", "sweep_2/net2net", "sweep_2/diagonal",
        "scratch, seed 3", "upscale/duplication, seed 3", "upscale/net2net, seed 3", "upscale/diagonal, seed 3",
        "scratch, seed 4", "upscale/duplication, seed 4", "upscale/net2net, seed 4", "upscale/diagonal, seed 4",
    ]  # fmt: skip
    sweeps = [part for part in whole.parts if isinstance(part, SweepPart)]
    assert [sweep.total for sweep in sweeps] == [2] * 3
    assert [len(stage) for stage in whole.stages] == [1, 5, 8]
    record = whole._record(["command"])
    assert record["runs"][-1] == {
        "role": "upscale", "seed": 4, "folder": "upscale/diagonal/seed=4", "method": "diagonal",
    }  # fmt: skip
    assert list(record["sweeps"]) == ["small_base", *names[3:6]]


def write_result(folder: Path, value: float) -> None:
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"value": str(value), "seconds": 1.0}))


def swap_of(trial: Trial) -> dict[str, Any]:
    (swap,) = (c for c in trial.runs[0].config["trainer"]["callbacks"] if class_of(c) == "UpscaleCallback")
    return dict(swap["init_args"])


@pytest.mark.slow
def test_each_method_grows_the_target_with_its_own_best_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained. All trials of one method diverge, and so it has no runs at the target size."""
    monkeypatch.setattr("mupscale.commands.lab.protocols.check", lambda description: None)
    whole = Experiment(Path("o"), read(Path(file()), []))
    whole.begin(["command"])
    for part in whole.parts[:3]:
        assert isinstance(part, RunPart)
        write_result(part.folder, 0.5)
    losses = {"duplication": [0.3, 0.2], "net2net": [math.inf, math.inf], "diagonal": [0.1, 0.2]}
    values = [(name, value) for name, both in losses.items() for value in both]
    for trial, (name, value) in zip(trials_of(whole.stages[1]).values(), values, strict=True):
        assert trial.name.startswith(f"sweep_2/{name}, lr=")
        assert class_of(swap_of(trial)["method"]) == class_of(THREE[name])
        assert trial.runs[0].config["model"]["init_args"]["init_from"] == "o/small_base/seed=3/checkpoints/last.ckpt"
        write_result(trial.runs[0].folder, value)
    for part in whole.stages[1]:
        part.conclude()
    assert Path("o/sweep_2/net2net/no_best.txt").read_text() == "none: all 2 trials diverged\n"
    assert len(list(Path("o/sweep_2").glob("*/best.yaml"))) == 2
    taken = {trial.name: trial for trial in trials_of(whole.stages[2]).values()}
    assert list(taken) == [
        "scratch, seed 3", "upscale/duplication, seed 3", "upscale/diagonal, seed 3",
        "scratch, seed 4", "upscale/duplication, seed 4", "upscale/diagonal, seed 4",
    ]  # fmt: skip
    assert list(trials_of(whole.stages[2])) == [0, 1, 3, 4, 5, 7]  # by which parts share them
    assert whole.left == (6, 17)
    for name, lr in (("duplication", 0.01), ("diagonal", 0.005)):
        for seed in (3, 4):
            trial = taken[f"upscale/{name}, seed {seed}"]
            model, swap = trial.runs[0].config["model"]["init_args"], swap_of(trial)
            assert model["optimizer"]["init_args"]["lr"] == lr
            assert model["init_from"] == f"o/base/seed={seed}/checkpoints/last.ckpt"
            assert (swap["width"], class_of(swap["method"])) == (32, class_of(THREE[name]))
    assert swap["method"]["init_args"]["variant"] == "diagonal"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sweep_2": {METHOD: [THREE["net2net"]]}}, f"sweep_2.{METHOD}: the key methods names"),
        ({"sweep_2": {f"{METHOD}.seed": [1, 2]}}, f"sweep_2.{METHOD}.seed: the key methods names"),
        ({"methods": []}, "methods: give a mapping by name"),
        ({"methods": {"a/b": THREE["net2net"]}}, "methods: a name is made of letters"),
        ({"methods": {"a": {"init_args": {}}}}, "methods.a: give the class_path of a growth method"),
        ({"methods": {"a": THREE["net2net"], "A": THREE["diagonal"]}}, "methods: a and A are the same"),
        ({"methods": {"a": THREE["net2net"], "b": THREE["net2net"]}}, "methods: a and b are the same"),
    ],
)
def test_mistakes_name_their_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        read(Path(file(**keys)), [])


def test_a_name_that_is_there_twice_is_refused() -> None:
    path = Path(file())
    path.write_text(path.read_text().replace("  diagonal:\n", "  net2net:\n"))
    with pytest.raises(ValueError, match=r"it has the key methods\.net2net twice, in lines"):
        read(path, [])


@pytest.mark.slow
def test_methods_that_cannot_grow_the_model_are_refused_before_the_first_run() -> None:
    noisy = {"class_path": "mupscale.methods.HyperCloning", "init_args": {"variant": "noisy"}}
    forced = {"callback_args": {"UpscaleCallback": {"method": THREE["net2net"]}}}
    for keys, parts in (
        ({"methods": {"a": {"class_path": "mupscale.Cloning"}}}, ["methods.a:", "Cloning"]),
        ({"methods": {"a": noisy}}, ["methods.a:", "has noise of its own"]),
        ({"methods": {"a": THREE["duplication"]}, "upscaled": forced}, ["upscaled:", METHOD]),
        ({"protocol": "transfer"}, ["protocol transfer has no key"]),
    ):
        message = refused("experiment", file(**keys), "--out", "o")
        assert all(part in message for part in parts), message
    assert not Path("o").exists()


# --- the report

GRID = {LR: [0.01, 0.02, 0.04], NOISE: [0.0, 0.5]}
CLASSES = {
    "lemon": "mupscale.methods.Lemon",
    "copies": "mupscale.methods.Duplication",
    "pad": "mupscale.methods.ZeroPadding",
}


def sweep(method: str, *rows: tuple[float, float, str], flops: float) -> None:
    """A finished sweep with trials (lr, std, loss), of which one is there with its cost."""
    folder = Path("runs/sweep_2", method)
    write_run(folder / "trials/0", epochs(1.0), flops=lambda step: step * flops / 200, grown={0: 400})
    axes = [{"key": key, "values": levels} for key, levels in GRID.items()]
    (folder / "sweep.json").write_text(json.dumps({"sweep": axes}))
    lines = [f"{trial},{lr},{std},{loss},trials/0" for trial, (lr, std, loss) in enumerate(rows)]
    (folder / "trials.csv").write_text("\n".join([f"trial,{LR},{NOISE},last_epoch,run", *lines]) + "\n")
    if any(loss != "diverged" for *_, loss in rows):
        (folder / "best.yaml").write_text("# the best\n")
    else:
        (folder / "no_best.txt").write_text("none\n")


def grown(method: str, seed: int, loss: list[float], swap_losses: tuple[float, float], validation: float) -> None:
    described = {"class_path": CLASSES[method], "init_args": {}}
    upscaled(
        loss,
        seed,
        {"trainer.callbacks": [upscale(method=described)]},
        name=f"upscale/{method}",
        swap_losses=swap_losses,
        validation={"val/loss": lambda step: validation},
        result=loss[-1],
    )


def compare_methods(*, pad: str = "1.0") -> tuple[Page, dict[str, Any], list[dict[str, str]]]:
    """The page, the summary and the table of three methods; `pad` is the loss of a method's only trial."""
    runs = []
    for seed in (0, 1):
        base(epochs(1.0), seed)
        scratch(epochs(1.0, 0.5), seed, validation={"val/loss": lambda step: 0.8})
        runs += [{"folder": f"{role}/seed={seed}"} for role in ("base", "scratch")]
        for method in CLASSES:
            runs.append({"folder": f"upscale/{method}/seed={seed}", "method": method})
    grown("copies", 0, epochs(0.9, 0.8, 0.7, 0.65, 0.6, 0.42), (1.0, 1.5), 0.7)
    grown("copies", 1, epochs(0.9, 0.8, 0.7, 0.65, 0.62, 0.46), (1.2, 1.7), 0.7)
    grown("lemon", 0, epochs(0.9, 0.8, 0.7, 0.6, 0.52, 0.51, 0.41), (1.0, 1.0), 0.75)
    grown("lemon", 1, epochs(0.9, 0.8, 0.7, 0.6, 0.54, 0.51, 0.41), (1.2, 1.2), 0.75)
    sweep("copies", (0.01, 0.0, "0.9"), (0.02, 0.5, "0.8"), flops=1e12)
    sweep("lemon", (0.01, 0.0, "0.8"), (0.02, 0.5, "0.9"), (0.04, 0.5, "diverged"), flops=2e12)
    sweep("pad", (0.01, 0.0, pad), flops=4e12)
    if pad != "diverged":
        grown("pad", 0, epochs(0.6), (1.0, 1.0), 0.9)
        grown("pad", 1, epochs(0.6), (1.2, 1.2), 0.9)
    described = {
        "protocol": "upscale",
        "experiment": {"methods": {name: {"class_path": path} for name, path in CLASSES.items()}},
        "runs": runs,
        "sweeps": {f"sweep_2/{method}": f"sweep_2/{method}" for method in CLASSES},
    }
    Path("runs/experiment.json").write_text(json.dumps(described))
    text, summary = report("runs")
    with open("report/methods.csv") as lines:
        return Page(text), summary, list(csv.DictReader(lines))


@pytest.mark.slow
def test_the_table_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.commands.reporting.draw.draw_pair", lambda *_: [])  # other tests draw them
    page, summary, rows = compare_methods()
    assert page.table("method") == [
        ["lemon", "2", "1.100 (1.000–1.200)", "0.5300 (0.5200–0.5400)", "0.4100 (0.4100–0.4100)",
         "0.7500 (0.7500–0.7500)", "140", "1,400 (1.4×)", "1,600 (1.2×)", "0.01", "0", "lr"],
        ["copies", "2", "1.600 (1.500–1.700)", "0.6100 (0.6000–0.6200)", "0.4400 (0.4200–0.4600)",
         "0.7000 (0.7000–0.7000)", "120", "1,200 (1.7×)", "1,400 (1.4×)", "0.02", "0.5", "no"],
        ["pad", "2", "1.100 (1.000–1.200)", "0.6000 (0.6000–0.6000)", "0.6000 (0.6000–0.6000)",
         "0.9000 (0.9000–0.9000)", "not reached", "—", "—", "0.01", "0", "lr"],
        ["from scratch", "2", "—", "—", "0.5000 (0.5000–0.5000)", "0.8000 (0.8000–0.8000)",
         "—", "2,000", "—", "—", "—", ""],
    ]  # fmt: skip
    assert "just before the growth it is 1.100 (1.000–1.200, 2 seeds)" in " ".join(page.text.split())
    assert summary["methods"][0]["verdict"] == [
        "Of 3 growth methods lemon ends lowest, at 0.4100 (0.4100–0.4100, 2 seeds); copies is next, at 0.4400 "
        "(0.4200–0.4600, 2 seeds): lemon is lower by 0.03 (98.3 % interval -0.73 to 0.79, 2 seeds; lower by 0.03 with "
        "each seed left out of the choice): they cannot be told apart.",
        "The paper's method, copies with noise 0.5, does not end lowest: it is number 2 of 3, at 0.4400; lemon is "
        "lower by 0.03 (97.5 % interval -0.48 to 0.54, 2 seeds): they cannot be told apart.",
        "By validation loss copies ends lowest, at 0.7000 (0.7000–0.7000, 2 seeds); lemon is next, at 0.7500 "
        "(0.7500–0.7500, 2 seeds): copies is lower by 0.05 (98.3 % interval 0.05 to 0.05, 2 seeds; lower by 0.05 with "
        "each seed left out of the choice).",
        "Against from scratch, 0.5000 (0.5000–0.5000, 2 seeds): lower: lemon; cannot be told apart: copies; higher: "
        "pad.",
    ]
    second = list(rows[1].values())
    assert second[:2] == ["lemon", "1"]
    assert list(map(float, second[2:-1])) == pytest.approx([1.2, 1.2, 0.54, 0.41, 0.75, 140, 1400e12, 0.01, 0.0])
    assert second[-1] == LR
    groups = [group["name"] for group in summary["groups"]]
    assert sorted(groups) == ["base", "from scratch", "upscaled, copies", "upscaled, lemon", "upscaled, pad"]
    assert {"methods.png", "methods_ends.png", "methods_ends.pdf"} <= set(summary["files"])
    # a method is charged with its own tuning
    charged = {}
    for comparison in summary["comparisons"]:
        if comparison["costs"]:
            charged[comparison["upscaled"]] = {row["kind"]: row["flops"] for row in comparison["costs"]}
    assert charged["upscaled, copies"]["tuning"] == pytest.approx(1201e12)
    assert charged["upscaled, lemon"]["tuning"] == pytest.approx(1402e12)


def test_a_method_without_a_best_trial_has_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[list[figures.Dots], list[str]]] = []

    def dots(path: Path, *drawn: Any) -> Any:
        ends.append(drawn)  # type: ignore[arg-type]
        drawing = path / "drawing"
        drawing.touch()
        return [drawing, drawing]

    def draw(folder: Path, groups: Any, numbers: Any, methods: Any) -> list[Any]:
        draw_ends(folder, methods[0])
        return []

    monkeypatch.setattr("mupscale.commands.figures.dots", dots)
    monkeypatch.setattr("mupscale.commands.reporting.draw_figures", draw)
    page, summary, rows = compare_methods(pad="diverged")
    shown, labels = ends[0]
    assert labels == ["training loss at the end", "validation loss at the end"]
    assert [(row.label, row.colour) for row in shown] == [("lemon", 2), ("copies", 0), ("from scratch", 1)]
    assert shown[1].panels == [pytest.approx([0.42, 0.46]), pytest.approx([0.7, 0.7])]
    assert page.table("method")[2] == ["pad", "0", *["—"] * 9, "no"]
    assert "All trials of pad diverged at the small size: it has no runs at the target size." in page.text
    assert "Not begun yet" not in page.text
    assert "not finished" not in " ".join(summary["methods"][0]["verdict"])
    assert {row["method"] for row in rows} == {"lemon", "copies"}
    (Path("runs/upscale/lemon/seed=1/result.json")).unlink()
    assert report("runs")[1]["methods"][0]["verdict"][-1].startswith("1 run not finished")
    shutil.rmtree("runs/upscale/copies")
    first, unranked, *_, scratch, missing = report("runs")[1]["methods"][0]["verdict"]
    assert first.startswith("Of 2 growth methods lemon ends lowest")  # with pad, which has diverged
    assert unranked == "The paper's method, copies with noise 0.5, is not ranked (no run at the target size yet)."
    assert scratch == "Against from scratch, 0.5000 (0.5000–0.5000, 2 seeds): lower: lemon."
    assert missing == "3 runs not finished, among them all of copies: this is how the methods stand now."
    shutil.rmtree("runs/upscale/lemon")
    assert report("runs")[1]["methods"][0]["verdict"] == [
        "No growth method has a loss to compare: lemon (no run at the target size yet), "
        "copies (no run at the target size yet), pad (all trials diverged)."
    ]
    grown("lemon", 0, [*epochs(0.9), math.nan], (1.0, 1.0), math.nan)
    assert "lemon (diverged at the target size), copies (no run" in report("runs")[1]["methods"][0]["verdict"][0]
