"""Which runs a report is about: found in folders, checked to be of one task, and grouped by what they are to each
other.
"""

import csv
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mupscale.commands.config import Config, brief, class_name
from mupscale.commands.run_logs import Run
from mupscale.errors import UserError

Role = Literal["upscaled", "scratch", "base", "other"]
NAMES: dict[Role, str] = {"upscaled": "upscaled", "scratch": "from scratch", "base": "base"}
ORDER: list[Role] = ["upscaled", "scratch", "base", "other"]

NO_DIFFERENCE = (
    "seed_everything",
    "ckpt_path",
    "weights_only",
    "callback_args",
    "checkpoint.",
    "loop.",
    "model.compile",
    "model.init_from",
    "trainer.accelerator",
    "trainer.barebones",
    "trainer.default_root_dir",
    "trainer.devices",
    "trainer.enable_",
    "trainer.log_every_n_steps",
    "trainer.logger",
    "trainer.model_registry",
    "trainer.num_nodes",
    "trainer.profiler",
    "trainer.strategy",
    "TrialMetric.",
)
"""Keys that tell where and how a run is run, not what it computes."""

WHERE = re.compile(r"data\.(.*[._])?(?<!class_)(dir|path|root|cache|device|workers|resident|seed)$")
"""Arguments of data modules that do not change the task."""

FREE = re.compile(r"model\.(width|init_from|compile)$|model\.lr_scheduler\b|model\.optimizer\.(?!class_path$)")
"""Of the model: hyperparameters, which may differ within a task."""


