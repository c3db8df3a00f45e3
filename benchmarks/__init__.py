"""Measurements: run one with `python -m benchmarks.<name>`."""

import mupscale  # noqa: F401  first, so that torchvision can be imported beside a CPU-only torch
