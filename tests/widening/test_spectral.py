"""Spectral norms against a full SVD: relative error at most 1e-4, in few launches."""

import math
from functools import cache

import pytest
import torch
from dispatched import Operations
from torch.utils._python_dispatch import TorchDispatchMode

from mupscale.models.resnet import ResNet18Net
from mupscale.spectral import spectral_norms


def orthogonal(n: int, k: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, k, dtype=torch.float64))[0]


def with_spectrum(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return orthogonal(rows, len(values)) @ torch.diag(values.double()) @ orthogonal(columns, len(values)).T


@cache
def matrices() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 200)
    dense_edge = torch.cos(0.5 * math.pi * torch.arange(300) / 300)  # what a Krylov space resolves worst
    return {
        "gaussian_square": torch.randn(400, 400),
        "gaussian_tall": torch.randn(900, 150),
        "gaussian_wide": torch.randn(150, 900),
        "gaussian_small": torch.randn(7, 5),
        "gaussian_half_precision": torch.randn(90, 200).half(),
        "vector": torch.randn(300, 1),
        "number": torch.randn(1, 1),
        "clustered_top": with_spectrum(1 - 1e-3 * ramp, 300, 300),
        "two_close": with_spectrum(torch.cat([torch.tensor([1.0, 0.9999]), 0.5 * ramp]), 300, 250),
        "two_apart": with_spectrum(torch.cat([torch.tensor([1.0, 0.997]), 0.3 * ramp]), 300, 250).float(),
        "dense_edge": with_spectrum(dense_edge, 300, 300).float(),
        "alone_above_a_dense_edge": with_spectrum(torch.cat([torch.ones(1), 0.9995 * dense_edge]), 320, 310).float(),
        "rank_one": torch.outer(torch.randn(200), torch.randn(200)),
        "ones": torch.ones(100, 120),
        "one_entry": torch.nn.functional.pad(torch.tensor([[-3.0]]), (40, 59, 70, 29)),
        "zero": torch.zeros(100, 100),
        "identity": torch.eye(100),
        "duplicated": torch.randn(60, 60).repeat_interleave(3, 0).repeat_interleave(3, 1),
        "tiny": 1e-20 * torch.randn(100, 100),
        "huge": 1e15 * torch.randn(100, 100),
        "denormal": torch.full((100, 100), 1e-42),
        "largest": torch.full((20, 20), 3e38),
        "double": 1e-200 * torch.randn(100, 100, dtype=torch.float64),
        "half": torch.randn(128, 128).bfloat16(),
        "trained_like": torch.randn(300, 300) / 17 + 3 * torch.outer(torch.randn(300), torch.randn(300)) / 300,
    }


@pytest.mark.parametrize("name", matrices())
def test_against_svd(name: str):
    matrix = matrices()[name]
    truth = torch.linalg.matrix_norm(matrix.double(), ord=2)
    assert spectral_norms(matrix[None]).item() == pytest.approx(truth.item(), rel=1e-4)


@pytest.mark.parametrize("columns", [20, 100])
def test_not_finite(columns: int):
    batch = torch.randn(3, 100, columns)
    batch[1, 2, 3], batch[2, 4, 5] = torch.nan, torch.inf
    norms = spectral_norms(batch)
    assert norms.isnan().tolist() == [False, True, True]


def matmul_precisions() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def test_the_precision_of_a_training_run_does_not_matter():
    matrix = 0.1 + 0.1 * torch.rand(1, 200, 200)
    calm = spectral_norms(matrix)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.baddbmm.default:
                seen.append((args[1].dtype, *matmul_precisions()))
            return func(*args, **(kwargs or {}))

    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16), Watch():
            assert torch.equal(spectral_norms(matrix), calm)
        assert set(seen) == {(torch.float32, "ieee", "ieee")}
        assert matmul_precisions() == ("tf32", "bf16")
    finally:
        torch.set_float32_matmul_precision("highest")


def launches(matrices: torch.Tensor) -> int:
    with Operations() as operations:
        spectral_norms(matrices)
    return operations.now.total()


def test_launches():
    """Eight a step; Gaussian matrices are checked once, after 16 + 4.5 · 256^(1/3) = 45 steps; the rest is set-up and
    small solves.
    """
    torch.manual_seed(0)
    assert launches(torch.randn(9, 256, 256)) <= 45 * 8 + 48
    assert launches(torch.randn(9, 64, 256)) <= 20
    convolutions = [part for part in ResNet18Net(32).modules() if isinstance(part, torch.nn.Conv2d)]
    kernels = [each.weight.detach().permute(2, 3, 0, 1).flatten(0, 1) for each in convolutions]
    assert sum(map(launches, kernels)) <= 3300


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 300, 1), (2, 200, 150)], ids=str)
def test_complex_matrices(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    batch = torch.randn(shape, dtype=dtype)
    expected = torch.linalg.matrix_norm(batch.to(torch.complex128), 2)
    torch.testing.assert_close(spectral_norms(batch), expected, rtol=1e-4, atol=0)
