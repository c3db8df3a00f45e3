"""The architectures of the equivalence grid, each as a pair of widths with what shapes alone cannot tell."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale
from mupscale.models.gpt2 import GPT2Net
from mupscale.models.mlp import MLPNet
from mupscale.models.resnet import ResNet18Net


@dataclass(frozen=True)
class Case:
    """`build(size)` makes the model; `base`, `narrow` and `wide` are the sizes of a muP base, the source and the
    target.
    """

    build: Callable[[Any], nn.Module]
    base: Any
    narrow: Any
    wide: Any
    batch: Callable[[], tuple[Tensor, Tensor]]
    plain_roles: dict[str, str] = field(default_factory=dict)
    """What the model needs without a muP multiplier."""
    init: str = "fan_in"

    def build_mup(self, size: Any) -> nn.Module:
        """With base shapes."""
        twice = tuple(2 * width for width in self.base) if isinstance(self.base, tuple) else 2 * self.base
        return mupscale.set_base_shapes(*map(self.build, (size, self.base, twice)), init=self.init)

    def batches(self, count: int = 4) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        return [self.batch() for _ in range(count)]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def _features() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 10), torch.randint(5, (16,))


def _images(size: int = 8) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(8, 3, size, size), torch.randint(5, (8,)))


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(30, (4, 9))
    return tokens[:, :-1], tokens[:, 1:]


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def rotate(x_BHTE: Tensor) -> Tensor:
    half = x_BHTE.shape[-1] // 2
    angles = torch.arange(x_BHTE.shape[-2])[:, None] * 100.0 ** -(torch.arange(half) / half)
    cos, sin = angles.cos().to(x_BHTE), angles.sin().to(x_BHTE)
    a, b = x_BHTE[..., :half], x_BHTE[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LlamaBlock(nn.Module):
    """RoPE, grouped-query attention with the usual 1/sqrt(head_dim), RMSNorm, SwiGLU; width grows through the number of
    heads.

    It declares its own blocks: whole heads for K and V, whole query groups for Q and O.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    @property
    def width_blocks(self) -> dict[str, dict[int, int]]:
        group = self.heads // self.kv_heads * self.head_dim
        return {
            "q_proj.weight": {0: group},
            "k_proj.weight": {0: self.head_dim},
            "v_proj.weight": {0: self.head_dim},
            "o_proj.weight": {1: group},
        }

    @property
    def width_groups(self) -> dict[str, dict[str, int]]:
        heads = {f"{name}_proj.weight": 0 for name in "qkv"} | {"o_proj.weight": 1}
        return {"heads": heads, "feed_forward": {"gate.weight": 0, "up.weight": 0, "down.weight": 1}}

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (
            proj(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = self.heads // self.kv_heads
        k, v = rotate(k).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, size: tuple[int, int, int]) -> None:
        super().__init__()
        heads, kv_heads, hidden = size
        self.embed = nn.Embedding(30, heads * 4)
        self.layers = nn.Sequential(*(LlamaBlock(heads, kv_heads, 4, hidden) for _ in range(2)))
        self.norm = RMSNorm(heads * 4)
        self.head = nn.Linear(heads * 4, 30, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens))))


class ViTBlock(nn.Module):
    """head_dim growth under 4 / head_dim, LayerScale as a bare parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((width,), 0.5)) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, scale=4 / q.shape[-1]).transpose(1, 2).flatten(2)
        x = x + self.gamma_1 * self.project(y)
        return x + self.gamma_2 * self.mlp(self.norm_2(x))


class ViT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 5, width))
        self.blocks = nn.Sequential(ViTBlock(width), ViTBlock(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ConvNet(nn.Module):
    """Depthwise, grouped (fixed and growing groups) and transposed convolutions, GroupNorm, PReLU, flatten into a
    linear layer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.norm = nn.GroupNorm(2, width)
        self.depthwise = nn.Conv2d(width, 2 * width, 3, 1, 1, groups=width)  # depth multiplier 2
        self.prelu = nn.PReLU(2 * width)
        self.fixed_groups = nn.Conv2d(2 * width, width, 3, 1, 1, groups=2)
        self.bn = nn.BatchNorm2d(width)
        self.growing_groups = nn.Conv2d(width, width, 3, 1, 1, groups=width // 2)
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.up_depthwise = nn.ConvTranspose2d(width, width, 3, 2, 1, groups=width)
        self.head = nn.Linear(width * 49, 5)

    @property
    def width_blocks(self) -> dict[str, dict[int, int]]:
        pairs = 2  # a group of `growing_groups`, and the outputs of one channel of `depthwise`
        return {
            "prelu.weight": {0: pairs},
            "fixed_groups.weight": {0: pairs, 1: pairs},
            "bn.*": {0: pairs},
            "up.weight": {0: pairs},
            "head.weight": {1: 49},
        }

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.bn(self.fixed_groups(self.prelu(self.depthwise(x))))
        x = self.up_depthwise(self.up(self.growing_groups(x)).tanh()[..., :4, :4])
        return self.head(x.flatten(1))


class Recurrent(nn.Module):
    """Two-layer bidirectional LSTM with projection, a GRU and a vanilla RNN cell on top."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.lstm = nn.LSTM(width, 2 * width, num_layers=2, bidirectional=True, proj_size=width, batch_first=True)
        self.gru = nn.GRU(2 * width, width, batch_first=True)
        self.cell = nn.RNNCell(width, width)
        self.head = nn.Linear(width, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.gru(self.lstm(self.embed(tokens))[0])[0]
        return self.head(torch.stack([self.cell(step) for step in x.unbind(1)], 1))


def _gpt2(tied: bool) -> Callable[[int], nn.Module]:
    return lambda width: GPT2Net(width, layers=2, heads=2, vocabulary=30, context=11, tied=tied)


CASES = {
    "mlp": Case(
        lambda hidden: MLPNet(10, hidden, 5, readout_zero_init=False), (4, 4, 4), (8, 12, 6), (16, 36, 24), _features
    ),
    "resnet18": Case(lambda width: ResNet18Net(width, 5, readout_zero_init=False), 1, 2, 4, _images(16)),
    "gpt2_tied": Case(_gpt2(True), 4, 8, 24, _tokens, plain_roles={"head.ln_f.*": "readout"}, init="constant"),
    "gpt2_untied": Case(_gpt2(False), 4, 8, 16, _tokens, init="constant"),
    "llama": Case(Llama, (4, 1, 8), (4, 2, 12), (8, 4, 36), _tokens),
    "vit": Case(ViT, 4, 8, 16, _images()),
    "convnet": Case(ConvNet, 4, 4, 8, _images()),
    "recurrent": Case(Recurrent, 2, 3, 12, _tokens),
}
