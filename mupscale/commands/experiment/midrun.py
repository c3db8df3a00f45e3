"""The protocol midrun: compares growing during a run with fixed widths, at equal total cost.

All runs have the same budget: the cost of the configured number of steps at the wide width, in FLOPs or in seconds. A
growing run spends a share of it at the narrow width. It is compared with three fixed widths: wide, narrow, and one in
between.

Hyperparameters come from the same comparison at a small size, at equal FLOPs. Each fixed width uses the best values of
`sweep_1` at its small counterpart. A growing run uses those of the narrow width until it grows, and then those of
`sweep_2`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from mupscale.commands.config import Config
from mupscale.commands.experiment.costs import CostPart
from mupscale.commands.experiment.file import Description, growing, of_width
from mupscale.commands.experiment.midrun_keys import stretched
from mupscale.commands.experiment.parts import Part, RunPart, SweepPart
from mupscale.commands.experiment.widths import Size
from mupscale.commands.tuning.space import Axis

Fixed = Literal["wide", "middle", "narrow"]
FIXED: tuple[Fixed, ...] = ("wide", "middle", "narrow")

TUNING_BUDGET = "flops"
"""What runs at the tuning size have in common: seconds of small networks say nothing of large ones."""


class MakeRun(Protocol):
    def __call__(
        self,
        role: str,
        seed: int,
        config: Callable[[], Config],
        needs: list[Part],
        *,
        details: dict[str, Any],
        keeps_checkpoints: bool,
        first: RunPart | None,
    ) -> RunPart: ...


class MakeSweep(Protocol):
    def __call__(
        self, name: str, axes: list[Axis], seeds: list[int], config: Callable[[], Config], needs: list[Part]
    ) -> SweepPart: ...


class MidrunParts:
    """The runs and sweeps of an experiment of protocol midrun."""

    def __init__(self, out: Path, description: Description, run: MakeRun, sweep: MakeSweep) -> None:
        assert description.midrun is not None
        self.description, self.keys = description, description.midrun
        self.small, self.target = description.growths
        self.costs = CostPart(out, description)
        self._run, self._sweep = run, sweep
        self._of_fixed: dict[tuple[str, str], SweepPart] = {}
        self._of_growth: dict[tuple[str, str, float], SweepPart] = {}

    def all(self) -> Iterator[Part]:
        """In order of execution: seed by seed, so that an experiment that is stopped early has complete seeds."""
        yield self.costs
        for schedule in self.keys.schedules:
            yield from self._sweeps(schedule)
        for seed in self.description.seeds:
            for schedule in self.keys.schedules:
                yield from self._runs(schedule, seed)

    # --- at the tuning size

    def _sweeps(self, schedule: str) -> Iterator[SweepPart]:
        seeds = self.description.seeds[:1]
        for fixed in FIXED:
            config = partial(self._fixed_config, schedule, TUNING_BUDGET, fixed, small=True)
            axes = self.description.sweeps["sweep_1"]
            part = self._sweep(f"{schedule}/sweep_1/{fixed}", axes, seeds, config, [self.costs])
            self._of_fixed[schedule, fixed] = part
            yield part
        for noise in self.keys.noises:
            for share in self.keys.tuned_at:
                config = partial(self._grown_config, schedule, TUNING_BUDGET, noise, share, small=True)
                name, axes = f"{schedule}/sweep_2/{noise}-{share:g}", self.description.sweeps["sweep_2"]
                part = self._sweep(name, axes, seeds, config, [self.costs, self._of_fixed[schedule, "narrow"]])
                self._of_growth[schedule, noise, share] = part
                yield part

    # --- at the target's

    def _runs(self, schedule: str, seed: int) -> Iterator[RunPart]:
        yield self._fixed_run(schedule, self.keys.budgets, "wide", seed)  # which is the same run in all budgets
        for budget in self.keys.budgets:
            for fixed in ("middle", "narrow"):
                yield self._fixed_run(schedule, [budget], fixed, seed)
            for share in self.keys.shares:
                first = None
                for noise in self.keys.noises:
                    part = self._grown_run(schedule, budget, noise, share, seed, first)
                    first = first or part  # until they grow, all of them are one run
                    yield part

    def _fixed_run(self, schedule: str, budgets: list[str], fixed: Fixed, seed: int) -> RunPart:
        tuned = self._of_fixed[schedule, fixed]

        def config() -> Config:
            return self._fixed_config(schedule, budgets[0], fixed, tuned.tuned)

        role = f"{schedule}/{fixed}" if fixed == "wide" else f"{schedule}/{budgets[0]}/{fixed}"
        details = {"schedule": schedule, "budgets": budgets, "fixed": fixed}
        return self._made(role, seed, config, [self.costs, tuned], details)

    def _grown_run(
        self, schedule: str, budget: str, noise: str, share: float, seed: int, first: RunPart | None
    ) -> RunPart:
        tuned = self._of_growth[schedule, noise, self.keys.nearest_tuned(share)]

        def config() -> Config:
            return self._grown_config(schedule, budget, noise, share, tuned.tuned)

        role = f"{schedule}/{budget}/{noise}-{share:g}"
        details = {"schedule": schedule, "budgets": [budget], "noise": noise, "share": share}
        needs = [self.costs, self._of_fixed[schedule, "narrow"], tuned]
        return self._made(role, seed, config, needs, details, first)

    def _made(
        self,
        role: str,
        seed: int,
        config: Callable[[], Config],
        needs: list[Part],
        details: dict[str, Any],
        first: RunPart | None = None,
    ) -> RunPart:
        # once all have grown, nothing starts from these runs, and there are many
        return self._run(role, seed, config, needs, details=details, keeps_checkpoints=False, first=first)

    # --- configurations

    def _fixed_config(self, schedule: str, budget: str, fixed: Fixed, *tuned: Path, small: bool = False) -> Config:
        costs, width = self.costs.costs, self._width(fixed, small)
        steps = costs.steps_of(budget, width, self._width("wide", small))
        return self.description.config(of_width(width), *self._length(schedule, steps), *tuned)

    def _grown_config(
        self, schedule: str, budget: str, noise: str, share: float, *tuned: Path, small: bool = False
    ) -> Config:
        growth = self.small if small else self.target
        at_step, steps = self.costs.costs.steps_of_growth(budget, growth, share)
        grown = growing(growth, at_step, self.keys.noises[noise])
        narrow = self._of_fixed[schedule, "narrow"].tuned
        return self.description.config(grown, *self._length(schedule, steps), narrow, *tuned)

    def _length(self, schedule: str, steps: int) -> list[Config]:
        """What gives a run its number of steps, with a validation after the last one, and its schedule."""
        length = {
            "max_steps": steps,
            "max_epochs": -1,
            "check_val_every_n_epoch": None,
            "val_check_interval": self.costs.costs.batches_of(steps),
        }
        return [{"trainer": length}, stretched(self.keys.schedules[schedule], steps)]

    def _width(self, fixed: Fixed, small: bool = False) -> Size:
        growth = self.small if small else self.target
        if fixed == "middle":
            return self.keys.small_middle if small else self.keys.middle
        return growth.after if fixed == "wide" else growth.before
