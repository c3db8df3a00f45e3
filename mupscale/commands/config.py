"""A whole configuration as plain values: finds keys, compares two, refuses what does not work.

Loads torch and Lightning only to refuse options of a run.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import yaml

from mupscale.commands.process import refuse_output_folder
from mupscale.data_files import json_of, read_text, read_yaml, yaml_of
from mupscale.errors import UserError, prefix_errors, refuse_unless_whole

Config = dict[str, Any]
"""A whole configuration, as plain dictionaries and lists, with every default written out."""

Point = dict[str, Any]
"""A value for every axis, by its key: what one trial changes in a configuration."""

MOST_DIFFERENCES = 4
"""How many differences a message lists."""


# --- keys


def apply_point(config: Config, point: Point) -> Config:
    answer = deepcopy(config)
    for key, value in point.items():
        for node, parts in places(answer, key):
            put(node, parts, value)
    return answer


def places(config: Config, key: str) -> list[tuple[Config, list[str]]]:
    """The dictionaries that hold the value of a key at some depth, each with the keys that lead to it.

    A key starts at the top of the configuration (`model.optimizer.lr`; `init_args` may be left out), or with the class
    of a callback in `trainer.callbacks` (`UpscaleCallback.noise.std`), and then means every callback of that class.
    """
    first, rest = callback_key(key)
    if first in config:
        return [(config, whole_key(config, key.split("."), key))]
    found = configured_callbacks(config, first)
    if not found or not rest or rest[0] == "class_path":
        classes = sorted({class_name(callback) for callback in config["trainer"]["callbacks"] or []})
        raise UserError(
            f"{key}: there is no {first!r}; a key starts with one of {', '.join(config)}, "
            f"or with a class in trainer.callbacks: {', '.join(classes) or 'there is none'}"
        )
    return [(callback, whole_key(callback, rest, key)) for callback in found]


def callback_key(key: str) -> tuple[str, list[str]]:
    """The class of a callback, and the parts of the key inside its arguments; `init_args` may be left out."""
    first, *rest = key.split(".")
    return first, rest[1:] if rest[:1] == ["init_args"] else rest


def configured_callbacks(config: Config, name: str) -> list[Config]:
    return [callback for callback in config["trainer"]["callbacks"] or [] if class_name(callback) == name]


def class_name(described: Config) -> str:
    return str(described["class_path"]).rpartition(".")[2]


def whole_key(node: Any, parts: list[str], key: str) -> list[str]:
    """The parts of a key in a dictionary, with every `init_args`. Raises a UserError if they lead nowhere."""
    answer = []
    for index, part in enumerate(parts):
        if isinstance(node, dict) and "class_path" in node and part not in ("class_path", "init_args"):
            answer.append("init_args")
            node = node.get("init_args", {})
        if not isinstance(node, dict):
            reached = key.removesuffix("." + ".".join(parts[index:]))
            raise UserError(
                f"{key}: {reached} is {node!r} in the configuration, which has no {part!r}; give it a value there first"
            )
        answer.append(part)
        if index < len(parts) - 1:
            if part not in node:
                raise UserError(f"{key}: there is no {part!r}; there are {', '.join(node)}")
            node = node[part]
    return answer


def put(node: Config, parts: list[str], value: Any) -> None:
    """Sets a value at some depth of a dictionary, and makes those on the way that are missing."""
    for part in parts[:-1]:
        node = node.setdefault(part, {})
    node[parts[-1]] = value


# --- command lines


def option_values(arguments: list[str], *options: str) -> Iterator[tuple[str, str]]:
    """Yields those of the options that a command line has, each with its value: `--config FILE`, or `--config=FILE`."""
    for before, argument in pairwise(["", *arguments]):
        name, equals, value = argument.partition("=")
        if before in options:
            yield before, argument
        elif equals and name in options:
            yield name, value


def with_merged_callback_args(arguments: list[str]) -> list[str]:
    """A command line in which the `callback_args` of its options and files are merged: later ones would replace all.

    So best.yaml, which has the tuned ones, keeps what the command line of a sweep says of the others. Raises a
    UserError for a file of --config that is not YAML with keys, or stands for too many values.
    """
    merged: Config = {}
    count = 0
    for option, value in option_values(arguments, "--config", "--callback_args"):
        content: Any = None
        if option == "--callback_args":
            with suppress(ValueError, yaml.YAMLError):  # the parser says what is wrong with it
                content = yaml_of(value)
        elif Path(value).exists() and not Path(value).is_dir():
            with prefix_errors("config"):
                whole = read_yaml(Path(value))
            if not isinstance(whole, dict):
                raise UserError(
                    f"config: give a YAML file with keys (model:, data:, trainer:), got {whole or 'nothing'}"
                )
            content = whole.get("callback_args")
        count += bool(content)
        for name, own in dictionary(content).items():
            merged[name] = _merged(merged.get(name, {}), own)
    if count < 2:
        return arguments
    return [*arguments, f"--callback_args={yaml.safe_dump(merged, default_flow_style=True)}"]


def _merged(before: Any, after: Any) -> Any:
    """The arguments of callbacks of one class, which may be a list with an entry for each of them."""
    if isinstance(before, list) and isinstance(after, list):
        pairs = list(zip_longest(before, after))
    elif isinstance(before, list) or isinstance(after, list):
        pairs = [(own, after) for own in before] if isinstance(before, list) else [(before, own) for own in after]
    else:
        return {**before, **after} if isinstance(before, dict) and isinstance(after, dict) else after
    return [_merged(one or {}, other or {}) for one, other in pairs]


def dictionary(value: Any) -> dict[Any, Any]:
    """A value that should be a dictionary; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


