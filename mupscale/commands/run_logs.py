"""A run read from its folder: its configuration and what it logged. Needs torch only if a run seems unfinished."""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from mupscale.commands.checkpoints import finished_at
from mupscale.commands.config import Config, callbacks_of
from mupscale.data_files import json_of, what_is_wrong, yaml_of
from mupscale.errors import UserError
from mupscale.flops import LOGGED

LOSS = "train/loss"
VALIDATION = "val/"
FLOPS = "x_axis_flops/train/loss"
WIDTH = "widening/width"
PAUSE = "widening/pause_seconds"
LOSS_BEFORE = "widening/loss_before"
LOSS_AFTER = "widening/loss_after"
EPOCH = "x_epoch"
SAMPLES = "x_axis_samples/"
"""TensorBoard tags, and beginnings of tags."""

FloatArray = npt.NDArray[np.float64]


@dataclass
class Log:
    """Scalars of a run by step. Steps are counted from 1: what was logged at 9 was logged after 10 steps."""

    loss: dict[int, float] = field(default_factory=dict)
    flops: dict[int, float] = field(default_factory=dict)
    widths: dict[int, float] = field(default_factory=dict)
    pauses: dict[int, float] = field(default_factory=dict)
    """Seconds of the swaps."""
    losses_before: dict[int, float] = field(default_factory=dict)
    losses_after: dict[int, float] = field(default_factory=dict)
    """Losses of the next batch, just before and just after each swap."""
    epochs: dict[int, float] = field(default_factory=dict)
    validation: dict[str, dict[int, float]] = field(default_factory=dict)
    damaged: bool = False

    def cut(self, step: int) -> None:
        """Removes what was logged at a step and after it."""
        swaps = (self.widths, self.pauses, self.losses_before, self.losses_after)
        for table in (self.loss, self.flops, *swaps, self.epochs, *self.validation.values()):
            for late in [each for each in table if each >= step]:
                del table[late]

    def update(self, other: "Log") -> None:
        self.loss |= other.loss
        self.flops |= other.flops
        self.widths |= other.widths
        self.pauses |= other.pauses
        self.losses_before |= other.losses_before
        self.losses_after |= other.losses_after
        self.epochs |= other.epochs
        for name, values in other.validation.items():
            self.validation.setdefault(name, {}).update(values)
        self.damaged |= other.damaged


