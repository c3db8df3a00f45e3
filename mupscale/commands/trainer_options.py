"""Options of Lightning's Trainer that do not work in the runs of this project, each with the reason and the remedy."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO

from mupscale.callbacks.incompatible import refuse_callbacks
from mupscale.errors import UserError

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
        lambda value: any(isinstance(plugin, AsyncCheckpointIO) for plugin in _listed(value)),
        "AsyncCheckpointIO reports a checkpoint as written before it is, so that older ones are deleted too early",
        "leave it out",
    ),
}
"""Options, which of their values are refused, why, and the remedy."""


def refuse_options(trainer: Any) -> None:
    """UserError for options and callbacks of the trainer's configuration that do not work in a run."""
    for key, (is_bad, reason, remedy) in OPTIONS.items():
        value = trainer.get(key)
        if is_bad(value):
            shown = str(value).lower() if isinstance(value, bool | int) else "AsyncCheckpointIO"
            raise UserError(f"trainer.{key}: {shown} does not work here: {reason}; {remedy}")
    refuse_callbacks(_listed(trainer.get("callbacks")))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
