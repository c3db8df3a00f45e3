"""`python -m mupscale COMMAND …`: finds the command before torch or Lightning is imported."""

import os
import sys
import textwrap

from mupscale.commands.mistakes import keeps_tracebacks, line_about
from mupscale.commands.process import EXIT_CODE, Terminated, did_you_mean, end_now, lenient_output, loaded, on_sigterm

COMMANDS = {
    "fit": ("cli", "train a configured model, with growth during the run if configured"),
    "resume": ("resume", "continue an interrupted run from its newest checkpoint"),
    "validate": ("cli", "evaluate a checkpoint on the validation set"),
    "test": ("cli", "evaluate a checkpoint on the test set"),
    "predict": ("cli", "predict with a checkpoint"),
    "plan": ("plan", "show how a configured model would grow, parameter by parameter"),
    "verify": ("verify", "check whether a configured model grows exactly, and name the layer that does not"),
    "coord-check": ("coord_check", "check whether activations and updates keep their scale as the width grows"),
    "upscale": ("upscale", "grow a saved checkpoint"),
    "export": ("export", "convert a checkpoint to a folder for transformers' from_pretrained"),
    "sweep": ("sweep", "tune hyperparameters: train with many values of configuration keys, and find the best"),
    "experiment": (
        "experiment",
        "run the paper's protocol: tune small, grow large, with several seeds, on all devices",
    ),
    "report": ("report", "write a page with the curves, costs and savings of runs"),
    "prepare": ("prepare", "tokenise FineWeb-Edu or your own text, for the data module FineWeb"),
}

USAGE = """usage: python -m mupscale COMMAND [options]

Grow neural networks: make a trained model larger, so that it computes and trains
exactly as before, then let it use its new width.

commands:
{commands}

For the options of a command: python -m mupscale COMMAND --help
"""


def main(arguments: list[str] | None = None) -> None:
    with lenient_output() as output:
        status = run(sys.argv[1:] if arguments is None else arguments)
    if output.problem is not None:
        sys.exit(f"error: standard output cannot be written ({output.problem.lower()}); the rest of it is lost")
    if status:
        sys.exit(status)


def run(arguments: list[str]) -> int | None:
    """Runs a command, and returns its exit status. A mistake, a signal and Ctrl-C exit with one line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(_describe_command(name) for name in COMMANDS)))
        return None
    name, *rest = arguments
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS) or f". The commands are {', '.join(COMMANDS)}"
        sys.exit(f"error: there is no command {name!r}{near}")
    # read when torch is loaded: on a busy machine OpenMP threads that spin for long make small operations fifty times
    # slower
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        with on_sigterm(end_now):
            return loaded(f"mupscale.commands.{COMMANDS[name][0]}").main(name, rest)
    except Exception as error:
        line = None if keeps_tracebacks() else line_about(error)
        if line is None:
            raise
        sys.exit(f"error: {line}")
    except KeyboardInterrupt as interrupt:
        sys.exit(f"interrupted; {str(interrupt) or 'run the same command again'}")
    except Terminated as ending:
        print(f"terminated; {str(ending) or 'run the same command again'}", file=sys.stderr)
        sys.exit(EXIT_CODE)


def _describe_command(name: str) -> str:
    """A command and what it is for, in lines of at most 80 characters."""
    return textwrap.fill(f"{name:<11} {COMMANDS[name][1]}", 80, initial_indent="  ", subsequent_indent=" " * 14)


if __name__ == "__main__":
    main()
