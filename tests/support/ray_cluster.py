"""A Ray cluster of two nodes on this machine, for tests that connect to it and kill a node; and the program that is it.

The program reads a JSON object a line, and answers with one: {"add": options} starts a node with these options of
`Cluster.add_node`; {"kill": number} kills a node's processes.
"""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paths import SUPPORT
from program_server import CORE_ONLY
from programs import start_program

ENVIRONMENT = {**CORE_ONLY, "RAY_USAGE_STATS_ENABLED": "0"}
"""For the processes of nodes, and of commands: all of them have the same code."""


class LocalCluster(ExitStack):
    """The client of the program: a head and nodes, each with one CPU, by number."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.log = folder / "cluster.txt"
        with open(self.log, "w") as log:
            self.process = self.enter_context(
                start_program(
                    SUPPORT / "ray_cluster.py",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=folder,  # which is not where commands are started
                    variables={**ENVIRONMENT, "WITHOUT_FIGURES": "1"},
                )
            )
        self.callback(self.process.communicate, timeout=60)  # it shuts the cluster down
        self.raylets: list[int] = []
        """The main process of each node, by its number."""
        self.second: int | None = None
        self.address = ""
        self.add("first")

    def another(self) -> int:
        """The number of a living node beside the head, named `second`."""
        if self.second is None:
            self.second = self.add("second")
        return self.second

    def add(self, name: str) -> int:
        """Starts a node; its number."""
        node = self.ask(add={"node_name": name, "num_cpus": 1})
        self.address = node["address"]
        self.raylets.append(node["raylet"])
        return len(self.raylets) - 1

    def kill(self, node: int) -> None:
        self.ask(kill=node)
        self.second = None

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)

    def node_of(self, process: int) -> int | None:
        """The number of the node that a process belongs to."""
        parent = status_of(process)[1]
        return self.raylets.index(int(parent)) if int(parent) in self.raylets else None


def is_dead(process: int) -> bool:
    return status_of(process)[0] == "Z"


def status_of(process: int) -> tuple[str, str]:
    """The state of a process, a letter, and the number of its parent; if it is gone, as of one that has just died."""
    try:
        state, parent, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "Z", "0"
    return state, parent


def serve() -> None:
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes: list[Any] = []
    for line in sys.stdin:
        ((what, value),) = json.loads(line).items()
        answer: Any = {}
        if what == "add":
            extra = {} if nodes else {"include_dashboard": False}
            nodes.append(cluster.add_node(**extra, **value))
            raylet = nodes[-1].all_processes[PROCESS_TYPE_RAYLET][0].process.pid
            answer = {"address": cluster.address, "raylet": raylet}
        else:
            cluster.remove_node(nodes[value], allow_graceful=False)
        print(json.dumps(answer), flush=True)
    logs = nodes[0].get_session_dir_path()
    cluster.shutdown()
    shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    serve()
