"""Architectures that nobody prepared for growth, to upscale with a check: what is exact, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import mupscale


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


def tied_head_without_norm(n: int) -> nn.Module:
    return Net(
        lambda s, t: F.linear(torch.tanh(s.hidden(s.emb(t))), s.emb.weight),
        emb=nn.Embedding(WORDS, n),
        hidden=nn.Linear(n, n),
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


def pixel_shuffle(n: int) -> nn.Module:
    return seq(nn.Conv2d(3, 4 * n, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(n, 3, 3, padding=1))


def channel_shuffle(n: int) -> nn.Module:
    grouped = nn.Conv2d(n, n, 3, groups=2)
    return seq(nn.Conv2d(3, n, 1), nn.ReLU(), nn.ChannelShuffle(2), grouped, nn.ReLU(), nn.Conv2d(n, OUT, 1))


def softmax_over_width(n: int) -> nn.Module:
    return seq(nn.Linear(IN, n), nn.Softmax(-1), nn.Linear(n, OUT))


def maxout(n: int) -> nn.Module:
    return Net(lambda s, x: s.b(s.a(x).view(len(x), -1, 2).amax(-1)), a=nn.Linear(IN, 2 * n), b=nn.Linear(n, OUT))


def maxout_of_halves(n: int) -> nn.Module:
    return Net(lambda s, x: s.b(s.a(x).view(len(x), 2, -1).amax(1)), a=nn.Linear(IN, 2 * n), b=nn.Linear(n, OUT))


def two_layers(n: int, end: Callable[[Tensor], Tensor]) -> nn.Module:
    return Net(lambda s, x: end(s.b(torch.tanh(s.a(x)))), a=nn.Linear(IN, n), b=nn.Linear(n, n))


def hidden(n: int, middle: nn.Module) -> nn.Module:
    return seq(nn.Linear(IN, n), middle, nn.Linear(n, OUT))


def scaled_embedding(n: int) -> nn.Module:
    return Net(
        lambda s, t: s.out(s.norm(s.emb(t) * math.sqrt(n))),
        emb=nn.Embedding(WORDS, n),
        norm=nn.LayerNorm(n),
        out=nn.Linear(n, OUT),
    )


# ------------------------------------------------------------------------------------------------ perceptrons


def mlp(n: int) -> nn.Module:
    return seq(nn.Linear(IN, n), nn.ReLU(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, OUT))


def zero_readout(n: int) -> nn.Module:
    readout = mupscale.Readout(n, OUT, readout_zero_init=True)
    return seq(nn.Linear(IN, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), readout)


def fused_gate(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        gate, up = s.both(x).chunk(2, -1)
        return s.down(F.silu(gate) * up)

    return Net(forward, both=nn.Linear(IN, 2 * n), down=nn.Linear(n, OUT))


def bare_parameters(n: int) -> nn.Module:
    return Net(
        lambda s, x: torch.tanh(x @ s.a + s.bias) @ s.b,
        a=drawn(IN, n),
        bias=nn.Parameter(torch.zeros(n)),
        b=drawn(n, OUT),
    )


def einsum(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(torch.einsum("bi,ni->bn", x, s.a))
        return torch.einsum("bn,nm,mo->bo", h, s.b, s.c)

    return Net(forward, a=drawn(n, IN), b=drawn(n, n), c=drawn(n, OUT))


def weight_normed(n: int) -> nn.Module:
    return seq(nn.Linear(IN, n), nn.Tanh(), parametrizations.weight_norm(nn.Linear(n, n)), nn.Tanh(), nn.Linear(n, OUT))


def spectrally_normed(n: int) -> nn.Module:
    return seq(nn.Linear(IN, n), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(n, n)), nn.Linear(n, OUT))


def bilinear(n: int) -> nn.Module:
    return Net(
        lambda s, x: s.out(torch.tanh(s.both(s.a(x), s.b(x)))),
        a=nn.Linear(IN, n),
        b=nn.Linear(IN, n),
        both=nn.Bilinear(n, n, 5),
        out=nn.Linear(5, OUT),
    )


def outer_product(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        return s.out((h[:, :, None] * h[:, None, :]).flatten(1))

    return Net(forward, a=nn.Linear(IN, n), out=nn.Linear(n * n, OUT))


def cosine_head(n: int) -> nn.Module:
    return Net(
        lambda s, x: 5 * F.linear(F.normalize(s.a(x), dim=-1), F.normalize(s.classes, dim=-1)),
        a=seq(nn.Linear(IN, n), nn.ReLU(), nn.Linear(n, n)),
        classes=drawn(OUT, n),
    )


def hypernetwork(n: int) -> nn.Module:
    """Makes the weights of a hidden layer of fixed size."""

    def forward(s: Any, x: Tensor) -> Tensor:
        weights = s.make(torch.tanh(s.hyper(s.task))).view(5, IN)
        return s.out(torch.tanh(x @ weights.T))

    return Net(forward, task=drawn(3), hyper=nn.Linear(3, n), make=nn.Linear(n, 5 * IN), out=nn.Linear(5, OUT))


def wide_hypernetwork(n: int) -> nn.Module:
    """Makes the weights of the layer that grows."""

    def forward(s: Any, x: Tensor) -> Tensor:
        weights = s.make(s.task).view(-1, IN)
        return s.out(torch.tanh(x @ weights.T))

    return Net(forward, task=drawn(3), make=nn.Linear(3, n * IN), out=nn.Linear(n, OUT))


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


def stacked_experts(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.silu(torch.einsum("bi,ein->ben", x, s.up))
        return torch.einsum("ben,eno,be->bo", h, s.down, s.router(x).softmax(-1))

    return Net(forward, router=nn.Linear(IN, 3), up=drawn(3, IN, n), down=drawn(3, n, OUT))


def capsules(n: int) -> nn.Module:
    """n capsules of 3 numbers each, squashed one by one."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x).view(len(x), -1, 3)
        norm = h.norm(dim=-1, keepdim=True)
        return s.out((h * norm / (1 + norm.square())).flatten(1))

    return Net(forward, a=nn.Linear(IN, 3 * n), out=nn.Linear(3 * n, OUT))


