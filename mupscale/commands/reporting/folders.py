"""Which runs, sweeps and experiments there are in folders."""

import math
import shlex
from pathlib import Path
from typing import Any

from mupscale.commands import figures
from mupscale.commands.config import dictionary, read_json
from mupscale.commands.reporting.compare import is_edge
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.data_files import inside, interpreting, json_of
from mupscale.errors import UserError
from mupscale.text_tables import read_csv

QUICK = "quick: no evidence. Tiny networks, few steps and little data: this shows only that the experiment runs."

EDGE = (
    "A value is at the edge if it is the least or largest of a grid of three or more, or beside one that diverged: "
    "better ones may lie beyond. No noise is no edge."
)

OWN_PART = ("transfer", "midrun")
"""Protocols of which the page shows an own part and the sweeps, not the runs."""


class SweepFolder:
    """The folder of a sweep, or of the runs that an experiment has instead of one. They are what tuning has cost."""

    def __init__(self, name: str, folder: Path, method: str = "") -> None:
        """`method` is the growth method that it has tuned, of those that an experiment compares."""
        self.name, self.folder, self.method = name, folder, method
        self.is_sweep = (folder / "sweep.json").is_file()
        self.has_no_best = (folder / "no_best.txt").is_file()
        """Whether it is finished, and all of its trials diverged."""
        self.rows = read_csv(folder / "trials.csv")
        """Those of its table, one for each finished trial."""

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
    def axes(self) -> dict[str, list[Any]]:
        """The values, or bounds, of each key."""
        try:
            described = json_of((self.folder / "sweep.json").read_text())["sweep"]
            return {axis["key"]: axis.get("values") or axis["bounds"] for axis in described}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    @property
    def best(self) -> str:
        """The best trial in one line: the first line of best.yaml, empty while there is none."""
        if self.has_no_best:
            return "none, because all trials diverged"
        path = self.folder / "best.yaml"
        return path.read_text().partition("\n")[0].removeprefix("# ") if path.is_file() else ""

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


class ExperimentFolder:
    """The folder of an experiment. Raises a UserError if experiment.json is not the description of one."""

    def __init__(self, folder: Path) -> None:
        path = folder / "experiment.json"
        with interpreting(f"{path} is not the description of an experiment"):
            self.folder, self.description = folder, read_json(path)
            self.protocol = str(self.description.get("protocol", "upscale"))
            words = self.description.get("command") or ""
            self.command = shlex.join(map(str, words)) if isinstance(words, list) else str(words)
            self.runs = [(inside(folder, run["folder"]), run) for run in self.description.get("runs", [])]
            """The folders of its runs, and what experiment.json says of each."""
            self.keys = dictionary(self.description.get("experiment"))
            """Those of its YAML file."""
            self.methods = dictionary(self.keys.get("methods"))
            self.method_of = {path: run["method"] for path, run in self.runs if run.get("method") in self.methods}
            tuned = {f"sweep_2/{method}": method for method in self.methods}
            self.sweeps = [
                SweepFolder(name, inside(folder, where), tuned.get(name, ""))
                for name, where in self.description.get("sweeps", {}).items()
            ]


class Found:
    """The runs, sweeps and experiments in folders, and notes on what is missing.

    Raises a UserError if one of the folders holds nothing.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.runs: list[LoggedRun] = []
        self.sweeps: list[SweepFolder] = []
        self.experiments: list[ExperimentFolder] = []
        self.notes: list[str] = []
        self._seen: set[Path] = set()
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder; name folders of runs, sweeps or experiments")
            before, sweep = self._total, SweepFolder(folder.name, folder)
            if sweep.is_sweep:
                self.sweeps.append(sweep)
            else:
                self._search(folder)
            if self._total == before:
                raise UserError(f"{folder} holds no runs: no config.yaml beside TensorBoard events, at any depth")
        methods = {run: name for experiment in self.experiments for run, name in experiment.method_of.items()}
        for run in self.runs:
            run.method = methods.get(run.folder, "")
            if not run.has_loss:
                self.notes.append(f"{run.folder} has logged no training loss to TensorBoard, and is left out.")
            elif run.log.damaged:
                damage = "is damaged or cut off; it counts as far as it can be read."
                self.notes.append(f"An event file of {run.folder} {damage}")
        self.runs = [run for run in self.runs if run.has_loss]
        if not self.runs and not self.of_protocol(*OWN_PART):
            trials = [f"To show the trials of a sweep, name {each.folder / 'trials'}." for each in self.sweeps[:1]]
            nothing = f"there is nothing to report in {', '.join(map(str, folders))}."
            raise UserError(" ".join([nothing, *trials, *self.notes]))

    @property
    def _total(self) -> int:
        return len(self.runs) + len(self.sweeps) + len(self.experiments)

    def of_protocol(self, *names: str) -> list[ExperimentFolder]:
        return [experiment for experiment in self.experiments if experiment.protocol in names]

    def shown_sweeps(self) -> list[tuple[str, SweepFolder]]:
        """The sweeps that were found, and then those of experiments whose runs the page does not show, by name."""
        named = [(sweep.name, sweep) for sweep in self.sweeps]
        for experiment in self.of_protocol(*OWN_PART):
            named += [(str(sweep.folder.relative_to(experiment.folder)), sweep) for sweep in experiment.sweeps]
        return [(name, sweep) for name, sweep in named if sweep.is_sweep]

    def _search(self, folder: Path) -> None:
        """Adds what a folder holds, at any depth. The trials of a sweep are no runs of their own."""
        if folder.resolve() in self._seen:
            return
        self._seen.add(folder.resolve())
        if (folder / "experiment.json").is_file():
            self._add_experiment(folder)
        elif (folder / "config.yaml").is_file():
            self.runs.append(LoggedRun(folder))
        elif not SweepFolder(folder.name, folder).is_sweep:
            for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
                self._search(inner)

    def _add_experiment(self, folder: Path) -> None:
        experiment = ExperimentFolder(folder)
        self.experiments.append(experiment)
        if experiment.description.get("quick"):
            self.notes.append(f"{folder.name} — {QUICK}")
        if experiment.protocol in OWN_PART:
            return
        self.sweeps += [sweep for sweep in experiment.sweeps if sweep.folder.is_dir()]
        without_best = [sweep.method for sweep in experiment.sweeps if sweep.has_no_best]
        for method in without_best:
            self.notes.append(f"All trials of {method} diverged at the small size: it has no runs at the target size.")
        waiting = []
        for run, _ in experiment.runs:
            if (run / "config.yaml").is_file():
                self._search(run)
            elif experiment.method_of.get(run) not in without_best:
                waiting.append(str(run))
        if waiting:
            more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
            self.notes.append(f"Not begun yet: {', '.join(waiting[:3])}{more}.")