# --- text and files


def brief(value: Any) -> str:
    """A value in a few characters; a class as `SGD(lr=0.1)`."""
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{name}={brief(item)}" for name, item in value.get("init_args", {}).items())
        return f"{class_name(value)}({arguments})"
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def labels(keys: Sequence[str]) -> dict[str, str]:
    """The shortest end of each key that no other key has: `lr`, `noise.std`."""
    answer = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
        others = [f".{other}" for other in keys if other != key]
        answer[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return answer


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file that a command wrote. Raises a UserError if it is damaged."""
    try:
        content = json_of(read_text(path))
        if not isinstance(content, dict) or not content:
            raise UserError(f"it holds {content!r}")
        return content
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run the same command again") from error


# --- two configurations


def refuse_difference(there: dict[str, Any], here: dict[str, Any], what: str) -> None:
    """Raises a UserError with the settings that differ, if any do; it starts with `what`."""
    found = differing_keys(there, here)
    if not found:
        return
    listed = [f"{key.removeprefix('config.')} is {a!r} there and {b!r} here" for key, a, b in found[:MOST_DIFFERENCES]]
    if len(found) > MOST_DIFFERENCES:
        listed.append(f"and {len(found) - MOST_DIFFERENCES} more")
    raise UserError(f"{what}: {'; '.join(listed)}. Choose another folder with --out, or delete that one")


def differing_keys(there: Any, here: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """The keys under which two nested values differ, each with both values."""
    found: list[tuple[str, Any, Any]] = []
    if isinstance(there, dict) and isinstance(here, dict):
        for name in {**there, **here}:
            found += differing_keys(there.get(name), here.get(name), f"{key}.{name}".removeprefix("."))
        return found
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, (a, b) in enumerate(zip(there, here, strict=True)):
            found += differing_keys(a, b, f"{key}.{index}")
        return found
    return [] if there == here else [(key, there, here)]


def number_in(value: Any) -> Any:
    """A value; a text such as 1e-3 as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# --- options that Lightning does not check


LEAST = {
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "log_every_n_steps": 0,
    "gradient_clip_val": 0,
}
"""Options of the trainer, and the least value that a run can have."""


def refuse_options(trainer: Any) -> None:
    """Raises a UserError for options and callbacks of the trainer's configuration that do not work in a run."""
    from lightning.pytorch.callbacks import Timer, WeightAveraging
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from mupscale.callbacks.swap import refuse_callbacks
    from mupscale.models._lightning import is_remote

    if any(isinstance(plugin, AsyncCheckpointIO) for plugin in listed(trainer.get("plugins"))):
        raise UserError("trainer.plugins: leave AsyncCheckpointIO out; it deletes older checkpoints too early")
    for key, least in LEAST.items():
        given = trainer.get(key)
        if isinstance(given, int | float) and given < least:
            raise UserError(f"trainer.{key} must be at least {least:g}, got {given}")
    interval = trainer.get("val_check_interval")
    if isinstance(interval, int | float) and interval <= 0:
        raise UserError(f"trainer.val_check_interval must be above 0, got {interval}")
    callbacks, limit = listed(trainer.get("callbacks")), trainer.get("max_time")
    refuse_callbacks(callbacks)
    for key in ("max_steps", "max_epochs", "limit_train_batches"):
        if trainer.get(key) in (0, "0") and trainer.get(key) is not False:
            raise UserError(f"trainer.{key} = 0: the run would train nothing; give a larger number")
    for timer in (*callbacks, *([] if limit is None else [Timer(limit)])):
        left = timer.time_remaining() if isinstance(timer, Timer) else None
        if left is not None and left <= 0:
            key = "trainer.callbacks: Timer.duration" if timer in callbacks else "trainer.max_time"
            raise UserError(f"{key} = {timedelta(seconds=left)}: the run would train nothing; give a longer time")
    for each in (*listed(trainer.get("profiler")), *callbacks):
        if isinstance(folder := getattr(each, "dirpath", None), str | Path) and folder and not is_remote(folder):
            refuse_output_folder(f"trainer: {type(each).__name__}.dirpath", Path(folder))
    for callback in callbacks if is_sharding(trainer.get("strategy")) else ():
        if isinstance(callback, WeightAveraging):
            name = type(callback).__name__
            raise UserError(f"trainer.callbacks: {name} cannot copy the shards of fsdp2; use trainer.strategy: ddp")


def refuse_nodes(trainer: Any) -> None:
    """Raises a UserError for several nodes where nothing could have started the others: the run would wait for them."""
    from lightning.fabric.plugins import environments

    kinds = (getattr(environments, f"{name}Environment") for name in ("LSF", "MPI", "SLURM", "TorchElastic"))
    nodes = trainer.get("num_nodes") or 1
    if nodes > 1 and "MASTER_ADDR" not in os.environ and not any(kind.detect() for kind in kinds):
        raise UserError(
            f"trainer.num_nodes = {nodes}, but neither torchrun nor srun has started this process: start the same "
            "command with one of them on each node, or set --trainer.num_nodes=1"
        )


def is_sharding(strategy: Any) -> bool:
    """Whether a configured strategy shards the model, and so loads a checkpoint after it is made."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    if isinstance(strategy, ModelParallelStrategy):
        return True
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    return str(name).rpartition(".")[2] in ("fsdp2", "FSDP2", "ModelParallelStrategy")


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def refuse_sections(config: Any) -> None:
    """Raises a UserError for a section that is a value, such as `trainer: 3`, and for numbers that cannot be meant."""
    for section in ("trainer", "loop", "checkpoint"):
        if not hasattr(config[section], "get"):
            raise UserError(f"{section}: wanted options by name, got {config[section]}")
    seed = config["seed_everything"]
    if not isinstance(seed, bool | None) and not 0 <= seed < 2**32:
        raise UserError(f"seed_everything must be a whole number from 0 to {2**32 - 1}, got {seed}")
    for logger in listed(config["trainer"].get("logger")):
        every = (getattr(logger, "init_args", None) or {}).get("flush_logs_every_n_steps")
        if every is not None:
            refuse_unless_whole("trainer.logger.flush_logs_every_n_steps", every)
    schedule = (config.get("model.init_args") or {}).get("lr_scheduler")
    for key, value in (getattr(schedule, "init_args", None) or {}).items():
        if any(isinstance(number, float) and not math.isfinite(number) for number in listed(value)):
            raise UserError(f"model.lr_scheduler.{key} must be a finite number, got {value}")


_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where PyYAML was built with it: the same text, many times as fast."""


def dump(config: Config) -> str:
    return str(yaml.dump(config, sort_keys=False, Dumper=_DUMPER))
