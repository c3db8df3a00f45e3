"""Runs in groups: checked to be of one task, and named by their roles and by the settings in which they differ."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mupscale.commands.config import Config, brief, class_name
from mupscale.commands.reporting.compare import Losses, Spread, spread
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.errors import UserError

Role = Literal["upscaled", "scratch", "base", "other"]
NAMES: dict[Role, str] = {"upscaled": "upscaled", "scratch": "from scratch", "base": "base"}
ORDER: list[Role] = ["upscaled", "scratch", "base", "other"]

PLACES: dict[Role, int] = {"upscaled": 0, "scratch": 1, "base": 2}
"""Places in the palette that the first group of each role has; those of the others follow."""

NO_DIFFERENCE = (
    "seed_everything",
    "ckpt_path",
    "weights_only",
    "callback_args",
    "checkpoint.",
    "loop.",
    "model.compile",
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
"""Keys that say where and how a run is run, not what it computes."""

WHERE = re.compile(r"data\.(.*[._])?(?<!class_)(dir|path|root|cache|device|workers|resident|seed)$")
"""Arguments of data modules that do not change the task."""

FREE = re.compile(r"model\.(width|layers|init_from|compile)$|model\.lr_scheduler\b|model\.optimizer\.(?!class_path$)")
"""Arguments of the model that may differ within a task: its size and hyperparameters."""


@dataclass
class Group:
    """Runs that differ only in their seeds."""

    role: Role
    name: str
    runs: list[LoggedRun]
    settings: dict[str, Any]
    method: str = ""
    """The name of its growth method in an experiment that compares several."""
    place: int = 0
    """In the palette of the figures."""

    @property
    def not_diverged(self) -> list[LoggedRun]:
        return [run for run in self.runs if run.diverged_at is None]

    @property
    def ended(self) -> list[LoggedRun]:
        """The runs that have ended, those that diverged too; or all if none has ended."""
        return [run for run in self.runs if not run.in_progress] or self.runs

    @property
    def counted(self) -> list[LoggedRun]:
        """The runs whose ends are compared: of those that have not diverged the finished ones, or all if none is."""
        return [run for run in self.not_diverged if not run.in_progress] or self.not_diverged

    @property
    def in_progress(self) -> bool:
        """Whether its ends are those of runs in progress."""
        return any(run.in_progress for run in self.counted)

    @property
    def final(self) -> Spread | None:
        return spread([run.final for run in self.counted])

    @property
    def flops(self) -> Spread | None:
        return spread([run.flops for run in self.counted])

    def last(self, metric: str) -> Spread | None:
        return spread([run.last(metric) for run in self.counted])

    def lowest(self, metric: str) -> Spread | None:
        return spread([run.lowest(metric)[0] for run in self.counted])

    def by_seed(self, metric: str = "") -> Losses:
        """The final losses, or the last values of a metric. Of several runs of one seed the first counts."""
        return {run.seed: run.last(metric) if metric else run.final for run in reversed(self.counted)}

    def of_seed(self, seed: Any) -> LoggedRun | None:
        """The first run of a seed that has not diverged."""
        return next((run for run in self.not_diverged if run.seed == seed), None)


# --- one task


def refuse_other_tasks(runs: list[LoggedRun]) -> None:
    """Raises a UserError if the runs differ in more than a report compares."""
    for run in runs[1:]:
        ours, theirs = task(runs[0].config), task(run.config)
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            if ours.get(key) != theirs.get(key):
                raise UserError(
                    f"{runs[0].folder} and {run.folder} are of different tasks: {key} is {ours.get(key)!r} in the one "
                    f"and {theirs.get(key)!r} in the other; a report compares runs of one task"
                )


def task(config: Config) -> dict[str, Any]:
    """What runs must have in common to be compared: the data, and the model but for its width and hyperparameters."""
    free = {"data": WHERE, "model": FREE}
    flat = {key: value for key, value in flattened(config).items() if key.partition(".")[0] in free}
    return {key: value for key, value in flat.items() if not free[key.partition(".")[0]].match(key)}


def flattened(config: Config) -> dict[str, Any]:
    """The values of a configuration by keys as `sweep` has them: `model.optimizer.lr`, `UpscaleCallback.width`."""
    flat: dict[str, Any] = {}

    def descend(value: Any, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                descend(item, key if name == "init_args" else f"{key}.{name}".removeprefix("."))
        else:
            flat[key] = value

    trainer = dict(config["trainer"])
    callbacks = trainer.pop("callbacks", None) or []
    descend({**config, "trainer": trainer}, "")
    names = [class_name(callback) for callback in callbacks]
    for index, (name, callback) in enumerate(zip(names, callbacks, strict=True)):
        place = names[:index].count(name) + 1
        descend(callback.get("init_args") or {}, f"{name}[{place}]" if names.count(name) > 1 else name)
    return flat


def settings(config: Config) -> dict[str, Any]:
    """What a run computes: its configuration without seed, folders and devices."""
    flat = flattened(config)
    flat["model.init_from"] = "a checkpoint" if flat.get("model.init_from") else None
    return {key: value for key, value in flat.items() if not (key.startswith(NO_DIFFERENCE) or WHERE.match(key))}


# --- groups


def group_runs(runs: list[LoggedRun], method_of: Mapping[Path, str] = MappingProxyType({})) -> list[Group]:
    """Runs in groups, each with its role and a name of its own, the upscaled ones first.

    `method_of` has the names of growth methods by the folders of the runs that compare them.
    """
    by_settings: dict[str, list[LoggedRun]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(settings(run.config), sort_keys=True, default=str), []).append(run)
    growing = [run for run in runs if run.grows]
    groups = []
    for members in by_settings.values():
        method = next((method_of[run.folder] for run in members if run.folder in method_of), "")
        groups.append(Group(role_of(members, growing), "", members, settings(members[0].config), method))
    groups.sort(key=lambda group: ORDER.index(group.role))
    name_groups(groups)
    firsts = {group.role: group for group in reversed(groups)}
    others = count(len(PLACES))
    for group in groups:
        is_first = group.role in PLACES and firsts[group.role] is group
        group.place = PLACES[group.role] if is_first else next(others)
        group.runs.sort(key=lambda run: (str(type(run.seed)), run.seed))
    return groups


def role_of(runs: list[LoggedRun], growing: list[LoggedRun]) -> Role:
    """What a group of runs is to the runs that grow."""
    run = runs[0]
    if run.grows:
        return "upscaled"
    checkpoints = [other.init_from.resolve() for other in growing if other.init_from is not None]
    for folder in (run.folder.resolve() for run in runs):
        if any(folder in checkpoint.parents for checkpoint in checkpoints):
            return "base"
    if run.init_from is None and any(run.end_size == other.end_size for other in growing):
        return "scratch"
    return "base" if any(run.end_size == other.start_size for other in growing) else "other"


def name_groups(groups: list[Group]) -> None:
    for group in groups:
        group.name = folder_name(group.runs) if group.role == "other" else f"{NAMES['upscaled']}, {group.method}"
    for role, name in NAMES.items():
        alike = [group for group in groups if group.role == role and not group.method]
        for group, distinct in zip(alike, distinct_names(name, alike), strict=True):
            group.name = distinct
    names = [group.name for group in groups]
    for index, group in enumerate(groups):
        if names.count(group.name) > 1:
            group.name += f" ({names[: index + 1].count(group.name)})"


def distinct_names(name: str, groups: list[Group]) -> list[str]:
    """Names of groups of one role, with as few of the values in which they differ as tell them apart."""
    names = [name for _ in groups]
    for key, values in differing(groups):
        label, is_class = key.removesuffix(".class_path").rpartition(".")[2], key.endswith(".class_path")
        shown = [str(value).rpartition(".")[2] if is_class else brief(value) for value in values]
        longer = [f"{each}, {label} {value}" for each, value in zip(names, shown, strict=True)]
        if len(set(longer)) > len(set(names)):
            names = longer
    return names


def folder_name(runs: list[LoggedRun]) -> str:
    """The folder of a run; of several, what their paths have in common."""
    parts = [[part for part in run.folder.resolve().parts if not part.startswith("seed=")] for run in runs]
    common = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return re.sub(r",seed=\d+$", "", common[-1] if len(common) > 1 else parts[0][-1])


def differing(groups: list[Group]) -> list[tuple[str, list[Any]]]:
    """The keys in which groups differ, each with the groups' values; "—" where a group does not have the key."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    rows = []
    for key in keys:
        values = [group.settings.get(key, "—") for group in groups]
        if len({repr(value) for value in values}) > 1:
            rows.append((key, values))
    return rows
