"""What can be done with the result of a command: lines for its end, each with a command to paste."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupscale.data_files import read_yaml
from mupscale.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from mupscale.models.checkpoint import Size, Width

NOISE = ("--noise", "0.1", "--centred")
"""What makes the copies of a widened model part, and keeps its function."""


WITHOUT_A_LOG = ("--trainer.logger", "false")
"""An evaluation that is logged would have the folder, and take the number, of a run."""


def command_line(*words: Any) -> str:
    """A command line of mupscale.

    >>> command_line("upscale", "my runs/last.ckpt", "--width", 64)
    "python -m mupscale upscale 'my runs/last.ckpt' --width 64"
    """
    return shlex.join(["python", "-m", "mupscale", *map(str, words)])


def after_fit(trainer: "Trainer", module: "LightningModule", folder: Path | None, saved: Sequence[Path]) -> list[str]:
    """How to evaluate and to widen the newest of the checkpoints in `saved`, and where the model itself is."""
    from mupscale.models.base import Growable, doubled
    from mupscale.models.hf import SAVED

    if folder is None or not saved:
        return []
    checkpoint = last_name(saved[0])
    lines = []
    if any(trainer.num_val_batches) and (folder / "config.yaml").is_file():
        words = ["validate", "--config", folder / "config.yaml", "--ckpt_path", checkpoint, *WITHOUT_A_LOG]
        lines.append(f"  evaluate: {command_line(*words)}")
    own_class = class_option(type(module))
    if isinstance(module, Growable) and own_class is not None:
        width = doubled(module.width)
        # not in the folder, where `resume` would take it for a checkpoint of the run
        named = folder if folder.name not in ("", "..") else folder.resolve()
        out = named.with_name(f"{named.name}-wide-{'-'.join(widths_of(width))}.ckpt")
        words = ["upscale", checkpoint, "--width", *widths_of(width), *NOISE, *own_class, "--out", out]
        lines.append(f"  widen further: {command_line(*words)}")
    if (folder / SAVED / "config.json").is_file():
        lines.append(f"  for from_pretrained of transformers: {folder / SAVED}")
    return lines


def after_upscale(source: Path, out: Path, size: "Size") -> list[str]:
    """How to evaluate a grown checkpoint and to train it, with the configuration of the run that it comes from."""
    config = _config_of(source)
    arguments = {"init_from": out, **size.arguments}
    settings = [word for key, value in arguments.items() for word in (f"--model.{key}", str(value))]
    if config is None or not _may_start_again(config):
        wanted = " and ".join(f"model.{key} to {value}" for key, value in arguments.items())
        lines = [f"  train it: set {wanted} in a configuration"]
    else:
        lines = [f"  train it: {command_line('fit', '--config', config, *settings)}"]
    if config is not None:
        words = ["validate", "--config", config, "--ckpt_path", out, *WITHOUT_A_LOG]
        lines.insert(0, f"  evaluate: {command_line(*words)}")
    return lines


def after_finished(run: Path, step: int) -> list[str]:
    trainer = _section(run / "config.yaml", "trainer")
    limits = {"max_steps": trainer.get("max_steps"), "max_epochs": trainer.get("max_epochs")}
    options = [
        f"--trainer.{name}={2 * limit}" for name, limit in limits.items() if isinstance(limit, int) and limit > 0
    ]
    return [f"  train it for twice as long: {command_line('resume', run, *options)}"] if options and step else []


def class_option(kind: type) -> list[str] | None:
    """The option that names a model class for `upscale`; none for one of mupscale, None if it cannot be imported."""
    if kind.__module__.startswith("mupscale."):
        return []
    return None if kind.__module__ == "__main__" else ["--model", f"{kind.__module__}.{kind.__qualname__}"]


def widths_of(width: "Width") -> list[str]:
    return [str(each) for each in width] if isinstance(width, list) else [str(width)]


def last_name(checkpoint: Path) -> Path:
    """The name `last.ckpt` of a checkpoint, where there is one."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        last = folder / "last.ckpt"
        if last.exists() and last.samefile(checkpoint):
            return last
    return checkpoint


def _config_of(checkpoint: Path) -> Path | None:
    """The configuration of the run that a checkpoint lies in: RUN/checkpoints/last.ckpt, or one folder deeper."""
    for folder in checkpoint.parents[:3]:
        if _section(folder / "config.yaml", "trainer"):
            return folder / "config.yaml"
    return None


def _may_start_again(config: Path) -> bool:
    """Whether a configuration starts a run in a folder of its own, and schedules no growth."""
    trainer = _section(config, "trainer")
    logger = trainer.get("logger")
    place = logger.get("init_args", {}) if isinstance(logger, dict) else {"version": "unknown"}
    callbacks = trainer.get("callbacks") or []
    names = [str(callback.get("class_path")) for callback in callbacks if isinstance(callback, dict)]
    return place.get("version") is None and not any(name.endswith("UpscaleCallback") for name in names)


def _section(config: Path, name: str) -> dict[str, Any]:
    """A section of a configuration; empty if it cannot be read."""
    try:
        content = read_yaml(config)
    except (UserError, OSError):
        return {}
    found = content.get(name) if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}
