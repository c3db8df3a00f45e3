"""Command lines as processes that start at once, so that a test can kill many of them: the client of interrupted.py."""

import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paths import SUPPORT
from programs import SHARED_CODE, start_program

CORE_ONLY = {"PYTHONPATH": f"{SUPPORT / 'ray_node'}{os.pathsep}{SUPPORT}"}
"""Variables of a server that needs none of the libraries that ray_node/sitecustomize.py hides: it starts sooner."""


WITHOUT_FIGURES = {**CORE_ONLY, "INTERRUPTED_IMPORTS": "without_figures"}
"""Variables of such a server whose sweeps and experiments draw no figures, which take seconds."""


class Server(ExitStack):
    """A process that has imported everything and forks for each command line.

    with Server(folder) as server:
        pid = server.start("fit", "--config", "c.yaml")
        status = server.answer()

    `variables` are added to its environment.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        super().__init__()
        self.log = folder / "log.txt"
        self.process = self.enter_context(
            start_program(
                SUPPORT / "interrupted.py",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                variables={**environment(folder), **variables},
            )
        )

    def start(self, *arguments: str, **watched: Any) -> int:
        """Starts a command line; its process id. `watched`: where it is killed, as interrupted.py reads it."""
        return self.start_together({"arguments": arguments, **watched})[0]

    def start_together(self, *requests: dict[str, Any]) -> list[int]:
        """Starts command lines at once; their process ids. `answer` follows for each."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(requests) + "\n")
        self.process.stdin.flush()
        return [self.answer() for _ in requests]

    def answer(self) -> int:
        """The next number that the server writes: after `start`, the exit status of the command line."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def run(self, *arguments: str) -> None:
        """Runs a command line to its end, which must be a success."""
        self.start(*arguments)
        assert self.answer() == 0, self.log.read_text()[-3000:]


def environment(folder: Path) -> dict[str, str]:
    """Variables for a command line that logs to `folder`, and writes checkpoints to `folder`/tmp first."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {
        **SHARED_CODE,
        "INTERRUPTED_LOG": str(folder / "log.txt"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch makes it in TMPDIR otherwise
        "TMPDIR": str(folder / "tmp"),
    }
