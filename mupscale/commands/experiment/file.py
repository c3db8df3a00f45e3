"""What an experiment's YAML file says: growths, sweeps and seeds, checked as far as possible without a run."""

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands.config import Config, callbacks_of
from mupscale.commands.sweep.results import checked_metric, signal_swap
from mupscale.commands.sweep.space import Axis, axis_of
from mupscale.commands.sweep.trial import described, for_trials, refuse_invalid, without_announcements
from mupscale.errors import UserError
from mupscale.models.checkpoint import Width
from mupscale.widening.plan import plan

REQUIRED = {
    "upscale": ["protocol", "config", "small", "target", "seeds", "noise", "sweep_2"],
    "transfer": ["protocol", "config", "growths", "seeds", "noise", "sweeps"],
}
OPTIONAL = {"upscale": ["metric", "sweep_1", "upscaled"], "transfer": ["metric", "upscaled"]}


@dataclass(frozen=True)
class Growth:
    """Two widths of one model."""

    before: Width
    after: Width

    @property
    def name(self) -> str:
        return f"{folder_name(self.before)}-{folder_name(self.after)}"


@dataclass(frozen=True)
class Description:
    """An experiment, as its file and the options on the command line tell it."""

    protocol: Literal["upscale", "transfer"]
    told: dict[str, Any]
    """The file, as it is."""
    options: list[str]
    """Of fit, laid over the configuration of every run."""
    growths: list[Growth]
    """Of the protocol upscale: small and target."""
    sweeps: dict[str, list[Axis]]
    seeds: list[int]
    metric: str

    def config(self, *laid: Config | Path) -> Config:
        """The whole configuration of a run: the experiment's own, with mappings or files laid over it, later ones over
        earlier ones.
        """
        return self.made(*laid)[0]

    def made(self, *laid: Config | Path) -> tuple[Config, Any]:
        """The same, and the model, data and trainer that were made of it."""
        with tempfile.TemporaryDirectory() as folder:

            def arguments(layers: tuple[Any, ...], kind: str) -> list[str]:
                files = []
                for index, layer in enumerate(layers):
                    path = layer
                    if isinstance(layer, dict):
                        path = Path(folder) / f"{kind}-{index}.yaml"
                        path.write_text(yaml.safe_dump(layer, sort_keys=False))
                    files += ["--config", str(path)]
                return files

            own = self.told["config"]
            own = tuple(own) if isinstance(own, list) else (own,)
            with without_announcements():
                config, cli = described([*arguments(own, "own"), *self.options, *arguments(laid, "laid")], "experiment")
            return for_trials(config), cli

    @cached_property
    def common(self) -> Config:
        """The configuration that runs differ from only in what is laid over it."""
        return self.config()

    @property
    def upscaled(self) -> Config:
        """What is laid over the upscaled runs only."""
        return self.told.get("upscaled") or {}

    def grown(self, growth: Growth, init_from: Path) -> Config:
        """What makes a run an upscale from a checkpoint."""
        swap = {
            "class_path": "UpscaleCallback",
            "init_args": {"at_step": 0, "width": growth.after, "noise": self.told["noise"]},
        }
        model = {"width": growth.before, "init_from": str(init_from)}
        return {"trainer": {"callbacks+": [swap]}, "model": {"init_args": model}}

    def identity(self) -> dict[str, Any]:
        """What makes two experiments the same: the file, and the configuration that it and the options make."""
        return {"experiment": self.told, "config": self.common}


