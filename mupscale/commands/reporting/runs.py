"""A run read from its folder: its configuration, its numbers and its curves. Needs no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mupscale.commands.checkpoints import read_result, read_run
from mupscale.commands.config import Config, class_name, configured_callbacks
from mupscale.commands.event_files import read_log
from mupscale.data_files import interpreting, read_yaml

FloatArray = npt.NDArray[np.float64]
Line = tuple[FloatArray, FloatArray]
"""The places and the values of a curve."""

SHARE = 0.02
"""The window over which losses are averaged in runs of no or few epochs, as a share of the steps."""

FEWEST = 5
"""The least number of logged losses in such a window, and of whole epochs in a run, for their means to be compared."""


class RunSize(NamedTuple):
    width: Any
    layers: Any


class LoggedRun:
    """A run in its folder. Raises a UserError if its configuration, or its result, is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "config.yaml"
        self.config: Config = read_yaml(path)
        with interpreting(f"{path} is not the configuration of a run"):
            self._read_config()
        self.log, self.plan, self.result = read_log(folder), read_run(folder), read_result(folder)
        self.steps: FloatArray = np.array(sorted(self.log.loss), dtype=float)
        self.losses: FloatArray = np.array([self.log.loss[int(step)] for step in self.steps], dtype=float)
        self.last_step = int(self.steps[-1]) if len(self.steps) else 0
        self.value: float | None = self.result.get("value")
        """The metric of a run that `sweep` or `experiment` finished: over every step, not only the logged ones."""
        bad = self.steps[~np.isfinite(self.losses)]
        well = self.steps < min(bad, default=math.inf)
        self.curve: Line = self.steps[well], self.losses[well]
        """The steps and losses that it has logged, until one that is not finite."""
        is_finite = self.value is None or math.isfinite(self.value)
        self.diverged_at = int(bad[0]) if len(bad) else None if is_finite else self.last_step
        """The step of the first loss that is not finite; the last step if only the result is not."""

    def _read_config(self) -> None:
        trainer, model = self.config["trainer"], self.config["model"]
        if isinstance(callback := trainer["callbacks"], dict):
            trainer["callbacks"] = [callback]
        self.seed = self.config["seed_everything"]
        self.task = f"{class_name(model)} on {class_name(self.config['data'])}"
        init_from = model["init_args"].get("init_from")
        self.init_from = Path(init_from) if init_from else None
        steps, epochs = (int(trainer[key] or -1) for key in ("max_steps", "max_epochs"))
        self.counts_epochs = steps == -1 and epochs != -1
        """Whether the configuration gives the length of the run in epochs."""
        self.interval = int(trainer["log_every_n_steps"] or 50)
        """The number of steps from one logged loss to the next."""
        swaps = [swap["init_args"] for swap in configured_callbacks(self.config, "UpscaleCallback")]
        self.swaps = sorted(swaps, key=lambda swap: int(swap["at_step"]))
        self.start_size = self.end_size = RunSize(*(model["init_args"].get(key) for key in RunSize._fields))
        for swap in self.swaps:
            grown = {key: swap[key] for key in RunSize._fields if swap.get(key) is not None}
            self.end_size = self.end_size._replace(**grown)
        self.grows, is_deeper = self.start_size != self.end_size, self.start_size.layers != self.end_size.layers
        sizes = [self.start_size, self.end_size] if self.grows else [self.start_size]
        self.width_range = " → ".join(f"{n} with {layers} layers" if is_deeper else str(n) for n, layers in sizes)
        """`100 → 400`, or the one width of a run that does not grow."""

    @property
    def growths(self) -> list[int]:
        """The steps before which the network grew."""
        return sorted({swap["at_step"] for swap in self.swaps if swap["at_step"] < self.last_step})

    # --- its metrics

    def last(self, metric: str) -> float:
        """The last value of a validation metric; NaN if there is none."""
        values = self.log.validation.get(metric, {})
        last = values[max(values)] if values else math.nan
        return self.result.get("validation", {}).get(metric, last)

    def validations(self, metric: str) -> Line:
        """The steps and finite values of a validation metric."""
        values = sorted(self.log.validation.get(metric, {}).items())
        finite = np.array([point for point in values if math.isfinite(point[1])], dtype=float).reshape(-1, 2)
        return finite[:, 0], finite[:, 1]

    # --- its length

    @property
    def planned_steps(self) -> int | None:
        """The length of the run in steps: as planned, or less if it ended before; None if it is not known."""
        ended = self.result.get("steps") if self.diverged_at is None else None
        return ended or whole_number(self.plan.get("steps"))

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
        return "finished" if self.result else f"{self.last_step:,} steps logged"

    # --- its cost

    @property
    def end_step(self) -> int:
        """The last step that it took, as far as that is known: the end of the plan if it got there."""
        steps = self.planned_steps
        return self.last_step if steps is None or self.diverged_at is not None or self.in_progress else steps

    @property
    def flops(self) -> float:
        """Training FLOPs so far."""
        return float(self.flops_over(np.array([self.end_step]))[0])

    def flops_over(self, at: FloatArray) -> FloatArray:
        """Training FLOPs after steps; NaN if none were logged."""
        return curve_along(self.log.flops, at)

    def samples_over(self, at: FloatArray) -> FloatArray:
        """Samples, or tokens, after steps; NaN if they were not logged."""
        return curve_along(self.log.samples, at)


