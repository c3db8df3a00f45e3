"""The protocols: the runs and sweeps of an experiment, in stages. A stage begins when the one before it is finished.

To add a protocol, write a class whose `stages` are its runs, list it in PROTOCOLS, and describe its keys in file.py.
"""

import json
import math
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mupscale.atomic import write_text
from mupscale.callbacks.trial_metric import window_of
from mupscale.commands.checkpoints import damage_at
from mupscale.commands.config import Config, callbacks_of, read_json
from mupscale.commands.lab.costs import CostPart
from mupscale.commands.lab.driver import Driver
from mupscale.commands.lab.execution import refuse_other_content
from mupscale.commands.lab.file import Description, check, growing, of_width, stretched
from mupscale.commands.lab.quick import IMAGES, write_images
from mupscale.commands.lab.run import Part, Result, Run, Trial, drop_checkpoints, result_of, with_run
from mupscale.commands.lab.space import Axis, Settings, grid
from mupscale.commands.lab.sweep import Sweep
from mupscale.commands.lab.transfer import write_transfer
from mupscale.commands.widths import FIXED, Fixed, Size, folder_name
from mupscale.errors import UserError
from mupscale.models.checkpoint import PRE_UPSCALE

Stages = list[list[Part]]

SMALL_BASE = "small_base"
"""The narrow run that sweep 2 starts from if there is no sweep 1. It counts as tuning."""


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
        result = None if self.is_left_out() else result_of(self.folder)
        return math.inf if result is None else result[0]

    @property
    def finished(self) -> bool:
        return self.is_left_out() or result_of(self.folder) is not None

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


def before_growth(config: Config) -> Config:
    """What decides a run until it grows: its configuration without the swap, but for its step."""
    answer = deepcopy(config)
    for swap in callbacks_of(answer, "UpscaleCallback"):
        swap["init_args"] = {"at_step": swap["init_args"]["at_step"]}
    return answer


class Protocol:
    """Makes the parts of an experiment in the folder `out`."""

    def __init__(self, out: Path, description: Description) -> None:
        self.out, self.description = out, description
        self.small, self.target = description.growths[0], description.growths[-1]

    def stages(self) -> Stages:
        raise NotImplementedError

    def base_of_seed(self, *folders: str) -> Path:
        """The last checkpoint of the base of every seed, which `{seed}` stands for: so all have one configuration."""
        return self.out.joinpath(*folders, "base", "seed={seed}", "checkpoints", "last.ckpt")

    def run(self, role: str, seed: int, config: Callable[[], Config], **options: Any) -> RunPart:
        """A run of a role. `options` are those of RunPart."""
        return RunPart(self.out, role, seed, config, self.description.metric, **options)

    def sweep(
        self, name: str, axes: list[Axis], seeds: list[int], config: Callable[[], Config], *, may_diverge: bool = False
    ) -> Sweep:
        trials = len(list(grid(axes)))

        def settings() -> Settings:
            whole = {**config(), "seed_everything": seeds[0]}
            return Settings(whole, axes, "grid", trials, seeds, self.description.metric)

        return Sweep(name, self.out / name, settings, trials, may_diverge=may_diverge)


