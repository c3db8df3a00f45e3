"""The protocols: the runs and sweeps of an experiment, what each of them needs, and the results."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mupscale.atomic import write_text
from mupscale.commands.config import Config, read_json, refuse_difference
from mupscale.commands.experiment.costs import CostPart
from mupscale.commands.experiment.file import Description, check, of_width
from mupscale.commands.experiment.midrun import MidrunParts
from mupscale.commands.experiment.parts import Part, RunPart, SweepPart
from mupscale.commands.experiment.quick import IMAGES, write_images
from mupscale.commands.experiment.transfer import write_transfer
from mupscale.commands.experiment.widths import Growth, Size, folder_name
from mupscale.commands.leases import locked
from mupscale.commands.stacks import Key, Unit
from mupscale.commands.tuning.results import Results, metric_label
from mupscale.commands.tuning.space import Axis, grid
from mupscale.commands.tuning.study import Settings
from mupscale.errors import UserError
from mupscale.text_tables import table

SMALL_BASE = "small_base"
"""The narrow run that sweep 2 starts from if there is no sweep 1. It counts as tuning."""


class Experiment:
    """The experiment of a description in a folder. It may have begun, and other processes may work on it."""

    def __init__(self, out: Path, description: Description) -> None:
        self.out, self.description = out, description
        protocols = {"upscale": self._upscale, "transfer": self._transfer, "midrun": self._midrun}
        self.parts: list[Part] = list(protocols[description.protocol]())
        """In the order in which they are taken."""
        self.most_together: int | None = None

    def begin(self, command: list[str]) -> None:
        """Checks what can be checked without a run, and writes experiment.json."""
        self.refuse_others()
        path = self.out / "experiment.json"
        if path.exists():
            return
        check(self.description)
        self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out):
            if path.exists():  # another process was faster
                self.refuse_others()
            else:
                if self.description.quick:
                    write_images(self.out / IMAGES)
                write_text(path, json.dumps(self._record(command), indent=1) + "\n")

    def _record(self, command: list[str]) -> dict[str, Any]:
        """The content of experiment.json."""
        runs: list[dict[str, Any]] = []
        tuning: dict[str, str] = {}
        for part in self.parts:
            if isinstance(part, RunPart) and part.role != SMALL_BASE:
                role, folder = part.role.rpartition("/")[2], str(part.folder.relative_to(self.out))
                runs.append({"role": role, "seed": part.seed, "folder": folder, **part.details})
            elif not isinstance(part, CostPart):
                name = part.name if isinstance(part, SweepPart) else SMALL_BASE
                tuning[name] = name
        head: dict[str, Any] = {"protocol": self.description.protocol, "command": command}
        if self.description.quick:
            head["quick"] = True
        return {**head, **self.description.identity(), "runs": runs, "sweeps": tuning}

    def refuse_others(self) -> None:
        """Raises a UserError if the folder holds another experiment, or something else."""
        path = self.out / "experiment.json"
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"--out {self.out} is a file; name a folder for the experiment")
        if self.out.is_dir() and any(self.out.iterdir()) and not path.exists() and not (self.out / "lock").exists():
            raise UserError(f"--out {self.out} is not empty and has no experiment; name a new folder")
        if path.exists():
            there, here = read_json(path), json.loads(json.dumps(self.description.identity()))
            refuse_difference({key: there.get(key) for key in here}, here, f"--out {self.out} holds another experiment")

    def waiting(self) -> list[Key]:
        """The units that can be made now, and that no process makes, in the order in which they are taken."""
        return [key for part in self._ready() for key in part.waiting()]

    def take(self, key: Key | None = None) -> Unit | None:
        """A unit that can be made now, and that no other process makes: that of a key, or the first."""
        for part in self._ready():
            unit = part.take(key)
            if unit is not None:
                return unit
        return None

    def _ready(self) -> Iterator[Part]:
        """The parts that are not finished, while those that they need are."""
        for part in self.parts:
            if not part.finished and all(need.finished for need in part.needs):
                yield part

    @property
    def finished(self) -> bool:
        return all(part.finished for part in self.parts)

    @property
    def under_way(self) -> int:
        """How many runs and trials processes are making."""
        return sum(part.state().running for part in self._ready())

    @property
    def left(self) -> tuple[int, int]:
        """How many runs are not finished, and how many there are."""
        states = [part.state() for part in self.parts]
        return sum(state.total - state.done for state in states), sum(state.total for state in states)

    def progress(self) -> str:
        left, total = self.left
        return f"{left} of {total} runs left"

    def conclude(self) -> str:
        """Writes the results of a finished experiment, and returns them in words."""
        words = self._conclude()
        if not self.description.quick:
            return words
        from mupscale.commands.reporting.folders import QUICK

        return f"{words}\n{QUICK}"

    def _conclude(self) -> str:
        with locked(self.out):
            for part in self.parts:
                if isinstance(part, RunPart):
                    part.tidy()  # again, because the process that finished the last run may have died before it did
            if self.description.protocol == "transfer":
                return write_transfer(self.out, self.description, self._transferred())
            lines = self._table() if self.description.protocol == "upscale" else []
            from mupscale.commands.reporting import write_report

            for draft in self.out.glob(".report-*"):  # left by a process that was killed
                shutil.rmtree(draft)
            write_report([self.out], self.out / "report")
            if self.description.protocol == "midrun":
                lines = read_json(self.out / "report" / "summary.json")["verdicts"]
            elif self.description.methods:
                lines += read_json(self.out / "report" / "summary.json")["methods"][0]["verdict"]
            return "\n".join([*lines, f"the report is {self.out / 'report' / 'index.html'}"])

    # --- the protocol upscale

    def _upscale(self) -> Iterator[Part]:
        """Sweep 1 at the small width; base and baseline with its best values; Sweep 2 on the small growth; the target
        growth with the best values of both. If methods are compared, each has its own Sweep 2 and its own target
        growth.
        """
        description = self.description
        small, target = description.growths
        first = description.seeds[0]

        def small_base() -> Config:
            return description.config(of_width(small.before))

        tuner: RunPart | SweepPart
        if "sweep_1" in description.sweeps:
            tuner = self._sweep("sweep_1", description.sweeps["sweep_1"], [first], small_base, [])
        else:
            tuner = self._run(SMALL_BASE, first, small_base, [], must_not_diverge=True)
        needs: list[Part] = [tuner] if isinstance(tuner, SweepPart) else []
        yield tuner

        def tuned() -> list[Path]:
            return [tuner.tuned] if isinstance(tuner, SweepPart) else []

        def narrow() -> Config:
            return description.config(of_width(target.before), *tuned())

        def wide() -> Config:
            return description.config(of_width(target.after), *tuned())

        bases = [self._run("base", seed, narrow, needs, must_not_diverge=True) for seed in description.seeds]
        yield from bases

        def small_growth(method: str) -> Config:
            grown = description.grown(small, tuner.checkpoint, method)
            return description.config(grown, *tuned(), description.upscaled)

        sweeps: dict[str, SweepPart] = {}
        for method in description.methods or [""]:
            name, axes = of_method("sweep_2", method), description.sweeps["sweep_2"]
            config = partial(small_growth, method)
            sweeps[method] = self._sweep(name, axes, [first], config, [tuner], may_diverge=bool(method))
        yield from sweeps.values()

        def upscaled(base: RunPart, method: str) -> RunPart:
            sweep_2 = sweeps[method]

            def config() -> Config:
                grown = description.grown(target, base.checkpoint, method)
                return description.config(grown, *tuned(), description.upscaled, sweep_2.tuned)

            return self._run(
                of_method("upscale", method),
                base.seed,
                config,
                [base, sweep_2],
                details={"role": "upscale", "method": method} if method else None,
                keeps_checkpoints=not method,  # of methods there are many runs, and nothing starts from them
                is_left_out=lambda: sweep_2.has_no_best,
            )

        for base in bases:  # seed by seed, so that an experiment that is stopped early has whole seeds to compare
            yield self._run("scratch", base.seed, wide, needs)
            for method in sweeps:
                yield upscaled(base, method)

    def _table(self) -> list[str]:
        values: dict[str, dict[int, float]] = {}
        for part in self.parts:
            if isinstance(part, RunPart) and part.role != SMALL_BASE:
                values.setdefault(part.role, {})[part.seed] = part.value
        rows = [("run", "seeds", f"{metric_label(self.description.metric)}: mean (min–max)")]
        for role, by_seed in values.items():
            rows.append((role, f"{len(by_seed)}", spread(list(by_seed.values()))))
        lines = table(rows, right=[1])
        return lines if self.description.methods else [*lines, verdict(values["upscale"], values["scratch"])]

    # --- the protocol transfer

    def _transfer(self) -> Iterator[Part]:
        """A base of every width and seed; then every sweep on every growth, each seed from its own base."""
        description = self.description
        bases: dict[str, list[Part]] = {}
        for growth in description.growths:
            name = folder_name(growth.before)
            if name not in bases:
                bases[name] = [self._base(growth.before, seed) for seed in description.seeds]
                yield from bases[name]
        for growth in description.growths:
            for sweep, axes in description.sweeps.items():
                yield self._growth_sweep(growth, sweep, axes, bases[folder_name(growth.before)])

    def _base(self, width: Size, seed: int) -> RunPart:
        def config() -> Config:
            return self.description.config(of_width(width))

        return self._run(f"{folder_name(width)}/base", seed, config, [], must_not_diverge=True)

    def _growth_sweep(self, growth: Growth, name: str, axes: list[Axis], needs: list[Part]) -> SweepPart:
        base = self.out / folder_name(growth.before) / "base" / "seed={seed}" / "checkpoints" / "last.ckpt"

        def config() -> Config:
            return self.description.config(self.description.grown(growth, base), self.description.upscaled)

        return self._sweep(f"{growth.name}/{name}", axes, self.description.seeds, config, needs)

    def _transferred(self) -> dict[str, list[Results]]:
        """The results of each sweep, by its name: one for each growth."""
        results = {part.name: part.results for part in self.parts if isinstance(part, SweepPart)}
        answer = {}
        for name in self.description.sweeps:
            answer[name] = [results[f"{growth.name}/{name}"] for growth in self.description.growths]
        return answer

    # --- the protocol midrun

    def _midrun(self) -> Iterator[Part]:
        return MidrunParts(self.out, self.description, self._run, self._sweep).all()

    # --- parts

    def _run(
        self,
        role: str,
        seed: int,
        config: Callable[[], Config],
        needs: list[Part],
        *,
        must_not_diverge: bool = False,
        details: dict[str, Any] | None = None,
        keeps_checkpoints: bool = True,
        is_left_out: Callable[[], bool] = lambda: False,
        first: RunPart | None = None,
    ) -> RunPart:
        return RunPart(
            self.out,
            role,
            seed,
            config,
            self.description.metric,
            needs,
            must_not_diverge,
            details,
            keeps_checkpoints,
            is_left_out,
            first,
        )

    def _sweep(
        self,
        name: str,
        axes: list[Axis],
        seeds: list[int],
        config: Callable[[], Config],
        needs: list[Part],
        *,
        may_diverge: bool = False,
    ) -> SweepPart:
        trials = len(list(grid(axes)))

        def settings() -> Settings:
            whole = {**config(), "seed_everything": seeds[0]}
            return Settings(whole, axes, "grid", trials, seeds, self.description.metric)

        return SweepPart(name, self.out, settings, trials, needs, may_diverge)


def of_method(name: str, method: str) -> str:
    """The name of a part that each method has by itself."""
    return f"{name}/{method}" if method else name


def spread(values: list[float]) -> str:
    """The mean and the range of the values that did not diverge."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "all diverged"
    diverged = f", {len(values) - len(finite)} diverged" if len(finite) < len(values) else ""
    return f"{sum(finite) / len(finite):.5g} ({min(finite):.5g}–{max(finite):.5g}){diverged}"


def verdict(upscaled: dict[int, float], scratch: dict[int, float]) -> str:
    """Whether upscaled ends below from-scratch, seed by seed."""
    below = [seed for seed in upscaled if upscaled[seed] < scratch[seed]]
    if not below:
        return "Upscaled does not end below from-scratch in any seed."
    both = [seed for seed in upscaled if math.isfinite(upscaled[seed]) and math.isfinite(scratch[seed])]
    ours, theirs = sum(upscaled[seed] for seed in both), sum(scratch[seed] for seed in both)
    share = f", on average by {1 - ours / theirs:.1%}" if both and 0 < ours < theirs else ""
    if len(below) == len(upscaled):
        return f"Upscaled ends below from-scratch in each seed{share}."
    some = f"{len(below)} of {len(upscaled)} seeds only"
    return f"Upscaled ends below from-scratch in {some}{share or ', and not on average'}."