def whole_number(value: Any) -> int | None:
    """A number of run.json, which the run wrote when it began; None if it is none."""
    return value if type(value) is int and value > 0 else None


def curve_along(logged: dict[int, float], at: FloatArray) -> FloatArray:
    """A sum over steps at some of them: as logged, interpolated in between, and continued at the speed of the end."""
    steps, sums = np.array([(0, 0.0), *(sorted(logged.items()) or [(1, math.nan)])]).T
    pace = (sums[-1] - sums[-2]) / (steps[-1] - steps[-2])
    return np.interp(at, steps, sums) + np.maximum(at - steps[-1], 0) * pace


# --- windows, over which losses are averaged


@dataclass(frozen=True)
class Windows:
    """Whole epochs, or running windows of `size` steps that end at every `every`-th step."""

    size: int
    every: int
    epochs: bool

    def of(self, run: LoggedRun) -> Line:
        """The ends of a run's windows, in steps, and the mean of the losses logged in each."""
        steps, losses = run.curve
        if not len(steps):
            return np.empty(0), np.empty(0)
        reached = int(steps[-1])
        if self.epochs:
            end = math.ceil(reached / self.size) * self.size
            reached = end if reached + run.interval > end else reached  # no more of the epoch would be logged
        ends = np.arange(self.size, reached + 1, self.every)
        if not self.epochs and (not len(ends) or ends[-1] != reached):
            ends = np.append(ends, reached)
        return trailing_means(steps, losses, ends.astype(float), self.size)

    @property
    def words(self) -> str:
        return "mean over an epoch" if self.epochs else f"running mean over {self.size:,} steps"


def trailing_means(x: FloatArray, y: FloatArray, ends: FloatArray, size: float) -> Line:
    """The mean of the values within `size` before each end; and these ends, without those that have no value."""
    sums = np.concatenate([[0.0], np.cumsum(y, dtype=float)])
    last = np.searchsorted(x, ends, side="right")
    first = np.searchsorted(x, ends - size, side="right")
    filled = last > first
    return ends[filled], (sums[last] - sums[first])[filled] / (last - first)[filled]


def windows_of(runs: list[LoggedRun]) -> Windows:
    """One window for all runs, so that their ends can be compared."""
    per_epoch = next((steps for run in runs if (steps := whole_number(run.plan.get("steps_per_epoch")))), None)
    interval = max((run.interval for run in runs), default=1)
    planned = [run.planned_steps or run.last_step for run in runs]
    has_epochs = all(run.counts_epochs for run in runs) or min(planned) >= FEWEST * (per_epoch or 0)
    if per_epoch and per_epoch >= interval and has_epochs:
        return Windows(per_epoch, per_epoch, True)
    steps = max(planned, default=1)
    wanted = max(math.ceil(SHARE * steps), FEWEST * interval)
    return Windows(max(min(wanted, steps // FEWEST), interval), interval, False)
