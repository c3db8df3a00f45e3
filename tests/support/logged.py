"""What a run has logged, as tests compare it."""

import csv
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def curves(run: Path) -> dict[str, list[tuple[int, Any]]]:
    """Everything in TensorBoard that does not depend on a clock: steps and values by tag."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    answer: dict[str, list[tuple[int, Any]]] = {}
    for tag in events.Tags()["scalars"]:
        answer[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["tensors"]:
        answer[tag] = [(event.step, event.tensor_proto.string_val[0]) for event in events.Tensors(tag)]
    return {tag: points for tag, points in answer.items() if not is_timed(tag)}


def table(run: Path) -> list[dict[str, str]]:
    """Everything in metrics.csv that does not depend on a clock."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if not is_timed(key)} for row in rows]


def losses(run: Path) -> list[float]:
    """The training loss at every step that was logged."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return [event.value for event in events.Scalars("train/loss")]


def is_timed(tag: str) -> bool:
    """Whether a clock decides it."""
    timed = ("growth/pause_seconds", "x_growth/pause_seconds")
    return tag.startswith(("throughput/", "x_throughput/")) or tag in timed
