"""Reports on growth methods that an experiment compares: their table, verdict and figures."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import LR, NOISE
from synthetic_runs import (
    Page,
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

from mupscale.commands import figures

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

GRID = {LR: [0.01, 0.02, 0.04], NOISE: [0.0, 0.5]}
CLASSES = {
    "lemon": "mupscale.methods.Lemon",
    "copies": "mupscale.methods.Duplication",
    "pad": "mupscale.methods.ZeroPadding",
}


def sweep(method: str, *rows: tuple[float, float, str], flops: float) -> None:
    """A finished sweep with trials (lr, std, loss), of which one is there with its cost."""
    folder = f"runs/sweep_2/{method}"
    write_run(Path(folder, "trials/0"), epochs(1.0), flops=lambda step: step * flops / 200)
    lines = [f"{trial},{lr},{std},{loss},trials/0" for trial, (lr, std, loss) in enumerate(rows)]
    has_best = any(loss != "diverged" for *_, loss in rows)
    write_sweep(folder, GRID, "the best" if has_best else "", [f"trial,{LR},{NOISE},last_epoch,run", *lines])
    if not has_best:
        Path(folder, "no_best.txt").write_text("none\n")


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
    methods = {name: {"class_path": path} for name, path in CLASSES.items()}
    sweeps = {f"sweep_2/{method}": f"sweep_2/{method}" for method in CLASSES}
    write_experiment("runs", experiment={"methods": methods}, runs=runs, sweeps=sweeps)
    text, summary = report("runs")
    with open("report/methods.csv") as lines:
        return Page(text), summary, list(csv.DictReader(lines))


@pytest.mark.slow
def test_the_table_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mupscale.commands.reporting.draw_figures", lambda *_: [])  # other tests draw them
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
        drawing = path.with_suffix(".png")
        drawing.touch()
        return [drawing, drawing]

    monkeypatch.setattr("mupscale.commands.figures.dots", dots)
    monkeypatch.setattr("mupscale.commands.reporting.draw_figures", lambda *_: [])
    monkeypatch.setattr("mupscale.commands.reporting.methods.draw_bands", lambda *_: [])
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
