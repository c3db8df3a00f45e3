"""What data modules meet: a trainer of any device and rank, a web server without a network, and an attack."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Attack:
    """Makes the file `marker` in the working folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("marker"),)


def trainer_stub(device: str = "cpu", **options: Any) -> SimpleNamespace:
    """What a data module asks a trainer for, on any device and as any rank."""
    strategy = SimpleNamespace(
        root_device=torch.device(device),
        broadcast=lambda value: value,
        reduce_boolean_decision=lambda decision, all: decision,
    )
    return SimpleNamespace(
        **{"strategy": strategy, "distributed_sampler_kwargs": None, "overfit_batches": 0, **options}
    )


def image_arrays(train: int = 70, test: int = 20) -> dict[str, np.ndarray]:
    """Noise in the form of CIFAR-100, darker and of less contrast in the test images."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, count, brightest in (("train", train, 256), ("test", test, 100)):
        arrays[f"x_{part}"] = draw.integers(0, brightest, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = draw.integers(0, 100, count, dtype=np.uint8)
    return arrays


def write_cifar100(folder: Path) -> None:
    np.savez(folder / "cifar100.npz", **image_arrays())  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def serving(content: bytes, status: int = 200, promised: int | None = None) -> Iterator[str]:
    """The address of a server that answers everything with `content`; it may promise more bytes than it sends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) if promised is None else promised))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/file"
        finally:
            server.shutdown()  # or its thread would spin on the closed socket for ever
