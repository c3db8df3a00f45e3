"""upscale: widen a checkpoint of a run, or a model folder of the transformers library, offline."""

from importlib import import_module
from pathlib import Path


def main(command: str, arguments: list[str]) -> None:
    """Loads only what the kind of input needs: Lightning for a checkpoint, transformers for a folder."""
    kind = "folder" if names_folder(arguments) else "checkpoint"
    getattr(import_module(f"mupscale.commands.upscale_{kind}"), f"widen_{kind}")(arguments)


def names_folder(arguments: list[str]) -> bool:
    """Whether a command line means a model folder: it has `--factor`, or begins with a folder with a configuration."""
    if any(argument.partition("=")[0] == "--factor" for argument in arguments):
        return True
    return bool(arguments) and (Path(arguments[0]) / "config.json").is_file()
