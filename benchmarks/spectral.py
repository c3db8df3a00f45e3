"""Time and launches of the spectral norms of a ResNet-18's convolutions, beside a full SVD.

    python -m benchmarks spectral [--quick] [--device cuda] [--width 256] [--svd] [--out spectral.json]

Each kernel position of a convolution is a matrix of its own. A launch is an operation that computes something on the
device; the full SVD is `torch.linalg.matrix_norm(weight, ord=2)`.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, now, run
from mupscale._torch import TorchDispatchMode, tree_leaves
from mupscale.models.resnet import ResNet18Net
from mupscale.spectral import spectral_norms


class Launches(TorchDispatchMode):
    """Counts the operations on a device that are more than another view of a tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.count = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        view = any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments)
        there = any(
            isinstance(leaf, Tensor) and leaf.device.type == self.device.type
            for leaf in tree_leaves((args, kwargs, result))
        )
        self.count += there and not view
        return result


def kernel_matrices(width: int, device: torch.device) -> list[Tensor]:
    """(positions, output channels, input channels) of every convolution of a ResNet-18, at its initial values."""
    with device:
        model = ResNet18Net(width)
    return [m.weight.detach().permute(2, 3, 0, 1).flatten(0, 1) for m in model.modules() if isinstance(m, nn.Conv2d)]


def timed(function: Callable[[Tensor], Tensor], weights: list[Tensor], repeats: int) -> tuple[float, list[Tensor]]:
    """The shortest of `repeats` passes over the weights in seconds, and the answers."""
    times = []
    for _ in range(repeats):
        start = now()
        answers = [function(weight) for weight in weights]
        times.append(now() - start)
    return min(times), answers


def rows(options: argparse.Namespace) -> Iterator[Row]:
    width = options.width or (64 if options.quick else 256)
    weights = kernel_matrices(width, options.device)
    seconds, norms = timed(spectral_norms, weights, repeats=3)
    with Launches(options.device) as launches:
        timed(spectral_norms, weights, repeats=1)
    matrices = sum(len(weight) for weight in weights)
    row = {
        "width": width, "convolutions": len(weights), "matrices": matrices, "seconds": seconds,
        "launches": launches.count,
    }  # fmt: skip
    if options.svd:
        row["svd seconds"], truth = timed(lambda weight: torch.linalg.matrix_norm(weight, ord=2), weights, repeats=1)
        row["ratio"] = row["svd seconds"] / seconds
        row["largest difference"] = max(((a - b).abs() / b).max().item() for a, b in zip(norms, truth, strict=True))
    yield row


def main(arguments: list[str]) -> None:
    run(
        __doc__,
        rows,
        arguments,
        {
            "--width": {"type": int, "help": "stem channels; 64 is 1×, 256 is 4× and the default"},
            "--svd": {"action": "store_true", "help": "compare with a full SVD (minutes at 4× on a CPU)"},
        },
    )