def unbiased_standardised(n: int) -> nn.Module:
    return hidden(n, act(lambda x: x / (x.std(-1, keepdim=True) + 0.1)))


def largest_units(n: int) -> nn.Module:
    return hidden(n, act(lambda x: x * (x >= x.quantile(0.5, -1, keepdim=True))))


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


def depthwise(n: int) -> nn.Module:
    return seq(
        nn.Conv2d(3, n, 1), nn.Conv2d(n, n, 3, groups=n), nn.BatchNorm2d(n), nn.Hardswish(), nn.Conv2d(n, n, 1),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(n, OUT),
    )  # fmt: skip


def transposed_conv(n: int) -> nn.Module:
    return seq(nn.Conv2d(3, n, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(n, n, 2, 2), nn.ReLU(), nn.Conv2d(n, 3, 1))


def u_net(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        one = torch.relu(s.down1(x))
        two = torch.relu(s.down2(F.avg_pool2d(one, 2)))
        return s.out(torch.cat([one, s.up(two)], 1))

    return Net(
        forward, down1=nn.Conv2d(3, n, 3, padding=1), down2=nn.Conv2d(n, 2 * n, 3, padding=1),
        up=nn.ConvTranspose2d(2 * n, n, 2, 2), out=nn.Conv2d(2 * n, OUT, 1),
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


def group_norm(n: int) -> nn.Module:
    return seq(nn.Conv2d(3, n, 3), nn.GroupNorm(2, n), nn.ReLU(), nn.Conv2d(n, OUT, 3))


def group_norm_of_fixed_groups(n: int) -> nn.Module:
    return seq(nn.Conv2d(3, n, 3), nn.GroupNorm(n // 2, n), nn.ReLU(), nn.Conv2d(n, OUT, 3))


def patches(n: int) -> nn.Module:
    """A vision transformer without attention: class token, positions, LayerScale, token mixing."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.embed(x).flatten(2).transpose(1, 2)
        h = torch.cat([s.cls.expand(len(h), -1, -1), h], 1) + s.positions
        h = h + s.scale * s.mix(h.transpose(1, 2)).transpose(1, 2)
        return s.out(h[:, 0] + h[:, 1:].amax(1))

    return Net(
        forward, embed=nn.Conv2d(3, n, 4, 4), cls=drawn(1, 1, n), positions=drawn(1, 5, n),
        scale=nn.Parameter(torch.full((n,), 0.1)), mix=nn.Linear(5, 5), out=nn.Linear(n, OUT),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ sequences


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, time, head_dim)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10.0 ** -torch.arange(half)
    one, other = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def rotary_grouped(n: int, dim: int = 4) -> nn.Module:
    """Two queries for each key, rotary positions, no norm."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.inp(x)
        q, k, v = (part(h).unflatten(-1, (-1, dim)).transpose(1, 2) for part in (s.q, s.k, s.v))
        k, v = (each.repeat_interleave(2, 1) for each in (rotated(k), v))
        y = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        return s.out(h + s.o(y.transpose(1, 2).flatten(2)))

    return Net(
        forward, inp=nn.Linear(IN, n), q=nn.Linear(n, n), k=nn.Linear(n, n // 2), v=nn.Linear(n, n // 2),
        o=nn.Linear(n, n), out=nn.Linear(n, OUT),
    )  # fmt: skip


def alibi(n: int, heads: int = 2) -> nn.Module:
    """Fixed heads, logits of c / head_dim, a bias that falls with the distance."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.inp(x)
        q, k, v = (part(h).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (s.q, s.k, s.v))
        time = torch.arange(h.shape[1])
        bias = -(time[:, None] - time).abs() * torch.tensor([0.5, 0.25])[:, None, None]
        weights = (q @ k.transpose(-1, -2) * (4 / q.shape[-1]) + bias.to(q)).softmax(-1)
        return s.out(h + s.o((weights @ v).transpose(1, 2).flatten(2)))

    return Net(
        forward, inp=nn.Linear(IN, n), q=nn.Linear(n, n), k=nn.Linear(n, n), v=nn.Linear(n, n), o=nn.Linear(n, n),
        out=nn.Linear(n, OUT),
    )  # fmt: skip


def linear_attention(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.inp(x)
        q, k, v = F.elu(s.q(h)) + 1, F.elu(s.k(h)) + 1, s.v(h)
        made = torch.einsum("btn,bsn,bsm->btm", q, k, v)
        return s.out(made / torch.einsum("btn,bsn->bt", q, k)[..., None])

    parts = {name: nn.Linear(n, n) for name in "qkv"}
    return Net(forward, inp=nn.Linear(IN, n), out=nn.Linear(n, OUT), **parts)


def encoder_layer(n: int, dim: int = 4) -> nn.Module:
    layer = nn.TransformerEncoderLayer(n, n // dim, 2 * n, dropout=0.0, batch_first=True)
    return seq(nn.Linear(IN, n), layer, nn.Linear(n, OUT))


def recurrent(n: int, kind: type[nn.RNNBase], **options: Any) -> nn.Module:
    rnn = kind(IN, n, batch_first=True, **options)
    size = options.get("proj_size", n) * (2 if options.get("bidirectional") else 1)
    return Net(lambda s, x: s.out(s.rnn(x)[0]), rnn=rnn, out=nn.Linear(size, OUT))


def lstm_state(n: int) -> nn.Module:
    """Returns its state, which grows, beside the output."""

    def forward(s: Any, x: Tensor) -> dict[str, Any]:
        made, (h, c) = s.rnn(x)
        return {"out": s.out(made), "state": (h, c), "nothing": None}

    return Net(forward, rnn=nn.LSTM(IN, n, batch_first=True), out=nn.Linear(n, OUT))


def state_space(n: int) -> nn.Module:
    """A diagonal state space model: every channel decays at its own rate."""

    def forward(s: Any, x: Tensor) -> Tensor:
        u, decay = s.inp(x), torch.sigmoid(s.rate)
        state, made = torch.zeros_like(u[:, 0]), []
        for step in u.unbind(1):
            state = decay * state + (1 - decay) * step
            made.append(state)
        return s.out(torch.tanh(torch.stack(made, 1)) * F.silu(s.gate(x)))

    return Net(
        forward, inp=nn.Linear(IN, n), rate=nn.Parameter(torch.linspace(-1, 1, n)), gate=nn.Linear(IN, n),
        out=nn.Linear(n, OUT),
    )  # fmt: skip


def fourier_filter(n: int) -> nn.Module:
    """A complex filter over time, one for each channel."""

    def forward(s: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(s.inp(x), dim=1) * s.filter
        return s.out(torch.tanh(torch.fft.irfft(spectrum, n=x.shape[1], dim=1)))

    filters = nn.Parameter(torch.randn(4, n, dtype=torch.complex64))
    return Net(forward, inp=nn.Linear(IN, n), filter=filters, out=nn.Linear(n, OUT))


def padded_embedding(n: int) -> nn.Module:
    return Net(
        lambda s, t: s.out(torch.tanh(s.mid(s.emb(t))).mean(1)),
        emb=nn.Embedding(WORDS, n, padding_idx=0),
        mid=nn.Linear(n, n),
        out=nn.Linear(n, OUT),
    )


def convolved_words(n: int) -> nn.Module:
    def forward(s: Any, t: Tensor) -> Tensor:
        h = s.emb(t).transpose(1, 2)
        return s.out(torch.cat([conv(h).amax(-1) for conv in s.convs], 1))

    convs = nn.ModuleList(nn.Conv1d(n, n, size) for size in (2, 3))
    return Net(forward, emb=nn.Embedding(WORDS, n), convs=convs, out=nn.Linear(2 * n, OUT))


def graph(n: int) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        edges = (torch.arange(7)[:, None] - torch.arange(7)).abs() == 1
        adjacency = edges.to(x) / 2
        h = torch.relu(adjacency @ s.a(x))
        return s.out((adjacency @ s.b(h)).amax(1))

    return Net(forward, a=nn.Linear(IN, n), b=nn.Linear(n, n), out=nn.Linear(n, OUT))


def graph_attention(n: int) -> nn.Module:
    """GAT: a logit of each pair of nodes from a vector that is summed over the width."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        logits = F.leaky_relu(h @ s.source + (h @ s.target).transpose(1, 2))
        return s.out(torch.relu(logits.softmax(-1) @ h))

    return Net(forward, a=nn.Linear(IN, n), source=drawn(n, 1), target=drawn(n, 1), out=nn.Linear(n, OUT))


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


CASES = {
    # of the first report
    "conv → flatten → linear": Case(conv_flatten, "images", 4),
    "tied head, norm before it": Case(tied_head, "tokens"),
    "tied head without a norm": Case(tied_head_without_norm, "tokens"),
    "tied autoencoder": Case(tied_autoencoder, "vectors"),
    "attention, heads fixed": Case(lambda n: attention(n, heads=2), "sequences"),
    "attention, head_dim fixed": Case(lambda n: attention(n, dim=4), "sequences"),
    "pixel shuffle": Case(pixel_shuffle, "images", 4),
    "channel shuffle": Case(channel_shuffle, "images", 4),
    "softmax over width": Case(softmax_over_width, "vectors"),
    "maxout of halves": Case(maxout_of_halves, "vectors"),
    "tanh, sum over width": Case(lambda n: two_layers(n, lambda h: torch.tanh(h).sum(-1)), "vectors"),
    "F.normalize": Case(lambda n: hidden(n, act(lambda x: F.normalize(x, dim=-1))), "vectors"),
    "embedding · sqrt(width)": Case(scaled_embedding, "tokens"),
    # perceptrons
    "zero readout": Case(zero_readout, "vectors"),
    "fused gate": Case(fused_gate, "vectors"),
    "bare parameters": Case(bare_parameters, "vectors"),
    "einsum": Case(einsum, "vectors"),
    "weight_norm": Case(weight_normed, "vectors"),
    "spectral_norm": Case(spectrally_normed, "vectors"),
    "bilinear": Case(bilinear, "vectors", 4),
    "outer product": Case(outer_product, "vectors", 4),
    "cosine head": Case(cosine_head, "vectors"),
    "wide hypernetwork": Case(wide_hypernetwork, "vectors"),
    "FiLM": Case(film, "vectors"),
    "complex weights": Case(complex_weights, "vectors"),
    "hard experts": Case(hard_experts, "vectors"),
    "stacked experts": Case(stacked_experts, "vectors"),
    "capsules": Case(capsules, "vectors", 4),
    "divided by its unbiased std": Case(unbiased_standardised, "vectors"),
    "units above the median": Case(largest_units, "vectors"),
    "cumulative sum over width": Case(cumulative, "vectors"),
    "halves in order": Case(halves_in_order, "vectors"),
    "largest unit": Case(lambda n: two_layers(n, lambda h: h.amax(-1)), "vectors"),
    "several heads": Case(several_heads, "vectors"),
    "changes its input": Case(changes_its_input, "vectors"),
    # images
    "CNN": Case(cnn, "images", 4),
    "depthwise": Case(depthwise, "images", 4),
    "transposed convolution": Case(transposed_conv, "images", 4),
    "U-Net": Case(u_net, "images", 4),
    "DenseNet": Case(dense_net, "images", 4),
    "convolution over channels": Case(channel_convolution, "images", 4),
    "GroupNorm": Case(group_norm, "images", 4),
    "GroupNorm, size fixed": Case(group_norm_of_fixed_groups, "images", 4),
    "patches": Case(patches, "images"),
    # sequences
    "rotary, grouped queries": Case(rotary_grouped, "sequences", 16),
    "ALiBi": Case(alibi, "sequences"),
    "linear attention": Case(linear_attention, "sequences"),
    "TransformerEncoderLayer": Case(encoder_layer, "sequences"),
    "LSTM, proj_size": Case(lambda n: recurrent(n, nn.LSTM, proj_size=3), "sequences"),
    "two GRUs, both directions": Case(lambda n: recurrent(n, nn.GRU, num_layers=2, bidirectional=True), "sequences", 4),
    "LSTM with its state": Case(lstm_state, "sequences"),
    "state space": Case(state_space, "sequences"),
    "Fourier filter": Case(fourier_filter, "sequences"),
    "padded embedding": Case(padded_embedding, "tokens"),
    "convolved words": Case(convolved_words, "tokens", 4),
    "graph attention": Case(graph_attention, "sequences"),
}


def batch(data: str) -> Tensor:
    if data == "tokens":
        return torch.randint(WORDS, (4, 7))
    return torch.randn(
        *{"vectors": (5, IN), "sequences": (2, 7, IN), "images": (3, 3, 8, 8)}[data], dtype=torch.float64
    )
