"""The YAML file of an experiment: growths, sweeps and seeds, checked as far as possible without a run."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from mupscale.commands.cli import CLI, described, refuse_growths
from mupscale.commands.config import Config, callbacks_of, class_name, temporary_file
from mupscale.commands.configured import refuse_optimizers
from mupscale.commands.lab.space import Axis, axis_of, for_trials, refuse_invalid, refuse_seeds
from mupscale.commands.lab.sweep import checked_metric, signal_swap
from mupscale.commands.widths import (
    BUDGETS,
    Growth,
    Size,
    factors_text,
    growth_of,
    in_proportion,
    is_size,
    model_size,
    numbers_in,
)
from mupscale.data_files import DECIMAL, interpreting, read_yaml
from mupscale.errors import UserError, prefix_errors

REQUIRED = {
    "upscale": ["protocol", "config", "small", "target", "seeds", "noise", "sweep_2"],
    "transfer": ["protocol", "config", "growths", "seeds", "noise", "sweeps"],
    "midrun": ["protocol", "config", "small", "target", "middle", "seeds", "shares", "noises", "sweep_1", "sweep_2"],
}
OPTIONAL = {
    "upscale": ["metric", "sweep_1", "upscaled", "methods"],
    "transfer": ["metric", "upscaled"],
    "midrun": ["metric", "schedules", "budgets", "tuned_at", "timing_steps"],
}

TIMING_STEPS = 300
"""Steps of a width by which its time is measured, unless the file gives their number."""

SHARE = re.compile(r"(\d+(?:\.\d+)?)%( of the budget)?")

BASE = Path("base.ckpt")
"""In the place of a checkpoint that is not made yet."""

METHOD = "UpscaleCallback.method"
"""The key of a growth method, as an axis of a sweep."""


@dataclass(frozen=True)
class MidrunKeys:
    middle: Size
    """The fixed width between those of the target."""
    small_middle: Size
    """Its counterpart at the tuning size."""
    shares: list[float]
    """Of the budget that is spent when a run grows."""
    tuned_at: list[float]
    """The shares at which sweep_2 grows."""
    noises: dict[str, Config]
    schedules: dict[str, Config]
    """What overrides the configuration of all runs of a schedule, by its name; see `stretched`."""
    budgets: list[str]
    timing_steps: int

    def nearest_tuned(self, share: float) -> float:
        """The share of sweep_2 whose values a run that grows at `share` takes."""
        return min(self.tuned_at, key=lambda tuned: abs(tuned - share))


@dataclass(frozen=True)
class Description:
    """An experiment, as its file and the options on the command line describe it."""

    protocol: Literal["upscale", "transfer", "midrun"]
    content: dict[str, Any]
    """The content of the file."""
    options: list[str]
    """Options of fit, which override the configuration of every run."""
    growths: list[Growth]
    """In the protocols upscale and midrun: small and target."""
    sweeps: dict[str, list[Axis]]
    seeds: list[int]
    metric: str
    midrun: MidrunKeys | None
    """What only the protocol midrun has."""
    methods: dict[str, Config]
    """In the protocol upscale: growth methods by name, to be compared. Without any, it compares none."""
    quick: bool = False
    """Whether this is a tiny version of the experiment."""

    _configs: dict[str, Config] = field(default_factory=dict, compare=False, repr=False)
    """What `config` has returned: runs of several seeds have the same."""

    def config(self, *overrides: Config) -> Config:
        """The whole configuration of a run: that of the experiment with `overrides`, in order."""
        key = json.dumps(overrides)
        if key not in self._configs:
            self._configs[key] = self.made(*overrides)[0]
        return deepcopy(self._configs[key])

    def made(self, *overrides: Config) -> tuple[Config, CLI]:
        """The whole configuration of a run, and the model, data and trainer that were made of it."""
        own = self.content["config"]
        with ExitStack() as files:

            def arguments(layers: list[Any]) -> list[str]:
                answer: list[str] = []
                for layer in layers:
                    path = files.enter_context(temporary_file(layer)) if isinstance(layer, dict) else str(layer)
                    answer += ["--config", path]
                return answer

            first = arguments(own if isinstance(own, list) else [own])
            config, cli = described([*first, *self.options, *arguments(list(overrides))], "experiment")
            return for_trials(config), cli

    @property
    def common(self) -> Config:
        """The configuration that all runs share, before anything overrides it."""
        return self.config()

    @property
    def upscaled(self) -> Config:
        """What overrides the configuration of the upscaled runs only."""
        return self.content.get("upscaled") or {}

    def grown(self, growth: Growth, init_from: Path, method: str = "") -> Config:
        """What makes a run an upscale from a checkpoint, by a method of `methods` or by that of the configuration."""
        answer = growing(growth, 0, self.content["noise"])
        if method:
            answer["trainer"]["callbacks+"][0]["init_args"]["method"] = self.methods[method]
        answer["model"]["init_args"]["init_from"] = str(init_from)
        return answer

    def identity(self) -> dict[str, Any]:
        """What two experiments must share to be the same: the file, and the configuration of it and the options."""
        return {"experiment": self.content, "config": self.common}


def growing(growth: Growth, at_step: int, noise: Config) -> Config:
    after = growth.after if isinstance(growth.after, dict) else {"width": growth.after}
    swap = {"class_path": "UpscaleCallback", "init_args": {"at_step": at_step, **after, "noise": noise}}
    return {"trainer": {"callbacks+": [swap]}, **of_width(growth.before)}


def of_width(width: Size) -> Config:
    return {"model": {"init_args": model_size(width)}}


# --- reading


def read(path: Path, options: list[str]) -> Description:
    """The description in a file. Raises a UserError that names the key that is wrong."""
    with interpreting(path):
        return description_of(content_of(path), options)


def description_of(content: dict[str, Any], options: list[str], *, quick: bool = False) -> Description:
    """The description that a file of this content gives. Raises a UserError that names the key that is wrong."""
    refuse_files(content["config"])
    seeds = content["seeds"]
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
        raise UserError(f"seeds: give a list of different whole numbers, got {seeds!r}")
    refuse_seeds("seeds", seeds)
    metric = checked_metric(content.get("metric", "last_epoch"))
    upscaled = content.get("upscaled") or {}
    if not isinstance(upscaled, dict):
        raise UserError(f"upscaled: give a mapping that overrides the configuration of upscaled runs, got {upscaled!r}")
    protocol, growths, sweeps = content["protocol"], growths_of(content), sweeps_of(content)
    midrun = midrun_keys(content, *growths) if protocol == "midrun" else None
    methods = methods_of(content) if content.get("methods") is not None else {}
    return Description(protocol, content, options, growths, sweeps, seeds, metric, midrun, methods, quick)


def content_of(path: Path) -> dict[str, Any]:
    """The content of an experiment's file, with all required keys of its protocol and no unknown ones."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; name the YAML file of an experiment (configs/experiments)")
    content = read_yaml(path, DECIMAL)
    protocol = content.get("protocol") if isinstance(content, dict) else content
    if not isinstance(content, dict) or protocol not in REQUIRED:
        raise UserError(f"{path}: protocol must be {' or '.join(REQUIRED)}, got {protocol!r}")
    required, known = REQUIRED[protocol], REQUIRED[protocol] + OPTIONAL[protocol]
    for key in content:
        if key not in known:
            raise UserError(f"{path}: protocol {protocol} has no key {key!r}; its keys are {', '.join(known)}")
    for key in required:
        if content.get(key) is None:
            raise UserError(f"{path}: protocol {protocol} needs the key {key!r}; it needs {', '.join(required)}")
    return content


