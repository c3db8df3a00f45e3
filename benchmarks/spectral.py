"""Time of the spectral norms of every convolution of a ResNet-18, as `SignalNoise` needs them, beside a full SVD.

python -m benchmarks.spectral [--device cuda] [--width 256] [--svd]
"""

import argparse
import time

import torch
from torch import nn

from mupscale.models.resnet import ResNet18Net
from mupscale.spectral import spectral_norms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=256, help="stem channels; 64 is 1×, 256 is 4×")
    parser.add_argument("--svd", action="store_true", help="compare with torch.linalg.svdvals (minutes at 4×)")
    options = parser.parse_args()
    device = torch.device(options.device)

    def timed(function) -> tuple[float, list[torch.Tensor]]:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        answer = [function(weight) for weight in weights]
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, answer

    with device:
        model = ResNet18Net(options.width)
    weights = [m.weight.detach().permute(2, 3, 0, 1).flatten(0, 1) for m in model.modules() if isinstance(m, nn.Conv2d)]
    timed(lambda w: spectral_norms(w[:1, :64, :64]))
    seconds, norms = timed(spectral_norms)
    count = sum(len(w) for w in weights)
    print(f"{count} matrices of {len(weights)} convolutions: {seconds:.3f} s")
    if options.svd:
        seconds, truth = timed(lambda w: torch.linalg.svdvals(w.double())[:, 0])
        error = max(((a.to(b) - b).abs() / b).max().item() for a, b in zip(norms, truth, strict=True))
        print(f"full SVD: {seconds:.3f} s; largest relative error of ours {error:.1e}")


if __name__ == "__main__":
    main()
