"""GPT-2 under muP: attention logits scaled by c / head_dim, a readout that averages over the width, tied or not.

Shapes: B batch, T positions, D model width, H heads, E head_dim = D / H, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.text import Perplexity

from mupscale.models.base import WidthScalable
from mupscale.readout import Readout

ATTENTION_SCALE = 8.0
"""c in the logit scale c / head_dim: at head_dim 64 it is the usual 1 / sqrt(head_dim)."""


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        q_BHTE, k_BHTE, v_BHTE = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True, scale=ATTENTION_SCALE / q_BHTE.shape[-1])
        return self.project(y_BHTE.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.ln_1(x_BTD))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class GPT2Net(nn.Module):
    """Width grows through head_dim at a fixed number of heads. Weights are drawn with std 0.02 (0.02 / sqrt(2 · layers) into the
    residual stream) whatever the width: pass init="constant" to `set_base_shapes`."""

    def __init__(self, width: int, *, layers: int, heads: int, vocabulary: int = 50304, context: int = 1024, tied: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        self.readout = Readout(width, vocabulary, bias=False)
        if tied:
            self.readout.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                into_stream = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_stream else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.wte(tokens_BT) + self.wpe.weight[: tokens_BT.shape[1]]
        return self.readout(self.ln_f(self.blocks(x_BTD)))


class GPT2(WidthScalable):
    """The paper's GPT-2, trained on batches of token rows: each position predicts the next."""

    init = "constant"

    def __init__(
        self,
        width: int,
        base_width: int | None = None,
        layers: int = 12,
        heads: int = 12,
        vocabulary: int = 50304,
        context: int = 1024,
        tied: bool = True,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            width: d_model; a multiple of `heads`, which stay.
            base_width: The width at which the optimizer's hyperparameters mean what they say; by default 2 per head.
            layers: Transformer blocks.
            heads: Attention heads, the same at every width.
            vocabulary: Tokens.
            context: Positions.
            tied: Share the embedding with the readout.
        """
        base_width = 2 * heads if base_width is None else base_width
        for name, value in (("width", width), ("base_width", base_width)):
            if value % heads:
                raise ValueError(f"model.{name} = {value} is not divisible by model.heads = {heads}")
        super().__init__(width, base_width, **kwargs)
        self.val_perplexity, self.test_perplexity = Perplexity(), Perplexity()

    def build(self, width: int) -> nn.Module:
        shape = {name: self.hparams[name] for name in ("layers", "heads", "vocabulary", "context", "tied")}
        return GPT2Net(width, **shape)

    def shard(self, net: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        assert isinstance(net, GPT2Net)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)

    def batch_size(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_perplexity)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_perplexity)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.log_softmax(self(batch), dim=-1)

    def _evaluate(self, batch: Tensor, stage: str, perplexity: Perplexity) -> None:
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        perplexity(logits.float(), targets)
        self.log(f"{stage}/loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()), batch_size=len(batch), sync_dist=True)
        self.log(f"{stage}/perplexity", perplexity, batch_size=len(batch), prog_bar=True)