def refuse_files(config: Any) -> None:
    for file in config if isinstance(config, list) else [config]:
        if not isinstance(file, str | dict):
            raise UserError(f"config: give a file, or a list of files and mappings, got {file!r}")
        if isinstance(file, str) and not Path(file).is_file():
            where = "" if Path(file).is_absolute() else f"; paths begin where the command is started, in {Path.cwd()}"
            raise UserError(f"config: there is no file {file}{where}")


def growths_of(content: dict[str, Any]) -> list[Growth]:
    """The growths of an experiment. Raises a UserError if they do not all grow by the same factor."""
    if content["protocol"] != "transfer":
        pairs = {key: content[key] for key in ("small", "target")}
    elif not isinstance(content["growths"], list) or len(content["growths"]) < 2:
        raise UserError(f"growths: give at least two, [[64, 128], [128, 256]], got {content['growths']!r}")
    else:
        pairs = {f"growths.{index}": pair for index, pair in enumerate(content["growths"])}
    growths = [growth_of(key, pair) for key, pair in pairs.items()]
    if len(set(map(repr, growths))) < len(growths):
        raise UserError(f"{', '.join(pairs)}: a growth is given twice")
    first_key, first = next(iter(pairs)), growths[0]
    for key, growth in zip(pairs, growths, strict=True):
        if growth.factors != first.factors:
            raise UserError(
                f"{key} grows by {factors_text(growth)}, {first_key} by {factors_text(first)}; give one factor"
            )
    return growths


