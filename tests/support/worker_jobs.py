"""Jobs that processes of a pool make without a run: what they see, and how they end."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mupscale.commands.lab.jobs import Job
from mupscale.errors import UserError


@dataclass(frozen=True)
class Sees(Job):
    """Writes the GPUs and the threads of its process."""

    def carry_out(self) -> dict[Path, Any]:
        path = Path(f"seen-{self.trials[0].name}")
        path.write_text(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {torch.get_num_threads()}")
        time.sleep(1)  # so that no other job comes to this process
        return {path: (1.0, 1.0)}


@dataclass(frozen=True)
class Dies(Job):
    """Kills its process, `times` times."""

    times: int = 1

    def carry_out(self) -> dict[Path, Any]:
        path = Path(f"deaths-{self.trials[0].name}")
        deaths = len(path.read_text()) if path.exists() else 0
        if deaths < self.times:
            path.write_text("x" * (deaths + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return {path: (1.0, 1.0)}


@dataclass(frozen=True)
class Refuses(Job):
    def carry_out(self) -> dict[Path, Any]:
        raise UserError("lr must be positive")


@dataclass(frozen=True)
class Interrupts(Job):
    """Sends the process of the command a signal, and works on."""

    number: int = 0
    process: int = 0

    def carry_out(self) -> dict[Path, Any]:
        Path("child").write_text(str(os.getpid()))
        os.kill(self.process, self.number)
        time.sleep(60)
        return {}
