"""GPT-2 inside `Trainer.fit`, compiled, beside a bare loop and the authors' code: tokens per second and TFLOP/s.

    git clone https://github.com/yuxinma98/mupscaling
    python -m benchmarks gpt2 --against mupscaling --repeat 3 [--quick] [--only "width 768"] [--sides authors,ours]

TFLOP/s count the matmuls of a step as torch's FLOP counter does, with attention in full.
"""

from functools import partial
from pathlib import Path

import torch

from benchmarks import authors
from benchmarks.training import Case, run
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.gpt2 import GPT2

SIZES = {  # name: width, layers, heads, vocabulary, batch
    "8 layers, width 512": (512, 8, 8, 8192, 64),
    "12 layers, width 768": (768, 12, 12, 50304, 32),
    "12 layers, width 1920": (1920, 12, 12, 50304, 16),
    "12 layers, width 3840": (3840, 12, 12, 50304, 8),
    "12 layers, width 3840, head_dim 64": (3840, 12, 60, 50304, 8),
}
QUICK = {"2 layers, width 32": (32, 2, 2, 64, 4)}


def case(name: str, shape: tuple[int, ...], quick: bool, against: Path | None) -> Case:
    width, layers, heads, vocabulary, batch = shape
    context = 32 if quick else 1024

    def batches(device: torch.device) -> ResidentLoader:
        rows = torch.randint(vocabulary, (batch * 8, context + 1), generator=torch.Generator().manual_seed(0))
        return ResidentLoader((rows.to(device),), batch, shuffle=True)

    def module() -> GPT2:
        return GPT2(width, layers=layers, heads=heads, vocabulary=vocabulary, context=context, compile=not quick)

    steps = 5 if quick else 15 if width > 1000 else 40
    return Case(
        name, module, batches, None if against is None else partial(authors.train, against, shape, context),
        "tok", batch * context, steps=steps, warm_up=6 if quick else 10, precision="bf16-mixed", draft_steps=steps,
        clip=authors.CLIP, rival="authors",
    )  # fmt: skip


def cases(quick: bool, against: Path | None) -> list[Case]:
    return [case(name, shape, quick, against) for name, shape in (QUICK if quick else SIZES).items()]


def main(arguments: list[str]) -> None:
    checkout = {"type": Path, "metavar": "DIR", "help": "a checkout of the authors' code, to be trained beside ours"}
    run(__doc__, cases, arguments, {"--against": checkout})
