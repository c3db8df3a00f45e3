"""resume: continue an interrupted run from its newest checkpoint, in its own folder; never from scratch."""

from pathlib import Path

from mupscale.commands.arguments import ArgumentParser
from mupscale.commands.checkpoints import newest_checkpoint
from mupscale.errors import UserError


def main(command: str, arguments: list[str]) -> None:
    parser = ArgumentParser(
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
            f"{options.run} has no checkpoint that can be read. Start again: python -m mupscale fit --config {config}"
        )
    if checkpoint.get("callbacks", {}).get("ExactResume", {}).get("finished") and not overrides:
        print(f"{options.run} is finished: {path} is of its last step, {checkpoint['global_step']}")
        return
    print(f"resuming from {path}", flush=True)

    from mupscale.commands.cli import parsed  # loads Lightning, which takes seconds; mistakes are reported before

    parsed(["fit", "--config", str(config), *overrides, "--ckpt_path", str(path)], folder=options.run)