def sweeps_of(content: dict[str, Any]) -> dict[str, list[Axis]]:
    two_sweeps = content["protocol"] != "transfer"
    found = {key: content[key] for key in ("sweep_1", "sweep_2") if content.get(key) is not None}
    tables = found if two_sweeps else content["sweeps"]
    if not isinstance(tables, dict) or not tables:
        raise UserError(f"sweeps: give sweeps by name, {{lr: {{model.optimizer.lr: [0.01, 0.02]}}}}, got {tables!r}")
    answer = {}
    for name, table in tables.items():
        key = name if two_sweeps else f"sweeps.{name}"
        if not isinstance(table, dict) or not table:
            raise UserError(f"{key}: the grid is empty, give {{model.optimizer.lr: [0.01, 0.02]}}, got {table!r}")
        if not two_sweeps and len(table) > 1:
            raise UserError(f"{key}: give one key, the others keep their values, got {', '.join(table)}")
        answer[str(name)] = [listed_axis(f"{key}.{k}", k, values) for k, values in table.items()]
    return answer


def listed_axis(where: str, key: Any, values: Any) -> Axis:
    """The axis of a key and its list of values. Raises a UserError for a range, because experiments sweep grids."""
    if not isinstance(values, list | str):
        raise UserError(f"{where}: give a list of values, or a text LOW:HIGH:N, got {values!r}")
    axis = axis_of(str(key), values, where)
    if axis.bounds is not None:
        raise UserError(f"{where}: {values} is a range; give LOW:HIGH:N, or a list")
    return axis


def methods_of(content: dict[str, Any]) -> dict[str, Config]:
    """The growth methods that an experiment compares, by name. UserError if two are one and the same."""
    methods = named("methods", content["methods"], "{net2net: {class_path: mupscale.methods.Net2Net}}")
    for key in content["sweep_2"]:
        if key == METHOD or str(key).startswith(f"{METHOD}."):
            raise UserError(f"sweep_2.{key}: the key methods names the growth methods; leave one of the two out")
    seen: dict[str, str] = {}
    for name, method in methods.items():
        if not isinstance(method.get("class_path"), str):
            raise UserError(f"methods.{name}: give the class_path of a growth method, got {method!r}")
        for identity in (name.lower(), json.dumps([method["class_path"], method.get("init_args") or {}])):
            if identity in seen:
                raise UserError(f"methods: {seen[identity]} and {name} are the same; leave one of them out")
            seen[identity] = name
    return methods