@dataclass
class Sweep:
    """The folder of a sweep, or of the runs that an experiment has instead of one. They are what tuning has cost."""

    name: str
    folder: Path

    @property
    def trials(self) -> list[Path]:
        inside = self.folder / "trials" if (self.folder / "sweep.json").is_file() else self.folder
        return sorted(path.parent for path in inside.glob("*/config.yaml"))

    @property
    def lost(self) -> int:
        """How many finished trials have no folder any more."""
        path = self.folder / "trials.csv"
        rows = csv.DictReader(path.read_text().splitlines()) if path.is_file() else []
        return sum(not (self.folder / row["run"] / "config.yaml").is_file() for row in rows)

    @property
    def best(self) -> str:
        """What it found, in a line: the first of its best.yaml."""
        path = self.folder / "best.yaml"
        head = path.read_text().partition("\n")[0] if path.is_file() else ""
        return head.removeprefix("# ") if head.startswith("#") else ""

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The values, or bounds, of each key."""
        try:
            described = json.loads((self.folder / "sweep.json").read_text())["sweep"]
            return {axis["key"]: axis.get("values") or axis["bounds"] for axis in described}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


@dataclass
class Experiment:
    """The folder of an experiment, with its experiment.json."""

    folder: Path
    description: dict[str, Any]

    @property
    def protocol(self) -> str:
        return str(self.description.get("protocol", "upscale"))

    @property
    def sweeps(self) -> list[Sweep]:
        return [Sweep(name, self.folder / where) for name, where in self.description.get("sweeps", {}).items()]


@dataclass
class Found:
    """What folders hold."""

    runs: list[Run] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Group:
    """Runs that differ only in their seeds."""

    role: Role
    name: str
    runs: list[Run]
    settings: dict[str, Any]

    @property
    def good(self) -> list[Run]:
        """Those that have not diverged."""
        return [run for run in self.runs if run.diverged_at is None]

    def of_seed(self, seed: Any) -> Run | None:
        return next((run for run in self.good if run.seed == seed), None)


# --- finding


def find(folders: list[Path]) -> Found:
    """The runs, sweeps and experiments in folders. FileNotFoundError or UserError if one holds nothing."""
    found = Found()
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; name folders of runs, sweeps or experiments")
        before = len(found.runs) + len(found.sweeps) + len(found.experiments) + len(found.notes)
        if (folder / "sweep.json").is_file():
            found.sweeps.append(Sweep(folder.name, folder))
        else:
            search(folder, found, seen)
        if before == len(found.runs) + len(found.sweeps) + len(found.experiments) + len(found.notes):
            raise UserError(f"{folder} holds no runs: no config.yaml beside TensorBoard events, at any depth")
    for run in [run for run in found.runs if not run.has_loss]:
        found.runs.remove(run)
        found.notes.append(f"{run.folder} has logged no training loss to TensorBoard, and is left out.")
    for run in found.runs:
        if run.log.damaged:
            found.notes.append(
                f"An event file of {run.folder} is damaged or cut off; it counts as far as it can be read."
            )
    if not found.runs and not any(experiment.protocol == "transfer" for experiment in found.experiments):
        raise UserError(" ".join([f"there is nothing to report in {', '.join(map(str, folders))}.", *found.notes]))
    return found


def search(folder: Path, found: Found, seen: set[Path]) -> None:
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    if (folder / "experiment.json").is_file():
        add_experiment(folder, found, seen)
    elif (folder / "config.yaml").is_file():
        found.runs.append(Run(folder))
    elif not (folder / "sweep.json").is_file():
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            search(inner, found, seen)


def add_experiment(folder: Path, found: Found, seen: set[Path]) -> None:
    path = folder / "experiment.json"
    try:
        experiment = Experiment(folder, json.loads(path.read_text()))
        runs = [folder / run["folder"] for run in experiment.description.get("runs", [])]
        sweeps = experiment.sweeps
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the description of an experiment: {error!r}") from error
    found.experiments.append(experiment)
    if experiment.protocol == "transfer":
        return  # its runs are there for its sweeps
    found.sweeps += [sweep for sweep in sweeps if sweep.folder.is_dir()]
    waiting = [run for run in runs if not (run / "config.yaml").is_file()]
    for run in runs:
        if run not in waiting:
            search(run, found, seen)
    if waiting:
        some = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
        found.notes.append(f"Not begun yet: {', '.join(str(run) for run in waiting[:3])}{some}.")


# --- one task


def refuse_other_tasks(runs: list[Run]) -> None:
    """UserError if the runs differ in more than a report compares."""
    for run in runs[1:]:
        ours, theirs = task(runs[0].config), task(run.config)
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            if ours.get(key) != theirs.get(key):
                raise UserError(
                    f"{runs[0].folder} and {run.folder} are of different tasks: {key} is {ours.get(key)!r} in the one "
                    "and "
                    f"{theirs.get(key)!r} in the other; a report compares runs of one task"
                )


def task(config: Config) -> dict[str, Any]:
    """What runs must have in common to be compared: the data, and the model but for its width and hyperparameters."""
    flat = flattened(config)
    data = {key: value for key, value in flat.items() if key.startswith("data.") and not WHERE.match(key)}
    model = {key: value for key, value in flat.items() if key.startswith("model.") and not FREE.match(key)}
    return {**data, **model}


def flattened(config: Config) -> dict[str, Any]:
    """The values of a configuration by keys as `sweep` has them: `model.optimizer.lr`, `UpscaleCallback.width`."""
    answer: dict[str, Any] = {}

    def descend(value: Any, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                descend(item, key if name == "init_args" else f"{key}.{name}".removeprefix("."))
        else:
            answer[key] = value

    callbacks = config["trainer"].get("callbacks") or []
    descend({**config, "trainer": {key: value for key, value in config["trainer"].items() if key != "callbacks"}}, "")
    names = [class_name(callback) for callback in callbacks]
    for index, (name, callback) in enumerate(zip(names, callbacks, strict=True)):
        count = names[:index].count(name)
        descend(callback.get("init_args") or {}, f"{name}[{count + 1}]" if names.count(name) > 1 else name)
    return answer


def settings(config: Config) -> dict[str, Any]:
    """What a run computes: its configuration without seed, folders and devices."""
    flat = flattened(config)
    flat |= {"model.init_from": "a checkpoint" if flat.get("model.init_from") else None}
    kept = [key for key in flat if key == "model.init_from" or not (key.startswith(NO_DIFFERENCE) or WHERE.match(key))]
    return {key: flat[key] for key in kept}


# --- groups


def grouped(runs: list[Run]) -> list[Group]:
    """Runs in groups, each with its role and a name of its own, the upscaled ones first."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(settings(run.config), sort_keys=True, default=str), []).append(run)
    growths = {(json.dumps(run.start_width), json.dumps(run.end_width)) for run in runs if grows(run)}
    bases = {source.resolve() for run in runs if grows(run) and (source := init_from(run)) is not None}
    groups = [
        Group(role_of(members, growths, bases), "", members, settings(members[0].config))
        for members in by_settings.values()
    ]
    groups.sort(key=lambda group: ORDER.index(group.role))
    for role in ORDER:
        alike = [group for group in groups if group.role == role]
        if role == "other":
            for group in alike:
                group.name = folder_name(group.runs)
        else:
            for group, name in zip(alike, told_apart(NAMES[role], alike), strict=True):
                group.name = name
    names = [group.name for group in groups]
    for index, group in enumerate(groups):
        if names.count(group.name) > 1:
            group.name += f" ({names[: index + 1].count(group.name)})"
    for group in groups:
        group.runs.sort(key=lambda run: (str(type(run.seed)), run.seed))
    return groups


