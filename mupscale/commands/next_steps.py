"""What can be done with the result of a command: lines for its end, each with a command to paste."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

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


def after_fit(trainer: "Trainer", module: "LightningModule", folder: Path, checkpoint: Path) -> list[str]:
    """How to evaluate and to widen the last checkpoint of a run, and where the model itself is."""
    from mupscale.models.base import Growable, doubled
    from mupscale.models.hf import SAVED

    lines = []
    if any(trainer.num_val_batches) and (folder / "config.yaml").is_file():
        words = ["validate", "--config", folder / "config.yaml", "--ckpt_path", checkpoint, *WITHOUT_A_LOG]
        lines.append(f"  evaluate: {command_line(*words)}")
    if isinstance(module, Growable) and type(module).__module__.startswith("mupscale."):
        width = doubled(module.width)
        widths = width if isinstance(width, list) else [width]
        # not in the folder, where `resume` would take it for a checkpoint of the run
        named = folder if folder.name not in ("", "..") else folder.resolve()
        out = named.with_name(f"{named.name}-wide-{'-'.join(map(str, widths))}.ckpt")
        lines.append(
            f"  widen further: {command_line('upscale', checkpoint, '--width', *widths, *NOISE, '--out', out)}"
        )
    if (folder / SAVED / "config.json").is_file():
        lines.append(f"  for from_pretrained of transformers: {folder / SAVED}")
    return lines
