"""Parameters whose pieces grow by different factors: their training goes on exactly."""

from itertools import pairwise

import pytest
import torch
from nets import OPTIMIZERS, backward, mup
from tiers import slow_except
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import mupscale


class Concat(nn.Module):
    """A layer that reads its width beside three fixed features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.fc = nn.Linear(3, width), nn.Linear(width + 3, width)
        self.readout = mupscale.Readout(width, 2)

    @staticmethod
    def blocks(width: int, k: int) -> dict:
        return {"fc.weight": {1: [(width, 1, k), (3, 1, 1)]}}

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.fc(torch.cat([self.inputs(x).relu(), x], -1)).tanh())


class MultiQuery(nn.Module):
    """Fused QKV of growing query heads over one key and value head; head_dim 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.qkv, self.project = nn.Linear(3, width), nn.Linear(width, width + 8), nn.Linear(width, width)
        self.readout = mupscale.Readout(width, 2)

    @staticmethod
    def blocks(width: int, k: int) -> dict:
        return {"qkv.weight": {0: [(width, 4, k), (8, 8, 1)]}, "project.weight": {1: 4}}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        y = self.qkv(x)
        q = y[..., :-8].unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = (t[:, None] for t in y[..., -8:].chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        return self.readout((x + self.project(y.transpose(1, 2).flatten(2))).tanh())


class ConcatReadout(nn.Module):
    """The readout itself reads width beside fixed features.

    The multiplier of a muP readout falls by the growth of all of its inputs; weights and rates make up for it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.readout = nn.Linear(3, width), mupscale.Readout(width + 3, 2)

    @staticmethod
    def blocks(width: int, k: int) -> dict:
        return {"readout.weight": {1: [(width, 1, k), (3, 1, 1)]}}

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.cat([self.inputs(x).relu(), x], -1))


def sequences() -> Tensor:
    return torch.randn(6, 5, 3)


WIDTHS = (8, 16, 48)


def follow(kind: type, make_optimizer, *, is_mup: bool, closure: bool = False) -> float:
    """The largest relative drift of the loss in 30 steps after the last upscale, in float64 with clipping."""
    torch.manual_seed(0)
    models = [(mup(kind, width) if is_mup else kind(width)).double() for width in WIDTHS]
    optimizer = make_optimizer(models[0].parameters())
    if is_mup:
        mupscale.apply_mup(optimizer, models[0])
    torch.manual_seed(1)
    batches = [sequences() for _ in range(4)]

    def step(model: nn.Module, optimizer: Optimizer, index: int) -> float:
        def gradients() -> Tensor:
            loss = backward(model, batches[index % 4])
            assert mupscale.clip_grad_norm_(model, 0.05) > 0.05
            return loss

        return (optimizer.step(gradients) if closure else (gradients(), optimizer.step())[0]).item()

    runs = [(models[0], optimizer)]
    for index in range(5):
        step(*runs[0], index)
    for (before, after), wide in zip(pairwise(WIDTHS), models[1:], strict=True):
        report = mupscale.upscale(
            runs[-1][0], wide, runs[-1][1], hints=mupscale.Hints(blocks=kind.blocks(before, after // before))
        )
        assert any(entry.mixed for entry in report.plan.parameters.values())
        runs.append((wide, report.optimizer))
    drift = 0.0
    for index in range(5, 35):
        losses = [step(*run, index) for run in runs]
        drift = max(drift, *(abs(loss / losses[0] - 1) for loss in losses[1:]))
        if index == 5:
            # the step leaves no trace of its reference units
            torch.testing.assert_close(runs[-1][0].readout.bias, runs[0][0].readout.bias, rtol=1e-10, atol=1e-12)
    return drift


@pytest.mark.parametrize(("is_mup", "closure"), [(False, True), (True, False)])
@pytest.mark.parametrize("optimizer_name", slow_except(OPTIMIZERS, "adamw"))
@pytest.mark.parametrize("kind", [Concat, MultiQuery, ConcatReadout])
def test_unlike_pieces_are_exact_after_two_upscales(kind: type, optimizer_name: str, is_mup: bool, closure: bool):
    assert follow(kind, OPTIMIZERS[optimizer_name], is_mup=is_mup, closure=closure) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_unlike_pieces_need_their_hooks(optimizer_name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mupscale.widening.stepping._work_of", lambda _: [])
    assert follow(Concat, OPTIMIZERS[optimizer_name], is_mup=False) > 1e-6


def test_a_weight_without_update_is_not_rounded():
    """Converting to reference units and back would move it by a rounding error at each step."""
    narrow, wide = Concat(4), Concat(12)
    optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
    optimizer = mupscale.upscale(narrow, wide, optimizer, hints=mupscale.Hints(blocks=Concat.blocks(4, 3))).optimizer
    before = wide.fc.weight.detach().clone()
    wide.fc.weight.grad = gradient = torch.zeros_like(before)
    optimizer.step()
    assert torch.equal(wide.fc.weight, before)
    assert wide.fc.weight.grad is gradient
