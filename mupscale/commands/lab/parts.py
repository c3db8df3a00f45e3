"""The parts of an experiment: single runs, and sweeps. Their folders show what is done.

A part makes its configurations only when its stage begins, because they follow from the results of the stages before.
"""

import csv
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mupscale.atomic import write_text
from mupscale.callbacks.trial_metric import window_of
from mupscale.commands.checkpoints import damage_at
from mupscale.commands.config import Config, callbacks_of
from mupscale.commands.lab.run import Result, Run, Trial, drop_checkpoints, result_of, with_run
from mupscale.commands.lab.space import Outcome, Settings
from mupscale.commands.lab.sweep import Sweep
from mupscale.commands.run_folder import RESULT
from mupscale.errors import UserError
from mupscale.models.checkpoint import PRE_UPSCALE

NO_BEST = "no_best.txt"
"""In the folder of a finished sweep whose trials all diverged, instead of a best.yaml."""


class Part:
    """Some trials of a stage."""

    total = 1
    """How many trials it has."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    @property
    def done(self) -> int:
        return int(self.finished)

    def trials(self) -> list[Trial]:
        """All of them, also those that are finished."""
        raise NotImplementedError

    def conclude(self) -> None:
        """Writes what there is to write once all trials are finished."""


@dataclass(eq=False)
class RunPart(Part):
    """One run of one seed, in its own folder.

    Of runs that are the same until they grow, the others follow the first, in a later stage: they start from its
    checkpoint of that step.
    """

    out: Path
    role: str
    seed: int
    config: Callable[[], Config]
    metric: str
    must_not_diverge: bool = False
    """Whether other runs start from it."""
    details: dict[str, Any] = field(default_factory=dict)
    """What experiment.json has of the run beside its role, seed and folder."""
    keeps_checkpoints: bool = True
    is_left_out: Callable[[], bool] = lambda: False
    """Whether the run is not to be made. Then it counts as finished."""
    first: "RunPart | None" = None
    """The run that this one follows, if they are the same until they grow."""

    def __post_init__(self) -> None:
        super().__init__(f"{self.role}, seed {self.seed}", self.out / self.role / f"seed={self.seed}")
        self._followers = list[RunPart]()
        if self.first is not None:
            self.first._followers.append(self)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def value(self) -> float:
        """The metric; infinite if the run diverged or is left out."""
        return math.inf if self.is_left_out() else result_of(self.folder)[0]

    @property
    def finished(self) -> bool:
        return self.is_left_out() or ((self.folder / RESULT).exists() and bool(result_of(self.folder)))

    def trials(self) -> list[Trial]:
        config = with_run(self.config(), self.metric, self.seed, self.folder)
        return [Trial(self.name, [Run(config, self.folder, self.name, self._start())], self._finish)]

    def conclude(self) -> None:
        if self.must_not_diverge and math.isinf(self.value):
            raise UserError(
                f"the run {self.folder} diverged, and other runs start from it; give a smaller model.optimizer.lr in "
                "the experiment's config, or smaller values in sweep_1, and another --out"
            )
        self._tidy()

    def _finish(self, results: list[Result]) -> str:
        ((value, seconds),) = results
        self._tidy()
        metric = self.metric if window_of(self.metric) is None else "training loss"
        return f"{f'{metric} {value:.5g}' if math.isfinite(value) else 'diverged'} in {seconds:.0f} s"

    def _tidy(self) -> None:
        """Deletes the checkpoints of a finished run if they are not kept, and no run is to start from them."""
        if self.first is not None:
            self.first._tidy()
        if not self.keeps_checkpoints and all(part.finished for part in (self, *self._followers)):
            drop_checkpoints(self.folder)

    def _start(self) -> Path | None:
        """The first run's checkpoint from just before it grew.

        None if there is none, as of a run that diverged before, or if this run is another one even then.
        """
        if self.first is None or before_growth(self.first.config()) != before_growth(self.config()):
            return None
        (swap,) = callbacks_of(self.config(), "UpscaleCallback")
        path = self.first.folder / "checkpoints" / f"{PRE_UPSCALE}{swap['init_args']['at_step']}.ckpt"
        return path if path.exists() and damage_at(path) is None else None


class SweepPart(Part):
    """A sweep as the command `sweep` makes it. `settings` is called when the sweep can start.

    If all of its trials diverge it is an error, unless it `may_diverge`: then it is finished, and has no best trial.
    """

    def __init__(
        self, name: str, out: Path, settings: Callable[[], Settings], trials: int, *, may_diverge: bool = False
    ) -> None:
        super().__init__(name, out / name)
        self.total, self._settings, self._may_diverge = trials, settings, may_diverge

    @cached_property
    def sweep(self) -> Sweep:
        return Sweep(self.folder, self._settings(), self.name)

    @property
    def best(self) -> Outcome:
        """The best trial of a finished sweep that has one."""
        best = self.sweep.best
        assert best is not None
        return best

    @property
    def tuned(self) -> Config:
        return self.sweep.tuned(self.best)

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint of the best trial, of its first seed."""
        return self.best.runs[0] / "checkpoints" / "last.ckpt"

    @property
    def finished(self) -> bool:
        return (self.folder / "best.yaml").exists() or self.has_no_best

    @property
    def has_no_best(self) -> bool:
        """Whether all trials diverged, of a sweep that may."""
        return (self.folder / NO_BEST).exists()

    @property
    def done(self) -> int:
        table = self.folder / "trials.csv"
        return len(list(csv.DictReader(table.read_text().splitlines()))) if table.exists() else 0

    def trials(self) -> list[Trial]:
        self.sweep.begin()
        (trials,) = self.sweep.rounds()
        return list(trials.values())

    def conclude(self) -> None:
        if self.finished:
            return
        if self._may_diverge and self.sweep.best is None:
            self.sweep.tidy()
            write_text(self.folder / NO_BEST, f"none: all {self.total} trials diverged\n")
        else:
            self.sweep.conclude()


def before_growth(config: Config) -> Config:
    """What decides a run until it grows: its configuration without the swap, but for its step."""
    answer = deepcopy(config)
    for swap in callbacks_of(answer, "UpscaleCallback"):
        swap["init_args"] = {"at_step": swap["init_args"]["at_step"]}
    return answer
