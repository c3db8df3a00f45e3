"""Small models with every trap that a model nobody prepared may hold: each is built by its width."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD = 4
TOKENS = torch.arange(12).reshape(2, 6) * 5 % 11


class Gain(nn.Module):
    """An RMS norm of a type that no library knows, with a gain of w or of 1 + w."""

    def __init__(self, width: int, shifted: bool = False) -> None:
        super().__init__()
        self.shifted = shifted
        self.weight = nn.Parameter(torch.zeros(width) if shifted else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return x * (self.weight + 1 if self.shifted else self.weight)


class Attention(nn.Module):
    """Fused queries, keys and values, side by side or head by head, with as many key heads as asked for."""

    def __init__(self, width: int, heads: int, keys: int, by_head: bool = False) -> None:
        super().__init__()
        self.heads, self.keys, self.size, self.by_head = heads, keys, width // heads, by_head
        self.qkv = nn.Linear(width, (heads + 2 * keys) * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = self.qkv(x)
        if self.by_head:
            q, k, v = mixed.view(batch, length, self.heads, 3, self.size).transpose(1, 2).unbind(3)
        else:
            parts = mixed.split([self.heads * self.size, self.keys * self.size, self.keys * self.size], -1)
            q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in parts)
            k, v = (part.repeat_interleave(self.heads // self.keys, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """Raw three-axis weights: gate and up in one, a router, and a shared scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2, 3 * width, width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(2, width, 3 * width // 2) / math.sqrt(width))
        self.router = nn.Parameter(torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        share = F.linear(x, self.router).softmax(-1)
        gate, up = torch.einsum("btw,eow->beto", x, self.gate_up).chunk(2, -1)
        made = torch.einsum("beto,ewo->betw", F.silu(gate) * up, self.down)
        return torch.einsum("betw,bte->btw", made, share)


class Decoder(nn.Module):
    """Two layers, with what a family of language models may have of its own."""

    def __init__(
        self,
        width: int,
        heads: int | None = None,
        keys: int | None = None,
        by_head: bool = False,
        tied: bool = False,
        scaled: bool = False,
        shifted: bool = False,
        experts: bool = False,
    ) -> None:
        super().__init__()
        heads = width // HEAD if heads is None else heads
        self.embed = nn.Embedding(11, width)
        self.scale = math.sqrt(width) if scaled else 1.0
        self.position = nn.Parameter(torch.randn(1, 6, width))
        self.norms = nn.ModuleList(Gain(width, shifted) for _ in range(4))
        self.attentions = nn.ModuleList(
            Attention(width, heads, heads if keys is None else width // HEAD // keys, by_head) for _ in range(2)
        )
        self.feed = nn.ModuleList(
            Experts(width) if experts else nn.Sequential(nn.Linear(width, 2 * width), nn.GLU(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.last = Gain(width, shifted)
        self.head = nn.Linear(width, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.position
        for layer in range(2):
            x = x + self.attentions[layer](self.norms[2 * layer](x))
            x = x + self.feed[layer](self.norms[2 * layer + 1](x))
        return self.head(self.last(x))


class Mixture(nn.Module):
    """Convolutions, a concatenation with fixed features, a depthwise layer, batch norm, a flattened readout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, width, 3, padding=1)
        self.deep = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.norm = nn.BatchNorm1d(width)
        self.mixed = nn.Conv1d(width + 3, 2 * width, 1)
        self.gated = nn.Conv1d(width, width, 1)
        self.slope = nn.PReLU(width)
        self.read = nn.Linear(width * 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(self.deep(self.first(x)))
        made = F.glu(self.mixed(torch.cat([made, x], 1)), 1)
        return self.read(self.slope(self.gated(made)).flatten(1))


class Recurrent(nn.Module):
    """Gates side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.lstm, self.read = nn.Linear(3, width), nn.LSTM(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.lstm(self.first(x))[0])


class Sinusoid(nn.Module):
    """A table that is a function of the width, and no part of what is saved: it cannot grow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(11, width), nn.Linear(width, 2)
        angles = torch.arange(6)[:, None] / 100 ** (torch.arange(width) / width)
        self.register_buffer("table", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read((self.embed(tokens) + self.table).tanh())


Build = Callable[[int], nn.Module]

_IMAGES = torch.linspace(-2, 2, 60, dtype=torch.float64).sin().reshape(4, 3, 5)

MODELS: dict[str, tuple[Build, Tensor]] = {
    "heads side by side": (Decoder, TOKENS),
    "heads one after another": (lambda width: Decoder(width, by_head=True), TOKENS),
    "grouped queries": (lambda width: Decoder(width, keys=2), TOKENS),
    "larger heads": (lambda width: Decoder(width, heads=2), TOKENS),
    "larger heads one after another": (lambda width: Decoder(width, heads=2, by_head=True), TOKENS),
    "tied": (lambda width: Decoder(width, tied=True), TOKENS),
    "scaled embedding": (lambda width: Decoder(width, scaled=True), TOKENS),
    "tied, scaled, gain 1 + w": (lambda width: Decoder(width, tied=True, scaled=True, shifted=True), TOKENS),
    "experts": (lambda width: Decoder(width, experts=True), TOKENS),
    "convolutions": (Mixture, _IMAGES),
    "recurrent": (Recurrent, _IMAGES.transpose(1, 2)),
}
"""A model by its width, and what it reads."""
