"""Runs command lines of torchrun, and of clusters, in forks of one process that has imported everything.

Reads a JSON object a line: `lines`, command lines as lists of words, which run at once, as on several machines, and
`environments`, the variables of each. Answers with a list: exit status and output of each.

A line that begins with `torchrun` goes through torchrun's own `main`. Only the interpreters that it would start are
forks, too.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import collector  # isort: skip  before what takes long to import
import mupscale  # noqa: F401  # isort: skip  first, so that torchvision can be imported beside a CPU-only torch
import torch
import torch.distributed.run as torchrun
from programs import start_fork, wait_for_fork
from torch.distributed.checkpoint import state_dict  # noqa: F401  before the forks
from torch.distributed.fsdp import fully_shard  # noqa: F401

from mupscale import __main__ as command_line
from mupscale.commands import cli, resume  # noqa: F401

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


def run(line: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    program, *words = line
    if program == "torchrun":
        torchrun.main(words)
    else:
        assert program == "python", line
        command(*words)


def serve(answers: TextIO) -> None:
    torch.set_num_threads(1)
    collector.begin()
    for request in map(json.loads, sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(request["folder"])
            outputs = [Path(folder, str(index)) for index in range(len(request["lines"]))]
            rows = zip(request["lines"], request["environments"], outputs, strict=True)
            started = [start_fork(partial(run, line, environment), output) for line, environment, output in rows]
            statuses = [wait_for_fork(pid) for pid in started]
            texts = [output.read_text() for output in outputs]
        print(json.dumps(list(zip(statuses, texts, strict=True))), file=answers, flush=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(answers)