class Upscale(Protocol):
    """Sweep 1 at the small width; bases with its best values, and sweep 2 on the small growth; then, with the best
    values of both, the target growth of each base, and runs from scratch.

    If methods are compared, each has its own sweep 2 and its own target growths.
    """

    def stages(self) -> Stages:
        before, after = (of_width(width) for width in (self.target.before, self.target.after))
        tuner = self._tuner()
        base_config = partial(self._config, tuner, before)
        bases = [self.run("base", seed, base_config, must_not_diverge=True) for seed in self.description.seeds]
        sweeps = {method: self._sweep_2(tuner, method) for method in self.description.methods or [""]}
        last: list[Part] = []
        for base in bases:  # seed by seed, so that an experiment that is stopped early has whole seeds to compare
            last.append(self.run("scratch", base.seed, partial(self._config, tuner, after)))
            last += [self._upscaled(tuner, base, method, sweep_2) for method, sweep_2 in sweeps.items()]
        return [[tuner], [*bases, *sweeps.values()], last]

    def _tuner(self) -> RunPart | Sweep:
        """What sweep 2 starts from."""
        description, seed = self.description, self.description.seeds[0]
        small_base = partial(description.config, of_width(self.small.before))
        if "sweep_1" in description.sweeps:
            return self.sweep("sweep_1", description.sweeps["sweep_1"], [seed], small_base)
        return self.run(SMALL_BASE, seed, small_base, must_not_diverge=True)

    def _sweep_2(self, tuner: RunPart | Sweep, method: str) -> Sweep:
        description = self.description

        def config() -> Config:
            grown = description.grown(self.small, tuner.checkpoint, method)
            return self._config(tuner, grown, description.upscaled)

        axes, seeds = description.sweeps["sweep_2"], description.seeds[:1]
        name = f"sweep_2/{method}" if method else "sweep_2"
        return self.sweep(name, axes, seeds, config, may_diverge=bool(method))

    def _upscaled(self, tuner: RunPart | Sweep, base: RunPart, method: str, sweep_2: Sweep) -> RunPart:
        description = self.description

        def config() -> Config:
            grown = description.grown(self.target, self.base_of_seed(), method)
            return self._config(tuner, grown, description.upscaled, sweep_2.tuned)

        if not method:
            return self.run("upscale", base.seed, config)
        details = {"role": "upscale", "method": method}
        options = {"details": details, "keeps_checkpoints": False, "is_left_out": lambda: sweep_2.has_no_best}
        return self.run(f"upscale/{method}", base.seed, config, **options)  # nothing starts from these many runs

    def _config(self, tuner: RunPart | Sweep, first: Config, *others: Config) -> Config:
        """The configuration of a run: with the best values of sweep 1, if there is one, over the first override."""
        tuned = [tuner.tuned] if isinstance(tuner, Sweep) else []
        return self.description.config(first, *tuned, *others)


class Transfer(Protocol):
    """A base of every width and seed; then every sweep on every growth, each seed from its own base."""

    def stages(self) -> Stages:
        description = self.description
        widths = {folder_name(growth.before): growth.before for growth in description.growths}
        bases: list[Part] = [self._base(width, seed) for width in widths.values() for seed in description.seeds]
        sweeps: list[Part] = []
        for growth in description.growths:
            base = self.base_of_seed(folder_name(growth.before))
            config = partial(description.config, description.grown(growth, base), description.upscaled)
            for name, axes in description.sweeps.items():
                sweeps.append(self.sweep(f"{growth.name}/{name}", axes, description.seeds, config))
        return [bases, sweeps]

    def _base(self, width: Size, seed: int) -> RunPart:
        config = partial(self.description.config, of_width(width))
        return self.run(f"{folder_name(width)}/base", seed, config, must_not_diverge=True)


TUNING_BUDGET = "flops"
"""What runs at the tuning size have in common: seconds of small networks say nothing of large ones."""


