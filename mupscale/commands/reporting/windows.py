"""The steps over which training losses are averaged."""

import math
from dataclasses import dataclass

import numpy as np

from mupscale.commands.reporting.runs import FloatArray, LoggedRun

SHARE = 0.02
"""The window over which losses are averaged in runs of no or few epochs, as a share of the steps."""

FEWEST = 5
"""The least number of logged losses in such a window, and of whole epochs in a run, for their means to be compared."""


@dataclass
class Windows:
    """The steps over which training losses are averaged: whole epochs, or a running window of `size` steps that ends
    at every `every`-th step.
    """

    size: int
    every: int
    epochs: bool

    def of(self, run: LoggedRun) -> tuple[FloatArray, FloatArray]:
        """The ends of a run's windows (in steps) and the mean of the losses logged in each."""
        steps, losses = finite_losses(run)
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
    def length(self) -> str:
        return "an epoch" if self.epochs else f"{self.size:,} steps"


def finite_losses(run: LoggedRun) -> tuple[FloatArray, FloatArray]:
    """The steps and losses that a run has logged, until one that is not finite."""
    finite = np.isfinite(run.losses)
    count = len(finite) if finite.all() else int(finite.argmin())
    return run.steps[:count], run.losses[:count]


def trailing_means(x: FloatArray, y: FloatArray, ends: FloatArray, size: float) -> tuple[FloatArray, FloatArray]:
    """The mean of the values within `size` before each end; and these ends, without those that have no value."""
    sums = np.concatenate([[0.0], np.cumsum(y, dtype=float)])
    last = np.searchsorted(x, ends, side="right")
    first = np.searchsorted(x, ends - size, side="right")
    filled = last > first
    return ends[filled], (sums[last] - sums[first])[filled] / (last - first)[filled]


def windows_of(runs: list[LoggedRun]) -> tuple[Windows, int | None]:
    """One window for all runs, so that their minima can be compared; and the steps of an epoch, if known."""
    per_epoch = next((run.steps_per_epoch for run in runs if run.steps_per_epoch), None)
    interval = max(run.interval for run in runs)
    planned = [run.planned_steps or run.last_step for run in runs]
    if per_epoch and per_epoch >= interval:
        many_epochs = min(planned) >= FEWEST * per_epoch
        if many_epochs or all(run.counts_epochs for run in runs):
            return Windows(per_epoch, per_epoch, True), per_epoch
    return running_windows(max(planned), interval), per_epoch


def running_windows(steps: int, interval: int) -> Windows:
    """Windows of a share of a run's steps, of which every `interval`-th has a logged loss."""
    wanted = max(math.ceil(SHARE * steps), FEWEST * interval)
    return Windows(max(min(wanted, steps // FEWEST), interval), interval, False)
