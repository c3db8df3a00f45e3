"""The two protocols: which runs and sweeps an experiment has, what each needs, and what it all ends in."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mupscale.commands.config import Config
from mupscale.commands.experiment.file import Description, Growth, check, folder_name
from mupscale.commands.experiment.parts import Part, Run, Sweep, Unit
from mupscale.commands.experiment.transfer import write_transfer
from mupscale.commands.leases import locked
from mupscale.commands.sweep.results import metric_label
from mupscale.commands.sweep.space import Axis, grid
from mupscale.commands.sweep.study import Settings, read, refuse_difference, write
from mupscale.errors import UserError
from mupscale.models.checkpoint import Width

SMALL_BASE = "small_base"
"""The narrow run that sweep 2 starts from, where there is no sweep 1: it is part of tuning, too."""


class Experiment:
    """The experiment of a description in a folder, which may have been begun, or be worked on by others."""

    def __init__(self, out: Path, description: Description) -> None:
        self.out, self.description = out, description
        self.parts: list[Part] = list(self._upscale() if description.protocol == "upscale" else self._transfer())
        """In order of preference."""

    def begin(self, command: list[str]) -> None:
        """Checks what can be checked, and writes experiment.json."""
        self.refuse_others()
        path = self.out / "experiment.json"
        if path.exists():
            return
        check(self.description)
        self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out):
            if path.exists():  # another process was faster
                self.refuse_others()
                return
            runs = [part for part in self.parts if isinstance(part, Run) and part.role != SMALL_BASE]
            tuning = [part.name if isinstance(part, Sweep) else SMALL_BASE for part in self.parts if part not in runs]
            entries = [
                {"role": run.role.rpartition("/")[2], "seed": run.seed, "folder": str(run.folder.relative_to(self.out))}
                for run in runs
            ]
            whole = {"protocol": self.description.protocol, "command": command, **self.description.identity()}
            write(
                path, json.dumps({**whole, "runs": entries, "sweeps": {name: name for name in tuning}}, indent=1) + "\n"
            )

    def refuse_others(self) -> None:
        """UserError if the folder has another experiment, or something else."""
        path = self.out / "experiment.json"
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"--out {self.out} is a file; name a folder for the experiment")
        if self.out.is_dir() and any(self.out.iterdir()) and not path.exists() and not (self.out / "lock").exists():
            raise UserError(f"--out {self.out} is not empty and has no experiment; name a new folder")
        if path.exists():
            there, ours = read(path), json.loads(json.dumps(self.description.identity()))
            refuse_difference({key: there.get(key) for key in ours}, ours, f"--out {self.out} is of another experiment")

    def take(self) -> Unit | None:
        """A run that can be made now, and that nobody makes."""
        for part in self.parts:
            if not part.finished and all(need.finished for need in part.needs):
                unit = part.take()
                if unit is not None:
                    return unit
        return None

    @property
    def finished(self) -> bool:
        return all(part.finished for part in self.parts)

    @property
    def left(self) -> tuple[int, int]:
        """How many runs are not finished, and how many there are."""
        states = [part.state() for part in self.parts]
        return sum(state.total - state.done for state in states), sum(state.total for state in states)

    def conclude(self) -> str:
        """Writes what the experiment ends in; the result in words."""
        with locked(self.out):
            if self.description.protocol == "transfer":
                return write_transfer(self.out, self.description, self._transferred())
            lines = self._table()
            from mupscale.commands.reporting import write_report

            for draft in self.out.glob(".report-*"):  # of a process that was killed over it
                shutil.rmtree(draft)
            write_report([self.out], self.out / "report")
            return "\n".join([*lines, f"the report is {self.out / 'report' / 'index.html'}"])

    # --- the protocol upscale

    def _upscale(self) -> Iterator[Part]:
        """Sweep 1 at the small width; base and baseline with its best; Sweep 2 on the small growth; the target growth
        with both.
        """
        told, (small, target), first = self.description, self.description.growths, self.description.seeds[0]
        tuner: Run | Sweep
        if "sweep_1" in told.sweeps:
            tuner = self._sweep(
                "sweep_1", told.sweeps["sweep_1"], [first], lambda: told.config(of_width(small.before)), []
            )
        else:
            tuner = self._run(SMALL_BASE, first, lambda: told.config(of_width(small.before)), [], True)
        needs: list[Part] = [tuner] if isinstance(tuner, Sweep) else []
        yield tuner

        def tuned() -> list[Path]:
            return [tuner.tuned] if isinstance(tuner, Sweep) else []

        def narrow() -> Config:
            return told.config(of_width(target.before), *tuned())

        def wide() -> Config:
            return told.config(of_width(target.after), *tuned())

        bases = [self._run("base", seed, narrow, needs, True) for seed in told.seeds]
        yield from bases

        def small_growth() -> Config:
            return told.config(told.grown(small, tuner.checkpoint), *tuned(), told.upscaled)

        sweep_2 = self._sweep("sweep_2", told.sweeps["sweep_2"], [first], small_growth, [tuner])
        yield sweep_2

        def upscaled(base: Run) -> Run:
            def config() -> Config:
                return told.config(told.grown(target, base.checkpoint), *tuned(), told.upscaled, sweep_2.tuned)

            return self._run("upscale", base.seed, config, [base, sweep_2])

        for base in bases:  # the long runs seed by seed: stopped early, there are whole ones to compare
            yield self._run("scratch", base.seed, wide, needs)
            yield upscaled(base)

    def _table(self) -> list[str]:
        runs = [part for part in self.parts if isinstance(part, Run)]
        values = {
            role: {run.seed: run.value for run in runs if run.role == role} for role in ("base", "scratch", "upscale")
        }
        lines = [f"{'':<9}{'seeds':>5}  {metric_label(self.description.metric)}: mean (min–max)"]
        lines += [f"{role:<9}{len(of):>5}  {spread(list(of.values()))}" for role, of in values.items()]
        return [*lines, verdict(values["upscale"], values["scratch"])]

    # --- the protocol transfer

    def _transfer(self) -> Iterator[Part]:
        """A base of every width and seed; then every sweep on every growth, each seed from its own base."""
        told = self.description
        bases: dict[str, list[Part]] = {}
        for growth in told.growths:
            name = folder_name(growth.before)
            if name not in bases:
                bases[name] = [self._base(growth.before, seed) for seed in told.seeds]
                yield from bases[name]
        for growth in told.growths:
            for sweep, axes in told.sweeps.items():
                yield self._growth_sweep(growth, sweep, axes, bases[folder_name(growth.before)])

    def _base(self, width: Width, seed: int) -> Run:
        return self._run(f"{folder_name(width)}/base", seed, lambda: self.description.config(of_width(width)), [], True)

    def _growth_sweep(self, growth: Growth, name: str, axes: list[Axis], needs: list[Part]) -> Sweep:
        base = self.out / folder_name(growth.before) / "base" / "seed={seed}" / "checkpoints" / "last.ckpt"

        def config() -> Config:
            return self.description.config(self.description.grown(growth, base), self.description.upscaled)

        return self._sweep(f"{growth.name}/{name}", axes, self.description.seeds, config, needs)

    def _transferred(self) -> dict[str, list[Any]]:
        sweeps = {part.name: part for part in self.parts if isinstance(part, Sweep)}
        growths = self.description.growths
        return {
            name: [sweeps[f"{growth.name}/{name}"].results for growth in growths] for name in self.description.sweeps
        }

    # --- parts

    def _run(self, role: str, seed: int, config: Any, needs: list[Part], must_not_diverge: bool = False) -> Run:
        return Run(self.out, role, seed, config, self.description.metric, needs, must_not_diverge)

    def _sweep(self, name: str, axes: list[Axis], seeds: list[int], config: Any, needs: list[Part]) -> Sweep:
        trials = len(list(grid(axes)))

        def settings() -> Settings:
            return Settings(
                {**config(), "seed_everything": seeds[0]}, axes, "grid", trials, seeds, self.description.metric
            )

        return Sweep(name, self.out, settings, trials, needs)


def of_width(width: Width) -> Config:
    return {"model": {"init_args": {"width": width}}}


def spread(values: list[float]) -> str:
    """The mean and the range of those that did not diverge."""
    finite = [value for value in values if math.isfinite(value)]
    diverged = f", {len(values) - len(finite)} diverged" if len(finite) < len(values) else ""
    if not finite:
        return "all diverged"
    return f"{sum(finite) / len(finite):.5g} ({min(finite):.5g}–{max(finite):.5g}){diverged}"


def verdict(upscaled: dict[int, float], scratch: dict[int, float]) -> str:
    """Whether upscaled ends below from-scratch, seed by seed."""
    below = [seed for seed in upscaled if upscaled[seed] < scratch[seed]]
    how_many = "each seed" if len(below) == len(upscaled) else f"{len(below)} of {len(upscaled)} seeds"
    if not below:
        return "Upscaled does not end below from-scratch in any seed."
    both = [seed for seed in upscaled if math.isfinite(upscaled[seed]) and math.isfinite(scratch[seed])]
    means = [sum(values[seed] for seed in both) for values in (upscaled, scratch)]
    share = f", on average by {1 - means[0] / means[1]:.1%}" if both and 0 < means[0] < means[1] else ""
    if len(below) == len(upscaled):
        return f"Upscaled ends below from-scratch in {how_many}{share}."
    return f"Upscaled ends below from-scratch in {how_many} only{share or ', and not on average'}."
