"""Folders of runs with given numbers, as `fit` would leave them, and the parts of reports on them."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from mupscale.commands.event_files import FLOPS
from mupscale.commands.reporting import write_report


def mlp_flops(width: int) -> int:
    """FLOPs of training the MLP on one sample, as the paper counts them: four layers, biases not charged."""
    return 6 * (54 * width + 2 * width**2 + width * 7)


CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "logger": None,
        "callbacks": None,
        "max_epochs": 10,
        "max_steps": -1,
        "val_check_interval": None,
        "check_val_every_n_epoch": 1,
        "log_every_n_steps": 5,
        "precision": None,
        "gradient_clip_val": None,
    },
    "model": {
        "class_path": "mupscale.models.mlp.MLP",
        "init_args": {
            "width": 500,
            "base_width": 1,
            "hidden_layers": 3,
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.0001}},
            "lr_scheduler": None,
            "compile": False,
            "init_from": None,
        },
    },
    "data": {
        "class_path": "mupscale.datamodules.covertype.Covertype",
        "init_args": {"data_dir": None, "batch_size": 2000, "seed": 0},
    },
    "checkpoint": {"every_n_train_steps": 500},
    "ckpt_path": None,
}

UPSCALE: dict[str, Any] = {
    "class_path": "mupscale.callbacks.upscale.UpscaleCallback",
    "init_args": {
        "at_step": 0,
        "width": 2000,
        "noise": {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": 1.0}},
        "lr": None,
    },
}


SAMPLES = "x_axis_samples/train/loss"
FIRST_FILE = "events.out.tfevents.1700000000.host.1.0"


class Events:
    """An event file, as TensorBoard's writer leaves it."""

    def __init__(self, folder: Path, name: str = FIRST_FILE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / name
        self._file = self.path.open("wb")
        self._records = RecordWriter(self._file)
        self._records.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())

    def add(self, tag: str, step: int, value: float) -> None:
        event = Event(wall_time=1.0, step=step)
        event.summary.value.add(tag=tag, simple_value=value)
        self._records.write(event.SerializeToString())

    def close(self) -> Path:
        self._file.close()
        return self.path


def with_values(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy with values at dotted keys, `init_args` written out."""
    answer = deepcopy(config)
    for key, value in values.items():
        *parts, last = key.split(".")
        node = answer
        for part in parts:
            node = node[part]
        node[last] = value
    return answer


def upscale(**arguments: Any) -> dict[str, Any]:
    answer = deepcopy(UPSCALE)
    answer["init_args"].update(arguments)
    return answer


def write_run(
    folder: Path,
    loss: Callable[[int], float] | Sequence[float],
    *,
    seed: int = 0,
    steps: int | None = None,
    steps_per_epoch: int = 20,
    flops: Callable[[int], float] | None = None,
    validation: dict[str, Callable[[int], float]] | None = None,
    grown: dict[int, int] | None = None,
    swap_losses: tuple[float, float] | None = None,
    result: float | None = None,
    has_ended: bool | None = None,
    values: dict[str, Any] | None = None,
    first_step: int = 1,
    file: str = FIRST_FILE,
) -> Path:
    """Writes a run that logged losses, and FLOPs so far, as often as its configuration says.

    Args:
        loss: The loss of a step, counted from 1; or a loss for every epoch.
        validation: Metrics by name, at the end of every epoch.
        grown: Widths by the step before which it grew to them.
        swap_losses: Those just before and just after it grew.
        values: Values of the configuration, by dotted keys.
        first_step: The first step of a resumed run, whose event file is `file`.
    """
    config = with_values({**CONFIG, "seed_everything": seed}, values or {})
    trainer = config["trainer"]
    total = trainer["max_steps"] if trainer["max_steps"] > 0 else trainer["max_epochs"] * steps_per_epoch
    steps = total if steps is None else steps
    loss_of = loss if callable(loss) else lambda step: loss[(step - 1) // steps_per_epoch]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    events = Events(folder, file)
    for step in range(first_step, steps + 1):
        if step % trainer["log_every_n_steps"] == 0:
            events.add("train/loss", step - 1, loss_of(step))
            events.add("throughput/steps_per_second", step - 1, 1.0)
            if flops is not None:
                events.add(SAMPLES, step * 2000, loss_of(step))
                events.add(FLOPS, int(flops(step) / 1e6), loss_of(step))
        if step % steps_per_epoch == 0:
            for name, metric in (validation or {}).items():
                events.add(name, step - 1, metric(step))
    events.close()
    (folder / "run.json").write_text(json.dumps({"id": "0", "steps": total, "steps_per_epoch": steps_per_epoch}))
    if result is not None or (steps == total if has_ended is None else has_ended):
        before, after = swap_losses or (0.0, 0.0)
        swap = {"seconds": 1.0, "loss_before": before, "loss_after": after}
        numbers: dict[str, Any] = {
            "steps": steps,
            "validation": {name: metric(steps) for name, metric in (validation or {}).items()},
            "validated_at": steps,
            "growths": [{"step": step, "after": width, **swap} for step, width in (grown or {}).items()],
        }
        if result is not None:
            numbers |= {"value": str(result), "seconds": 1.0}
        (folder / "result.json").write_text(json.dumps(numbers))
    return folder


# --- an experiment in the folder runs: two widths of an MLP, ten epochs of twenty steps

UPSCALED = {"trainer.callbacks": [upscale()], "model.init_args.optimizer.init_args.lr": 0.013}
WIDE = {"model.init_args.width": 2000}


def base(loss: Any, seed: int = 0, values: dict[str, Any] | None = None, **options: Any) -> Path:
    options = {"flops": lambda step: step * 1e12, **options}
    return write_run(Path(f"runs/base/seed={seed}"), loss, seed=seed, values=values, **options)


def scratch(loss: Any, seed: int = 0, values: dict[str, Any] | None = None, **options: Any) -> Path:
    options = {"flops": lambda step: step * 10e12, **options}
    return write_run(Path(f"runs/scratch/seed={seed}"), loss, seed=seed, values={**WIDE, **(values or {})}, **options)


def upscaled(
    loss: Any, seed: int = 0, values: dict[str, Any] | None = None, name: str = "upscale", **options: Any
) -> Path:
    init_from = {"model.init_args.init_from": f"runs/base/seed={seed}/checkpoints/last.ckpt"}
    options = {"flops": lambda step: step * 10e12, "grown": {0: 2000}, **options}
    return write_run(
        Path(f"runs/{name}/seed={seed}"), loss, seed=seed, values={**UPSCALED, **init_from, **(values or {})}, **options
    )


def epochs(*losses: float, count: int = 10) -> list[float]:
    """A loss for every epoch, the last one for the rest."""
    return [*losses, *[losses[-1]] * (count - len(losses))]


def accuracy(value: float) -> dict[str, Any]:
    return {"val/accuracy": lambda step: value}


def report(*folders: str, out: str = "report") -> tuple[str, dict[str, Any]]:
    """The page as text, and its summary."""
    write_report([Path(folder) for folder in folders or ("runs",)], Path(out))
    return (Path(out) / "index.html").read_text(), json.loads((Path(out) / "summary.json").read_text())


class Page(HTMLParser):
    """The tags, the text and the tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.resources: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._cell = False
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.resources += [
            str(value) for name, value in attrs if name in ("src", "srcset", "href", "data", "action", "poster")
        ]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data

    def table(self, first: str) -> list[list[str]]:
        """The rows below a heading whose first cell is `first`."""
        return next(rows[1:] for rows in self.tables if rows[0][0] == first)
