"""Architectures that nobody prepared for growth, to upscale with a check: what is exact, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """A module from a function and its parts."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


seq = nn.Sequential
IN, OUT, WORDS = 6, 4, 11


def act(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Net(lambda s, x: function(x))


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


# ------------------------------------------------------------------------------------ the list of the first report


def conv_flatten(n: int) -> nn.Module:
    return seq(nn.Conv2d(3, n, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * n, OUT))


def tied_head(n: int) -> nn.Module:
    return Net(
        lambda s, t: F.linear(s.norm(torch.tanh(s.hidden(s.emb(t)))), s.emb.weight),
        emb=nn.Embedding(WORDS, n),
        hidden=nn.Linear(n, n),
        norm=nn.LayerNorm(n),
    )


def tied_autoencoder(n: int) -> nn.Module:
    return Net(lambda s, x: F.linear(torch.tanh(s.enc(x)), s.enc.weight.T), enc=nn.Linear(IN, n))


def attention(n: int, heads: int | None = None, dim: int | None = None) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.inp(x)
        shape = (heads, -1) if heads else (-1, dim)
        q, k, v = s.qkv(h).view(*h.shape[:2], 3, *shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return s.out(h + s.proj(y))

    return Net(
        forward, inp=nn.Linear(IN, n), qkv=nn.Linear(n, 3 * n), proj=nn.Linear(n, n), out=nn.Linear(n, OUT)
    )  # fmt: skip


def channel_shuffle(n: int) -> nn.Module:
    grouped = nn.Conv2d(n, n, 3, groups=2)
    return seq(nn.Conv2d(3, n, 1), nn.ReLU(), nn.ChannelShuffle(2), grouped, nn.ReLU(), nn.Conv2d(n, OUT, 1))


def softmax_over_width(n: int) -> nn.Module:
    return seq(nn.Linear(IN, n), nn.Softmax(-1), nn.Linear(n, OUT))


def two_layers(n: int, end: Callable[[Tensor], Tensor]) -> nn.Module:
    return Net(lambda s, x: end(s.b(torch.tanh(s.a(x)))), a=nn.Linear(IN, n), b=nn.Linear(n, n))


def hidden(n: int, middle: nn.Module) -> nn.Module:
    return seq(nn.Linear(IN, n), middle, nn.Linear(n, OUT))


# ------------------------------------------------------------------------------------------------ perceptrons


def mlp(n: int) -> nn.Module:
    return seq(nn.Linear(IN, n), nn.ReLU(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, OUT))


def bare_parameters(n: int) -> nn.Module:
    return Net(
        lambda s, x: torch.tanh(x @ s.a + s.bias) @ s.b,
        a=drawn(IN, n),
        bias=nn.Parameter(torch.zeros(n)),
        b=drawn(n, OUT),
    )


def film(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        scale, shift = s.film(x[:, :2]).chunk(2, -1)
        return s.out(torch.relu((1 + scale) * s.body(x) + shift))

    return Net(forward, film=nn.Linear(2, 2 * n), body=nn.Linear(IN, n), out=nn.Linear(n, OUT))


def complex_weights(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.view_as_real(x.to(s.a.dtype) @ s.a)
        return s.out(torch.tanh(h[..., 0] * h[..., 1]))

    return Net(forward, a=nn.Parameter(torch.randn(IN, n, dtype=torch.complex64)), out=nn.Linear(n, OUT))


def hard_experts(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        gates = s.router(x).softmax(-1)
        gates = gates * F.one_hot(gates.argmax(-1), 3)
        made = torch.stack([down(F.gelu(up(x))) for up, down in zip(s.up, s.down, strict=True)], -1)
        return (made * gates[:, None]).sum(-1)

    up = nn.ModuleList(nn.Linear(IN, n) for _ in range(3))
    return Net(forward, router=nn.Linear(IN, 3), up=up, down=nn.ModuleList(nn.Linear(n, OUT) for _ in range(3)))


def capsules(n: int) -> nn.Module:
    """n capsules of 3 numbers each, squashed one by one."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x).view(len(x), -1, 3)
        norm = h.norm(dim=-1, keepdim=True)
        return s.out((h * norm / (1 + norm.square())).flatten(1))

    return Net(forward, a=nn.Linear(IN, 3 * n), out=nn.Linear(3 * n, OUT))


def cumulative(n: int) -> nn.Module:
    return hidden(n, act(lambda x: torch.tanh(x).cumsum(-1)))


def halves_in_order(n: int) -> nn.Module:
    """Units before the middle of the axis are treated in another way."""
    return hidden(n, act(lambda x: torch.cat([x[..., : x.shape[-1] // 2].sin(), x[..., x.shape[-1] // 2 :]], -1)))


# ------------------------------------------------------------------------------------------------ images


def cnn(n: int) -> nn.Module:
    return seq(
        nn.Conv2d(3, n, 3), nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, n, 3), nn.BatchNorm2d(n), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, OUT),
    )  # fmt: skip


def dense_net(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        for conv in s.convs:
            h = torch.cat([h, torch.relu(conv(h))], 1)
        return s.out(h.mean((2, 3)))

    convs = nn.ModuleList([nn.Conv2d(n, n, 3, padding=1), nn.Conv2d(2 * n, n, 3, padding=1)])
    return Net(forward, stem=nn.Conv2d(3, n, 1), convs=convs, out=nn.Linear(3 * n, OUT))


def channel_convolution(n: int) -> nn.Module:
    """ECA: a convolution along the channels, whose neighbours change."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.relu(s.stem(x))
        gate = torch.sigmoid(s.conv(h.mean((2, 3))[:, None])[:, 0])
        return s.out(h.mean((2, 3)) * gate)

    return Net(forward, stem=nn.Conv2d(3, n, 3), conv=nn.Conv1d(1, 1, 3, padding=1), out=nn.Linear(n, OUT))


# ------------------------------------------------------------------------------------------------ sequences


def both_directions(n: int) -> nn.Module:
    gru = nn.GRU(IN, n, batch_first=True, num_layers=2, bidirectional=True)
    return Net(lambda s, x: s.out(s.rnn(x)[0]), rnn=gru, out=nn.Linear(2 * n, OUT))


@dataclass
class Heads:
    policy: Tensor
    value: Tensor
    names: tuple[str, ...] = ("policy", "value")


def several_heads(n: int) -> nn.Module:
    return Net(
        lambda s, x: Heads(s.policy(s.body(x)), s.value(s.body(x))),
        body=seq(nn.Linear(IN, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU()),
        policy=nn.Linear(n, OUT),
        value=nn.Linear(n, 1),
    )


def changes_its_input(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        x.mul_(2).clamp_(-1, 1)
        return s.body(x)

    return Net(forward, body=mlp(n))


class Case(NamedTuple):
    build: Callable[[int], nn.Module]
    data: str
    """Of which kind its batches are."""
    n: int = 8
    exact: bool = True
    """At twice the width; if not, it is refused."""


CASES = {
    # of the first report
    "conv → flatten → linear": Case(conv_flatten, "images", 4),
    "tied head, norm before it": Case(tied_head, "tokens"),
    "tied autoencoder": Case(tied_autoencoder, "vectors", exact=False),
    "attention, heads fixed": Case(lambda n: attention(n, heads=2), "sequences"),
    "softmax over width": Case(softmax_over_width, "vectors"),
    "tanh, sum over width": Case(lambda n: two_layers(n, lambda h: torch.tanh(h).sum(-1)), "vectors", exact=False),
    # perceptrons
    "bare parameters": Case(bare_parameters, "vectors"),
    "FiLM": Case(film, "vectors"),
    "complex weights": Case(complex_weights, "vectors"),
    "hard experts": Case(hard_experts, "vectors"),
    "capsules": Case(capsules, "vectors", 4),
    "cumulative sum over width": Case(cumulative, "vectors", exact=False),
    "halves in order": Case(halves_in_order, "vectors"),
    "several heads": Case(several_heads, "vectors"),
    "changes its input": Case(changes_its_input, "vectors"),
    # images
    "CNN": Case(cnn, "images", 4),
    "DenseNet": Case(dense_net, "images", 4),
    "convolution over channels": Case(channel_convolution, "images", 4, exact=False),
    # sequences
    "two GRUs, both directions": Case(both_directions, "sequences", 4),
}


def batch(data: str) -> Tensor:
    if data == "tokens":
        return torch.randint(WORDS, (4, 7))
    return torch.randn(
        *{"vectors": (5, IN), "sequences": (2, 7, IN), "images": (3, 3, 8, 8)}[data], dtype=torch.float64
    )
