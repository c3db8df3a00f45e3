"""The parts of an experiment: single runs, and sweeps.

Their folders show what is done, what is running, and what can be taken.
"""

import csv
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from mupscale.atomic import write_text
from mupscale.callbacks.trial_metric import window_of
from mupscale.commands.checkpoints import damage_at
from mupscale.commands.config import Config, callbacks_of
from mupscale.commands.leases import Lease, lapsed, locked
from mupscale.commands.run_folder import RESULT
from mupscale.commands.runs import Result, Run, result_of, with_run
from mupscale.commands.stacks import Key, Unit
from mupscale.commands.tuning.execution import conclude, keys_of, results_of, tidy, unit_of
from mupscale.commands.tuning.results import Results
from mupscale.commands.tuning.space import point_text
from mupscale.commands.tuning.study import Settings, Study
from mupscale.commands.tuning.trial import drop_checkpoints
from mupscale.data_files import yaml_of
from mupscale.errors import UserError
from mupscale.models.checkpoint import PRE_UPSCALE

NO_BEST = "no_best.txt"
"""In the folder of a finished sweep whose trials all diverged, instead of a best.yaml."""


@dataclass(frozen=True)
class State:
    """How many units a part has, how many are finished, and how many are running."""

    total: int
    done: int
    running: int


class Part:
    """Units of work that can be taken once all parts in `needs` are finished."""

    def __init__(self, name: str, folder: Path, needs: "list[Part]") -> None:
        self.name, self.folder, self.needs = name, folder, needs

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    def state(self) -> State:
        raise NotImplementedError

    def waiting(self) -> list[Key]:
        """The units that no process makes."""
        raise NotImplementedError

    def take(self, key: Key | None = None) -> Unit | None:
        """A unit for this process alone, as long as it lives: that of a key, or any.

        None if it is none of this part, or other processes have all that are left.
        """
        raise NotImplementedError


class SingleUnit(Part):
    """A part of one unit. A lease in the experiment's folder gives it to one process."""

    def __init__(self, out: Path, name: str, folder: Path, needs: list[Part], key: Key, lease: str) -> None:
        """`lease` names the lease."""
        super().__init__(name, folder, needs)
        self.out, self._key = out, key
        self._lease = out / "leases" / lease.replace("/", "-")

    def state(self) -> State:
        return State(1, int(self.finished), int(not self.finished and not lapsed(self._lease)))

    def waiting(self) -> list[Key]:
        return [] if self.finished or not lapsed(self._lease) else [self._key]

    def claimed(self, key: Key | None) -> Lease | None:
        """The lease, for this process; None if the key is that of another unit, or nothing is left to do."""
        if key not in (None, self._key):
            return None
        with locked(self.out):
            if self.finished or not lapsed(self._lease):
                return None
            self._lease.parent.mkdir(exist_ok=True)
            return Lease(self._lease)


class RunPart(SingleUnit):
    """One run of one seed, in its own folder. It must not diverge if other runs start from it.

    Of runs that are the same until they grow, the others follow the first: they start from its checkpoint of that step.
    """

    def __init__(
        self,
        out: Path,
        role: str,
        seed: int,
        config: Callable[[], Config],
        metric: str,
        needs: list[Part],
        must_not_diverge: bool = False,
        details: dict[str, Any] | None = None,
        keeps_checkpoints: bool = True,
        is_left_out: Callable[[], bool] = lambda: False,
        first: "RunPart | None" = None,
    ) -> None:
        """
        Args:
            details: What experiment.json has of the run beside its role, seed and folder.
            is_left_out: Whether the run is not to be made. Then it counts as finished.
            first: The run that this one follows, if they are the same until they grow.
        """
        needs = needs if first is None else [*needs, first]
        key, folder = Key(role, "seed", seed), out / role / f"seed={seed}"
        super().__init__(out, f"{role}, seed {seed}", folder, needs, key, f"{role}-{seed}")
        self.role, self.seed, self.details = role, seed, details or {}
        self._config, self._metric, self._must_not_diverge = config, metric, must_not_diverge
        self._keeps_checkpoints, self._is_left_out = keeps_checkpoints, is_left_out
        self._first, self._followers = first, list[RunPart]()
        if first is not None:
            first._followers.append(self)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def value(self) -> float:
        """The metric; infinite if the run diverged or is left out."""
        return math.inf if self._is_left_out() else result_of(self.folder)[0]

    @property
    def finished(self) -> bool:
        if self._is_left_out():
            return True
        if not (self.folder / RESULT).exists():
            return False
        if self._must_not_diverge and math.isinf(self.value):
            raise UserError(
                f"the run {self.folder} diverged, and other runs start from it; give a smaller model.optimizer.lr in "
                "the experiment's config, or smaller values in sweep_1, and another --out"
            )
        return True

    def take(self, key: Key | None = None) -> Unit | None:
        lease = self.claimed(key)
        if lease is None:
            return None
        try:
            config = with_run(self._config(), self._metric, self.seed, self.folder)
            run = Run(config, self.folder, self.name, self._start())
        except BaseException:
            lease.release()
            raise

        def finish(results: list[Result]) -> str:
            self.tidy()
            if self._first is not None:
                self._first.tidy()
            lease.release()
            value, seconds = results[0]
            return f"{ended(self._metric, value)} in {seconds:.0f} s"

        return Unit(self.name, [run], finish, lease.release)

    def tidy(self) -> None:
        """Deletes the checkpoints of a finished run if they are not kept, and no run is to start from them."""
        if not self._keeps_checkpoints and all(part.finished for part in (self, *self._followers)):
            drop_checkpoints(self.folder)

    def _start(self) -> Path | None:
        """The first run's checkpoint from just before it grew.

        None if there is none, as of a run that diverged before, or if this run is another one even then.
        """
        if self._first is None or before_growth(self._first._config()) != before_growth(self._config()):
            return None
        (swap,) = callbacks_of(self._config(), "UpscaleCallback")
        path = self._first.folder / "checkpoints" / f"{PRE_UPSCALE}{swap['init_args']['at_step']}.ckpt"
        return path if path.exists() and damage_at(path) is None else None


