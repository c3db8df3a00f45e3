"""Spectral norms against a full SVD: relative error at most 1e-4."""

import pytest
import torch

from mupscale.spectral import spectral_norms


def orthogonal(n: int, k: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, k, dtype=torch.float64))[0]


def with_spectrum(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return orthogonal(rows, len(values)) @ torch.diag(values.double()) @ orthogonal(columns, len(values)).T


def matrices() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 200)
    return {
        "gaussian_square": torch.randn(400, 400),
        "gaussian_tall": torch.randn(900, 150),
        "gaussian_wide": torch.randn(150, 900),
        "gaussian_small": torch.randn(7, 5),
        "vector": torch.randn(300, 1),
        "clustered_top": with_spectrum(1 - 1e-3 * ramp, 300, 300),
        "two_close": with_spectrum(torch.cat([torch.tensor([1.0, 0.9999]), 0.5 * ramp]), 300, 250),
        "rank_one": torch.outer(torch.randn(200), torch.randn(200)),
        "zero": torch.zeros(100, 100),
        "identity": torch.eye(100),
        "duplicated": torch.randn(60, 60).repeat_interleave(3, 0).repeat_interleave(3, 1),
        "tiny": 1e-20 * torch.randn(100, 100),
        "huge": 1e15 * torch.randn(100, 100),
        "half": torch.randn(128, 128).bfloat16(),
        "trained_like": torch.randn(300, 300) / 17 + 3 * torch.outer(torch.randn(300), torch.randn(300)) / 300,
    }


@pytest.mark.parametrize("name", matrices())
def test_against_svd(name: str):
    matrix = matrices()[name]
    truth = torch.linalg.matrix_norm(matrix.double(), ord=2)
    assert spectral_norms(matrix[None]).item() == pytest.approx(truth.item(), rel=1e-4)


def test_a_batch_of_different_matrices():
    torch.manual_seed(0)
    batch = torch.stack([torch.randn(120, 80), 1e-3 * torch.randn(120, 80), torch.zeros(120, 80), torch.ones(120, 80)])
    truth = torch.linalg.matrix_norm(batch.double(), ord=2)
    torch.testing.assert_close(spectral_norms(batch), truth, rtol=1e-4, atol=0)


def test_same_matrix_same_answer():
    matrix = torch.randn(1, 200, 200)
    torch.manual_seed(1)
    first = spectral_norms(matrix)
    torch.manual_seed(2)
    assert torch.equal(first, spectral_norms(matrix))
