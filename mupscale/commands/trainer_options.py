"""Options and numbers of a configuration that do not work in the runs of this project: the reason and the remedy."""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

from mupscale.callbacks.incompatible import refuse_callbacks
from mupscale.errors import UserError, refuse_unless_level
from mupscale.models.fsdp2 import NAME as FSDP2_NAME

LAUNCHERS = (LSFEnvironment, MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment)
"""What may start the processes of several nodes."""

OPTIONS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "barebones": (
        bool,
        "it forbids the checkpoints and logs by which a run is resumed and compared",
        "for speed: --loop.cuda_graph true, a larger --trainer.log_every_n_steps, --trainer.enable_progress_bar false",
    ),
    "enable_checkpointing": (
        lambda value: value is False,
        "without checkpoints a run cannot be resumed, nor saved before an upscale",
        "to save at the end alone: --checkpoint.every_n_train_steps 1000000000",
    ),
    "plugins": (
        lambda value: any(isinstance(plugin, AsyncCheckpointIO) for plugin in listed(value)),
        "AsyncCheckpointIO reports a checkpoint as written before it is, so that older ones are deleted too early",
        "leave it out",
    ),
}
"""Options, which of their values are refused, why, and the remedy."""


def refuse_options(trainer: Any) -> None:
    """Raises a UserError for options and callbacks of the trainer's configuration that do not work in a run."""
    for key, (is_bad, reason, remedy) in OPTIONS.items():
        value = trainer.get(key)
        if is_bad(value):
            shown = str(value).lower() if isinstance(value, bool | int) else "AsyncCheckpointIO"
            raise UserError(f"trainer.{key}: {shown} does not work here: {reason}; {remedy}")
    for key in ("max_steps", "max_epochs", "limit_train_batches"):
        value = trainer.get(key)
        if value == 0 and not isinstance(value, bool):
            raise UserError(f"trainer.{key} = {value}: the run would train nothing; give a larger number")
    refuse_callbacks(listed(trainer.get("callbacks")))
    if is_sharding(trainer.get("strategy")):
        for callback in listed(trainer.get("callbacks")):
            if isinstance(callback, WeightAveraging):
                raise UserError(
                    f"trainer.callbacks: {type(callback).__name__} does not work under trainer.strategy: {FSDP2_NAME}, "
                    "because it copies the model, and shards cannot be copied; use trainer.strategy: ddp, or leave it "
                    "out"
                )


def refuse_processes(trainer: Any) -> None:
    """Raises a UserError if torchrun has started another number of processes than the trainer's configuration says.

    UserError also for several nodes without anything that could have started the others: the run would wait for them;
    and for more devices of a CPU than it has cores: each of them would be a process of this run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _refuse_other_processes(trainer)
    if "MASTER_ADDR" in os.environ or any(kind.detect() for kind in LAUNCHERS):
        return
    nodes = trainer.get("num_nodes") or 1
    if nodes > 1:
        raise UserError(
            f"trainer.num_nodes = {nodes}, but neither torchrun nor srun has started this process: start the same "
            "command with one of them on each node, or set --trainer.num_nodes=1"
        )
    devices, cores = str(trainer.get("devices")), len(os.sched_getaffinity(0))
    has_others = torch.cuda.is_available() or torch.backends.mps.is_available()
    is_cpu = trainer.get("accelerator") == "cpu" or (trainer.get("accelerator") == "auto" and not has_others)
    if is_cpu and devices.isdecimal() and int(devices) > max(2, cores):
        raise UserError(
            f"trainer.devices = {devices}: on a CPU each device is a process, and this one has {cores} cores; give at "
            f"most {max(2, cores)}"
        )


def _refuse_other_processes(trainer: Any) -> None:
    here, everywhere = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    started = {"devices": (here, "--nproc-per-node"), "num_nodes": (everywhere // here, "--nnodes")}
    for key, (count, option) in started.items():
        given = trainer.get(key)
        if given in ("auto", -1, "-1") and trainer.get("accelerator") != "cpu":
            continue  # all that there are
        wanted = 1 if given == "auto" else len(given) if isinstance(given, list) else given
        if str(wanted) != str(count):
            what = "processes on this machine" if key == "devices" else "machines"
            raise UserError(
                f"trainer.{key} = {given}, but torchrun has started {count} {what}: set --trainer.{key}={count}, or "
                f"start torchrun with {option}={wanted}"
            )


def is_sharding(strategy: Any) -> bool:
    """Whether a configured strategy shards the model, and so loads a checkpoint after it is made."""
    if isinstance(strategy, ModelParallelStrategy):
        return True
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    return str(name).rpartition(".")[2] in (FSDP2_NAME, "FSDP2", "ModelParallelStrategy")


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


NEVER_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "betas")
"""Arguments of optimizers that must be at least 0."""

LEAST = {"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "log_every_n_steps": 0, "devices": -1}
"""Options of the trainer that Lightning does not check, and the least value that it can run with."""


def refuse_values_for_sections(config: Any) -> None:
    """Raises a UserError for a section of a configuration that is a value, such as `trainer: 3`."""
    for section in ("trainer", "loop", "checkpoint"):
        if not hasattr(config[section], "get"):
            raise UserError(f"{section}: wanted options by name, got {config[section]}")


def refuse_levels(config: Any) -> None:
    """Raises a UserError for invalid numbers in the optimizer, the schedule, the trainer's options or the seed."""
    arguments = _plain(config.get("model")).get("init_args") or {}
    for section in ("optimizer", "lr_scheduler"):
        made = arguments.get(section)
        given = (made.get("init_args") or {}) if isinstance(made, dict) else {}
        for key, value in _numbers(f"model.{section}", given):
            name = key.split(".")[2]
            at_least_0 = section == "optimizer" and name in NEVER_NEGATIVE
            if not math.isfinite(value) or (at_least_0 and value < 0):
                raise UserError(f"{key} must be a finite number{' of at least 0' * at_least_0}, got {value}")
    seed = config.get("seed_everything")
    if seed is not None and not isinstance(seed, bool) and not 0 <= seed < 2**32:
        raise UserError(f"seed_everything must be a whole number from 0 to {2**32 - 1}, got {seed}")
    trainer = _plain(config.get("trainer"))
    for key, least in LEAST.items():
        given = trainer.get(key)
        number = int(given) if isinstance(given, str) and given.removeprefix("-").isdecimal() else given
        if isinstance(number, int | float) and number < least:
            raise UserError(f"trainer.{key} must be at least {least:g}, got {given}")
    if isinstance(trainer.get("val_check_interval"), int | float) and trainer["val_check_interval"] <= 0:
        raise UserError(f"trainer.val_check_interval must be above 0, got {trainer['val_check_interval']}")
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, dict) and (optimizer.get("init_args") or {}).get("lr", 0.0) is None:
        raise UserError("model.optimizer.lr must be a finite number of at least 0, got null")
    clip = trainer.get("gradient_clip_val")
    if clip is not None:
        refuse_unless_level("trainer.gradient_clip_val", clip)


def _plain(section: Any) -> dict[str, Any]:
    return section.as_dict() if hasattr(section, "as_dict") else section or {}


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number inside a value, with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(f"{key}.{index}", inner)
    elif isinstance(value, float | int):
        yield key, value
