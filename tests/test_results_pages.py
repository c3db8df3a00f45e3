"""Every row of numbers on the pages of results is computed here from the CSV files beside them."""

import csv
import re
from collections.abc import Callable, Iterable
from itertools import groupby, product
from math import pi, sqrt, tan
from statistics import mean, stdev

import pytest
from paths import ROOT

FOLDER = ROOT / "docs" / "results"
Row = dict[str, str]


def read_rows(name: str) -> list[Row]:
    return list(csv.DictReader((FOLDER / name).read_text().splitlines()))


def take(rows: Iterable[Row], column: str, **where: str) -> list[float]:
    return [float(row[column]) for row in rows if all(row[key] == value for key, value in where.items())]


def show(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def show_recorded(runs: str, quantity: str) -> str:
    """Values of which only mean and range were kept."""
    (row,) = (row for row in read_rows("recorded.csv") if (row["runs"], row["quantity"]) == (runs, quantity))
    return f"{row['mean']} ({row['lowest']}–{row['highest']})" if row["lowest"] else row["mean"]


def show_factor(cost: float, charged: float) -> str:
    return f"{cost / charged:.1f}×" if cost > charged else f"{charged / cost:.1f}× more expensive"


def join(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


GROUPS = ("base", "from scratch", "upscaled")
TITLES = {"mlp_adamw": "MLP, AdamW", "mlp_sgd": "MLP, SGD", "resnet": "ResNet-18", "gpt2": "GPT-2, constant rate"}


def overview_rows() -> list[str]:
    rows = []
    names = {
        **TITLES,
        "gpt2_decay": "GPT-2, decaying rate",
        "mlp_adamw_decay": "MLP, AdamW, 80 epochs, decaying rate",
        "mlp_sgd_decay": "MLP, SGD, 80 epochs, decaying rate",
        "resnet_decay": "ResNet-18, decaying rate",
    }
    for experiment, title in names.items():
        runs = read_rows(f"{experiment}/summary.csv")
        scratch, upscaled = (mean(take(runs, "final_loss", group=group)) for group in GROUPS[1:])
        digits = 4 if experiment.startswith("mlp") else 3
        change = f"{upscaled / scratch - 1:.{0 if scratch < 1 else 1}%}".replace("-", "−").replace("%", " %")
        seeds = len(take(runs, "seed", group="base"))
        rows.append(join(title, str(seeds), f"{scratch:.{digits}f}", f"{upscaled:.{digits}f}", change))
    recorded = show_recorded("mlp_sgd_decay from scratch", "training loss").split()[0]
    upscaled = mean(take(read_rows("mlp_sgd/summary.csv"), "final_loss", group="upscaled"))
    change = f"+{upscaled / float(recorded) - 1:.0%}".replace("%", " %")
    return [*rows, join("MLP, SGD, from scratch with a falling rate", "5", recorded, f"{upscaled:.4f}", change)]


def cost_rows() -> list[str]:
    rows = []
    for experiment, title in TITLES.items():
        runs = read_rows(f"{experiment}/summary.csv")
        scratch = mean(take(runs, "flops", group="from scratch")) / 1e12
        reached = mean(take(runs, "reach_flops", group="upscaled")) / 1e12
        base = mean(take(runs, "flops", group="base")) / 1e12
        tuning = sum(take(read_rows("sweeps.csv"), "tflops", experiment=experiment))
        totals = (reached, reached + base, reached + tuning, reached + base + tuning)
        rows.append(
            join(title, f"{scratch:,.0f}", *(f"{total:,.0f}: {show_factor(scratch, total)}" for total in totals))
        )
    return rows


def upscale_rows() -> list[str]:
    """Losses and accuracies of base, from scratch and upscaled."""
    rows = []
    for experiment, title, columns in (
        ("mlp_adamw", "AdamW, ", ("final_loss", "val/accuracy", "val/loss")),
        ("mlp_sgd", "SGD, ", ("final_loss", "val/accuracy", "val/loss")),
        ("resnet", "", ("final_loss", "val/accuracy", "val/loss")),
        ("gpt2", "constant, ", ("final_loss", "val/loss")),
        ("gpt2_decay", "decaying, ", ("final_loss", "val/loss")),
    ):
        runs, digits = read_rows(f"{experiment}/summary.csv"), 4 if experiment.startswith("mlp") else 3
        labels = {"final_loss": "training loss", "val/accuracy": "validation accuracy", "val/loss": "validation loss"}
        for column in columns:
            cells = [show(take(runs, column, group=group), digits) for group in GROUPS]
            rows.append(join(title + labels[column], *cells))
        if experiment.startswith("mlp"):
            cells = [show_recorded(f"{experiment} {group}", "lowest validation loss") for group in GROUPS]
            rows.append(join(title + "lowest validation loss", *cells))
    return rows


def falling_rate_rows() -> list[str]:
    runs, rows = read_rows("mlp_sgd/summary.csv"), []
    for quantity, column in (("training loss", "final_loss"), ("validation accuracy", "val/accuracy")):
        cells = [show(take(runs, column, group=group), 4) for group in GROUPS[1:]]
        rows.append(join(quantity, *cells, show_recorded("mlp_sgd_decay from scratch", quantity)))
    names = "mlp_sgd from scratch", "mlp_sgd upscaled", "mlp_sgd_decay from scratch"
    cells = [show_recorded(name, "lowest validation loss") for name in names]
    return [*rows, join("lowest validation loss", *cells)]


DECAYS = {"mlp_adamw": "AdamW", "mlp_sgd": "SGD", "resnet": "ResNet"}
"""Experiments with a falling rate on both sides."""


def decay_rows(experiment: str) -> list[str]:
    runs, rows = read_rows(f"{experiment}_decay/summary.csv"), []
    labels = {"final_loss": "training loss", "val/accuracy": "validation accuracy", "val/loss": "validation loss"}
    for column, label in labels.items():
        cells = [show(take(runs, column, group=group), 3 + experiment.startswith("mlp")) for group in GROUPS]
        rows.append(join(f"{DECAYS[experiment]}, {label}", *cells))
    return rows


def midrun_mean(runs: list[Row], column: str, digits: int, schedule: str, budget: str, arm: str) -> str:
    return f"{mean(take(runs, column, schedule=schedule, budget=budget, arm=arm)):.{digits}f}"


def midrun_gpt2_rows() -> list[str]:
    runs = read_rows("midrun_gpt2/midrun.csv")
    settings = [(schedule, budget) for schedule in ("constant", "decay") for budget in ("flops", "seconds")]

    def cells(column: str, arm: str) -> list[str]:
        return [midrun_mean(runs, column, 3, *setting, arm) for setting in settings]

    rows = [join(f"width {width}", *cells("validation_loss", f"width {width}")) for width in (512, 384, 256)]
    for share in (10, 25, 50, 75):
        centred, paper = (cells("validation_loss", f"grown at {share} % ({noise})") for noise in ("centred", "paper"))
        rows.append(join(f"grown at {share} %", *(f"{c} ({p})" for c, p in zip(centred, paper, strict=True))))
    narrow = cells("training_loss", "width 256")
    arms = {row["arm"] for row in runs if row["noise"]}
    best = [min(losses) for losses in zip(*(cells("training_loss", arm) for arm in arms), strict=True)]
    return [
        *rows,
        join("training loss: width 256, best growth", *(f"{n}, {b}" for n, b in zip(narrow, best, strict=True))),
    ]


def midrun_mlp_rows() -> list[str]:
    runs, rows = read_rows("midrun_mlp/midrun.csv"), []
    for arm in ("width 2000", "width 1000", "width 500", *(f"grown at {share} %" for share in (10, 25, 50, 75))):
        cells = []
        for budget in ("flops", "seconds"):
            for column in ("training_loss", "validation_loss"):
                names = [arm] if arm.startswith("width") else [f"{arm} (centred)", f"{arm} (paper)"]
                values = [midrun_mean(runs, column, 4, "constant", budget, name) for name in names]
                cells.append(values[0] if len(values) == 1 else f"{values[0]} ({values[1]})")
        rows.append(join(arm, *cells))
    return rows


METHODS = {
    "aki": "AKI", "duplication": "duplication, the paper's", "fpi": "FPI", "hypercloning": "HyperCloning",
    "hypercloning-diagonal": "HyperCloning, diagonal", "lemon": "LEMON", "ligo": "LiGO", "net2net": "Net2Net",
    "shrink-and-pad": "shrink and pad", "zero-padding": "zero padding",
}  # fmt: skip
COSTS = {  # FLOPs from scratch, and of the base
    "methods_mlp": (12_258_000 * 2000 * 18_560, 725_928e9 * 80 / 500),
    "methods_mlp_4x": (11_255.712e12 * 80 / 500, 725_928e9 * 80 / 500),
    "methods_gpt2": (19_791.209299e12, 6_184.752906e12),
}


def method_rows(name: str) -> list[str]:
    rows, digits = [], 3 if name == "methods_gpt2" else 4
    scratch, base = COSTS[name]
    for method, group in groupby(read_rows(f"{name}/methods.csv"), lambda row: row["method"]):
        runs = list(group)
        tuned = ", ".join(runs[0][key] for key in ("model.optimizer.lr", "UpscaleCallback.noise.std"))
        losses = [f"{mean(take(runs, 'loss_just_after')):.2f}", f"{mean(take(runs, 'loss_after_100')):.3f}"]
        losses.append(show(take(runs, "final_loss"), digits))
        if name == "methods_gpt2":
            losses.append(show(take(runs, "val/loss"), digits))
        else:
            losses.append(f"{mean(take(runs, 'val/accuracy')):.4f}, {mean(take(runs, 'val/loss')):.4f}")
        if all(row["reach_flops"] for row in runs):
            reached = mean(take(runs, "reach_flops"))
            cheaper = f"{show_factor(scratch, reached)}, {show_factor(scratch, reached + base)}"
        else:
            cheaper = "not reached"
        rows.append(join(METHODS[method], tuned, *losses, cheaper))
    recorded = [show_recorded(f"{name} from scratch", "training loss")]
    if name == "methods_gpt2":
        recorded.append(show_recorded(f"{name} from scratch", "validation loss"))
    else:
        both = [show_recorded(f"{name} from scratch", f"validation {what}") for what in ("accuracy", "loss")]
        recorded.append(", ".join(both))
    return [*rows, join("from scratch", "", "", "", *recorded, "")]


def transfer_rows() -> list[str]:
    rows = []
    for name, title in (("gpt2", "GPT-2"), ("mlp_sgd", "MLP, SGD"), ("mlp_adamw", "MLP, AdamW")):
        values, drifts, prices = [], [], []
        for sweep in ("lr", "noise"):
            runs = [row for row in read_rows(f"transfer_{name}/transfer.csv") if row["sweep"] == sweep]
            best = [row for row in runs if row["optimum"]]
            values.append(", ".join(row["value"] for row in best))
            loss = next(key for key in best[0] if key.startswith("last"))
            last = [row for row in runs if row["before"] == best[-1]["before"]]
            widest = {row["value"]: float(row[loss].replace("diverged", "inf")) for row in last}
            price = widest[best[0]["value"]] / min(widest.values()) - 1
            prices.append(f"{100 * price:.{1 if price < 0.05 else 0}f} %" if price else "0")
            drift = next(row for row in read_rows(f"transfer_{name}/drift.csv") if row["sweep"] == sweep)
            exponent = f"{float(drift['exponent']):.2f}".replace("-0.00", "0.00").replace("-", "−")
            drifts.append(f"{exponent} ± {float(drift['error']):.2f}")
        rows.append(join(title, *values, *drifts, *prices))
    return rows


def test_the_rows_of_the_readme() -> None:
    """Validation losses with a falling rate on both sides, and the compute of growing, its base counted."""
    text = (ROOT / "README.md").read_text().replace("**", "")
    for experiment in ("mlp_adamw", "mlp_sgd", "resnet", "gpt2"):
        runs, digits = read_rows(f"{experiment}_decay/summary.csv"), 3 + experiment.startswith("mlp")
        cells = [f"{mean(take(runs, 'val/loss', group=group)):.{digits}f}" for group in GROUPS[1:]]
        base, scratch, upscaled = (mean(take(runs, "flops", group=group)) for group in GROUPS)
        cells.append(f"{(base + upscaled) / scratch:.2f}×")
        assert f" | {' | '.join(cells)} |" in text, experiment


@pytest.mark.parametrize("experiment", DECAYS)
def test_falling_rates_in_words(experiment: str) -> None:
    runs = read_rows(f"{experiment}_decay/summary.csv")
    page = " ".join((FOLDER / "paper.md").read_text().split())
    section = page[page.index(f"**{DECAYS[experiment]}, falling rate") :]
    for column, name in (("final_loss", "training"), ("val/loss", "validation")):
        scratch, upscaled = (take(runs, column, group=group) for group in GROUPS[1:])
        change = mean(upscaled) / mean(scratch) - 1
        assert f"{name} loss ends {100 * abs(change):.0f} % {'higher' if change > 0 else 'lower'}" in section
        # Student's t with two degrees of freedom, over seeds
        differences = [grown - fixed for grown, fixed in zip(upscaled, scratch, strict=True)]
        half = 4.3027 * stdev(differences) / sqrt(3)
        low, high = (mean(differences) + side * half for side in (-1, 1))
        assert f"({low:.3f} to {high:.3f})".replace("-", "−") in section
    keys = ("model.optimizer.lr", "UpscaleCallback.noise.std", "UpscaleCallback.noise.t")
    for number in (1, 2):
        trials = [row for row in read_rows(f"{experiment}_decay/sweep_{number}.csv") if row["last_epoch"] != "diverged"]
        best = min(trials, key=lambda row: float(row["last_epoch"]))
        assert f"Sweep {number} " + " and ".join(best[key] for key in keys if key in best) in section


def test_the_midrun_difference_that_is_above_zero() -> None:
    runs = read_rows("midrun_gpt2/midrun.csv")
    above = []
    for schedule, budget in product(("constant", "decay"), ("flops", "seconds")):
        setting = {"schedule": schedule, "budget": budget}
        arms = {row["arm"] for row in runs if row["noise"]}
        losses = {arm: take(runs, "validation_loss", arm=arm, **setting) for arm in (*arms, "width 256")}
        best = min(arms, key=lambda arm: mean(losses[arm]))
        assert best.startswith("grown at 75 %")
        first, second = (grown - narrow for grown, narrow in zip(losses[best], losses["width 256"], strict=True))
        assert min(first, second) > 0
        # Student's t with one degree of freedom
        half = tan(pi * (1 - 0.05 / len(arms)) / 2) * abs(first - second) / 2
        if (centre := (first + second) / 2) > half:
            above.append((schedule, budget, f"{centre:.3f} ({centre - half:.3f} to {centre + half:.3f})"))
    assert [setting[:2] for setting in above] == [("constant", "seconds")]
    page = " ".join((FOLDER / "paper.md").read_text().split())
    assert f"zero: {above[0][2]}, at a constant rate and equal seconds" in page


PAGES: dict[str, tuple[Callable[[], list[str]], ...]] = {
    "paper": (
        overview_rows, cost_rows, lambda: upscale_rows()[:8], falling_rate_rows,
        lambda: decay_rows("mlp_adamw"), lambda: decay_rows("mlp_sgd"), lambda: upscale_rows()[8:11],
        lambda: decay_rows("resnet"), lambda: upscale_rows()[11:], midrun_gpt2_rows, midrun_mlp_rows,
    ),
    "methods": tuple(lambda name=name: method_rows(name) for name in COSTS),
    "transfer": (transfer_rows,),
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_every_row_of_numbers_is_computed_from_the_runs(page: str) -> None:
    computed = [row for rows in PAGES[page] for row in rows()]
    found = [
        line.replace("**", "")
        for line in (FOLDER / f"{page}.md").read_text().splitlines()
        if line.startswith("|") and re.search(r"\d\.\d|\d,\d{3}", line) and "![" not in line
    ]
    assert found == computed
