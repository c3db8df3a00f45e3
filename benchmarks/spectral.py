"""Time and launches of the spectral norms of a ResNet-18's convolutions, beside a full SVD.

    python -m benchmarks spectral [--quick] [--device cuda] [--width 256] [--svd] [--out spectral.json]

Each kernel position of a convolution is a matrix of its own. A launch is an operation that computes something on the
device; the full SVD is `torch.linalg.matrix_norm(weight, ord=2)`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    synchronize = torch.cuda.synchronize if weights[0].is_cuda else lambda: None
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        answers = [function(weight) for weight in weights]
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times), answers


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="1×, which a CPU does in seconds")
    parser.add_argument("--width", type=int, help="stem channels; 64 is 1×, 256 is 4× and the default")
    parser.add_argument("--svd", action="store_true", help="compare with a full SVD (minutes at 4× on a CPU)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    width = options.width or (64 if options.quick else 256)
    weights = kernel_matrices(width, torch.device(options.device))

    seconds, norms = timed(spectral_norms, weights, repeats=3)
    with Launches(weights[0].device) as launches:
        timed(spectral_norms, weights, repeats=1)
    row = {
        "width": width,
        "device": options.device,
        "convolutions": len(weights),
        "matrices": sum(len(weight) for weight in weights),
        "seconds": seconds,
        "launches": launches.count,
    }
    print("{matrices} matrices of {convolutions} convolutions: {seconds:.3f} s in {launches} launches".format(**row))
    if options.svd:
        row["svd_seconds"], truth = timed(lambda weight: torch.linalg.matrix_norm(weight, ord=2), weights, repeats=1)
        row["largest_difference"] = max(((a - b).abs() / b).max().item() for a, b in zip(norms, truth, strict=True))
        row["ratio"] = row["svd_seconds"] / seconds
        print(
            "full SVD: {svd_seconds:.3f} s, {ratio:.1f} times as long; "
            "largest difference {largest_difference:.1e}".format(**row)
        )
    if options.out:
        options.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