class Midrun(Protocol):
    """Compares growing during a run with fixed widths, at equal total cost.

    All runs have the same budget: the cost of the configured number of steps at the wide width, in FLOPs or in
    seconds. A growing run spends a share of it at the narrow width. It is compared with three fixed widths: wide,
    narrow, and one in between.

    Hyperparameters come from the same comparison at a small size, at equal FLOPs. Each fixed width uses the best values
    of `sweep_1` at its small counterpart. A growing run uses those of the narrow width until it grows, and then those
    of `sweep_2`. Runs that differ only in the noise are one run until they grow: the first one trains it, and the
    others start from its checkpoint, in the last stage.
    """

    def __init__(self, out: Path, description: Description) -> None:
        super().__init__(out, description)
        assert description.midrun is not None
        self.keys = description.midrun
        self.costs = CostPart(out, description)
        self._of_fixed: dict[tuple[str, str], Sweep] = {}
        self._of_growth: dict[tuple[str, str, float], Sweep] = {}

    def stages(self) -> Stages:
        for schedule in self.keys.schedules:
            self._add_sweeps(schedule)
        runs: list[Part] = []
        followers: list[Part] = []
        for seed in self.description.seeds:
            for schedule in self.keys.schedules:
                self._add_runs(schedule, seed, runs, followers)
        sweeps = [list(self._of_fixed.values()), list(self._of_growth.values())]
        return [[self.costs], *map(list[Part], sweeps), runs, followers]

    # --- at the tuning size

    def _add_sweeps(self, schedule: str) -> None:
        seeds, sweeps = self.description.seeds[:1], self.description.sweeps
        for fixed in FIXED:
            config = partial(self._fixed_config, schedule, TUNING_BUDGET, fixed, small=True)
            name = f"{schedule}/sweep_1/{fixed}"
            self._of_fixed[schedule, fixed] = self.sweep(name, sweeps["sweep_1"], seeds, config)
        for noise in self.keys.noises:
            for share in self.keys.tuned_at:
                config = partial(self._grown_config, schedule, TUNING_BUDGET, noise, share, small=True)
                name = f"{schedule}/sweep_2/{noise}-{share:g}"
                self._of_growth[schedule, noise, share] = self.sweep(name, sweeps["sweep_2"], seeds, config)

    # --- at the target's

    def _add_runs(self, schedule: str, seed: int, runs: list[Part], followers: list[Part]) -> None:
        runs.append(self._fixed_run(schedule, self.keys.budgets, "wide", seed))  # which is the same in all budgets
        for budget in self.keys.budgets:
            for fixed in ("middle", "narrow"):
                runs.append(self._fixed_run(schedule, [budget], fixed, seed))
            for share in self.keys.shares:
                first = None
                for noise in self.keys.noises:
                    part = self._grown_run(schedule, budget, noise, share, seed, first)
                    (runs if first is None else followers).append(part)
                    first = first or part

    def _fixed_run(self, schedule: str, budgets: list[str], fixed: Fixed, seed: int) -> RunPart:
        def config() -> Config:
            return self._fixed_config(schedule, budgets[0], fixed, self._of_fixed[schedule, fixed].tuned)

        role = f"{schedule}/{fixed}" if fixed == "wide" else f"{schedule}/{budgets[0]}/{fixed}"
        details = {"schedule": schedule, "budgets": budgets, "fixed": fixed}
        return self.run(role, seed, config, details=details, keeps_checkpoints=False)

    def _grown_run(
        self, schedule: str, budget: str, noise: str, share: float, seed: int, first: RunPart | None
    ) -> RunPart:
        tuned = self._of_growth[schedule, noise, self.keys.nearest_tuned(share)]

        def config() -> Config:
            return self._grown_config(schedule, budget, noise, share, tuned.tuned)

        details = {"schedule": schedule, "budgets": [budget], "noise": noise, "share": share}
        role = f"{schedule}/{budget}/{noise}-{share:g}"
        return self.run(role, seed, config, details=details, keeps_checkpoints=False, first=first)

    # --- configurations

    def _fixed_config(self, schedule: str, budget: str, fixed: Fixed, *tuned: Config, small: bool = False) -> Config:
        costs, width = self.costs.costs, self._width(fixed, small)
        steps = costs.steps_of(budget, width, self._width("wide", small))
        return self.description.config(of_width(width), *self._length(schedule, steps), *tuned)

    def _grown_config(
        self, schedule: str, budget: str, noise: str, share: float, *tuned: Config, small: bool = False
    ) -> Config:
        growth = self.small if small else self.target
        at_step, steps = self.costs.costs.steps_of_growth(budget, growth, share)
        grown = growing(growth, at_step, self.keys.noises[noise])
        narrow = self._of_fixed[schedule, "narrow"].tuned
        return self.description.config(grown, *self._length(schedule, steps, (at_step, share)), narrow, *tuned)

    def _length(self, schedule: str, steps: int, grows: tuple[int, float] | None = None) -> list[Config]:
        """What gives a run its number of steps, with a validation after the last one, and its schedule."""
        length = {
            "max_steps": steps,
            "max_epochs": -1,
            "check_val_every_n_epoch": None,
            "val_check_interval": self.costs.costs.batches_of(steps),
        }
        return [{"trainer": length}, stretched(self.keys.schedules[schedule], steps, grows)]

    def _width(self, fixed: Fixed, small: bool = False) -> Size:
        growth = self.small if small else self.target
        if fixed == "middle":
            return self.keys.small_middle if small else self.keys.middle
        return growth.after if fixed == "wide" else growth.before


