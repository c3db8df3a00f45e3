"""GPT-2, the paper's MLP or ResNet-18 inside `Trainer.fit`, beside a bare loop, and the authors' code.

    git clone https://github.com/yuxinma98/mupscaling
    python -m benchmarks gpt2 --against mupscaling --repeat 3 [--quick] [--only "width 768"]
    python -m benchmarks fp8 --against mupscaling --repeat 3
    python -m benchmarks mlp [--quick] [--out mlp.json]     # and resnet

TFLOP/s count the matmuls of a step as torch's FLOP counter does, with attention in full. The authors' network and
optimizer are read from the checkout: this project contains none of them.
"""

import argparse
import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import mup
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import ONLY, Options, Row
from benchmarks.training import Case, bare, compare_sides
from mupscale.datamodules.cifar100 import AugmentingLoader, normalisation_table, padded
from mupscale.datamodules.resident import ResidentLoader
from mupscale.models.fp8 import is_large
from mupscale.models.gpt2 import GPT2
from mupscale.models.mlp import MLP
from mupscale.models.resnet import ResNet18

# --- GPT-2

SIZES = {  # name: width, layers, heads, vocabulary, batch
    "8 layers, width 512": (512, 8, 8, 8192, 64),
    "12 layers, width 768": (768, 12, 12, 50304, 32),
    "12 layers, width 1920": (1920, 12, 12, 50304, 16),
    "12 layers, width 3840": (3840, 12, 12, 50304, 8),
    "12 layers, width 3840, head_dim 64": (3840, 12, 60, 50304, 8),
}
FP8_SIZES = {f"width {width}": (width, 12, width // 64, 50304, rows) for width, rows in ((1920, 16), (3840, 8))}
QUICK = {"2 layers, width 32": (32, 2, 2, 64, 4)}
CLIP = 1.0


def token_rows(vocabulary: int, context: int, batch: int, device: torch.device) -> ResidentLoader:
    tokens = torch.randint(vocabulary, (batch * 8, context + 1), generator=torch.Generator().manual_seed(0))
    return ResidentLoader((tokens.to(device),), batch, shuffle=True)


def gpt2(options: argparse.Namespace, sizes: dict[str, tuple[int, ...]] = SIZES) -> Iterator[Case]:
    quick, context = options.quick, 32 if options.quick else 1024
    for name, shape in (QUICK if quick else sizes).items():
        width, layers, heads, vocabulary, batch = shape
        module = partial(
            GPT2, width, layers=layers, heads=heads, vocabulary=vocabulary, context=context, compile=not quick
        )
        authors = (
            {} if options.against is None else {"authors": partial(train_authors, options.against, shape, context)}
        )
        steps = 5 if quick else 15 if width > 1000 else 40
        yield Case(
            name, module, partial(token_rows, vocabulary, context, batch), "tok", batch * context, steps=steps,
            warm_up=6 if quick else 10, precision="bf16-mixed", clip=CLIP, others=authors,
        )  # fmt: skip


def fp8(options: argparse.Namespace) -> Iterator[Case]:
    """The blocks in float8, beside bare loops in bfloat16 and with torchao's layers."""
    for case in gpt2(options, FP8_SIZES):
        others = {**case.others, "bf16": partial(bare, case)}
        if not options.quick:
            others["torchao"] = partial(
                bare, replace(case, module=partial(WithTorchao, *case.module.args, **case.module.keywords))
            )
        yield replace(case, module=partial(case.module, fp8=not options.quick), others=others)


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


def load_authors(checkout: Path, file: str, *names: str) -> ModuleType:
    """A file of the checkout as a module, without its package, whose import needs the authors' accounts."""
    wanted = f"--against {checkout}: give a checkout of https://github.com/yuxinma98/mupscaling"
    if not (checkout / file).is_file():
        raise SystemExit(f"{wanted}; there is no {file}")
    spec = importlib.util.spec_from_file_location(f"authors_{Path(file).stem}", checkout / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise SystemExit(f"{wanted}; {file} has no {' and no '.join(missing)}")
    return module


def train_authors(checkout: Path, shape: tuple[int, ...], context: int, device: torch.device) -> Iterator[None]:
    """Steps as in their `train_gpt2.py`, with muP, biases and a constant learning rate; the network is compiled."""
    width, layers, heads, vocabulary, rows = shape
    networks = load_authors(checkout, "src/weight_transfer/GPT2/gpt2_model.py", "GPT", "GPTConfig")
    optimizers = load_authors(checkout, "src/weight_transfer/optim.py", "MuAdamW")

    def network(width: int) -> nn.Module:
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary, "block_size": context}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            return networks.GPT(networks.GPTConfig(**sizes, bias=True))

    with device:
        net = network(width)
    mup.set_base_shapes(net, network(2 * heads), delta=network(4 * heads))
    decayed = [parameter for parameter in net.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in net.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    on_gpu = device.type == "cuda"
    optimizer = optimizers.MuAdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    compiled = torch.compile(net) if on_gpu else net
    torch.backends.cudnn.benchmark = True
    tokens = np.random.default_rng(0).integers(vocabulary, size=2_000_000, dtype=np.uint16)

    def batch() -> list[Tensor]:
        starts = torch.randint(len(tokens) - context, (rows,)).tolist()
        rows_of = [torch.from_numpy(tokens[start : start + context + 1].astype(np.int64)) for start in starts]
        parts = [torch.stack([row[:-1] for row in rows_of]), torch.stack([row[1:] for row in rows_of])]
        return [(part.pin_memory() if on_gpu else part).to(device, non_blocking=True) for part in parts]

    x, y = batch()
    total = torch.zeros((), device=device)
    while True:
        with torch.autocast(device.type, torch.bfloat16):
            _, loss = compiled(x, y)
        x, y = batch()  # while the device computes
        loss.backward()
        total += loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        yield


# --- the paper's MLP: AdamW, batch 2000, rows of the shape of Covertype

MLP_BATCH = 2000


@cache
def table(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 54, generator=torch.Generator().manual_seed(0))
    return x, x[:, :7].argmax(1)


def table_batches(count: int, device: torch.device) -> ResidentLoader:
    return ResidentLoader(tuple(part.to(device) for part in table(count)), MLP_BATCH, shuffle=True, drop_last=True)


def mlp(options: argparse.Namespace) -> Iterator[Case]:
    quick, count = options.quick, 10_000 if options.quick else 464_809
    for width in [16] if quick else [500, 2000]:
        yield Case(
            f"width {width}", partial(MLP, width), partial(table_batches, count), "row", MLP_BATCH,
            steps=20 if quick else 3000, warm_up=6 if quick else 100, precision="32-true",
        )  # fmt: skip


# --- ResNet-18: SGD, batch 128, augmented images

RESNET_BATCH = 128
RESNET_STEPS = {32: 800, 64: 800, 128: 400, 256: 200}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}


@cache
def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (count, 32, 32, 3), np.uint8), generator.integers(0, 100, count)


def image_batches(count: int, device: torch.device) -> AugmentingLoader:
    x, y = (torch.from_numpy(part).to(device) for part in images(count))
    table = normalisation_table(torch.full((3,), 0.5), torch.full((3,), 0.25)).to(device)
    return AugmentingLoader(table, (padded(x), y), RESNET_BATCH, shuffle=True, drop_last=True)


def resnet(options: argparse.Namespace) -> Iterator[Case]:
    quick, count = options.quick, 1000 if options.quick else 50_000
    for width in [8] if quick else list(RESNET_STEPS):
        module = partial(ResNet18, width, optimizer=partial(torch.optim.SGD, **SGD), compile=not quick)
        yield Case(
            f"width {width} ({width / 64:g}×)", module, partial(image_batches, count), "img", RESNET_BATCH,
            steps=4 if quick else RESNET_STEPS[width], warm_up=5 if quick else 50, precision="bf16-mixed",
        )  # fmt: skip


CASES = {"gpt2": gpt2, "fp8": fp8, "mlp": mlp, "resnet": resnet}


OPTIONS: Options = ONLY | {
    "--repeat": {"type": int, "default": 1, "help": "how often all sides of a case are measured, in turn"},
    "--against": {
        "type": Path,
        "metavar": "DIR",
        "help": "for gpt2, fp8: a checkout of the authors' code to train beside",
    },
}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    return compare_sides(options, list(CASES[options.name](options)))
