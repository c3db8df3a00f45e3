"""The comparison of two steps: what is borrowed is put back, and what differs is found."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import mupscale
from mupscale.checks.real_step import GradientMasks, Steps, StepTolerance, borrowed, comparing

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self, n: int, mid: Callable[..., Tensor] = lambda s, h: torch.tanh(s.b(h))) -> None:
        super().__init__()
        self.n, self.t, self.seen, self.mid, self.items = n, 0, [], mid, iter(range(999))
        self.a, self.b, self.c = nn.Linear(3, n), nn.Linear(n, n), nn.Linear(n, 2)
        self.register_buffer("r", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.t += 1
        self.seen.append(next(self.items))
        return self.c(self.mid(self, torch.tanh(self.a(x.to(self.c.weight)))))


OUTSIDE = torch.zeros(3)


def written_outside(s: Any, h: Tensor) -> Tensor:
    OUTSIDE.add_(h.detach().to(OUTSIDE)[0, 0])
    return torch.tanh(s.b(h))


def take_step(model: nn.Module, optimizers: Any) -> None:
    torch.manual_seed(0)
    (model(X) - 1).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def trained(build: Callable[[int], nn.Module], make: Callable[..., Optimizer], n: int = 8) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = build(n)
    optimizer = make(model.parameters())
    for _ in range(3):
        take_step(model, [optimizer])
        optimizer.zero_grad()
    return model, optimizer


def compared(
    build: Callable[[int], nn.Module],
    make: Callable[..., Optimizer] = lambda p: AdamW(p, lr=1e-2),
    n: int = 16,
) -> Steps:
    """The steps of a trained model and its wide one, neither of which changes."""
    narrow, optimizer = trained(build, make)
    wide = build(n)
    plan = mupscale.plan(narrow, wide)
    held = [*narrow.parameters(), *wide.parameters(), *narrow.buffers()]
    pointers = [x.data_ptr() for x in held]
    before = copy.deepcopy((narrow.state_dict(), wide.state_dict(), optimizer.state_dict()))
    counters, random_state, outside = (narrow.t, list(narrow.seen), wide.t), torch.get_rng_state(), OUTSIDE.clone()
    masks = GradientMasks(plan, StepTolerance())
    with torch.random.fork_rng(), comparing(narrow, wide, [optimizer], plan, masks) as compare:
        steps = compare(take_step, lambda model: None)
    assert [x.data_ptr() for x in held] == pointers
    torch.testing.assert_close((narrow.state_dict(), wide.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    assert (narrow.t, narrow.seen, wide.t) == counters
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(OUTSIDE, outside)
    return steps


@pytest.mark.parametrize("n", [16, 24, 12])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-2),
        lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
        lambda p: RMSprop(p, lr=1e-3),
        lambda p: SGD(p, lr=1.0),
    ],
)
def test_growing_and_stepping_commute(make: Callable[..., Optimizer], n: int):
    found = compared(Net, make, n)
    assert [str(each) for each in found.differences] == []
    assert found.updates < 1e-9


@pytest.mark.parametrize(
    ("mid", "grows"),
    [
        (written_outside, False),
        (lambda s, h: F.dropout(torch.tanh(s.b(h)), 0.3) + 0.1 * torch.randn_like(h), True),
        (lambda s, h: torch.tanh(s.b(h)) * torch.rand(len(h), 1, dtype=h.dtype), False),
    ],
)
def test_writes_elsewhere_are_undone_and_random_numbers_replayed(mid: Callable[..., Tensor], grows: bool):
    found = compared(lambda n: Net(n, mid))
    assert found.differences == []
    assert (found.wide.grows, found.wide.is_not_replayed) == (grows, False)


def test_tensors_that_share_memory_share_their_copies():
    model = Net(4)
    model.view = model.a.weight.detach()[:2]
    with borrowed([model]):
        assert model.a.weight.dtype == model.view.dtype == torch.float64
        model.a.weight.data.fill_(3.0)
        assert bool((model.view == 3).all())
    assert model.a.weight.dtype == torch.float32
    assert torch.equal(model.view, model.a.weight[:2])
    assert model.view.data_ptr() == model.a.weight.data_ptr()


def test_a_graph_that_is_still_held_does_not_round_gradients():
    """The node that accumulates a gradient knows the dtype with which it was made."""
    model = Net(4)
    loss = model(X).square().mean()
    loss.backward()
    with borrowed([model]):
        model(X).square().mean().backward()
        assert model.a.weight.grad is not None
        assert model.a.weight.grad.dtype == torch.float64
        assert bool((model.a.weight.grad != model.a.weight.grad.float().double()).any())
    assert model.a.weight.grad.dtype == torch.float32
