"""GPT-2 under muP: attention logits are scaled by c / head_dim; the readout, tied or not, averages over the width.

Shapes: B batch, T positions, D model width, A attention width, H heads, E head_dim = A / H, V vocabulary.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mupscale._torch import is_mapped
from mupscale.errors import UserError, refuse_unless_level
from mupscale.models.base import refuse_bad_counts, refuse_bad_width
from mupscale.models.tasks import LanguageModel
from mupscale.readout import Readout, ReadoutLoss

ATTENTION_SCALE = 8.0
"""c in the logit scale c / head_dim: at head_dim 64 it is the usual 1 / sqrt(head_dim)."""

ATTENTION_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels by their speed on a GPU; the first that fits is taken. At head_dim > 256 that is the third."""

TWICE_SQRT_2_BY_PI = 2 * (2 / math.pi) ** 0.5

SHAPE = (
    "base_layers", "heads", "head_dim", "vocabulary", "context", "tied",
    "gain", "embedding_std", "output_mult", "readout_zero_init",
)  # fmt: skip
"""Arguments of GPT2 that its network takes as they are."""

HEADS = 12
"""The number of heads, if neither it nor head_dim is given."""


class CausalAttention(nn.Module):
    """Causal attention. With `grows_by_heads`, a wider model has more heads of the same size; otherwise larger heads.

    `inner` is the width of all heads together, by default the width of the model.
    """

    def __init__(self, width: int, heads: int, grows_by_heads: bool = False, inner: int | None = None) -> None:
        super().__init__()
        inner = width if inner is None else inner
        self.heads = heads
        self.grows_by_heads = grows_by_heads
        self.qkv = nn.Linear(width, 3 * inner)
        self.project = nn.Linear(inner, width)

    @property
    def width_blocks(self) -> dict[str, dict[int, int]]:
        """Whole heads are duplicated, in each of the three sections of `qkv`."""
        if not self.grows_by_heads:
            return {}
        head_dim = self.project.in_features // self.heads
        return {"qkv.weight": {0: head_dim}, "project.weight": {1: head_dim}}

    @property
    def width_groups(self) -> dict[str, dict[str, int]]:
        """The units of attention, if the number of heads grows: whole heads."""
        return {"heads": {"qkv.weight": 0, "project.weight": 1}} if self.grows_by_heads else {}

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        q_BHTE, k_BHTE, v_BHTE = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        # in a stack, the kernel that can be mapped was chosen outside
        chooses = x_BTD.is_cuda and not is_mapped(x_BTD)
        with sdpa_kernel(ATTENTION_KERNELS, set_priority=True) if chooses else nullcontext():
            y_BHTE = F.scaled_dot_product_attention(
                q_BHTE, k_BHTE, v_BHTE, is_causal=True, scale=ATTENTION_SCALE / q_BHTE.shape[-1]
            )
        return self.project(y_BHTE.transpose(1, 2).flatten(2))


class GELU(nn.GELU):
    """GELU's tanh approximation; compiled, as x · sigmoid(2u) with u inside the tanh, which is the same function.

    One exponential takes 19 instructions where a tanh, with its branches, takes 33: more than a GPU can issue while it
    waits for memory.
    """

    def __init__(self) -> None:
        super().__init__(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(x)
        return x * torch.sigmoid(x * (TWICE_SQRT_2_BY_PI + 0.044715 * TWICE_SQRT_2_BY_PI * x * x))


class Block(nn.Module):
    """A pre-norm transformer block, whose two residual branches are multiplied by `branch_multiplier`."""

    residual_outputs = "attention.project.weight", "attention.project.bias", "mlp.2.weight", "mlp.2.bias"
    """The parameters that make it the identity where they are zero."""

    def __init__(
        self,
        width: int,
        heads: int,
        grows_by_heads: bool = False,
        attention_width: int | None = None,
        feed_forward: int | None = None,
        branch_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        units = 4 * width if feed_forward is None else feed_forward
        self.branch_multiplier = branch_multiplier
        self.ln_1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, grows_by_heads, attention_width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, units), GELU(), nn.Linear(units, width))

    @property
    def width_groups(self) -> dict[str, dict[str, int]]:
        return {"feed_forward": {"mlp.0.weight": 0, "mlp.2.weight": 1}}

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = torch.add(x_BTD, self.attention(self.ln_1(x_BTD)), alpha=self.branch_multiplier)
        return torch.add(x_BTD, self.mlp(self.ln_2(x_BTD)), alpha=self.branch_multiplier)


