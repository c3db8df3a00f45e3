"""The command line that the scripts about whole procedures share: one YAML file, checked, made, and continued."""

import sys

from mupscale.commands import experiment
from mupscale.errors import UserError


def run(
    name: str,
    description: str | None,
    make: experiment.Make,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    arguments: list[str] | None = None,
) -> None:
    """Makes an experiment of this module in the folder --out; run the same command again to continue."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        experiment.run(f"python -m experiments.{name}", description, make, required, optional, given)
    except UserError as error:
        sys.exit(f"error: {error}")
