"""resume: go on with an interrupted run, from its newest checkpoint, in its own folder; never from scratch."""

import argparse
from pathlib import Path
from typing import Any

from mupscale.errors import UserError


def main(command: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mupscale resume",
        description=__doc__,
        epilog="Further options are those of fit, and override the run's configuration.",
    )
    parser.add_argument("run", type=Path, help="the folder of the run, with its config.yaml (runs/NAME/version_0)")
    options, overrides = parser.parse_known_args(arguments)
    config = options.run / "config.yaml"
    if not config.is_file():
        raise UserError(f"{options.run} is not the folder of a run: it has no config.yaml")
    path, checkpoint = newest_checkpoint(options.run)
    if path is None:
        raise UserError(
            f"{options.run} has no checkpoint that can be read. Start anew: python -m mupscale fit --config {config}"
        )
    if checkpoint.get("callbacks", {}).get("ExactResume", {}).get("finished") and not overrides:
        print(f"{options.run} is finished: {path} is of its last step, {checkpoint['global_step']}")
        return
    print(f"resuming from {path}", flush=True)

    from mupscale.commands.cli import parsed  # Lightning takes seconds to load, which a mistake need not wait for

    parsed(["fit", "--config", str(config), *overrides, "--ckpt_path", str(path)], folder=options.run)


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint with the most steps that can be read, and what it holds: one cut off by a crash is passed over."""
    best: tuple[tuple[int, float], Path | None, dict[str, Any]] = (-1, 0.0), None, {}
    for path in folder.rglob("*.ckpt"):
        checkpoint = readable(path)
        if checkpoint is not None:
            age = checkpoint["global_step"], path.stat().st_mtime
            if age > best[0] and not path.is_symlink():  # what last.ckpt points to is here, too
                best = age, path, checkpoint
    return best[1:]


def readable(path: Path) -> dict[str, Any] | None:
    """What a checkpoint holds, its tensors mapped and not read; None for the remains of one."""
    import torch

    file = path / "meta.pt" if path.is_dir() else path  # sharded ones are folders
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch raises many kinds
        return None
    whole = (
        isinstance(checkpoint, dict)
        and "global_step" in checkpoint
        and "optimizer_states" in {*checkpoint, *sharded(path)}
    )
    return checkpoint if whole else None


def sharded(path: Path) -> set[str]:
    """What a sharded checkpoint keeps outside of meta.pt; its .metadata is written last."""
    return {"optimizer_states"} if (path / ".metadata").is_file() else set()