def grows(run: Run) -> bool:
    return run.start_width != run.end_width


def init_from(run: Run) -> Path | None:
    """The checkpoint that a run started from."""
    path = run.model["init_args"].get("init_from")
    return Path(path) if path else None


def role_of(runs: list[Run], growths: set[tuple[str, str]], bases: set[Path]) -> Role:
    run = runs[0]
    width = json.dumps(run.end_width)
    if grows(run):
        return "upscaled"
    if any(run.folder.resolve() in checkpoint.parents for run in runs for checkpoint in bases):
        return "base"
    if width in {end for _, end in growths} and init_from(run) is None:
        return "scratch"
    return "base" if width in {start for start, _ in growths} else "other"


def told_apart(name: str, groups: list[Group]) -> list[str]:
    """Names of groups of one role, with the values in which they differ: three, or as many as tell them apart."""
    if len(groups) <= 1:
        return [name for _ in groups]
    keys = [key for key in groups[0].settings if len({repr(group.settings.get(key)) for group in groups}) > 1]
    keys += [key for group in groups[1:] for key in group.settings if key not in groups[0].settings and key not in keys]
    keys = [key for key in keys if not key.endswith("class_path")] or keys

    def names(of: list[str]) -> list[str]:
        columns = [[f"{key.rpartition('.')[2]} {value}" for value in short_values(key, groups)] for key in of]
        return [", ".join([name, *values]) for values in zip(*columns, strict=True)]

    told = keys[:3]
    for key in keys[3:]:
        if len(set(names([*told, key]))) > len(set(names(told))):
            told.append(key)
    return names(told)


def short_values(key: str, groups: list[Group]) -> list[str]:
    """Each group's value of a key; of paths what comes after the folder that they share, for a legend has no room for
    more.
    """
    values = [group.settings.get(key) for group in groups]
    paths = [os.path.abspath(value) for value in values if value] if key.endswith(".path") else []
    shared = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    return [os.path.relpath(value, shared) if shared and value else brief(value) for value in values]


def folder_name(runs: list[Run]) -> str:
    """The folder of a run; of several, what their paths have in common."""
    parts = [[part for part in run.folder.resolve().parts if not re.fullmatch(r"seed=.*", part)] for run in runs]
    common = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return re.sub(r",seed=\d+$", "", common[-1] if len(common) > 1 else parts[0][-1])


def differing(groups: list[Group]) -> list[tuple[str, list[Any]]]:
    """The keys in which groups differ, each with the groups' values."""
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    missing = math.nan
    rows = [(key, [group.settings.get(key, missing) for group in groups]) for key in keys]
    return [
        (key, ["—" if value is missing else value for value in values])
        for key, values in rows
        if len({repr(v) for v in values}) > 1
    ]
