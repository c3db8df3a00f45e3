"""A run read from its folder: its configuration, its numbers and its curves. Needs no torch."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mupscale.commands.checkpoints import read_result, read_run
from mupscale.commands.config import Config, callbacks_of, class_name
from mupscale.commands.event_files import read_log
from mupscale.data_files import interpreting, read_yaml

FloatArray = npt.NDArray[np.float64]
Line = tuple[FloatArray, FloatArray]
"""The places and the values of a curve."""


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
        self.has_loss = len(self.steps) > 0
        self.last_step = int(self.steps[-1]) if self.has_loss else 0
        self.value: float | None = self.result.get("value")
        """The metric of a run that `sweep` or `experiment` finished: over every step, not only the logged ones."""
        bad = self.steps[~np.isfinite(self.losses)]
        well = self.steps < min(bad, default=math.inf)
        self.curve: Line = self.steps[well], self.losses[well]
        """The steps and losses that it has logged, until one that is not finite."""
        is_finite = self.value is None or math.isfinite(self.value)
        self.diverged_at = int(bad[0]) if len(bad) else None if is_finite else self.last_step
        """The step of the first loss that is not finite; the last step if only the result is not."""
        self.ends: FloatArray = np.empty(0)
        self.means: FloatArray = np.empty(0)
        """The ends of windows of steps, and the mean losses in them. They and `row` follow from all runs compared."""
        self.row: dict[str, Any] = {}
        """The numbers of this run, by the columns of the table of runs."""
        self.method = ""
        """Its growth method, in an experiment that compares several."""

    def _read_config(self) -> None:
        trainer, model = self.config["trainer"], self.config["model"]
        if isinstance(callback := trainer["callbacks"], dict):
            trainer["callbacks"] = [callback]
        self.seed = self.config["seed_everything"]
        self.task = f"{class_name(model)} on {class_name(self.config['data'])}"
        init_from = model["init_args"].get("init_from")
        self.init_from = Path(init_from) if init_from else None
        self.max_steps, epochs = (int(trainer[key] or -1) for key in ("max_steps", "max_epochs"))
        self.counts_epochs = self.max_steps == -1 and epochs != -1
        """Whether the configuration gives the length of the run in epochs."""
        self.interval = int(trainer["log_every_n_steps"] or 50)
        """The number of steps from one logged loss to the next."""
        metrics = [judge["init_args"]["metric"] for judge in callbacks_of(self.config, "TrialMetric")]
        self.metric = metrics[0] if metrics else None
        """The name of the metric whose value is in the result."""
        self.swaps = [swap["init_args"] for swap in callbacks_of(self.config, "UpscaleCallback")]
        self.swaps.sort(key=lambda swap: int(swap["at_step"]))
        size = RunSize(*(model["init_args"].get(key) for key in RunSize._fields))
        self.start_size = self.end_size = size
        for swap in self.swaps:
            grown = {key: swap[key] for key in RunSize._fields if swap.get(key) is not None}
            self.end_size = self.end_size._replace(**grown)
        self.grows = self.start_size != self.end_size
        sizes, is_deeper = (self.start_size, self.end_size), self.start_size.layers != self.end_size.layers
        widths: list[Any] = [f"{each.width} with {each.layers} layers" if is_deeper else each.width for each in sizes]
        self.start_width, self.end_width = widths
        """In words with the layers if these become more."""
        self.width_range = " → ".join(map(str, widths if self.grows else widths[:1]))
        """`100 → 400`, or the one width of a run that does not grow."""

    @property
    def growths(self) -> list[int]:
        """The steps before which the network grew."""
        return sorted({swap["at_step"] for swap in self.swaps if swap["at_step"] < self.last_step})

    @property
    def last_growth(self) -> dict[str, float]:
        """The losses and the pause of the last growth, as result.json has them; empty until the run has ended."""
        return (self.result.get("growths") or [{}])[-1]

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

    def lowest(self, metric: str) -> tuple[float, int | None]:
        """The lowest value of a validation loss, where a run could have stopped, and its step; NaN if there is none."""
        steps, values = self.validations(metric)
        return (float(values.min()), int(steps[values.argmin()])) if len(steps) else (math.nan, None)

    # --- its length

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

    # --- its cost

    @property
    def flops(self) -> float:
        """Training FLOPs: to the end of the plan if it got there, and otherwise to the last step that is known."""
        steps = self.planned_steps
        if steps is None or self.diverged_at is not None or self.in_progress:
            steps = self.last_step
        return self.flops_at(steps)

    def flops_at(self, step: float) -> float:
        return float(self.flops_over(np.array([step]))[0])

    def flops_over(self, at: FloatArray) -> FloatArray:
        """Training FLOPs after steps: as logged, and interpolated in between; NaN if none were logged."""
        steps, flops = self._logged_flops()
        return np.interp(at, steps, flops) + np.maximum(at - steps[-1], 0) * self.flops_per_step

    @property
    def flops_per_step(self) -> float:
        """Training FLOPs of a step at the last width; NaN if none were logged."""
        steps, flops = self._logged_flops()
        since = max((step for step in self.growths if step < steps[-1]), default=0)
        first = min(int(np.searchsorted(steps, since)), len(steps) - 2)
        return float((flops[-1] - flops[first]) / (steps[-1] - steps[first]))

    def _logged_flops(self) -> FloatArray:
        """The steps at which FLOPs were logged, and the FLOPs, both from 0 on."""
        return np.array([(0, 0.0), *(sorted(self.log.flops.items()) or [(1, math.nan)])]).T
