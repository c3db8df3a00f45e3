"""Runs in groups: checked to be of one task, and named by their roles and by the settings in which they differ."""

import json
import re
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from mupscale.commands.config import Config, brief, class_name
from mupscale.commands.reporting.compare import Losses, Spread, spread
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.errors import UserError

Role = Literal["upscaled", "scratch", "base", "other"]
NAMES: dict[Role, str] = {"upscaled": "upscaled", "scratch": "from scratch", "base": "base"}
"""In the order of the groups. The first group of each has its place in the palette; those of the others follow."""

PLACES: dict[Role, int] = {role: place for place, role in enumerate(NAMES)}

NO_DIFFERENCE = re.compile(
    r"seed_everything|ckpt_path|weights_only|callback_args|checkpoint\.|loop\.|model\.compile|TrialMetric\."
    r"|trainer\.(accelerator|barebones|default_root_dir|devices|enable_|log_every_n_steps|logger|model_registry"
    r"|num_nodes|profiler|strategy)|data\.(.*[._])?(?<!class_)(dir|path|root|cache|device|workers|resident|seed)$"
)
"""Keys that say where and how a run is run, not what it computes."""

TASK = re.compile(r"data\.|model\.(?!(width|layers|init_from)$|lr_scheduler\b|optimizer\.(?!class_path$))")
"""Keys whose values runs must have in common: the data, and the model but for its size and hyperparameters."""


@dataclass
class Group:
    """Runs that differ only in their seeds."""

    runs: list[LoggedRun]
    settings: dict[str, Any]
    role: Role = "other"
    name: str = ""
    place: int = 0
    """In the palette of the figures."""

    @property
    def method(self) -> str:
        """The name of its growth method in an experiment that compares several."""
        return next(filter(None, (run.method for run in self.runs)), "")

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

    def mean(self, column: str) -> Spread | None:
        """The mean and range of a column of the table of runs."""
        return spread([run.row[column] for run in self.counted])

    def losses(self, column: str) -> Losses:
        """A column of the table of runs by seed. Of several runs of one seed the first counts."""
        return {run.seed: run.row[column] for run in reversed(self.counted)}

    def of_seed(self, seed: Any) -> LoggedRun | None:
        """The first run of a seed that has not diverged."""
        return next((run for run in self.not_diverged if run.seed == seed), None)


# --- configurations


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
    return {key: value for key, value in flat.items() if not NO_DIFFERENCE.match(key)}


def differing(groups: list[Group]) -> list[tuple[str, list[Any]]]:
    """The keys in which groups differ, each with the groups' values; "—" where a group does not have the key."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    rows = [(key, [group.settings.get(key, "—") for group in groups]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


# --- groups


def group_runs(runs: list[LoggedRun]) -> list[Group]:
    """Runs in groups, each with its role and a name of its own, the upscaled ones first.

    Raises a UserError if they differ in more than a report compares.
    """
    by_settings: dict[str, Group] = {}
    for run in runs:
        computed = settings(run.config)
        key = json.dumps(computed, sort_keys=True, default=str)
        by_settings.setdefault(key, Group([], computed)).runs.append(run)
    groups = list(by_settings.values())
    refuse_other_tasks(groups)
    growing = [run for run in runs if run.grows]
    for group in groups:
        group.role = role_of(group.runs, growing)
        group.runs.sort(key=lambda run: (str(type(run.seed)), run.seed))
    groups.sort(key=lambda group: PLACES.get(group.role, len(PLACES)))
    name_groups(groups)
    places, others = dict(PLACES), count(len(PLACES))
    for group in groups:
        group.place = places.pop(group.role) if group.role in places else next(others)
    return groups


def refuse_other_tasks(groups: list[Group]) -> None:
    """Raises a UserError if groups differ in the data, or in the model but for its size and hyperparameters."""
    for group in groups[1:]:
        for key, (ours, theirs) in differing([groups[0], group]):
            if TASK.match(key):
                raise UserError(
                    f"{groups[0].runs[0].folder} and {group.runs[0].folder} are of different tasks: {key} is {ours!r} "
                    f"in the one and {theirs!r} in the other; a report compares runs of one task"
                )


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
