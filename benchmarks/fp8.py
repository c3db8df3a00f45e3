"""GPT-2 with its blocks in float8, beside bfloat16, torchao and the authors' code: bare loops of captured steps.

python -m benchmarks fp8 --against mupscaling --repeat 3
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.cases import CLIP, OPTIONS, QUICK, token_rows, train_authors  # noqa: F401  # OPTIONS: of every command
from benchmarks.harness import Row, clear_memory
from benchmarks.training import Case, bare, timed
from mupscale.models.fp8 import is_large
from mupscale.models.gpt2 import GPT2

SIZES = {  # name: width, layers, heads, vocabulary, batch
    "width 1024": (1024, 12, 16, 50304, 32),
    "width 1920": (1920, 12, 30, 50304, 16),
    "width 3840": (3840, 12, 60, 50304, 8),
}


class WithTorchao(GPT2):
    """The same layers as `fp8: true` takes, by torchao."""

    def prepare_network(self) -> None:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

        assert self.net is not None
        for block in self.blocks_of(self.net):
            convert_to_float8_training(
                block, module_filter_fn=lambda layer, _: type(layer) is nn.Linear and is_large(layer)
            )
        super().prepare_network()


def rows(options: argparse.Namespace) -> Iterator[Row]:
    torch.set_float32_matmul_precision("high")
    quick, context = options.quick, 32 if options.quick else 1024
    for name, shape in (QUICK if quick else SIZES).items():
        if options.only not in name:
            continue
        width, layers, heads, vocabulary, batch = shape
        sizes: dict[str, Any] = {
            "layers": layers, "heads": heads, "vocabulary": vocabulary, "context": context, "compile": not quick,
        }  # fmt: skip
        sides: dict[str, Callable[[], GPT2]] = {
            "bf16": partial(GPT2, width, **sizes), "fp8": partial(GPT2, width, **sizes, fp8=True),
        }  # fmt: skip
        if not quick:
            sides["torchao"] = partial(WithTorchao, width, **sizes)
        rival = None if options.against is None else partial(train_authors, options.against, shape, context)
        measured: dict[str, list[float]] = {}
        for _ in range(options.repeat):
            for side in [*sides, *(["authors"] if rival else [])]:
                torch.compiler.reset()
                clear_memory()
                case = Case(
                    name, sides.get(side, sides["bf16"]), partial(token_rows, vocabulary, context, batch), rival,
                    "tok", batch * context, steps=3 if quick else 30, warm_up=6 if quick else 12,
                    precision="bf16-mixed", clip=CLIP,
                )  # fmt: skip
                steps = rival(options.device) if side == "authors" else bare(case, options.device)
                clock, loss = timed(steps, case.warm_up, case.steps)
                speed = clock.rate(case.warm_up, case.warm_up + case.steps) * batch * context
                measured.setdefault(side, []).append(speed)
                last = "" if side == "authors" else float(loss)
                yield {"case": name, "side": side, "tok/s": speed, "last loss": last}
        medians = {side: sorted(speeds)[len(speeds) // 2] for side, speeds in measured.items()}
        for side, speed in medians.items():
            spread = (max(measured[side]) - min(measured[side])) / speed
            ratios = {f"÷ {other}": speed / medians[other] for other in medians if other != side}
            yield {"case": name, "side": f"median {side}", "tok/s": speed, "spread": spread, **ratios}
