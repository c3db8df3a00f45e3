"""Runs command lines in forks of one process that has imported everything, so that interrupting them many times is
cheap.

Reads a JSON list of arguments a line, answers with the pid of its process, then, once that has ended, with its exit
status. An object with `arguments`, `folder` and `point` instead of the list: its process is killed at that point of
what it does to the folder (`kill_points.Point`), and draws no figures; with `counts`, a path, it writes which points
there are. INTERRUPTED_IMPORTS names more modules to import.
"""

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import collector  # isort: skip  before what takes long to import
import mupscale  # noqa: F401  # isort: skip  first, so that torchvision can be imported beside a CPU-only torch
import torch
from kill_points import Point, Watch
from programs import start_fork, wait_for_fork
from torch import Tensor, nn

from mupscale import __main__ as command_line
from mupscale.commands import cli, resume, sweep  # noqa: F401
from mupscale.commands.lab import protocols, workers  # noqa: F401
from mupscale.commands.lab import sweep as lab_sweep
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


def run(request: Any) -> None:
    if isinstance(request, list):
        command_line.main(request)
        return
    watch = Watch([Path(request["folder"])], Point(*request["point"]) if request.get("point") else None)
    watch.start()
    lab_sweep.draw_sweep = lambda *_: []  # type: ignore[assignment]  # figures take seconds
    try:
        command_line.main(request["arguments"])
    finally:
        watch.stop()
        if request.get("counts"):
            kinds = {thread: [operation.path for operation in found] for thread, found in watch.operations.items()}
            Path(request["counts"]).write_text(json.dumps(kinds))


def serve() -> None:
    for module in os.environ.get("INTERRUPTED_IMPORTS", "").split():
        importlib.import_module(module)
    cli.import_classes()
    torch.set_num_threads(1)
    torch.compiler.reset()  # imports a thousand modules
    collector.begin()
    log = Path(os.environ["INTERRUPTED_LOG"])
    for request in map(json.loads, sys.stdin):
        pid = start_fork(partial(run, request), log)
        print(pid, flush=True)
        print(wait_for_fork(pid), flush=True)


if __name__ == "__main__":
    sys.modules["interrupted"] = sys.modules["__main__"]  # one class, by whichever name
    serve()
