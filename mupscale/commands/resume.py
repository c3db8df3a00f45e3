"""resume: continue an interrupted run from its newest checkpoint, in the same folder."""

from pathlib import Path

from mupscale.commands.checkpoints import SUMMARY, dirpath_of, is_finished, newest_checkpoint
from mupscale.commands.config import dictionary
from mupscale.commands.process import ArgumentParser, command_line, without_collections
from mupscale.data_files import read_yaml
from mupscale.errors import UserError


def main(command: str, arguments: list[str]) -> None:
    parser = ArgumentParser(
        prog="python -m mupscale resume",
        description=__doc__,
        epilog=f"Further options are those of fit. {SUMMARY}. All others must stay the same.",
    )
    parser.add_argument("run", type=Path, help="the folder of the run, with its config.yaml (runs/NAME/version_0)")
    options, overrides = parser.parse_known_args(arguments)
    config = options.run / "config.yaml"
    if not config.is_file():
        raise UserError(f"{options.run} is not the folder of a run: it has no config.yaml{runs_near(options.run)}")
    if any(override.partition("=")[0] in ("--ckpt_path", "--ckpt-path") for override in overrides):
        raise UserError("--ckpt_path: resume uses the newest checkpoint; to continue from another one: fit --ckpt_path")
    problems: list[str] = []
    path, checkpoint = newest_checkpoint(options.run, tell=problems.append)
    if path is None:
        reasons = f" ({'; '.join(problems)})" if problems else ""
        elsewhere = dirpath_of(options.run)
        if elsewhere is not None and not elsewhere.is_absolute():
            reasons += f". Its checkpoint.dirpath is {elsewhere}: start resume where the run was started"
        raise UserError(
            f"{options.run} has no checkpoint that can be read{reasons}. Start again: "
            f"{command_line('fit', '--config', config)}"
        )
    for problem in problems:
        print(f"{problem}; it is skipped")
    if is_finished(checkpoint) and not overrides:
        print(f"{options.run} is finished: {path} is of its last step, {checkpoint['global_step']}")
        trainer = dictionary(dictionary(read_yaml(config)).get("trainer"))
        length = "max_epochs" if trainer.get("max_steps") in (None, -1) else "max_steps"
        print(f"  train it for longer: {command_line('resume', options.run)} --trainer.{length} N")
        return
    print(f"resuming from {path}", flush=True)

    with without_collections():  # Lightning takes seconds to load; mistakes are reported before
        from mupscale.commands.cli import run_cli

    run_cli(["--config", str(config), *overrides, "--ckpt_path", str(path)], "fit", folder=options.run)


def runs_near(folder: Path) -> str:
    """The newest runs in a folder, or beside it, as the end of an error message; empty if there are none."""
    for place in (folder, folder.parent):
        configs = sorted(place.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
        if configs:
            return f". Runs near it, the newest first: {', '.join(str(path.parent) for path in configs[:3])}"
    return ""
