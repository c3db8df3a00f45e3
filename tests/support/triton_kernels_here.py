"""Where tests of Triton kernels run: on a GPU, or with Triton and `TRITON_INTERPRET=1` on a CPU."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernel = pytest.mark.slow if INTERPRETED else pytest.mark.gpu

COMPILER_WARNINGS = (
    "ignore:overflow encountered:RuntimeWarning",  # of Triton's interpreter; on a GPU it is an infinity
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning",
)
