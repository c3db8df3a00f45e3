"""The loss of a readout is the cross-entropy of its logits, whichever way it is computed, and reads them seldom.

The kernel needs a GPU, or Triton and `TRITON_INTERPRET=1`, with which it runs on a CPU.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradients import relative_gap, with_gradients
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from mupscale import readout
from mupscale.readout import ReadoutLoss, slopes_in_place

pytestmark = pytest.mark.filterwarnings(
    "ignore:TensorFloat32 tensor cores:UserWarning",  # float32 is compared without them
    "ignore:overflow encountered in multiply:RuntimeWarning",  # of Triton's interpreter; on a GPU it is an infinity
)

VOCABULARY = 37
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_kernel = pytest.mark.slow if INTERPRETED else pytest.mark.gpu


def problem(
    dtype: torch.dtype = torch.float64, rows: int = 24, width: int = 8, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the size of a trained network's: what is read out, the readout, and targets."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (rows, vocabulary))
    return (
        x.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        torch.randint(vocabulary, (rows,), generator=generator),
    )


@pytest.mark.parametrize("scale", [1.0, 1024.0, -0.3])  # a loss scale, an accumulated batch's share
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_it_is_the_cross_entropy_of_the_logits(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    x, weight, targets = problem(dtype)
    ours = with_gradients(ReadoutLoss.apply(x, weight, targets), x, weight, scale=scale)
    exact = problem()
    theirs = with_gradients(F.cross_entropy(exact[0] @ exact[1].T, targets), *exact[:2], scale=scale)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert relative_gap(mine, other) < tolerance


def test_it_agrees_with_finite_differences() -> None:
    x, weight, targets = problem(rows=5, width=3)
    assert torch.autograd.gradcheck(lambda x, weight: ReadoutLoss.apply(x, weight, targets), (x, weight))


def test_large_logits_do_not_overflow() -> None:
    x, weight, targets = problem(torch.float32)
    loss, *gradients = with_gradients(ReadoutLoss.apply(x * 1e4, weight * 1e4, targets), x, weight)
    torch.testing.assert_close(loss, F.cross_entropy(x * 1e4 @ (weight * 1e4).T, targets).detach())
    assert all(gradient.isfinite().all() for gradient in gradients)


# --- the kernel


@needs_kernel
@pytest.mark.parametrize("factor", [1.0, 300.0])
@pytest.mark.parametrize("vocabulary", [1, 37, 8192, 16385, 50304])  # up to 16,384 a row stays in registers
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_the_kernel_is_exact_to_rounding(dtype: torch.dtype, tolerance: float, vocabulary: int, factor: float) -> None:
    """Losses, and the slopes left in place of the logits, against float64 on the same logits."""
    from mupscale.readout_kernel import overwrite_with_slopes

    logits = (factor * torch.randn(5, vocabulary)).to(dtype)
    targets = torch.randint(vocabulary, (5,))
    targets[0], targets[-1] = 0, vocabulary - 1
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, reduction="none")
    (slope,) = torch.autograd.grad(losses.sum(), exact)
    ours = logits.to(DEVICE)
    found = overwrite_with_slopes(ours, targets.to(DEVICE)).cpu()
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=2e-6)
    assert float((ours.cpu().double() - slope).abs().max()) < tolerance


@needs_kernel
def test_a_target_outside_the_vocabulary_makes_the_loss_nan() -> None:
    from mupscale.readout_kernel import overwrite_with_slopes

    losses = overwrite_with_slopes(torch.randn(3, 100, device=DEVICE), torch.tensor([-100, 1, 100], device=DEVICE))
    assert losses.isnan().tolist() == [True, False, True]


@needs_kernel
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_both_ways_agree(dtype: torch.dtype, tolerance: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(readout, "uses_kernel", lambda x: True)
    x, weight, targets = (each.detach().to(DEVICE) for each in problem(dtype, 64, 16, 1000))
    x.requires_grad_(), weight.requires_grad_()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return ReadoutLoss.apply(x, weight, targets)

    ours = with_gradients((torch.compile(loss, fullgraph=True) if compiled else loss)(x, weight), x, weight)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    theirs = with_gradients(F.cross_entropy(exact[0] @ exact[1].T, targets), *exact)
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_gap(mine, other) < tolerance


@needs_kernel
def test_the_operator_does_what_it_declares() -> None:
    torch.library.opcheck(slopes_in_place, [each.detach().to(DEVICE) for each in problem(torch.float32)])


# --- how often the logits are read: counted without a GPU


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (True, ["getitem"]),  # from what the operator returns
        (False, ["mm", "eq", "sub", "exp", "_to_copy", "sub"]),
    ],
)
def test_tensors_of_the_size_of_the_logits(kernel: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward and a backward pass, views aside; a compiler fuses the second list, and reads the logits thrice."""
    monkeypatch.setattr(readout, "uses_kernel", lambda x: kernel)
    x, weight, targets = problem(torch.float32)

    def step(x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
        return with_gradients(ReadoutLoss.apply(x, weight, targets), x, weight)

    graph = make_fx(step, tracing_mode="fake")(x, weight, targets).graph
    large = [
        node.target
        for node in graph.nodes
        if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].numel() == len(x) * VOCABULARY
    ]
    made = [target for target in large if not getattr(target, "is_view", False)]
    assert [target.__name__.partition(".")[0] for target in made] == expected


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("cpu", torch.bfloat16, False), ("cuda", torch.bfloat16, True), ("cuda", torch.float64, False)],
)
def test_the_kernel_is_for_gpus_and_low_precision(
    device: str, dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readout, "KERNEL", True)

    x: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    assert readout.uses_kernel(x) is expected