class SweepPart(Part):
    """A sweep as the command `sweep` makes it. `settings` is called when the sweep can start.

    If all of its trials diverge it is an error, unless it `may_diverge`: then it is finished, and has no best trial.
    """

    def __init__(
        self,
        name: str,
        out: Path,
        settings: Callable[[], Settings],
        trials: int,
        needs: list[Part],
        may_diverge: bool = False,
    ) -> None:
        super().__init__(name, out / name, needs)
        self.out, self.trials, self._settings, self._may_diverge = out, trials, settings, may_diverge

    @cached_property
    def study(self) -> Study:
        return Study(self.folder, self._settings())

    @property
    def results(self) -> Results:
        return results_of(self.study)

    @property
    def tuned(self) -> Path:
        """The best.yaml. Raises a UserError if it is not what the sweep found."""
        best = self.results.best
        assert best is not None
        try:
            whole = yaml_of(self._best.read_text()) == self.results.tuned(best)
        except (ValueError, yaml.YAMLError):
            whole = False
        if not whole:
            raise UserError(f"{self._best} is not what the sweep found; delete it, and the same command rewrites it")
        return self._best

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint of the best trial, of its first seed."""
        best = self.results.best
        assert best is not None
        return self.results.runs(best)[0] / "checkpoints" / "last.ckpt"

    @property
    def finished(self) -> bool:
        return self._best.exists() or self.has_no_best

    @property
    def has_no_best(self) -> bool:
        """Whether all trials diverged, of a sweep that may."""
        return (self.folder / NO_BEST).exists()

    def state(self) -> State:
        table = self.folder / "trials.csv"
        done = 0
        if table.exists():
            with open(table) as file:
                done = len(list(csv.DictReader(file)))
        running = 0
        if not self.finished:
            leases = [path for path in (self.folder / "leases").glob("*") if not path.suffix]
            running = sum(not lapsed(path) for path in leases)
        return State(self.trials, done, running)

    def waiting(self) -> list[Key]:
        keys = keys_of(self.study, self.name)
        if not keys:
            self._conclude()
        return keys

    def take(self, key: Key | None = None) -> Unit | None:
        if key is not None and key.group != self.name:
            return None
        taken = self.study.take(None if key is None else key.number)
        if taken is None:
            self._conclude()
            return None
        trial = unit_of(self.study, taken, f"{self.name}, {point_text(taken.point, self.results.names)}")

        def finish(results: list[Result]) -> str:
            end = trial.finish(results)
            self._conclude()
            return end

        return replace(trial, finish=finish)

    @property
    def _best(self) -> Path:
        return self.folder / "best.yaml"

    def _conclude(self) -> None:
        if len(self.study.outcomes()) == self.trials:
            with locked(self.out):
                if not self.finished and self._may_diverge and self.results.best is None:
                    tidy(self.study)
                    write_text(self.folder / NO_BEST, f"none: all {self.trials} trials diverged\n")
                elif not self.finished:
                    conclude(self.study)


def before_growth(config: Config) -> Config:
    """What decides a run until it grows: its configuration without the swap, but for its step."""
    answer = deepcopy(config)
    for swap in callbacks_of(answer, "UpscaleCallback"):
        swap["init_args"] = {"at_step": swap["init_args"]["at_step"]}
    return answer


def ended(metric: str, value: float) -> str:
    """The end of a run in words."""
    name = metric if window_of(metric) is None else "training loss"
    return f"{name} {value:.5g}" if math.isfinite(value) else "diverged"
