"""Whether the code of a module may sum over the width of a parameter: the notes of the plan on its guesses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale


class Model(nn.Module):
    """A layer of `width` units, and one parameter `p` that follows it."""

    def __init__(self, width: int, shape: Callable[[int], tuple[int, ...]]) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.p = nn.Parameter(torch.randn(shape(width)))


class Query(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.p


class Product(Model):
    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) * self.p).sum(dim=-1)


class Gain(Model):
    """Also with a sum over the rows of the batch, and where a matrix sums over the product."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.p
        return ((h * self.p).sum(0) + self.p) @ torch.ones(h.shape[-1])


class Outer(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("n,w->nw", self.first(x).sum(-1), self.p) + torch.outer(self.p, self.p)


class Heads(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nw,ewc->nec", self.first(x), self.p)


class Experts(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(self.p.shape[0], -1, -1), self.p)


class Position(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)[None] + self.p[:, : x.shape[0]]


class Convolution(Model):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.p)


class Attended(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.p @ self.first(x).transpose(-2, -1)


class Held(nn.Module):
    """The parameter is used by the module around the one that holds it."""

    def __init__(self, width: int, shape: Any) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Gain(width, shape)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0].first(x) @ self.inner[0].p


CASES = [
    (Query, lambda w: (w,), True),
    (Product, lambda w: (w,), True),
    (Product, lambda w: (1, 2, w), True),
    (Held, lambda w: (w,), True),
    (Gain, lambda w: (w,), False),
    (Outer, lambda w: (w,), False),
    (Heads, lambda w: (2, w, 3), True),
    (Heads, lambda w: (2, 4, w), False),
    (Experts, lambda w: (2, w, 3), True),
    (Experts, lambda w: (2, 3, w), False),
    (Position, lambda w: (1, 5, w), False),
    (Convolution, lambda w: (3, w, 5), True),
    (Convolution, lambda w: (w, 3, 5), False),
    (Attended, lambda w: (1, 4, w), True),
    (Attended, lambda w: (1, w, 4), False),
]


@pytest.mark.parametrize(("kind", "shape", "summed"), CASES)
def test_a_guess_that_may_be_wrong_is_noted(kind: Any, shape: Any, summed: bool) -> None:
    notes = [note for note in mupscale.plan(kind(4, shape), kind(8, shape)).notes if "treated as a vector" in note]
    assert bool(notes) == summed, notes
    assert all("but a forward pass may sum over its width; if its width is summed over" in note for note in notes)


def test_a_given_role_is_no_guess_and_the_note_names_the_right_one() -> None:
    narrow, wide = (Query(width, lambda w: (w,)) for width in (4, 8))
    settings: Any = {"optimizer": torch.optim.AdamW, "batches": [torch.randn(5, 3)], "steps": 3}
    settings["loss"] = lambda model, x: (model(x) - 1).square().mean()
    (note,) = mupscale.plan(narrow, wide).notes
    assert note.endswith('give roles={"p": "readout"}')
    assert not mupscale.verify(narrow, wide, **settings)
    assert mupscale.plan(narrow, wide, roles={"p": "readout"}).notes == ()
    assert mupscale.verify(narrow, wide, roles={"p": "readout"}, **settings)
