"""The paper's MLP (AdamW, batch 2000, Covertype-shaped rows) in `Trainer.fit`, beside a bare loop and a draft.

python -m benchmarks mlp [--quick] [--out mlp.json]
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.training import Case, first_draft, run
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.mlp import MLP

BATCH = 2000


def rows(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 54, generator=torch.Generator().manual_seed(0))
    return x, x[:, :7].argmax(1)


def draft(width: int, count: int, device: torch.device) -> Iterator[None]:
    sizes = [54, width, width, width]
    hidden = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*hidden, nn.Linear(width, 7)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = TensorDataset(*rows(count))
    return first_draft(net, optimizer, data, BATCH, device)


def cases(quick: bool) -> list[Case]:
    count = 10_000 if quick else 464_809

    def batches(device: torch.device) -> ResidentLoader:
        return ResidentLoader(tuple(part.to(device) for part in rows(count)), BATCH, shuffle=True, drop_last=True)

    return [
        Case(
            f"width {width}", partial(MLP, width), batches, partial(draft, width, count), "row", BATCH,
            steps=20 if quick else 3000, warm_up=6 if quick else 100, precision="32-true",
            draft_steps=10 if quick else 300,
        )
        for width in ([16] if quick else [500, 2000])
    ]  # fmt: skip


def main(arguments: list[str]) -> None:
    run(__doc__, cases, arguments)
