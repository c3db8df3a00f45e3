"""A run read from its folder: its configuration, its numbers and its curves. Needs no torch."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from mupscale.commands.config import Config, callbacks_of, read_json
from mupscale.commands.event_files import read_log
from mupscale.commands.run_folder import RESULT, read_run
from mupscale.data_files import interpreting, what_is_wrong, yaml_of
from mupscale.errors import UserError

FloatArray = npt.NDArray[np.float64]

AT_GROWTH = ("loss_before", "loss_after", "seconds")
"""Numbers of a growth in result.json: the losses of the next batch just before and after it, and its pause."""


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
            self.start_size, self.end_size = sizes(self.config)
            self._refuse_other_content()
        except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{folder / 'config.yaml'} is not the configuration of a run: {what_is_wrong(error)}"
            raise UserError(problem) from error
        self.log = read_log(folder)
        self.plan = read_run(folder)
        self.result = read_result(folder)
        self.steps: FloatArray = np.array(sorted(self.log.loss), dtype=float)
        self.losses: FloatArray = np.array([self.log.loss[int(step)] for step in self.steps], dtype=float)
        self.ends: FloatArray = np.empty(0)
        self.means: FloatArray = np.empty(0)
        """The ends of windows of steps, and the mean losses in them. They and `final` follow from all runs compared."""
        self.final = math.nan

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
    def start_width(self) -> Any:
        """The width at the start, in words with the layers if these become more."""
        return self._width(self.start_size)

    @property
    def end_width(self) -> Any:
        return self._width(self.end_size)

    def _width(self, size: "RunSize") -> Any:
        is_deeper = self.start_size.layers != self.end_size.layers
        return f"{size.width} with {size.layers} layers" if is_deeper else size.width

    @property
    def grows(self) -> bool:
        return self.start_size != self.end_size

    @property
    def width_range(self) -> str:
        """`100 → 400`, or the one width of a run that does not grow."""
        return f"{self.start_width} → {self.end_width}" if self.grows else str(self.start_width)

    @property
    def init_from(self) -> Path | None:
        path = self.model["init_args"].get("init_from")
        return Path(path) if path else None

    @property
    def growths(self) -> list[int]:
        """The steps before which the network grew."""
        steps = sorted({swap["init_args"]["at_step"] for swap in callbacks_of(self.config, "UpscaleCallback")})
        return [step for step in steps if self.has_loss and step < self.last_step]

    @property
    def last_growth(self) -> dict[str, float]:
        """The numbers AT_GROWTH of the last growth; empty until the run has ended."""
        growths = self.result.get("growths") or [{}]
        return {name: float(growths[-1][name]) for name in AT_GROWTH if name in growths[-1]}

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

    @cached_property
    def diverged_at(self) -> int | None:
        """The step of the first loss that is not finite; the last step if only the result is not."""
        bad = np.flatnonzero(~np.isfinite(self.losses))
        if len(bad):
            return int(self.steps[bad[0]])
        return self.last_step if self.value is not None and not math.isfinite(self.value) else None

    @property
    def value(self) -> float | None:
        """The metric of a run that `sweep` or `experiment` finished: over every step, not only the logged ones."""
        return float(self.result["value"]) if "value" in self.result else None

    def last(self, metric: str) -> float:
        """The last value of a validation metric; NaN if there is none."""
        if metric in self.result.get("validation", {}):
            return float(self.result["validation"][metric])
        values = self.log.validation.get(metric, {})
        return values[max(values)] if values else math.nan

    def lowest(self, metric: str) -> tuple[float, int | None]:
        """The lowest value of a validation loss, where a run could have stopped, and its step; NaN if there is none."""
        values = self.log.validation.get(metric, {})
        return min(((value, step) for step, value in values.items() if math.isfinite(value)), default=(math.nan, None))

    @property
    def metric(self) -> str | None:
        """The name of the metric whose value is `result`."""
        callbacks = callbacks_of(self.config, "TrialMetric")
        return callbacks[0]["init_args"]["metric"] if callbacks else None

    @property
    def counts_epochs(self) -> bool:
        """Whether the configuration gives the length of the run in epochs."""
        trainer = self.config["trainer"]
        return trainer["max_steps"] in (None, -1) and trainer["max_epochs"] not in (None, -1)

    def planned(self, name: str) -> int | None:
        """A number of run.json, which the run wrote when it began: `steps`, or `steps_per_epoch`."""
        number = self.plan.get(name)
        return number if type(number) is int and number > 0 else None

    @property
    def planned_steps(self) -> int | None:
        """The length of the run in steps: as planned, or less if it ended before; None if it is not known."""
        ended = self.result.get("steps") if self.diverged_at is None else None
        return ended or self.planned("steps")

    @property
    def in_progress(self) -> bool:
        if self.result or self.diverged_at is not None or self.planned_steps is None:
            return False
        return self.last_step + self.interval <= self.planned_steps

    @property
    def state(self) -> str:
        if self.diverged_at is not None:
            return f"diverged at step {self.diverged_at:,}"
        if self.in_progress:
            return f"in progress, {self.last_step:,} of {self.planned_steps:,} steps"
        return f"{self.last_step:,} steps"

    @property
    def flops(self) -> float:
        """Training FLOPs: to the end of the plan if it got there, and otherwise to the last step that is known."""
        steps = self.planned_steps
        if steps is None or self.diverged_at is not None or self.in_progress:
            steps = self.last_step
        return self.flops_at(steps)

    @cached_property
    def _flops(self) -> tuple[FloatArray, FloatArray]:
        """The steps at which FLOPs were logged, and the FLOPs, both from 0 on."""
        steps = sorted(self.log.flops)
        return np.array([0.0, *steps]), np.array([0.0, *(self.log.flops[step] for step in steps)])

    def flops_at(self, step: float) -> float:
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


class RunSize(NamedTuple):
    width: Any
    layers: Any


def sizes(config: Config) -> tuple[RunSize, RunSize]:
    """The size that a run starts with, and the size that it ends with."""
    size = start = RunSize(*(config["model"]["init_args"].get(key) for key in RunSize._fields))
    for swap in sorted(callbacks_of(config, "UpscaleCallback"), key=lambda swap: swap["init_args"]["at_step"]):
        grown = {key: swap["init_args"].get(key) for key in RunSize._fields}
        size = size._replace(**{key: number for key, number in grown.items() if number is not None})
    return start, size


def read_result(folder: Path) -> dict[str, Any]:
    """What result.json says of a run that has ended; empty if it has not. Raises a UserError if it is damaged."""
    path = folder / RESULT
    if not path.is_file():
        return {}
    content = read_json(path)
    with interpreting(f"{path} is damaged; delete it and run the same command again"):
        float(content.get("value", 0))
        if not isinstance(content.get("steps", 0), int) or content.get("steps", 0) < 0:
            raise ValueError(f"steps is {content['steps']!r}")
        for number in dict(content.get("validation", {})).values():
            float(number)
        for growth in content.get("growths", []):
            for name in AT_GROWTH:
                float(growth[name])
    return content
