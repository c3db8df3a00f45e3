"""Scripts of the published experiments: run one with `python -m experiments.<name>`."""

import mupscale  # noqa: F401  first, so that torchvision can be imported beside a CPU-only torch