# --- what only the protocol midrun has


def midrun_keys(content: dict[str, Any], small: Growth, target: Growth) -> MidrunKeys:
    """The keys of protocol midrun. Raises a UserError that names the one that is wrong."""
    middle = content["middle"]
    if not is_size(middle):
        raise UserError(f"middle: give a width between {target.before} and {target.after}, got {middle!r}")
    small_middle = in_proportion(middle, target.before, small.before)
    if small_middle is None or not _is_between(middle, target):
        raise UserError(
            f"middle: give a width between {target.before} and {target.after} whose counterpart at the tuning size, "
            f"{small.before}/{target.before} of it, is a whole number too; got {middle}"
        )
    shares = _shares("shares", content["shares"])
    tuned_at = _shares("tuned_at", content.get("tuned_at", shares))
    noises = named("noises", content["noises"], "{paper: {class_path: mupscale.AdditiveNoise, init_args: {std: 1.0}}}")
    schedules = named("schedules", content.get("schedules", {"constant": {}}), "{constant: {}}")
    budgets = content.get("budgets", list(BUDGETS))
    known = isinstance(budgets, list) and bool(budgets) and set(map(str, budgets)) <= set(BUDGETS)
    if not known or len(set(budgets)) < len(budgets):
        raise UserError(f"budgets: give a list of {' and '.join(BUDGETS)}, or of one of them, got {budgets!r}")
    timing_steps = content.get("timing_steps", TIMING_STEPS)
    if type(timing_steps) is not int or timing_steps < 10:
        raise UserError(f"timing_steps: give a whole number of at least 10, got {timing_steps!r}")
    return MidrunKeys(middle, small_middle, shares, tuned_at, noises, schedules, budgets, timing_steps)


def _is_between(width: Size, growth: Growth) -> bool:
    lists = [numbers_in(each) for each in (growth.before, width, growth.after)]
    if len({len(each) for each in lists}) > 1:
        return False
    if lists[1] in (lists[0], lists[2]):
        return False  # which are compared anyway
    return all(low <= each <= high for low, each, high in zip(*lists, strict=True))


def _shares(key: str, shares: Any) -> list[float]:
    if not isinstance(shares, list) or not shares or not all(type(each) is float and 0 < each < 1 for each in shares):
        raise UserError(f"{key}: give shares of the budget between 0 and 1, such as [0.1, 0.5], got {shares!r}")
    if len({f"{share:g}" for share in shares}) < len(shares):  # as folders are named
        raise UserError(f"{key}: a share is given twice, got {shares}")
    return sorted(shares)


def named(key: str, table: Any, example: str) -> dict[str, Config]:
    """Mappings by names that are names of folders, too."""
    if not isinstance(table, dict) or not table:
        raise UserError(f"{key}: give a mapping by name, such as {example}, got {table!r}")
    for name, value in table.items():
        if not isinstance(name, str):
            raise UserError(f"{key}: YAML reads a name as {name!r}, which is no text; quote it")
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{key}: a name is made of letters, digits, '-', '_' and '.', got {name!r}")
        if not isinstance(value or {}, dict):
            raise UserError(f"{key}.{name}: give a mapping, got {value!r}")
    return {name: value or {} for name, value in table.items()}


def stretched(schedule: Any, steps: int, grows: tuple[int, float] | None = None) -> Any:
    """The configuration of a schedule for a run of so many steps.

    In it, `20%` is a fifth of the steps. `20% of the budget` is the share of the steps, at the end of the run, in which
    it spends the last fifth of its budget.

    Args:
        schedule: The configuration.
        steps: Of the whole run.
        grows: The step at which the run grows, if it does, and the share of the budget that it has then spent.
    """
    if isinstance(schedule, dict):
        return {key: stretched(item, steps, grows) for key, item in schedule.items()}
    if isinstance(schedule, list):
        return [stretched(item, steps, grows) for item in schedule]
    found = SHARE.fullmatch(schedule) if isinstance(schedule, str) else None
    if found is None:
        return schedule
    share = float(found[1]) / 100
    if not found[2]:
        return max(1, round(share * steps))
    if grows is None:
        return share
    at_step, spent = grows
    wide = min(share, 1 - spent) / (1 - spent) * (steps - at_step)
    return (wide + max(0.0, share - (1 - spent)) / spent * at_step) / steps