PROTOCOLS: dict[str, type[Protocol]] = {"upscale": Upscale, "transfer": Transfer, "midrun": Midrun}


# --- an experiment in its folder


class Experiment:
    """The experiment of a description in a folder. It may have begun."""

    def __init__(self, out: Path, description: Description) -> None:
        self.out, self.description = out, description
        self.stages = PROTOCOLS[description.protocol](out, description).stages()

    @property
    def parts(self) -> list[Part]:
        return [part for stage in self.stages for part in stage]

    def begin(self, command: list[str]) -> None:
        """Checks what can be checked without a run, and writes experiment.json."""
        self.refuse_others()
        path = self.out / "experiment.json"
        if path.exists():
            return
        check(self.description)
        self.out.mkdir(parents=True, exist_ok=True)
        if self.description.quick:
            write_images(self.out / IMAGES)
        write_text(path, json.dumps(self._record(command), indent=1) + "\n")

    def _record(self, command: list[str]) -> dict[str, Any]:
        runs: list[dict[str, Any]] = []
        tuning: dict[str, str] = {}
        for part in self.parts:
            if isinstance(part, RunPart) and part.role != SMALL_BASE:
                role, folder = part.role.rpartition("/")[2], str(part.folder.relative_to(self.out))
                runs.append({"role": role, "seed": part.seed, "folder": folder, **part.details})
            elif not isinstance(part, CostPart):
                name = part.name if isinstance(part, Sweep) else SMALL_BASE
                tuning[name] = name
        head: dict[str, Any] = {"protocol": self.description.protocol, "command": command}
        if self.description.quick:
            head["quick"] = True
        return {**head, **self.description.identity(), "runs": runs, "sweeps": tuning}

    def refuse_others(self) -> None:
        refuse_other_content(self.out, "experiment", json.loads(json.dumps(self.description.identity())))

    def make(self, driver: Driver) -> bool:
        """Makes the runs, stage by stage. False if, at the end, those of other parts are missing."""
        for stage in self.stages:
            trials = trials_of(stage)
            driver.make(trials, self.progress)
            if stage is not self.stages[-1]:
                driver.wait_for_other_parts(trials)
            elif not driver.have_finished(trials):
                return False
            for part in stage:
                part.conclude()
        return True

    @property
    def left(self) -> tuple[int, int]:
        total = sum(part.total for part in self.parts)
        return total - sum(part.done for part in self.parts), total

    def progress(self) -> str:
        left, total = self.left
        return f"{left} of {total} runs left"

    # --- results

    def conclude(self) -> str:
        """Writes the results of a finished experiment, and returns them in words."""
        if self.description.protocol == "transfer":
            sweeps = {part.name: part for part in self.parts if isinstance(part, Sweep)}
            lines = write_transfer(self.out, self.description, sweeps)
        else:
            lines = self._report()
        if self.description.quick:
            from mupscale.commands.reporting.folders import QUICK

            lines.append(QUICK)
        return "\n".join(lines)

    def _report(self) -> list[str]:
        """Writes the report, and returns its verdicts; if growth methods are compared, those on them."""
        from mupscale.commands.reporting import write_report

        for draft in self.out.glob(".report-*"):  # left by a process that was killed
            shutil.rmtree(draft)
        write_report([self.out], self.out / "report")
        summary = read_json(self.out / "report" / "summary.json")
        verdicts = summary["methods"][0]["verdict"] if self.description.methods else summary["verdicts"]
        return [*verdicts, f"the report is {self.out / 'report' / 'index.html'}"]


def trials_of(stage: list[Part]) -> dict[int, Trial]:
    """The trials of a stage that are not known to be finished, by their numbers among all of the stage."""
    answer: dict[int, Trial] = {}
    number = 0
    for part in stage:
        if not part.finished:
            answer |= dict(enumerate(part.trials(), number))
        number += part.total
    return answer