def read(path: Path, options: list[str]) -> Description:
    """The description in a file. UserError names the key that is wrong."""
    if not path.is_file():
        raise UserError(
            f"there is no file {path}; name the YAML file of an experiment, such as configs/experiments/quickstart.yaml"
        )
    try:
        told = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(told, dict) or told.get("protocol") not in REQUIRED:
        seen = told.get("protocol") if isinstance(told, dict) else told
        raise UserError(f"{path}: protocol must be {' or '.join(REQUIRED)}, got {seen!r}")
    protocol = told["protocol"]
    required, optional = REQUIRED[protocol], OPTIONAL[protocol]
    for key in told:
        if key not in required + optional:
            raise UserError(
                f"{path}: there is no key {key!r} in protocol {protocol}; there are {', '.join(required + optional)}"
            )
    for key in required:
        if told.get(key) is None:
            raise UserError(f"{path}: protocol {protocol} needs the key {key!r}; it needs {', '.join(required)}")
    files = told["config"] if isinstance(told["config"], list) else [told["config"]]
    for file in files:
        if not isinstance(file, str | dict):
            raise UserError(f"config: give a file, or a list of files and mappings, got {file!r}")
        if isinstance(file, str) and not Path(file).is_file():
            raise UserError(f"config: there is no file {file}")
    seeds = told["seeds"]
    if (
        not isinstance(seeds, list)
        or not seeds
        or not all(type(seed) is int for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise UserError(f"seeds: give a list of different whole numbers, got {seeds!r}")
    metric = checked_metric(told.get("metric", "last_epoch"))
    if not isinstance(told.get("upscaled") or {}, dict):
        raise UserError(
            f"upscaled: give a mapping that is laid over the configuration of upscaled runs, got {told['upscaled']!r}"
        )
    return Description(protocol, told, options, growths_of(told), sweeps_of(told), seeds, metric)


def growths_of(told: dict[str, Any]) -> list[Growth]:
    upscale = told["protocol"] == "upscale"
    pairs = {"small": told["small"], "target": told["target"]} if upscale else {"growths": told["growths"]}
    if not upscale:
        if not isinstance(told["growths"], list) or len(told["growths"]) < 2:
            raise UserError(f"growths: give at least two, [[64, 128], [128, 256]], got {told['growths']!r}")
        pairs = {f"growths.{index}": pair for index, pair in enumerate(told["growths"])}
    growths = [growth_of(key, pair) for key, pair in pairs.items()]
    if len(set(map(repr, growths))) < len(growths):
        raise UserError(f"{', '.join(pairs)}: a growth is there twice")
    factors = [factor(growth) for growth in growths]
    for key, found in zip(pairs, factors, strict=True):
        if found != factors[0]:
            first = next(iter(pairs))
            raise UserError(
                f"{key} grows by {shown(found)}, {first} by {shown(factors[0])}: values transfer between growths by "
                "the same factor only"
            )
    return growths


def growth_of(key: str, pair: Any) -> Growth:
    def is_width(width: Any) -> bool:
        return (type(width) is int and width > 0) or (
            isinstance(width, list) and bool(width) and all(is_width(w) for w in width)
        )

    if not isinstance(pair, list) or len(pair) != 2 or not all(is_width(width) for width in pair):
        raise UserError(f"{key}: give two widths, before and after, such as [100, 400], got {pair!r}")
    growth = Growth(*pair)
    if any(ratio != int(ratio) for ratio in factor(growth)) or max(factor(growth)) == 1 or min(factor(growth)) < 1:
        raise UserError(f"{key}: the width after must be a multiple of the one before, got {pair[0]} → {pair[1]}")
    return growth


def factor(growth: Growth) -> list[float]:
    """By what the widths grow; one number if it is the same everywhere."""
    before, after = (width if isinstance(width, list) else [width] for width in (growth.before, growth.after))
    if len(before) != len(after):
        raise UserError(f"widths {growth.before} → {growth.after}: give as many before as after")
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return ratios[:1] if len(set(ratios)) == 1 else ratios


def shown(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:g}" for ratio in ratios)


def sweeps_of(told: dict[str, Any]) -> dict[str, list[Axis]]:
    upscale = told["protocol"] == "upscale"
    tables = (
        {key: told[key] for key in ("sweep_1", "sweep_2") if told.get(key) is not None} if upscale else told["sweeps"]
    )
    if not isinstance(tables, dict) or not tables:
        raise UserError(
            f"sweeps: give a mapping of sweeps by name, {{lr: {{model.optimizer.lr: [0.01, 0.02]}}}}, got {tables!r}"
        )
    answer = {}
    for name, table in tables.items():
        key = name if upscale else f"sweeps.{name}"
        if not isinstance(table, dict) or not table:
            raise UserError(
                f"{key}: the grid is empty, give keys with their values, {{model.optimizer.lr: [0.01, 0.02]}}, got "
                f"{table!r}"
            )
        if not upscale and len(table) > 1:
            raise UserError(
                f"{key}: give one key, the others stay at the configuration's values, got {', '.join(table)}"
            )
        answer[str(name)] = [axis(f"{key}.{k}", k, values) for k, values in table.items()]
    return answer


def axis(where: str, key: Any, values: Any) -> Axis:
    if key == "seed_everything":
        raise UserError(f"{where}: seeds are no axis, give them as seeds: [0, 1, 2]")
    if not isinstance(values, list | str):
        raise UserError(f"{where}: give a list of values, or a text LOW:HIGH:N, got {values!r}")
    answer = axis_of(str(key), values, where)
    if answer.bounds is not None:
        raise UserError(f"{where}: {values} is a range; give LOW:HIGH:N, or a list")
    return answer


def check(description: Description) -> None:
    """UserError if a run of the experiment could not be made, or a sweep's key does not exist.

    Takes seconds, and no data.
    """
    if callbacks_of(description.common, "UpscaleCallback"):
        raise UserError(
            "config: trainer.callbacks has an UpscaleCallback already; the experiment adds its own, so leave it out"
        )
    for growth in description.growths:
        grown, cli = description.made(description.grown(growth, Path("base.ckpt")), description.upscaled)
        refuse_growth(growth, cli)
    signal_swap(grown)
    for name, axes in description.sweeps.items():
        prefix = f"{name}:" if description.protocol == "upscale" else f"sweeps.{name}:"
        refuse_invalid(
            description.common if name == "sweep_1" and description.protocol == "upscale" else grown, axes, prefix
        )


def refuse_growth(growth: Growth, cli: Any) -> None:
    (swap,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, UpscaleCallback))
    try:
        with torch.random.fork_rng(devices=[]):
            planned = plan(cli.model.network(growth.before, meta=True), cli.model.network(growth.after, meta=True))
        if swap.noise is not None:
            swap.noise.check(planned)
    except ValueError as error:
        raise UserError(f"widths {growth.before} → {growth.after}: {error}") from error


def folder_name(width: Width) -> str:
    return "x".join(map(str, width)) if isinstance(width, list) else str(width)
