"""A Ray cluster on this machine, for tests that connect to it and kill its nodes.

Reads a JSON object a line, and answers with one: {"add": options} starts a node with these options of
`Cluster.add_node`, and answers with its number; {"kill": number} kills a node's processes.
"""

import json
import sys
from pathlib import Path

from ray.cluster_utils import Cluster


def serve(folder: Path) -> None:
    cluster = Cluster()
    nodes = []
    print(json.dumps("ready"), file=sys.stderr)
    for line in sys.stdin:
        ((what, value),) = json.loads(line).items()
        if what == "add":
            extra = {} if nodes else {"include_dashboard": False}
            nodes.append(cluster.add_node(**extra, **value))
            answer = {"address": cluster.address, "node": len(nodes) - 1}
        else:
            cluster.remove_node(nodes[value], allow_graceful=False)
            answer = {}
        print(json.dumps(answer), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
