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


CONFIG: dict[str, Any] = yaml.safe_load("""
seed_everything: 0
trainer: {accelerator: cpu, devices: 1, logger: null, callbacks: null, max_epochs: 10, max_steps: -1,
  val_check_interval: null, check_val_every_n_epoch: 1, log_every_n_steps: 5, precision: null, gradient_clip_val: null}
model:
  class_path: mupscale.models.mlp.MLP
  init_args: {width: 500, base_width: 1, hidden_layers: 3, lr_scheduler: null, compile: false, init_from: null,
    optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1, weight_decay: 0.0001}}}
data:
  class_path: mupscale.datamodules.covertype.Covertype
  init_args: {data_dir: null, batch_size: 2000, seed: 0}
checkpoint: {every_n_train_steps: 500}
ckpt_path: null
""")

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

    def add(self, step: int, values: dict[str, float]) -> None:
        """Writes values of one step, by their tags."""
        event = Event(wall_time=1.0, step=step)
        for tag, value in values.items():
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


def upscale(std: Any = 1.0, **arguments: Any) -> dict[str, Any]:
    """An UpscaleCallback with noise."""
    noise = {"class_path": "mupscale.AdditiveNoise", "init_args": {"std": std}}
    given = {"at_step": 0, "width": 2000, "noise": noise, "lr": None, **arguments}
    return {"class_path": "mupscale.callbacks.upscale.UpscaleCallback", "init_args": given}


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
    swap_losses: tuple[float, float] = (0.0, 0.0),
    result: float | None = None,
    has_ended: bool = False,
    values: dict[str, Any] | None = None,
) -> Path:
    """Writes a run that logged losses, and FLOPs so far, as often as its configuration says.

    Args:
        loss: The loss of a step, counted from 1; or a loss for every epoch.
        validation: Metrics by name, at the end of every epoch.
        grown: Widths by the step before which it grew to them.
        swap_losses: Those just before and just after it grew.
        has_ended: Whether it has ended, though before its last step.
        values: Values of the configuration, by dotted keys.
    """
    config = with_values({**CONFIG, "seed_everything": seed}, values or {})
    trainer = config["trainer"]
    total = trainer["max_steps"] if trainer["max_steps"] > 0 else trainer["max_epochs"] * steps_per_epoch
    steps = total if steps is None else steps
    loss_of = loss if callable(loss) else lambda step: loss[(step - 1) // steps_per_epoch]
    metrics = validation or {}
    events = Events(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for step in range(1, steps + 1):
        if step % trainer["log_every_n_steps"] == 0:
            events.add(step - 1, {"train/loss": loss_of(step), "throughput/steps_per_second": 1.0})
            if flops is not None:
                events.add(step * 2000, {SAMPLES: loss_of(step)})
                events.add(int(flops(step) / 1e6), {FLOPS: loss_of(step)})
        if step % steps_per_epoch == 0 and metrics:
            events.add(step - 1, {name: metric(step) for name, metric in metrics.items()})
    events.close()
    (folder / "run.json").write_text(json.dumps({"id": "0", "steps": total, "steps_per_epoch": steps_per_epoch}))
    if result is not None or has_ended or steps == total:
        swap = {"seconds": 1.0, "loss_before": swap_losses[0], "loss_after": swap_losses[1]}
        numbers: dict[str, Any] = {
            "steps": steps,
            "validation": {name: metric(steps) for name, metric in metrics.items()},
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


def base(loss: Any, seed: int = 0, **options: Any) -> Path:
    return write_run(Path(f"runs/base/seed={seed}"), loss, seed=seed, **{"flops": lambda step: step * 1e12, **options})


def scratch(loss: Any, seed: int = 0, values: dict[str, Any] | None = None, **options: Any) -> Path:
    options = {"flops": lambda step: step * 10e12, **options}
    return write_run(Path(f"runs/scratch/seed={seed}"), loss, seed=seed, values=WIDE | (values or {}), **options)


def upscaled(
    loss: Any, seed: int = 0, values: dict[str, Any] | None = None, name: str = "upscale", **options: Any
) -> Path:
    init_from = {"model.init_args.init_from": f"runs/base/seed={seed}/checkpoints/last.ckpt"}
    options = {"flops": lambda step: step * 10e12, "grown": {0: 2000}, **options}
    values = UPSCALED | init_from | (values or {})
    return write_run(Path(f"runs/{name}/seed={seed}"), loss, seed=seed, values=values, **options)


def write_sweep(folder: str, axes: dict[str, list[Any]], best: str = "", table: Sequence[str] = ()) -> None:
    """A sweep: its axes, the head of best.yaml, and the lines of trials.csv."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    described = {"metric": "last_epoch", "sweep": [{"key": key, "values": levels} for key, levels in axes.items()]}
    Path(folder, "sweep.json").write_text(json.dumps(described))
    if best:
        Path(folder, "best.yaml").write_text(f"# {best}\n")
    if table:
        Path(folder, "trials.csv").write_text("\n".join(table) + "\n")


def epochs(*losses: float, count: int = 10) -> list[float]:
    """A loss for every epoch, the last one for the rest."""
    return [*losses, *[losses[-1]] * (count - len(losses))]


def accuracy(value: float) -> dict[str, Any]:
    return {"val/accuracy": lambda step: value}


def report(*folders: str, out: str = "report") -> str:
    """The page as text."""
    write_report([Path(folder) for folder in folders or ("runs",)], Path(out))
    return (Path(out) / "index.html").read_text()


class Page(HTMLParser):
    """The text and the tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._cell = False
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._cell = tag in ("td", "th") or (self._cell and tag in ("span", "wbr"))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.tables[-1][-1][-1] += data

    def table(self, first: str) -> list[list[str]]:
        """The rows below a heading whose first cell is `first`."""
        return next(rows[1:] for rows in self.tables if rows[0][0] == first)