# --- checking


def check(description: Description) -> None:
    """Raises a UserError if a run of the experiment could not be made, or a key of a sweep does not exist.

    Takes seconds, and no data.
    """
    if callbacks_of(description.common, "UpscaleCallback"):
        raise UserError("config: trainer.callbacks has an UpscaleCallback already; leave it out")
    if description.protocol == "midrun":
        check_midrun(description)
        return
    for method in description.methods or [""]:
        for growth in description.growths:
            with refusals(f"methods.{method}" if method else f"widths {growth}"):
                grown, cli = description.made(description.grown(growth, BASE, method), description.upscaled)
                refuse_growths(cli.model, cli.trainer)
        (swap,) = callbacks_of(grown, "UpscaleCallback")
        if method and class_name(swap["init_args"]["method"]) != class_name(description.methods[method]):
            raise UserError(f"upscaled: it sets {METHOD}, which the key methods sets; leave one of the two out")
    with refusals("config"):
        refuse_optimizers(cli.model, cli.trainer)
    signal_swap(grown)
    for name, axes in description.sweeps.items():
        if description.protocol == "transfer":
            refuse_invalid(grown, axes, f"sweeps.{name}:")
        else:
            refuse_invalid(description.common if name == "sweep_1" else grown, axes, f"{name}:")


def check_midrun(description: Description) -> None:
    keys = description.midrun
    assert keys is not None
    trainer = description.common["trainer"]
    if trainer["max_steps"] in (None, -1) and trainer["max_epochs"] in (None, -1):
        raise UserError("config: trainer.max_steps, trainer.max_epochs: give the length of a run of the wide width")
    for name, overlay in keys.schedules.items():
        config, cli = description.made(stretched(overlay, 1000))
        with refusals(f"schedules.{name}"):
            refuse_optimizers(cli.model, cli.trainer)
        refuse_validated_schedule(f"schedules.{name}", config)
    refuse_invalid(description.common, description.sweeps["sweep_1"], "sweep_1:")
    for width in (keys.middle, keys.small_middle):
        _, cli = description.made(of_width(width))
        with refusals(f"middle: width {width}"):
            cli.model.network(**model_size(width), meta=True)
    for name, noise in keys.noises.items():
        for growth in description.growths:
            grown, cli = description.made(growing(growth, 1, noise))
            with refusals(f"widths {growth}"):
                refuse_growths(cli.model, cli.trainer)
        refuse_invalid(grown, description.sweeps["sweep_2"], f"sweep_2, noises.{name}:")


def refuse_validated_schedule(where: str, config: Config) -> None:
    """Raises a UserError for a schedule that follows validations: a run of midrun has one, at its end."""
    schedule = config["model"]["init_args"].get("lr_scheduler")
    if not schedule or class_name(schedule) != "ReduceLROnPlateau":
        return
    monitor = (schedule.get("init_args") or {}).get("monitor", "val/loss")  # torch's own has none
    if monitor.startswith("val"):
        raise UserError(
            f"{where}: model.lr_scheduler: ReduceLROnPlateau monitors {monitor}, and runs of protocol midrun validate "
            "only after their last step; use lightning.pytorch.cli.ReduceLROnPlateau with monitor: train/loss"
        )


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """What is refused is a UserError that starts with `where`; random numbers are drawn as if nothing had been."""
    with prefix_errors(where, ValueError), torch.random.fork_rng(devices=[]):
        yield
