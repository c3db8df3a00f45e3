"""Every row of numbers on the pages of results is computed here from the CSV files beside them."""

import re
from collections.abc import Callable
from itertools import groupby
from statistics import mean

import pytest
from paths import ROOT
from result_rows import FOLDER, GROUPS, TITLES, Row, by_seed, number, read_rows, show_factor, take

from mupscale.commands.reporting.compare import compare


def show(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def join(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


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
    return rows


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
    return rows


DECAYED = {"mlp_sgd_decay": "MLP with SGD", "mlp_adamw_decay": "AdamW", "resnet_decay": "ResNet", "gpt2_decay": "GPT-2"}

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


def midrun_decay_rows() -> list[str]:
    runs, rows = read_rows("midrun_mlp/midrun.csv"), []
    for arm in ("width 2000", "width 1000", "width 500", "grown at 25 % (centred)", "grown at 50 % (centred)"):
        losses = [take(runs, f"{kind}_loss", schedule="decay", arm=arm) for kind in ("training", "validation")]
        rows.append(join(arm.removesuffix(" (centred)"), show(losses[0], 5), show(losses[1], 4)))
    return rows


METHODS = {
    "aki": "AKI", "duplication": "duplication, the paper's", "fpi": "FPI", "hypercloning": "HyperCloning",
    "hypercloning-diagonal": "HyperCloning, diagonal", "lemon": "LEMON", "ligo": "LiGO", "net2net": "Net2Net",
    "shrink-and-pad": "shrink and pad", "zero-padding": "zero padding",
}  # fmt: skip
WIDTH_1000 = 12_258_000 * 2000 * 18_560
"""FLOPs of the MLP of width 1000 from scratch, which no file holds: those of a row, batch and steps."""


def method_costs(name: str) -> tuple[float, float]:
    """FLOPs from scratch and of the base. The paper's MLP has runs of 500 epochs, the methods have 80."""
    runs, share = read_rows("gpt2/summary.csv" if name == "methods_gpt2" else "mlp_adamw/summary.csv"), 80 / 500
    base, scratch = (mean(take(runs, "flops", group=group)) for group in GROUPS[:2])
    if name == "methods_gpt2":
        return scratch, base
    return WIDTH_1000 if name == "methods_mlp" else scratch * share, base * share


def method_rows(name: str) -> list[str]:
    rows, digits = [], 3 if name == "methods_gpt2" else 4
    scratch, base = method_costs(name)
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
    return rows


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
            widest = {row["value"]: number(row[loss]) for row in last}
            price = widest[best[0]["value"]] / min(widest.values()) - 1
            prices.append(f"{100 * price:.{1 if price < 0.05 else 0}f} %" if price else "0")
            drift = next(row for row in read_rows(f"transfer_{name}/drift.csv") if row["sweep"] == sweep)
            exponent = f"{float(drift['exponent']):.2f}".replace("-0.00", "0.00").replace("-", "−")
            drifts.append(f"{exponent} ± {float(drift['error']):.2f}")
        rows.append(join(title, *values, *drifts, *prices))
    return rows


def test_the_rows_of_the_readme() -> None:
    """Validation losses with a falling rate on both sides, and the compute of growing; bold where one is lower."""
    text = (ROOT / "README.md").read_text()
    for experiment in ("mlp_adamw", "mlp_sgd", "resnet", "gpt2"):
        runs, digits = read_rows(f"{experiment}_decay/summary.csv"), 3 + experiment.startswith("mlp")
        losses = [by_seed(runs, "val/loss", group) for group in GROUPS[1:]]
        found = compare(*losses)
        lower = found.low > 0, found.high < 0  # by the 95 % interval of upscaled - from scratch
        cells = [f"{mean(each.values()):.{digits}f}" for each in losses]
        cells = [f"**{cell}**" if is_lower else cell for cell, is_lower in zip(cells, lower, strict=True)]
        base, scratch, upscaled = (mean(take(runs, "flops", group=group)) for group in GROUPS)
        cells.append(f"{(base + upscaled) / scratch:.2f}×")
        assert f" | {' | '.join(cells)} |" in text, experiment


def test_costs_at_constant_rates_on_both_summaries() -> None:
    costs = [row.split(" | ") for row in cost_rows()]
    with_base = [row[3].split(": ")[1] for row in costs]
    factors = sorted(float(factor.rstrip("×")) for factor in with_base)
    first, overview = (" ".join(path.read_text().split()) for path in (ROOT / "README.md", FOLDER / "README.md"))
    assert f"with {factors[0]} to {factors[-1]} times less compute" in first
    assert f"at a constant rate: {', '.join(with_base)}; at a falling rate" in overview


def test_costs_at_falling_rates_in_the_summary() -> None:
    overview = " ".join((FOLDER / "README.md").read_text().split())
    found = []
    for experiment, title in DECAYED.items():
        runs = read_rows(f"{experiment}/summary.csv")
        base, scratch = (mean(take(runs, "flops", group=group)) for group in GROUPS[:2])
        factor = scratch / (mean(take(runs, "reach_flops", group="upscaled")) + base)
        found.append(f"{factor:.1f}× ({title})")
    assert f"which measures the schedule too, {', '.join(found)}, and" in overview


PAGES: dict[str, tuple[Callable[[], list[str]], ...]] = {
    "paper": (
        overview_rows, cost_rows, lambda: upscale_rows()[:6], lambda: decay_rows("mlp_adamw"),
        lambda: decay_rows("mlp_sgd"), lambda: upscale_rows()[6:9], lambda: decay_rows("resnet"),
        lambda: upscale_rows()[9:], midrun_gpt2_rows, midrun_mlp_rows,
        midrun_decay_rows,
    ),
    "methods": tuple(lambda name=name: method_rows(name) for name in ("methods_mlp", "methods_mlp_4x", "methods_gpt2")),
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
