"""resume: go on with an interrupted run, from its newest checkpoint, in its own folder; never from scratch."""

import argparse
from pathlib import Path

import torch

from mupscale.commands.fit import run


def main(command: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m mupscale resume", description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of the run, with its config.yaml (runs/NAME/version_0)")
    options, overrides = parser.parse_known_args(arguments)
    config = options.run / "config.yaml"
    if not config.is_file():
        raise SystemExit(f"{options.run} is not the folder of a run: it has no config.yaml")
    checkpoint = newest_checkpoint(options.run)
    if checkpoint is None:
        raise SystemExit(f"{options.run} has no checkpoint that can be read: nothing to resume. Start anew with: fit --config {config}")
    print(f"resuming from {checkpoint}")
    logger = ["--trainer.logger.init_args.version", options.run.name]
    run(["fit", "--config", str(config), *logger, *overrides, "--ckpt_path", str(checkpoint)], overwrite=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the most steps that can be read: one cut off by a crash is passed over."""
    best: tuple[int, float, Path] | None = None
    for path in folder.rglob("*.ckpt"):
        step = saved_step(path)
        if step is not None and (best is None or (step, path.stat().st_mtime) > best[:2]):
            best = step, path.stat().st_mtime, path
    return best[2] if best else None


def saved_step(path: Path) -> int | None:
    file = path / "meta.pt" if path.is_dir() else path  # a distributed checkpoint is a folder
    try:
        return int(torch.load(file, map_location="cpu", weights_only=True, mmap=not path.is_dir())["global_step"])
    except Exception:
        return None
