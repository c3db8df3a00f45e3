"""Residual blocks that nobody prepared: new ones add nothing, whatever ends their branches, alone and with width."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale
from mupscale.errors import UserError


class GroupNormed(nn.Module):
    ends = ("c2.weight", "c2.bias")

    def __init__(self, w: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(4, w), nn.Conv2d(w, w, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(4, w), nn.Conv2d(w, w, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c2(F.silu(self.n2(self.c1(F.silu(self.n1(x))))))


class SqueezeExcitation(nn.Module):
    ends = ("norm.weight", "norm.bias")

    def __init__(self, w: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(w, w, 3, padding=1, bias=False), nn.BatchNorm2d(w)
        self.down, self.up = nn.Conv2d(w, w // 4, 1), nn.Conv2d(w // 4, w, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        return x + h * torch.sigmoid(self.up(F.relu(self.down(h.mean((2, 3), keepdim=True)))))


class SpatialGating(nn.Module):
    ends = ("down.weight", "down.bias")

    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(w), nn.Linear(w, 4 * w), nn.LayerNorm(2 * w)
        self.mix, self.down = nn.Linear(6, 6), nn.Linear(2 * w, w)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(a * self.mix(self.gate(b).transpose(1, 2)).transpose(1, 2))


class Fourier(nn.Module):
    ends = ("gain", "down.weight", "down.bias")

    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(w), nn.Linear(w, 2 * w), nn.Linear(2 * w, w)
        self.gain = nn.Parameter(torch.ones(w))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * torch.fft.fft(self.norm(x), dim=1).real
        return x + self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    ends = tuple(f"down.{expert}.{kind}" for expert in range(3) for kind in ("weight", "bias"))

    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm, self.route = nn.RMSNorm(w), nn.Linear(w, 3)
        self.up = nn.ModuleList(nn.Linear(w, 2 * w) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * w, w) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        shares = self.route(h).softmax(-1).unbind(-1)
        experts = zip(shares, self.up, self.down, strict=True)
        return x + sum(share[..., None] * down(F.silu(up(h))) for share, up, down in experts)


class GatedConvolution(nn.Module):
    ends = ("out.weight", "out.bias")

    def __init__(self, w: int) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(w, 2 * w, 3, padding=1), nn.Conv1d(w, w, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.conv(x.transpose(1, 2)).chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b)).transpose(1, 2)


class Modulated(nn.Module):
    """As in diffusion transformers: shift, scale and gate come from what conditions it."""

    ends = ("down.weight", "down.bias")

    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm, self.condition = nn.LayerNorm(w, elementwise_affine=False), nn.Linear(w, 3 * w)
        self.up, self.down = nn.Linear(w, 2 * w), nn.Linear(2 * w, w)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate = self.condition(F.silu(x.mean(1, keepdim=True))).chunk(3, -1)
        return x + gate * self.down(F.gelu(self.up(self.norm(x) * (1 + scale) + shift)))


class Recurrent(nn.Module):
    ends = ("out.weight", "out.bias")

    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm, self.gru, self.out = nn.LayerNorm(w), nn.GRU(w, w, batch_first=True), nn.Linear(w, w)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.gru(self.norm(x))[0])


class Sandwich(nn.Module):
    """A norm follows the branch: with a zero projection before it, gradients would be hundreds of times too large."""

    ends = ("after.weight",)

    def __init__(self, w: int) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(w), nn.RMSNorm(w)
        self.up, self.down = nn.Linear(w, 2 * w, bias=False), nn.Linear(2 * w, w, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.down(F.silu(self.up(self.norm(x)))))


class PostNorm(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(w, 2 * w), nn.Linear(2 * w, w), nn.LayerNorm(w)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.silu(self.up(x))))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module], w: int, layers: int) -> None:
        super().__init__()
        self.is_image = block in (GroupNormed, SqueezeExcitation)
        self.enter = nn.Conv2d(3, w, 3, padding=1) if self.is_image else nn.Linear(5, w)
        self.blocks = nn.ModuleList(block(w) for _ in range(layers))
        self.leave = nn.Linear(w, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((2, 3)) if self.is_image else x)


BLOCKS = [
    GroupNormed, SqueezeExcitation, SpatialGating, Fourier, Experts, GatedConvolution, Modulated, Recurrent, Sandwich,
]  # fmt: skip


def inputs(net: Net) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2, 3, 4, 4, dtype=torch.float64) if net.is_image else torch.randn(2, 6, 5, dtype=torch.float64)


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("block", BLOCKS)
def test_new_blocks_add_nothing_and_learn(block: type[nn.Module], width: int) -> None:
    torch.manual_seed(1)
    narrow, wide = Net(block, 8, 2).double(), Net(block, width, 4).double()
    x = inputs(narrow)
    optimizer = torch.optim.AdamW(narrow.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        narrow(x).square().mean().backward()
        optimizer.step()
    report = mupscale.upscale(narrow, wide, optimizer, call=lambda model: model(x), depth="identity")
    assert report.exact is True
    filled = {name for name, entry in report.plan.parameters.items() if entry.fill is not None}
    assert filled == {f"blocks.{layer}.{end}" for layer in (1, 3) for end in block.ends}
    narrow.eval()
    wide.eval()
    assert (wide(x) - narrow(x)).abs().max() <= 1e-12 * narrow(x).abs().max()
    wide.zero_grad()
    wide(x).square().mean().backward()
    for name in filled:
        gradient = wide.get_parameter(name).grad
        assert gradient is not None
        assert gradient.any(), f"{name} cannot learn"


def test_a_norm_behind_the_sum_is_refused_with_the_alternatives() -> None:
    narrow, wide = Net(PostNorm, 8, 2).double(), Net(PostNorm, 8, 4).double()
    x = inputs(narrow)
    with pytest.raises(UserError, match=r'post-norm.* depth="interleave" or depth="stack"'):
        mupscale.upscale(narrow, wide, call=lambda model: model(x), depth="identity")
