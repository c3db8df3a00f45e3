"""Spectral norms of batches of matrices by Golub–Kahan–Lanczos bidiagonalisation, in few launches."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_DIRECT = 64
"""Up to this many singular values their Gram matrix is as small as what the iteration leaves to solve."""


@torch.no_grad()
def spectral_norms(matrices: Tensor, rtol: float = 1e-4) -> Tensor:
    """The largest singular value of each matrix in a batch, to a relative error of `rtol`, in float64.

    Matrices are (batch, rows, columns), real or complex.

    NaN for a matrix with entries that are not finite. The same matrices give the same answer on one type of device: the
    start vector comes from its own generator. Beside the matrices, a contiguous copy in at least float32 is held.
    """
    if matrices.is_complex():  # A + iB has the singular values of this real matrix, twice each
        rows = torch.cat([matrices.real, -matrices.imag], 2), torch.cat([matrices.imag, matrices.real], 2)
        matrices = torch.cat(rows, 1)
    size = torch.linalg.vector_norm(
        matrices, math.inf, (1, 2), dtype=torch.promote_types(matrices.dtype, torch.float32)
    )
    unit = torch.empty(matrices.shape, dtype=size.dtype, device=matrices.device)
    torch.div(matrices, size[:, None, None], out=unit)  # the largest entry is 1: squares neither overflow nor vanish
    if unit.shape[1] < unit.shape[2]:
        unit = unit.mT
    with _full_precision(unit.device.type):
        norms = _gram_norms(unit) if unit.shape[2] <= _DIRECT else _krylov_norms(unit, rtol)
    return norms.to(size.device) * size.double()


def _gram_norms(a: Tensor) -> Tensor:
    """Norms from Gram matrices, which lose digits of small singular values only, not of the largest."""
    gram = _finite(torch.bmm(a.mT, a).cpu().double())
    return torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()


def _krylov_norms(a: Tensor, rtol: float) -> Tensor:
    """The largest singular value of the bidiagonal matrix that the iteration makes of `a` (Golub and Kahan 1965).

    Nothing is orthogonalised beyond the recurrence: rounding then finds singular values again that were found already,
    and leaves the largest what it is (Paige 1980). No basis is kept, and the launches it would take are saved, more
    than all the others.
    """
    batch, rows, columns = a.shape
    # Gaussian noise has converged here: its largest singular values lie n^-2/3 apart, and the iteration takes gap^-1/2
    # steps
    check = 16 + round(4.5 * columns ** (1 / 3))
    # whatever the spectrum, the error is beyond rtol with a chance of at most 1 in 1000 (Kuczyński and Woźniakowski
    # 1992)
    last = math.ceil((1 + math.log(1648 * columns**0.5) / math.sqrt(2 * rtol)) / 2)

    generator = torch.Generator(a.device).manual_seed(0)
    start = torch.randn(1, 1, columns, generator=generator, dtype=a.dtype, device=a.device)
    v, _ = _direction(start.expand(batch, -1, -1))
    u, beta = a.new_zeros(batch, 1, rows), a.new_zeros(batch, 1, 1)
    lengths: list[Tensor] = []
    for step in range(1, last + 1):
        # rows times matrices: columns are slower on a CPU
        u, alpha = _direction(torch.baddbmm(beta * u, v, a.mT, beta=-1))
        v, beta = _direction(torch.baddbmm(alpha * v, u, a, beta=-1))
        lengths += [alpha, beta]
        if step in (check, last):
            norms, errors = _ritz(torch.cat(lengths, dim=2)[:, 0])
            if bool((10 * errors <= rtol * norms).all()):
                break
            check += check // 4
    return norms


def _direction(x: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vectors of x (batch, 1, n), and their lengths; rounding, or not finite, once a space is exhausted."""
    length = torch.linalg.vector_norm(x, dim=2, keepdim=True)
    return x / length, length


def _ritz(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The largest singular value of each bidiagonal matrix, and a bound on its error.

    The bound is its distance from some singular value of what was iterated.

    Reading the lengths is the only wait for the device. By the time that distance is small, the value is the largest
    there is.
    """
    eps = torch.finfo(lengths.dtype).eps
    lengths = _finite(lengths.cpu().double())
    exhausted = lengths <= 100 * eps * lengths.amax(1, keepdim=True)
    lengths = lengths.where(exhausted.cumsum(1) == 0, 0.0)
    alphas, betas = lengths[:, 0::2], lengths[:, 1::2]
    bidiagonal = torch.diag_embed(alphas) + torch.diag_embed(betas[:, :-1], offset=1)
    squares, left = torch.linalg.eigh(bidiagonal @ bidiagonal.mT)
    values = squares[:, -2:].clamp(min=0).sqrt()
    residual = betas[:, -1] * left[:, -1, -1].abs()
    # where a value is found again its residual grows for a while; a mixture of the two vectors then has none but their
    # distance
    return values[:, 1], torch.minimum(residual, values[:, 1] - values[:, 0])


def _finite(x: Tensor) -> Tensor:
    """Zero for what dividing by a length or a size of zero has left."""
    return x.where(x.isfinite(), 0.0)


@contextmanager
def _full_precision(device_type: str) -> Iterator[None]:
    """Multiplies float32 matrices in float32, whatever a training run allows: TF32 alone costs more than `rtol`."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
