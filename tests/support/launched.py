"""Command lines of torchrun, and of clusters, in a fork of interrupted.py, which has imported everything.

A line that begins with `torchrun` goes through torchrun's own `main`. Only the interpreters that it would start are
forks, too.
"""

import os
import sys
from typing import Any

import torch.distributed.run as torchrun
from torch.distributed.checkpoint import state_dict  # noqa: F401  before the forks
from torch.distributed.fsdp import fully_shard  # noqa: F401

from mupscale import __main__ as command_line

PREFIXES = (["-u", "-m", "mupscale"], ["-m", "mupscale"])


def command(*words: str) -> None:
    """What `python -m mupscale …` does."""
    prefix = next(prefix for prefix in PREFIXES if list(words[: len(prefix)]) == prefix)
    arguments = list(words[len(prefix) :])
    sys.argv = ["mupscale", *arguments]
    command_line.main(arguments)


def config_of_forks(arguments: Any) -> Any:
    """Torchrun's own, but its processes are forks that call a function."""
    config, _, words = original_config(arguments)
    config.start_method = "fork"
    config.monitor_interval = 0.05
    return config, command, words


original_config = torchrun.config_from_args
torchrun.config_from_args = config_of_forks


def main(arguments: list[Any]) -> None:
    """Arguments are the folder, variables of the environment, and the line."""
    folder, variables, program, *words = arguments
    os.chdir(folder)
    os.environ.update(variables)
    if program == "torchrun":
        torchrun.main(words)
    else:
        assert program == "python", program
        command(*words)
