"""The CSV files of docs/results."""

import csv
from collections.abc import Iterable

from paths import ROOT

FOLDER = ROOT / "docs" / "results"
Row = dict[str, str]


def read_rows(name: str) -> list[Row]:
    return list(csv.DictReader((FOLDER / name).read_text().splitlines()))


def number(text: str) -> float:
    return float(text.replace("diverged", "inf"))


def take(rows: Iterable[Row], column: str, **where: str) -> list[float]:
    return [number(row[column]) for row in rows if all(row[key] == value for key, value in where.items())]


def show_factor(cost: float, charged: float) -> str:
    return f"{cost / charged:.1f}×" if cost > charged else f"{charged / cost:.1f}× more expensive"


GROUPS = ("base", "from scratch", "upscaled")
TITLES = {"mlp_adamw": "MLP, AdamW", "mlp_sgd": "MLP, SGD", "resnet": "ResNet-18", "gpt2": "GPT-2, constant rate"}


def by_seed(runs: list[Row], column: str, group: str) -> dict[str, float]:
    return {row["seed"]: float(row[column]) for row in runs if row["group"] == group}
