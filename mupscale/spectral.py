"""Spectral norms of many or large matrices by Golub–Kahan–Lanczos bidiagonalisation."""

import torch
from torch import Tensor

_DIRECT = 128
"""Below this many singular values a direct SVD is cheaper than the iteration."""
_CHECK_EVERY = 8
"""Iterations between convergence checks: each reads the small bidiagonal back to the host."""


def spectral_norms(matrices: Tensor, rtol: float = 1e-4) -> Tensor:
    """The largest singular value of each matrix in a batch (batch, rows, columns), to a relative error of `rtol`.

    Krylov vectors are orthogonalised in full. The residual bounds the distance of the estimate from some singular value; the
    iteration goes on to a tenth of `rtol`, by when it has found the largest, or until the space is exhausted and the answer
    exact. The start vector comes from its own generator: the same matrices give the same answer.
    """
    dtype = matrices.dtype if matrices.dtype == torch.float64 else torch.float32
    size = matrices.detach().abs().amax((1, 2)).to(dtype)
    size = size.where(size > 0, 1.0)  # entries of order 1: squares neither overflow nor vanish
    return _unit_norms(matrices.detach().to(dtype) / size[:, None, None], rtol).to(matrices.device) * size.double()


def _unit_norms(a: Tensor, rtol: float) -> Tensor:
    if a.shape[1] < a.shape[2]:
        a = a.mT
    batch, rows, columns = a.shape
    if columns == 1:
        return torch.linalg.vector_norm(a, dim=(1, 2)).double()
    if columns <= _DIRECT:
        # the Gram matrix would lose half the digits; QR keeps them and leaves a small square problem
        return torch.linalg.svdvals(torch.linalg.qr(a, mode="r").R)[:, 0].double()

    generator = torch.Generator(a.device).manual_seed(0)
    v = torch.randn(1, columns, generator=generator, dtype=a.dtype, device=a.device).expand(batch, -1)
    v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    left, right = a.new_zeros(batch, rows, 0), v[..., None]
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    for iteration in range(1, columns + 1):
        u = torch.einsum("bmn,bn->bm", a, v)
        u, alpha = _next_direction(u, left)
        left = torch.cat([left, u[..., None]], dim=-1)
        v = torch.einsum("bmn,bm->bn", a, u)
        v, beta = _next_direction(v, right)
        diagonal.append(alpha)
        off_diagonal.append(beta)
        if iteration % _CHECK_EVERY == 0 or iteration == columns:
            norms, errors = _ritz(torch.stack(diagonal, -1), torch.stack(off_diagonal, -1))
            if bool((errors <= rtol * norms).all()):
                break
        right = torch.cat([right, v[..., None]], dim=-1)
    return norms


def _ritz(diagonal: Tensor, off_diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """The largest singular value of each bidiagonal matrix, and ten times the residual of its vectors."""
    alphas, betas = diagonal.double().cpu(), off_diagonal.double().cpu()
    bidiagonal = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], offset=1)
    left, values, _ = torch.linalg.svd(bidiagonal)
    return values[:, 0], 10 * betas[:, -1] * left[:, -1, 0].abs()


def _next_direction(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vector of x beyond the basis, and its length; both zero where only rounding is left of it: the space is exhausted."""
    before = torch.linalg.vector_norm(x, dim=-1)
    for _ in range(2):  # twice is enough (Kahan and Parlett)
        x = x - torch.einsum("bnk,bk->bn", basis, torch.einsum("bnk,bn->bk", basis, x))
    length = torch.linalg.vector_norm(x, dim=-1)
    length = length.where(length > 100 * torch.finfo(x.dtype).eps * before, 0.0)
    return x * (1 / length).nan_to_num(posinf=0.0)[:, None], length
