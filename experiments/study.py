"""The command line that the scripts about whole procedures share: one YAML file, checked, made, and continued."""

import sys

from mupscale.commands.experiment import Make, conduct, parser, read, study_of
from mupscale.commands.lab.execution import goes_on_when_repeated, refuse_options
from mupscale.errors import UserError


def run(
    name: str,
    description: str | None,
    make: Make,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    arguments: list[str] | None = None,
) -> None:
    """Makes an experiment of this module in the folder --out; run the same command again to continue."""
    options, rest = parser(f"python -m experiments.{name}", description).own_and_other(
        sys.argv[1:] if arguments is None else arguments
    )
    try:
        refuse_options(options)
        content = read(options.file, required, optional)
        with goes_on_when_repeated():
            conduct(study_of(options, rest, content), make, content, only_plan=options.plan)
    except UserError as error:
        sys.exit(f"error: {error}")