class LoggedRun:
    """A folder with a config.yaml and TensorBoard events. Raises a UserError if the configuration cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = (folder / "config.yaml").read_text()
        try:
            self.config: Config = yaml_of(self.text)
            self.seed = self.config["seed_everything"]
            if isinstance(callback := self.config["trainer"]["callbacks"], dict):
                self.config["trainer"]["callbacks"] = [callback]
            self.start_width, self.end_width = widths(self.config)
            self._refuse_other_content()
        except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder / 'config.yaml'} is not the configuration of a run: {what_is_wrong(error)}"
            ) from error
        self.log = read_log(folder)
        self.steps: FloatArray = np.array(sorted(self.log.loss), dtype=float)
        self.losses: FloatArray = np.array([self.log.loss[int(step)] for step in self.steps], dtype=float)

    def _refuse_other_content(self) -> None:
        """TypeError, KeyError or ValueError for a configuration that no run has."""
        trainer = self.config["trainer"]
        for key in ("max_steps", "max_epochs", "log_every_n_steps"):
            if not isinstance(trainer[key], int | None):
                raise TypeError(f"trainer.{key} is {trainer[key]!r}")
        for described in (self.config["model"], self.config["data"], *(trainer["callbacks"] or [])):
            if not isinstance(described["class_path"], str):
                raise TypeError(f"class_path is {described['class_path']!r}")

    @property
    def model(self) -> Config:
        return self.config["model"]

    @property
    def data(self) -> Config:
        return self.config["data"]

    @property
    def growths(self) -> list[int]:
        """The steps before which the network grew."""
        return [step - 1 for step in sorted(self.log.widths)]

    @property
    def first_growth(self) -> int:
        """The step at which the network is to grow first, in a run that grows."""
        return min(swap["init_args"]["at_step"] for swap in callbacks_of(self.config, "UpscaleCallback"))

    @property
    def has_loss(self) -> bool:
        return len(self.steps) > 0

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    @property
    def interval(self) -> int:
        """The number of steps from one logged loss to the next."""
        return int(self.config["trainer"]["log_every_n_steps"] or 50)

    @property
    def diverged_at(self) -> int | None:
        """The step of the first loss that is not finite; the last step if only the result is not."""
        bad = np.flatnonzero(~np.isfinite(self.losses))
        if len(bad):
            return int(self.steps[bad[0]])
        return self.last_step if self.result is not None and not math.isfinite(self.result) else None

    @cached_property
    def result(self) -> float | None:
        """The metric of a run that `sweep` or `experiment` finished: over every step, not only the logged ones."""
        try:
            return float(json_of((self.folder / "result.json").read_text())["value"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def metric(self) -> str | None:
        """The name of the metric whose value is `result`."""
        callbacks = callbacks_of(self.config, "TrialMetric")
        return callbacks[0]["init_args"]["metric"] if callbacks else None

    @property
    def max_epochs(self) -> int | None:
        """The length of the run, if the configuration gives it in epochs."""
        trainer = self.config["trainer"]
        in_epochs = trainer["max_steps"] in (None, -1) and trainer["max_epochs"] not in (None, -1)
        return trainer["max_epochs"] if in_epochs else None

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """Worked out from the epochs that were logged with metrics; None if they leave it open."""
        trainer = self.config["trainer"]
        logged = sorted((step, int(epoch)) for step, epoch in self.log.epochs.items())
        low = max((math.ceil(step / (epoch + 1)) for step, epoch in logged), default=1)
        high = min(((step - 1) // epoch for step, epoch in logged if epoch), default=None)
        if logged and trainer["check_val_every_n_epoch"] and trainer["val_check_interval"] in (None, 1.0):
            # validations are at the end of an epoch; a model's own metrics may be logged in the middle of one
            validated = {step for values in self.log.validation.values() for step in values}
            step, epoch = next((each for each in logged if each[0] in validated), logged[0])
            steps = step // (epoch + 1)
            if step % (epoch + 1) == 0 and low <= steps and (high is None or steps <= high):
                return steps
        is_complete = self.result is not None and self.diverged_at is None and not self._may_stop_early
        if high is None and self.max_epochs and is_complete and self.has_loss:
            low = math.ceil(self.last_step / self.max_epochs)
            high = (self.last_step + self.interval - 1) // self.max_epochs
        return low if low == high else None

    @property
    def _may_stop_early(self) -> bool:
        """Whether something else than the number of steps or epochs may end the run."""
        stopping = callbacks_of(self.config, "EarlyStopping") + callbacks_of(self.config, "Timer")
        return bool(stopping or self.config["trainer"].get("max_time"))

    def planned_steps(self, steps_per_epoch: int | None) -> int | None:
        """The length of the run in steps: as configured, or less if it ended before; None if it is not known."""
        trainer = self.config["trainer"]
        limits = [trainer["max_steps"]]
        if steps_per_epoch and trainer["max_epochs"] not in (None, -1):
            limits.append(trainer["max_epochs"] * steps_per_epoch)
        planned = min((limit for limit in limits if limit not in (None, -1)), default=None)
        if planned is None or self.diverged_at is not None or self.last_step + self.interval > planned:
            return planned
        return self._end or planned

    @cached_property
    def _end(self) -> int | None:
        """The step at which the run ended; None if it has not ended, or its checkpoints are gone."""
        if self.result is not None:
            return self.last_step
        end = finished_at(self.folder)
        return end if end is not None and end >= self.last_step else None  # otherwise it was resumed

    @cached_property
    def _flops(self) -> tuple[FloatArray, FloatArray]:
        """The steps at which FLOPs were logged, and the FLOPs, both from 0 on."""
        steps = sorted(self.log.flops)
        return np.array([0.0, *steps]), np.array([0.0, *(self.log.flops[step] for step in steps)])

    def flops_at(self, step: float) -> float:
        """Training FLOPs after a step."""
        return float(self.flops_over(np.array([step]))[0])

    def flops_over(self, at: FloatArray) -> FloatArray:
        """Training FLOPs after steps: as logged, and interpolated in between; NaN if none were logged."""
        steps, flops = self._flops
        if len(steps) == 1:
            return np.full(len(at), math.nan)
        return np.interp(at, steps, flops) + np.maximum(at - steps[-1], 0) * self.flops_per_step

    @property
    def flops_per_step(self) -> float:
        """Training FLOPs of a step at the last width; NaN if none were logged."""
        steps, flops = self._flops
        if len(steps) == 1:
            return math.nan
        since = max((step for step in self.growths if step < steps[-1]), default=0)
        first = int(np.searchsorted(steps, since))
        first = min(first, len(steps) - 2)
        return float((flops[-1] - flops[first]) / (steps[-1] - steps[first]))


def widths(config: Config) -> tuple[Any, Any]:
    """The width that a run starts with, and the width that it ends with."""
    start = config["model"]["init_args"].get("width")
    swaps = sorted(callbacks_of(config, "UpscaleCallback"), key=lambda swap: swap["init_args"]["at_step"])
    return start, swaps[-1]["init_args"]["width"] if swaps else start


def higher_is_better(metric: str) -> bool | None:
    """Whether a metric is to be maximised, judged by its name; None if the name does not say."""
    name = metric.lower()
    if any(part in name for part in ("loss", "error", "perplexity", "ppl", "bpb")):
        return False
    return True if "acc" in name or "f1" in name or "auc" in name else None


def read_log(folder: Path) -> Log:
    """The scalars in the event files of a folder; a damaged file is read up to the damage."""
    log = Log()
    for path in sorted(folder.glob("events.out.tfevents.*"), key=numbers_in_name):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path} is a link to a file outside of its folder; copy the file into it")
        part = read_file(path)
        if part.loss:  # a resumed run has logged some steps twice: the later file counts
            log.cut(min(part.loss))
        log.update(part)
    return log


def numbers_in_name(path: Path) -> list[int]:
    """Sorts event files by time: their names hold the time, the process and a counter."""
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def read_file(path: Path) -> Log:
    log = Log()
    step = None
    try:
        for tag, at, value in scalars(path):
            if tag == LOSS:
                step = at + 1
                log.loss[step] = value
            elif tag == FLOPS and step is not None:  # logged right after the loss, at the FLOPs of its step
                log.flops[step] = float(at * LOGGED)
            elif tag == WIDTH:
                log.widths[at + 1] = value
            elif tag == PAUSE:
                log.pauses[at + 1] = value
            elif tag == LOSS_BEFORE:
                log.losses_before[at + 1] = value
            elif tag == LOSS_AFTER:
                log.losses_after[at + 1] = value
            elif tag == EPOCH:
                log.epochs[at + 1] = value
            elif tag.startswith(VALIDATION):
                log.validation.setdefault(tag, {})[at + 1] = value
    except DamagedError:
        log.damaged = True
    return log


class DamagedError(Exception):
    """The rest of an event file cannot be read."""


def scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """Tag, step and value of the scalars that a report needs. DamagedError where a record is damaged.

    A long run logs tens of thousands of other scalars. A record is parsed only if the name of a wanted one is in its
    bytes, which makes this ten times faster than TensorBoard's own reader.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    # the tags of FLOPs contain LOSS
    wanted = [tag.encode() for tag in (LOSS, VALIDATION, WIDTH, PAUSE, LOSS_BEFORE, LOSS_AFTER, EPOCH)]
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
        if any(tag in record for tag in wanted) and SAMPLES.encode() not in record:
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
