"""Sweeps of small configurations, in folders beside each other, and what they leave behind."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import trials
from logged import curves
from run_ends import differences

from mupscale.__main__ import main
from mupscale.commands.lab import space, sweep


@contextlib.contextmanager
def plain_sweeps() -> Iterator[None]:
    """Sweeps without figures and without a check of every value, which take seconds; all trials keep checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "draw_sweep", lambda *_: [])
        patch.setattr(space, "refuse_invalid", lambda *_: None)
        patch.setattr(sweep, "drop_checkpoints", lambda folder: None)
        yield


def swept(folder: str, config: str, *options: str) -> Path:
    """Makes a sweep `s` inside of a folder, so that two of them have the same paths in their files; its folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(config).resolve()
    with plain_sweeps(), contextlib.chdir(folder):
        main(["sweep", "--config", str(path), "--out", "s", *options])
    return Path(folder, "s")


def changed(config: str, *, optimizer: dict[str, Any] | None = None, **sections: dict[str, Any]) -> str:
    """Writes other arguments of the optimizer, or of sections such as `model`, into a configuration; its path."""
    path = Path(config)
    content = yaml.safe_load(path.read_text())
    if optimizer is not None:
        content["model"]["init_args"]["optimizer"] = optimizer
    for name, values in sections.items():
        content[name] |= values
    path.write_text(yaml.safe_dump(content))
    return config


def starts(run: Path) -> list[int]:
    """The steps at which a run was begun and resumed by itself; none of a run of a stack."""
    if not (run / "log.txt").exists():
        return []
    return [int(step) for step in re.findall(r"^step (\d+): \w+, width", (run / "log.txt").read_text(), re.MULTILINE)]


def process_in(lock: Path) -> int:
    """The process that a lock names; 0 if there is none."""
    try:
        words = lock.read_text().split()
    except FileNotFoundError:
        return 0
    return int(words[1]) if words else 0


def values_of(out: Path) -> list[dict[str, str]]:
    """The rows of a sweep's table, without what a clock decides."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in trials(out)]


def numbers_of(out: Path) -> list[list[float]]:
    """The metric of every trial and of its seeds; infinite if it diverged."""
    rows = [{k: v for k, v in row.items() if k.startswith(("last_", "val/", "seed "))} for row in trials(out)]
    return [[float("inf") if value == "diverged" else float(value) for value in row.values()] for row in rows]


TAGS = ("train/loss", "train/width", "val/loss", "x_axis_flops/train/loss", "x_axis_samples/val/loss")
"""The curves that a run has however it was trained."""


def unlike(ours: Path, theirs: Path, within: float = 0.0) -> list[str]:
    """What differs in the finished runs under two folders, in words: configurations, results, curves."""
    found: list[str] = []
    for result in sorted(theirs.rglob("result.json")):
        run = result.parent.relative_to(theirs)
        found += differences(read_files(ours / run), read_files(theirs / run), str(run), within)
    return found


def read_files(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    drawn = curves(run)
    return {
        "config": (run / "config.yaml").read_text(),
        "result": {key: value for key, value in result.items() if key not in ("seconds", "growths")},
        "growths": [{key: value for key, value in each.items() if key != "seconds"} for each in result["growths"]],
        "curves": {tag: drawn.get(tag) for tag in TAGS},
    }
