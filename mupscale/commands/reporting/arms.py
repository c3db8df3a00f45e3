"""Runs in arms: checked to be of one task, and named by their roles and by the settings in which they differ."""

import json
import re
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from mupscale.commands.config import Config, brief, class_name
from mupscale.commands.reporting.runs import LoggedRun
from mupscale.errors import UserError

Role = Literal["upscaled", "scratch", "base", "other"]
NAMES: dict[Role, str] = {"upscaled": "upscaled", "scratch": "from scratch", "base": "base"}
"""Roles in the order of the arms. The first arm of each role has the role's colour; the other arms get later ones."""

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
class Arm:
    """Runs that differ only in their seeds."""

    runs: list[LoggedRun]
    settings: dict[str, Any]
    role: Role = "other"
    name: str = ""
    place: int = 0
    """The place of its colour in the palette of the figures."""

    @property
    def not_diverged(self) -> list[LoggedRun]:
        return [run for run in self.runs if run.diverged_at is None]

    @property
    def counted(self) -> list[LoggedRun]:
        """The runs whose ends are compared: of those that have not diverged the finished ones, or all if none is."""
        return [run for run in self.not_diverged if not run.in_progress] or self.not_diverged


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


def differing(arms: list[Arm]) -> list[tuple[str, list[Any]]]:
    """The keys in which arms differ, each with the arms' values; "—" where an arm has none, or None."""
    keys = dict.fromkeys(key for arm in arms for key in arm.settings)
    rows = [(key, ["—" if (value := arm.settings.get(key)) is None else value for arm in arms]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


# --- arms


def arms_of(runs: list[LoggedRun]) -> list[Arm]:
    """Runs in arms, each with its role and a name of its own, the upscaled ones first.

    Raises a UserError if they differ in more than a report compares.
    """
    by_settings: dict[str, Arm] = {}
    for run in runs:
        computed = settings(run.config)
        key = json.dumps(computed, sort_keys=True, default=str)
        by_settings.setdefault(key, Arm([], computed)).runs.append(run)
    arms = list(by_settings.values())
    for arm in arms[1:]:
        for key, (ours, theirs) in differing([arms[0], arm]):
            if TASK.match(key):
                raise UserError(
                    f"{arms[0].runs[0].folder} and {arm.runs[0].folder} are of different tasks: {key} is {ours!r} "
                    f"in the one and {theirs!r} in the other; a report compares runs of one task"
                )
    growing = [run for run in runs if run.grows]
    for arm in arms:
        arm.role = role_of(arm.runs, growing)
        arm.runs.sort(key=lambda run: (str(type(run.seed)), run.seed))
    arms.sort(key=lambda arm: PLACES.get(arm.role, len(PLACES)))
    name_arms(arms)
    places, others = dict(PLACES), count(len(PLACES))
    for arm in arms:
        arm.place = places.pop(arm.role) if arm.role in places else next(others)
    return arms


def role_of(runs: list[LoggedRun], growing: list[LoggedRun]) -> Role:
    """What an arm is to the runs that grow."""
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


def name_arms(arms: list[Arm]) -> None:
    """Names arms by their roles and as few of the values in which they differ as tell them apart; others by folders."""
    names: list[str] = []
    for arm in arms:
        arm.name = NAMES.get(arm.role) or folder_name(arm.runs)
        alike = [other for other in arms if other.role == arm.role] if arm.role in NAMES else [arm]
        values = {other.runs[0].folder: "" for other in alike}
        for key, found in differing(alike):
            label, is_class = key.removesuffix(".class_path").rpartition(".")[2], key.endswith(".class_path")
            shown = [str(value).rpartition(".")[2] if is_class else brief(value) for value in found]
            longer = {k: f"{values[k]}, {label} {value}" for k, value in zip(values, shown, strict=True)}
            if len(set(longer.values())) > len(set(values.values())):
                values = longer
        arm.name += values[arm.runs[0].folder]
        names.append(arm.name)
        if names.count(arm.name) > 1:
            arm.name += f" ({names.count(arm.name)})"


def folder_name(runs: list[LoggedRun]) -> str:
    """The folder of a run; of several, what their paths have in common."""
    parts = [
        [part for part in run.folder.resolve().parts if part != "trials" and not part.startswith("seed=")]
        for run in runs
    ]
    common = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return re.sub(r",seed=\d+$", "", common[-1] if len(common) > 1 else parts[0][-1])
