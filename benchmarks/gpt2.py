"""GPT-2 inside `Trainer.fit`, compiled, beside a bare loop and a first draft: tokens per second and TFLOP/s.

    python -m benchmarks gpt2 [--quick] [--only "width 768"] [--sides ours,draft] [--out gpt2.json]

TFLOP/s count the matmuls of a step as torch's FLOP counter does, with attention in full.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.training import CLIP, Case, first_draft, run
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.gpt2 import GPT2

SIZES = {  # name: width, layers, heads, vocabulary, batch
    "8 layers, width 512": (512, 8, 8, 8192, 64),
    "12 layers, width 768": (768, 12, 12, 50304, 32),
    "12 layers, width 1920": (1920, 12, 12, 50304, 16),
    "12 layers, width 3840": (3840, 12, 12, 50304, 8),
}
QUICK = {"2 layers, width 32": (32, 2, 2, 64, 4)}


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        q, k, v = self.attention(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, positions, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).contiguous().view(batch, positions, width))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Random crops of a long row of tokens, as nanoGPT draws them."""

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(len(self.tokens) - self.context, ()))
        row = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return row[:-1], row[1:]


def draft(shape: tuple[int, ...], context: int, device: torch.device) -> Iterator[None]:
    width, layers, heads, vocabulary, batch = shape
    net = PlainGPT(width, layers, heads, vocabulary, context).to(device)
    compiled = torch.compile(net) if device.type == "cuda" else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    data = Crops(np.random.default_rng(0).integers(vocabulary, size=2_000_000, dtype=np.int32), context)
    return first_draft(net, optimizer, data, batch, compiled, device, clip=CLIP)


def case(name: str, shape: tuple[int, ...], quick: bool) -> Case:
    width, layers, heads, vocabulary, batch = shape
    context = 32 if quick else 1024

    def batches(device: torch.device) -> ResidentLoader:
        rows = torch.randint(vocabulary, (batch * 8, context + 1), generator=torch.Generator().manual_seed(0))
        return ResidentLoader((rows.to(device),), batch, shuffle=True)

    def module() -> GPT2:
        return GPT2(width, layers=layers, heads=heads, vocabulary=vocabulary, context=context, compile=not quick)

    steps = 5 if quick else 15 if width > 1000 else 40
    return Case(
        name, module, batches, partial(draft, shape, context), "tok", batch * context,
        steps=steps, warm_up=6 if quick else 10, precision="bf16-mixed", draft_steps=steps, clip=CLIP,
    )  # fmt: skip


def cases(quick: bool) -> list[Case]:
    return [case(name, shape, quick) for name, shape in (QUICK if quick else SIZES).items()]


def main(arguments: list[str]) -> None:
    run(__doc__, cases, arguments)
