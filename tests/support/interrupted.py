"""Runs command lines in forks of one process that has imported everything, so that interrupting them many times is
cheap.

Reads a JSON list of objects a line: command lines that start at once. Answers with the pids of their processes, then,
once each has ended, with its exit status. An object has `arguments`, for the `main` of mupscale or of a `module`; with
`folder` and `point`, its process is killed at that point of what it does to the folder (`kill_points.Point`), and draws
no figures. INTERRUPTED_IMPORTS names more modules to import.
"""

import importlib
import json
import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import collector  # isort: skip  before what takes long to import
import mupscale  # noqa: F401  # isort: skip  first, so that torchvision can be imported beside a CPU-only torch
import torch
from kill_points import Point, Watch
from programs import start_fork, wait_for_fork
from torch import Tensor, nn

from mupscale import __main__  # noqa: F401
from mupscale.commands import (  # noqa: F401
    cli,
    experiment,
    resume,
    sweep,
)
from mupscale.commands.lab import sweep as lab_sweep
from mupscale.commands.lab import workers  # noqa: F401
from mupscale.models.mlp import MLP, MLPNet


class DropoutNet(MLPNet):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(self.activation(layer(x)), 0.1, self.training)
        return self.readout(x)


class DropoutMLP(MLP):
    """One that draws random numbers as it trains."""

    def build(self, width: int | list[int]) -> nn.Module:
        hidden = width if isinstance(width, list) else [width] * self.hparams["hidden_layers"]
        return DropoutNet(self.hparams["inputs"], hidden, self.hparams["outputs"])


def run(
    arguments: list[str],
    module: str = "mupscale.__main__",
    folder: str | None = None,
    point: list[Any] | None = None,
) -> None:
    program = importlib.import_module(module)
    if folder is None:
        program.main(arguments)
        return
    watch = Watch([Path(folder)], Point(*point) if point else None)
    watch.start()
    lab_sweep.draw_sweep = lambda *_: []  # type: ignore[assignment]  # figures take seconds
    try:
        program.main(arguments)
    finally:
        watch.stop()


def serve() -> None:
    for module in os.environ.get("INTERRUPTED_IMPORTS", "").split():
        importlib.import_module(module)
    cli.import_classes()
    torch.set_num_threads(1)
    torch.compiler.reset()  # imports a thousand modules
    collector.begin()
    log = Path(os.environ["INTERRUPTED_LOG"])
    for requests in map(json.loads, sys.stdin):
        started = [start_fork(partial(run, **request), log) for request in requests]
        for number in chain(started, map(wait_for_fork, started)):
            print(number, flush=True)


if __name__ == "__main__":
    sys.modules["interrupted"] = sys.modules["__main__"]  # one class, by whichever name
    serve()
