"""One thread a test process: the suite runs one process per core."""

import torch

import mupscale  # noqa: F401  first, so that torchvision can be imported beside a CPU-only torch

torch.set_num_threads(1)
