"""Which runs, sweeps and experiments there are in folders."""

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mupscale.commands import figures
from mupscale.commands.config import read_json
from mupscale.commands.reporting.compare import is_edge
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.data_files import inside, interpreting, json_of
from mupscale.errors import UserError

QUICK = "quick: no evidence. Tiny networks, few steps and little data: this shows only that the experiment runs."

OWN_PART = ("transfer", "midrun")
"""Protocols of which the page shows an own part and the sweeps, not the runs."""


@dataclass
class SweepFolder:
    """The folder of a sweep, or of the runs that an experiment has instead of one. They are what tuning has cost."""

    name: str
    folder: Path
    method: str = ""
    """The growth method that it has tuned, of those that an experiment compares."""

    @property
    def is_sweep(self) -> bool:
        return (self.folder / "sweep.json").is_file()

    @property
    def trials(self) -> list[Path]:
        inside = self.folder / "trials" if self.is_sweep else self.folder
        return sorted(path.parent for path in inside.glob("*/config.yaml"))

    @property
    def lost(self) -> int:
        """How many finished trials have no folder any more."""
        runs = [inside(self.folder, row.get("run")) for row in self.rows]
        return sum(not (run / "config.yaml").is_file() for run in runs)

    @property
    def rows(self) -> list[dict[str, str]]:
        """Those of its table, one for each finished trial."""
        path = self.folder / "trials.csv"
        return list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []

    def best_trial(self, metric: str) -> dict[str, str] | None:
        """The row of the best trial; None if there is none that has not diverged."""
        finished = [row for row in self.rows if row.get(metric, "diverged") != "diverged"]
        return min(finished, key=lambda row: float(row[metric]), default=None)

    def edges(self, metric: str) -> list[str]:
        """The keys whose best value is at the edge of the grid, the other keys at their best values."""
        best = self.best_trial(metric)
        answer = []
        for key, levels in self.axes.items():
            if best is None or not figures.is_ordered(levels):
                continue
            means = dict.fromkeys(map(float, levels), 0.0)  # finite, until a trial is known to have diverged
            for row in self.rows:
                if all(row[other] == best[other] for other in self.axes if other != key):
                    means[float(row[key])] = math.inf if row[metric] == "diverged" else float(row[metric])
            if is_edge(float(best[key]), means):
                answer.append(key)
        return answer

    @property
    def best(self) -> str:
        """The best trial in one line: the first line of best.yaml, empty while there is none."""
        if self.has_no_best:
            return "none, because all trials diverged"
        path = self.folder / "best.yaml"
        head = path.read_text().partition("\n")[0] if path.is_file() else ""
        return head.removeprefix("# ") if head.startswith("#") else ""

    @property
    def has_no_best(self) -> bool:
        """Whether it is finished, and all of its trials diverged."""
        return (self.folder / "no_best.txt").is_file()

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The values, or bounds, of each key."""
        try:
            described = json_of((self.folder / "sweep.json").read_text())["sweep"]
            return {axis["key"]: axis.get("values") or axis["bounds"] for axis in described}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


@dataclass
class ExperimentFolder:
    """The folder of an experiment, with its experiment.json."""

    folder: Path
    description: dict[str, Any]

    @property
    def protocol(self) -> str:
        return str(self.description.get("protocol", "upscale"))

    @property
    def runs(self) -> list[Path]:
        return [inside(self.folder, run["folder"]) for run in self.description.get("runs", [])]

    @property
    def sweeps(self) -> list[SweepFolder]:
        methods = {f"sweep_2/{method}": method for method in self.methods}
        listed = self.description.get("sweeps", {}).items()
        return [SweepFolder(name, inside(self.folder, where), methods.get(name, "")) for name, where in listed]

    @property
    def methods(self) -> dict[str, Any]:
        described = self.description.get("experiment")
        methods = described.get("methods") if isinstance(described, dict) else None
        return methods if isinstance(methods, dict) else {}

    @property
    def method_of(self) -> dict[Path, str]:
        runs = zip(self.description.get("runs", []), self.runs, strict=True)
        return {folder: str(run["method"]) for run, folder in runs if run.get("method") in self.methods}


@dataclass
class Found:
    """The runs, sweeps and experiments that were found, and notes on what is missing."""

    runs: list[LoggedRun] = field(default_factory=list)
    sweeps: list[SweepFolder] = field(default_factory=list)
    experiments: list[ExperimentFolder] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.runs) + len(self.sweeps) + len(self.experiments) + len(self.notes)

    @property
    def method_of(self) -> dict[Path, str]:
        return {run: name for experiment in self.experiments for run, name in experiment.method_of.items()}

    def of_protocol(self, *names: str) -> list[ExperimentFolder]:
        return [experiment for experiment in self.experiments if experiment.protocol in names]


def find_runs(folders: list[Path]) -> Found:
    """The runs, sweeps and experiments in folders. Raises a UserError if one of the folders holds nothing."""
    found = Found()
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; name folders of runs, sweeps or experiments")
        before = found.total
        sweep = SweepFolder(folder.name, folder)
        if sweep.is_sweep:
            found.sweeps.append(sweep)
        else:
            search(folder, found, seen)
        if found.total == before:
            raise UserError(f"{folder} holds no runs: no config.yaml beside TensorBoard events, at any depth")
    for run in found.runs:
        if not run.has_loss:
            found.notes.append(f"{run.folder} has logged no training loss to TensorBoard, and is left out.")
        elif run.log.damaged:
            found.notes.append(
                f"An event file of {run.folder} is damaged or cut off; it counts as far as it can be read."
            )
    found.runs = [run for run in found.runs if run.has_loss]
    if not found.runs and not found.of_protocol(*OWN_PART):
        trials = [f"To show the trials of a sweep, name {found.sweeps[0].folder / 'trials'}."] if found.sweeps else []
        nothing = f"there is nothing to report in {', '.join(map(str, folders))}."
        raise UserError(" ".join([nothing, *trials, *found.notes]))
    return found


def search(folder: Path, found: Found, seen: set[Path]) -> None:
    """Adds what a folder holds to `found`, at any depth. The trials of a sweep are no runs of their own."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    if (folder / "experiment.json").is_file():
        add_experiment(folder, found, seen)
    elif (folder / "config.yaml").is_file():
        found.runs.append(LoggedRun(folder))
    elif not SweepFolder(folder.name, folder).is_sweep:
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            search(inner, found, seen)


def add_experiment(folder: Path, found: Found, seen: set[Path]) -> None:
    path = folder / "experiment.json"
    with interpreting(f"{path} is not the description of an experiment"):
        experiment = ExperimentFolder(folder, read_json(path))
        runs, sweeps, _ = experiment.runs, experiment.sweeps, experiment.method_of
    found.experiments.append(experiment)
    if experiment.description.get("quick"):
        found.notes.append(f"{folder.name} — {QUICK}")
    if experiment.protocol in OWN_PART:
        return
    found.sweeps += [sweep for sweep in sweeps if sweep.folder.is_dir()]
    without_best = [sweep.method for sweep in sweeps if sweep.has_no_best]
    for method in without_best:
        found.notes.append(f"All trials of {method} diverged at the small size: it has no runs at the target size.")
    waiting = []
    for run in runs:
        if (run / "config.yaml").is_file():
            search(run, found, seen)
        elif experiment.method_of.get(run) not in without_best:
            waiting.append(run)
    if waiting:
        more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
        found.notes.append(f"Not begun yet: {', '.join(str(run) for run in waiting[:3])}{more}.")