class Head(nn.Module):
    """The last norm and the readout; given targets, their mean loss. In one module, which can be compiled as one."""

    def __init__(self, width: int, vocabulary: int, *, output_mult: float = 1.0, zero_init: bool = False) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(width)
        self.readout = Readout(width, vocabulary, bias=False, output_mult=output_mult, readout_zero_init=zero_init)

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        dtype = x_BTD.dtype  # of the residual stream, in which matmuls are computed; autocast makes the norm float32
        x_BTD = self.ln_f(x_BTD)
        if targets_BT is None:
            return self.readout(x_BTD)
        # a readout of another class, or with a bias, is called as it is
        if not isinstance(self.readout, Readout) or self.readout.bias is not None:
            return F.cross_entropy(self.readout(x_BTD).flatten(0, 1), targets_BT.flatten())
        x_ND = (self.readout.multiplier * x_BTD).flatten(0, 1).to(dtype)
        return ReadoutLoss.apply(x_ND, self.readout.weight.to(dtype), targets_BT.flatten())


class GPT2Net(nn.Module):
    """GPT-2. As the width grows, either the number of `heads` or `head_dim` stays fixed: give that one.

    `attention_width` is the width of all heads of a block together, by default the width of the model; `feed_forward`
    is the number of feed-forward units, by default four times that.

    Matrices are drawn with std `gain` / sqrt(fan_in), which is init="fan_in" of `set_base_shapes`, the default. Without
    `gain` they have GPT-2's std of 0.02 (0.02 / sqrt(2 · layers) into the residual stream) at every width: then pass
    init="constant". Embeddings have `embedding_std` at every width. A readout that is not tied starts at zero, or like
    the other matrices.

    With `base_layers` the depth follows CompleteP (arXiv 2505.01618, Table 1 with α = 1, m_L = layers / base_layers),
    as the width follows muP:

        MHA and MLP residual              X + m_L⁻¹ · F(X): `branch_multiplier`
        AdamW ε of residual blocks        m_L⁻¹, by `set_base_shapes`, which reads the multiplier
        LR of pre-LN, hidden, bias        m_L⁰; for SGD m_L, because gradients of a block have a factor m_L⁻¹
        weight decay, initial variance    m_L⁰: std 0.02 / sqrt(2 · base_layers) into the residual stream
    """

    def __init__(
        self,
        width: int,
        *,
        layers: int,
        base_layers: int | None = None,
        heads: int | None = None,
        head_dim: int | None = None,
        vocabulary: int = 50304,
        context: int = 1024,
        tied: bool = True,
        gain: float | None = None,
        embedding_std: float = 0.02,
        output_mult: float = 1.0,
        readout_zero_init: bool = False,
        attention_width: int | None = None,
        feed_forward: int | None = None,
    ) -> None:
        super().__init__()
        inner, what = (width, "width") if attention_width is None else (attention_width, "an attention width of")
        if (heads is None) == (head_dim is None):
            raise UserError(f"give either heads or head_dim, got heads = {heads} and head_dim = {head_dim}")
        grows_by_heads = heads is None
        if head_dim is not None:
            if inner % head_dim:
                raise UserError(f"{what} {inner} is not divisible by a head_dim of {head_dim}")
            heads = inner // head_dim
        assert heads is not None
        if inner % heads:
            raise UserError(f"{what} {inner} is not divisible by {heads} heads")
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        base_layers = layers if base_layers is None else base_layers
        shape = width, heads, grows_by_heads, attention_width, feed_forward, base_layers / layers
        self.blocks = nn.Sequential(*(Block(*shape) for _ in range(layers)))
        self.head = Head(width, vocabulary, output_mult=output_mult, zero_init=readout_zero_init)
        if tied:
            self.head.readout.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith(("wte", "wpe")):
                nn.init.normal_(parameter, std=embedding_std)
            elif parameter.ndim == 2 and not (readout_zero_init and name.startswith("head")):
                into_stream = name.endswith(("project.weight", "mlp.2.weight"))
                constant = 0.02 / (2 * base_layers) ** 0.5 if into_stream else 0.02
                nn.init.normal_(parameter, std=constant if gain is None else gain / parameter.shape[1] ** 0.5)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits; given targets, their mean loss."""
        x_BTD = self.wte(tokens_BT) + self.wpe.weight[: tokens_BT.shape[1]]
        # embeddings are not autocast, and a residual stream in float32 is twice the traffic of all that happens between
        # matmuls
        x_BTD = x_BTD.to(autocast_dtype(x_BTD))
        return self.head(self.blocks(x_BTD), targets_BT)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The precision in which matmuls of x are computed."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


class GPT2(LanguageModel):
    """The paper's GPT-2, trained on batches of token rows: each position predicts the next."""

    def __init__(
        self,
        width: int | list[int],
        base_width: int | list[int] | None = None,
        layers: int = 12,
        base_layers: int | None = None,
        heads: int | None = None,
        vocabulary: int = 50304,
        context: int = 1024,
        tied: bool = True,
        head_dim: int | None = None,
        gain: float | None = None,
        embedding_std: float = 0.02,
        output_mult: float = 1.0,
        readout_zero_init: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            width: d_model, a multiple of `heads` or of `head_dim`, whichever is given. Or a list of three: d_model, the
                width of all heads together, and the feed-forward units; 256 means [256, 256, 1024].
            base_width: The width for which the optimizer's hyperparameters are given; by default 2 per
                head, or one head of `head_dim`.
            layers: The number of transformer blocks.
            base_layers: The number of blocks for which the optimizer's hyperparameters are given. With it, residual
                branches are multiplied by base_layers / layers, and the hyperparameters are rescaled, so that they
                serve at every depth (CompleteP); without it, by 1.
            heads: The number of attention heads; a wider model has larger heads. 12, unless `head_dim` is given.
            vocabulary: The number of tokens.
            context: The number of positions.
            tied: Share the embedding with the readout.
            head_dim: The size of a head; a wider model has more heads. Give either `heads` or `head_dim`.
            gain: Draw matrices with std gain / sqrt(fan_in). By default their std is GPT-2's at the base width: 0.02,
                and 0.02 / sqrt(2 · layers), or base_layers, where they write to the residual stream.
            embedding_std: The std of the embeddings of tokens and positions, at every width.
            output_mult: The factor on the logits.
            readout_zero_init: Initialise the readout at zero; it must not be tied.
        """
        if heads is not None and head_dim is not None:
            raise UserError(
                f"model.heads = {heads} and model.head_dim = {head_dim}: one of them stays as the width grows. Give "
                "one, and null for the other"
            )
        if head_dim is None:
            heads = HEADS if heads is None else heads
        key, kept = ("heads", heads) if head_dim is None else ("head_dim", head_dim)
        assert kept is not None
        refuse_bad_counts(layers=layers, vocabulary=vocabulary, context=context, **{key: kept})
        if base_layers is not None:
            refuse_bad_counts(base_layers=base_layers)
        if base_width is None:
            base_width = 2 * kept if head_dim is None else kept
        for name, value in (("width", width), ("base_width", base_width)):
            refuse_bad_width(f"model.{name}", value)
            if isinstance(value, list) and len(value) != 3:
                raise UserError(
                    f"model.{name} of a GPT2 is one number, or three: d_model, the width of all heads together, and "
                    f"the feed-forward units; got {value}"
                )
            if (value[1] if isinstance(value, list) else value) % kept:
                raise UserError(f"model.{name} = {value} is not divisible by model.{key} = {kept}")
        levels = {"embedding_std": embedding_std, "output_mult": output_mult, "gain": 0.0 if gain is None else gain}
        for name, level in levels.items():
            refuse_unless_level(f"model.{name}", level)
        if readout_zero_init and tied:
            raise UserError("model.readout_zero_init needs a readout that is not tied: set model.tied: false")
        super().__init__(width, base_width, layers=layers, **kwargs)
        self.init = "constant" if gain is None else "fan_in"

    def build(self, width: int | list[int], layers: int) -> nn.Module:
        shape = {"layers": layers, **{name: self.hparams[name] for name in SHAPE}}
        if not isinstance(width, list):
            return GPT2Net(width, **shape)
        if len(width) != 3:
            raise UserError(f"give one width, or three: d_model, that of all heads, feed-forward units; got {width}")
        return GPT2Net(width[0], attention_width=width[1], feed_forward=width[2], **shape)

    def blocks_of(self, net: nn.Module) -> list[nn.Module]:
        assert isinstance(net, GPT2Net)
        return list(net.blocks)

    def compile_network(self, net: nn.Module) -> None:
        # by parts: the blocks share one compilation, which takes half the time of the whole, and runs as fast
        assert isinstance(net, GPT2Net)
        for part in (*net.blocks, net.head):
            part.compile()

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch[:, :-1], batch[:, 1:])
