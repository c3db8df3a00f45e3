"""fit, validate, test and predict: what LightningCLI makes of them."""

from mupscale.commands.cli import parsed


def main(command: str, arguments: list[str]) -> None:
    parsed([command, *arguments])
