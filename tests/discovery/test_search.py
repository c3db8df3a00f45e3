"""What `discover` needs no search for, what it refuses before one, and what is carried over to other sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mupscale
from mupscale.errors import UserError


class Excited(nn.Module):
    """Squeeze and excitation around a depthwise layer, before fixed groups: one layout serves all, unit by unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, width, 3), nn.BatchNorm1d(width)
        self.deep = nn.Conv1d(width, width, 3, groups=width)
        self.squeeze, self.excite = nn.Conv1d(width, width // 4, 1), nn.Conv1d(width // 4, width, 1)
        self.grouped, self.last = nn.Conv1d(width, width, 1, groups=4), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.norm(self.first(x)).relu())
        x = x * self.excite(self.squeeze(x.mean(-1, keepdim=True)).relu()).sigmoid()
        return self.last(self.grouped(x).relu().mean(-1))


def test_a_model_that_grows_as_it_is_planned_needs_no_search() -> None:
    inputs = torch.randn(4, 3, 9)
    found = mupscale.discover(Excited(8), Excited(16), lambda model: model(inputs))
    assert (found.roles, found.rescale) == ({}, {})
    assert found.blocks["grouped.weight"] == {0: 1, 1: 1}
    assert found.passes <= 3


def test_what_cannot_be_exact_is_refused_with_the_reason_of_the_plan() -> None:
    inputs = torch.randn(2, 3, 8)
    narrow, wide = (nn.Sequential(nn.Linear(8, n), nn.TransformerEncoderLayer(n, 2, n)) for n in (8, 16))
    with pytest.raises(UserError, match=r"module '1.self_attn' \(MultiheadAttention\) grows head_dim 4 → 8"):
        mupscale.discover(narrow, wide, lambda model: model(inputs))


class Heads(nn.Module):
    """Four units for each head, and numbers for each head: a temperature alone, and two scales side by side."""

    def __init__(self, width: int, scaled: bool = False) -> None:
        super().__init__()
        self.first, self.qkv, self.last = nn.Linear(3, width), nn.Linear(width, 3 * width), nn.Linear(width, 2)
        self.temperature = nn.Parameter(1 + torch.rand(width // 4, 1, 1))
        self.scales = nn.Parameter(1 + torch.rand(width // 2)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        if self.scales is not None:
            of_queries, of_values = self.scales.chunk(2)
            q, v = q * of_queries[:, None, None], v * of_values[:, None, None]
        attention = (q @ k.mT * self.temperature).softmax(-1)
        return self.last((attention @ v).transpose(1, 2).flatten(2))


def test_a_single_head_is_carried_over_to_many() -> None:
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    found = mupscale.discover(Heads(4), Heads(8), lambda model: model(inputs))
    narrow, wide = Heads(16).double(), Heads(32).double()
    mupscale.upscale(narrow, wide, hints=found.resolved(narrow, wide))
    assert torch.allclose(wide(inputs), narrow(inputs), rtol=1e-12)


@pytest.mark.slow
def test_a_single_head_that_does_not_show_how_many_grow_is_refused() -> None:
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    found = mupscale.discover(Heads(4, scaled=True), Heads(8, scaled=True), lambda model: model(inputs))
    with pytest.raises(UserError, match=r"'temperature' has 1 unit in the model .* where a width is 1"):
        found.resolved(Heads(16, scaled=True), Heads(32, scaled=True))


class Joined(nn.Module):
    """Reads two widths and fixed features side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(5, width), nn.Linear(5, width // 2)
        self.middle, self.last = nn.Linear(width + width // 2 + 5, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.cat([self.first(x).tanh(), self.other(x).tanh(), x], -1)).tanh())


def test_an_axis_that_is_joined_of_known_widths_is_carried_over() -> None:
    inputs = torch.randn(7, 5, dtype=torch.float64)
    found = mupscale.discover(Joined(8), Joined(16), lambda model: model(inputs))
    narrow, wide = Joined(20).double(), Joined(40).double()
    resolved = found.resolved(narrow, wide)
    assert resolved.blocks["middle.weight"][1] == [(20, 20, 2), (10, 10, 2), (5, 5, 1)]
    mupscale.upscale(narrow, wide, hints=resolved)
    assert torch.allclose(wide(inputs), narrow(inputs), rtol=1e-12)


class Scaled(nn.Module):
    """A linear layer whose weights, and not its bias, are scaled by their number."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.w / self.w.shape[1] ** 0.5, self.b)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (
            # interleaved channels serve both numbers of groups, and the flattened ones follow them
            lambda n: nn.Sequential(
                nn.Conv1d(3, n, 1), nn.ReLU(), nn.Conv1d(n, n, 3, groups=4), nn.ReLU(),
                nn.Conv1d(n, n, 3, groups=2), nn.Flatten(), nn.Linear(5 * n, 2),
            ),
            (3, 9),
        ),
        (lambda n: nn.Sequential(Scaled(3, n), nn.Tanh(), Scaled(n, n), nn.Tanh(), Scaled(n, 2)), (3,)),
    ],
    ids=["the plan leads further than the first guess", "of a layer, the matrix alone is rescaled"],
)  # fmt: skip
def test_a_plan_is_found(build: Callable[[int], nn.Module], shape: tuple[int, ...]) -> None:
    narrow, wide, inputs = build(8), build(16), torch.randn(4, *shape)
    assert mupscale.upscale(narrow, wide, call=lambda model: model(inputs)).exact is True
