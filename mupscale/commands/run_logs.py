"""A run as it can be read from its folder: its configuration, and what it logged. Needs neither torch nor Lightning."""

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mupscale.commands.config import Config, callbacks_of
from mupscale.errors import UserError
from mupscale.flops import LOGGED

LOSS, FLOPS, WIDTH, EPOCH, VALIDATION = "train/loss", "by_flops/train/loss", "upscale/width", "epoch", "val/"

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The former, where it is built, is ten times faster."""


@dataclass
class Log:
    """Scalars of a run by its steps, counted from 1: what was logged at 9 was logged after 10 steps."""

    loss: dict[int, float] = field(default_factory=dict)
    flops: dict[int, float] = field(default_factory=dict)
    widths: dict[int, float] = field(default_factory=dict)
    epochs: dict[int, float] = field(default_factory=dict)
    validation: dict[str, dict[int, float]] = field(default_factory=dict)
    damaged: bool = False

    def tables(self) -> list[dict[int, float]]:
        return [self.loss, self.flops, self.widths, self.epochs, *self.validation.values()]


class Run:
    """A folder with a config.yaml and TensorBoard events. UserError if the configuration cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = (folder / "config.yaml").read_text()
        try:
            self.config: Config = yaml.load(self.text, LOADER)
            self.seed = self.config["seed_everything"]
            if isinstance(callback := self.config["trainer"]["callbacks"], dict):
                self.config["trainer"]["callbacks"] = [callback]
            self.start_width, self.end_width = widths(self.config)
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(f"{folder / 'config.yaml'} is not the configuration of a run: {error!r}") from error
        self.log = read_log(folder)
        self.steps = np.array(sorted(self.log.loss), dtype=float)
        self.losses = np.array([self.log.loss[int(step)] for step in self.steps])

    @property
    def model(self) -> Config:
        return self.config["model"]

    @property
    def data(self) -> Config:
        return self.config["data"]

    @property
    def growths(self) -> list[int]:
        """The steps before which it grew."""
        return [step - 1 for step in sorted(self.log.widths)]

    @property
    def has_loss(self) -> bool:
        return len(self.steps) > 0

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    @property
    def interval(self) -> int:
        """Steps from one logged loss to the next."""
        return int(self.config["trainer"]["log_every_n_steps"] or 50)

    @property
    def diverged_at(self) -> int | None:
        """The step at which it is known to have diverged."""
        bad = np.flatnonzero(~np.isfinite(self.losses))
        if len(bad):
            return int(self.steps[bad[0]])
        return self.last_step if self.result is not None and not math.isfinite(self.result) else None

    @cached_property
    def result(self) -> float | None:
        """The metric of a run that `sweep` or `experiment` finished: over every step, not only logged ones."""
        try:
            return float(json.loads((self.folder / "result.json").read_text())["value"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def metric(self) -> str | None:
        """What `result` is."""
        judges = callbacks_of(self.config, "TrialMetric")
        return judges[0]["init_args"]["metric"] if judges else None

    @property
    def max_epochs(self) -> int | None:
        """Its length, where it is told in epochs."""
        trainer = self.config["trainer"]
        counted = trainer["max_steps"] in (None, -1) and trainer["max_epochs"] not in (None, -1)
        return trainer["max_epochs"] if counted else None

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """As far as it can be told from the epochs that were logged with validations."""
        trainer = self.config["trainer"]
        logged = sorted((step, int(epoch)) for step, epoch in self.log.epochs.items())
        if logged and trainer["check_val_every_n_epoch"] and trainer["val_check_interval"] in (None, 1.0):
            step, epoch = logged[0]  # validated at the end of epochs
            return step // (epoch + 1) if step % (epoch + 1) == 0 else None
        low = max((math.ceil(step / (epoch + 1)) for step, epoch in logged), default=1)
        high = min(((step - 1) // epoch for step, epoch in logged if epoch), default=None)
        if high is None and self.max_epochs and self.result is not None and self.has_loss:  # finished
            low, high = (
                math.ceil(self.last_step / self.max_epochs),
                (self.last_step + self.interval - 1) // self.max_epochs,
            )
        return low if low == high else None

    def planned_steps(self, steps_per_epoch: int | None) -> int | None:
        trainer = self.config["trainer"]
        if self.max_epochs is None:
            return trainer["max_steps"] if trainer["max_steps"] not in (None, -1) else None
        return self.max_epochs * steps_per_epoch if steps_per_epoch else None

    @cached_property
    def _flops(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = sorted(self.log.flops.items())
        return np.array([0.0, *(step for step, _ in pairs)]), np.array([0.0, *(flops for _, flops in pairs)])

    def flops_at(self, step: float) -> float:
        """Training FLOPs after a step."""
        return float(self.flops_over(np.array([step]))[0])

    def flops_over(self, at: np.ndarray) -> np.ndarray:
        """Training FLOPs after steps, as it logged them, and evenly in between; NaN if it logged none."""
        steps, flops = self._flops
        if len(steps) == 1:
            return np.full(len(at), math.nan)
        return np.interp(at, steps, flops) + np.maximum(at - steps[-1], 0) * self.flops_per_step

    @property
    def flops_per_step(self) -> float:
        """At its last width."""
        steps, flops = self._flops
        if len(steps) == 1:
            return math.nan
        since = max((step for step in self.growths if step < steps[-1]), default=0)
        first = int(np.searchsorted(steps, since))
        first = min(first, len(steps) - 2)
        return float((flops[-1] - flops[first]) / (steps[-1] - steps[first]))


def widths(config: Config) -> tuple[Any, Any]:
    """The width that a run starts with, and the one it ends with."""
    start = config["model"]["init_args"].get("width")
    swaps = sorted(callbacks_of(config, "UpscaleCallback"), key=lambda swap: swap["init_args"]["at_step"])
    return start, swaps[-1]["init_args"]["width"] if swaps else start


def higher_is_better(metric: str) -> bool | None:
    """None if the name does not tell."""
    name = metric.lower()
    if any(part in name for part in ("loss", "error", "perplexity", "ppl", "bpb")):
        return False
    return True if "acc" in name or "f1" in name or "auc" in name else None


def read_log(folder: Path) -> Log:
    """What the event files of a folder hold; a file that breaks off is read up to there."""
    log = Log()
    for path in sorted(
        folder.glob("events.out.tfevents.*"), key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)]
    ):
        part = read_file(path)
        log.damaged |= part.damaged
        if part.loss:  # a run that went on from a checkpoint has logged some steps twice
            start = min(part.loss)
            for table in log.tables():
                for step in [step for step in table if step >= start]:
                    del table[step]
        for name, values in part.validation.items():
            log.validation.setdefault(name, {}).update(values)
        for table, values in zip(log.tables()[:4], part.tables()[:4], strict=True):
            table.update(values)
    return log


def read_file(path: Path) -> Log:
    log = Log()
    step = None
    try:
        for tag, at, value in scalars(path):
            if tag == LOSS:
                step = at + 1
                log.loss[step] = value
            elif tag == FLOPS and step is not None:  # comes right after the loss, with FLOPs for the step
                log.flops[step] = float(at * LOGGED)
            elif tag == WIDTH:
                log.widths[at + 1] = value
            elif tag == EPOCH:
                log.epochs[at + 1] = value
            elif tag.startswith(VALIDATION):
                log.validation.setdefault(tag, {})[at + 1] = value
    except DamagedError:
        log.damaged = True
    return log


class DamagedError(Exception):
    """An event file that cannot be read further."""


def scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """Tag, step and value of the scalars that a report needs.

    A long run logs tens of thousands of others. A record is looked into only if the name of one of these is in its
    bytes, which makes this ten times faster than TensorBoard's own reader.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c  # type: ignore[import-untyped]

    wanted = [name.encode() for name in (LOSS, WIDTH, EPOCH, VALIDATION)]
    content = path.read_bytes()
    at = 0
    while at < len(content):
        if at + 12 > len(content):
            raise DamagedError
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length
        if end + 4 > len(content):
            raise DamagedError
        record = content[at + 12 : end]
        if any(name in record for name in wanted) and b"by_samples/" not in record:
            if struct.unpack_from("<I", content, end)[0] != masked_crc32c(record):
                raise DamagedError
            try:
                event = Event.FromString(record)
            except DecodeError as error:
                raise DamagedError from error
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value
        at = end + 4
