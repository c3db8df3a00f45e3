"""Batches per second of each data module, alone, beside a plain torch DataLoader that does the same work.

    python -m benchmarks data [--quick] [--device cuda] [--data DIR] [--out data.json]

DIR holds covertype.npz, cifar100.npz and fineweb/, a folder written by `python -m mupscale prepare`; what it lacks is
generated at its real size (581,012 rows, 50,000 images, 100 M tokens). Both
sides deliver the training batches, ready, on the device. The plain loader indexes sample by sample, shuffles, collates
in worker processes, and copies from pinned memory.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.cases import Augmented
from benchmarks.harness import Row, now, rate
from benchmarks.training import endless
from mupscale.datamodules.cifar100 import CIFAR100
from mupscale.datamodules.covertype import Covertype
from mupscale.datamodules.fineweb import FineWeb
from mupscale.datamodules.preparation import FILE_TOKENS
from mupscale.datamodules.token_files import MappedTokens, TokenFolder
from mupscale.datamodules.token_writer import TokenWriter

WARM_UP = 10
ROWS, IMAGES, TOKENS = 581_012, 50_000, 100_000_000
Batches = Generator[Any, None, None]


def read_rows(file: Path) -> TensorDataset:
    """Standardised Covertype rows and labels."""
    arrays = np.load(file)
    x = torch.from_numpy(arrays["X"]).float()
    x[:, :10] = (x[:, :10] - x[:, :10].mean(0)) / x[:, :10].std(0)
    return TensorDataset(x, torch.from_numpy(arrays["y"].astype(np.int64)) - 1)


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Random crops of a long row of tokens, as nanoGPT draws them."""

    def __init__(self, tokens: MappedTokens, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(len(self.tokens) - self.context, ()))
        row = np.empty(self.context + 1, np.int64)
        self.tokens.read(start, row)
        return torch.from_numpy(row[:-1]), torch.from_numpy(row[1:])


def plain(dataset: Callable[[], Dataset[Any]], batch_size: int, workers: int, device: torch.device) -> Batches:
    loader = DataLoader(
        dataset(), batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0,
        pin_memory=device.type == "cuda", drop_last=True,
    )  # fmt: skip
    for batch in endless(loader):
        yield [part.to(device, non_blocking=True) for part in batch]


def ours(module: LightningDataModule, device: torch.device) -> Batches:
    module.trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module.trainer.strategy.connect(LightningModule())  # whose sizes the data are checked against; this one has none
    module.prepare_data()
    module.setup("fit")
    yield from endless(module.train_dataloader())


def compared(name: str, unit: str, units: int, sides: dict[str, Batches], seconds: float) -> Iterator[Row]:
    """The plain sides and ours one after another, and ours over the fastest plain one."""
    fastest = 0.0
    for side, batches in sides.items():
        start = now()
        next(batches)
        first = now() - start
        for _ in islice(batches, WARM_UP):
            pass
        speed = rate(lambda batches=batches: next(batches), seconds)
        batches.close()  # stops its workers, and frees its memory
        is_ours = side.startswith("ours")
        fastest = fastest if is_ours else max(fastest, speed)
        yield {
            "case": name, "way": side, "batches/s": speed, "unit": unit, "units/s": speed * units, "first s": first,
            "over plain": speed / fastest if is_ours else "",
        }  # fmt: skip


# --- data of the real sizes and formats


def generate_covertype(file: Path) -> None:
    draw = np.random.default_rng(0)
    features = np.zeros((ROWS, 54), np.int16)
    features[:, :10] = draw.integers(4000, size=(ROWS, 10))
    features[np.arange(ROWS), 10 + draw.integers(4, size=ROWS)] = 1
    features[np.arange(ROWS), 14 + draw.integers(40, size=ROWS)] = 1
    np.savez(file, X=features, y=draw.integers(1, 8, size=ROWS, dtype=np.uint8))


def generate_cifar100(file: Path) -> None:
    draw = np.random.default_rng(0)
    sizes = {"train": IMAGES, "test": IMAGES // 5}
    images = {f"x_{part}": draw.integers(256, size=(size, 32, 32, 3), dtype=np.uint8) for part, size in sizes.items()}
    np.savez(file, **images, **{f"y_{part}": draw.integers(100, size=size) for part, size in sizes.items()})


def generate_tokens(folder: Path, vocabulary: int = 50_257, document: int = 1000) -> None:
    draw = np.random.default_rng(0)
    folder.mkdir()
    for split, tokens in (("train", TOKENS), ("val", TOKENS // 100)):
        writer = TokenWriter(folder / split, FILE_TOKENS)
        writer.append(draw.integers(vocabulary, size=tokens, dtype=np.uint16), np.full(tokens // document, document))
        writer.finish("generated")


GENERATORS: dict[str, Callable[[Path], None]] = {
    "covertype.npz": generate_covertype,
    "cifar100.npz": generate_cifar100,
    "fineweb": generate_tokens,
}


def complete(given: Path | None, temporary: Path) -> Iterator[Path]:
    """Where each data set is; what is not given is generated."""
    for name, generate in GENERATORS.items():
        if given is not None and (given / name).exists():
            yield given / name
        else:
            print(f"generating {name}", flush=True)
            generate(temporary / name)
            yield temporary / name


def rows(options: argparse.Namespace) -> Iterator[Row]:
    if options.data is not None and not options.data.is_dir():
        raise SystemExit(f"--data: there is no folder {options.data}")
    device, seconds = options.device, 0.5 if options.quick else 5.0
    workers = min(8, len(os.sched_getaffinity(0)))
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the DataLoader's workers have: two threads on a busy machine wait for each other

    def plain_sides(dataset: Callable[[], Dataset[Any]], batch_size: int) -> dict[str, Batches]:
        return {f"DataLoader, {n} workers": plain(dataset, batch_size, n, device) for n in (0, workers)}

    def images() -> Dataset[Any]:
        arrays = np.load(cifar100)
        return Augmented(arrays["x_train"], arrays["y_train"])

    def crops() -> Dataset[Any]:
        return Crops(TokenFolder(fineweb).tokens("train"), context)

    batch, context = 64, 1024
    with tempfile.TemporaryDirectory() as temporary:
        covertype, cifar100, fineweb = complete(options.data, Path(temporary))
        sides = plain_sides(lambda: read_rows(covertype), 2000)
        sides["ours"] = ours(Covertype(str(covertype.parent), 2000), device)
        yield from compared("Covertype", "rows", 2000, sides, seconds)
        sides = {**plain_sides(images, 128), "ours": ours(CIFAR100(str(cifar100.parent), 128), device)}
        yield from compared("CIFAR-100", "images", 128, sides, seconds)
        sides = plain_sides(crops, batch)
        for kind in ("resident", "mapped"):
            sides[f"ours, {kind}"] = ours(FineWeb(str(fineweb), batch, context, resident=kind == "resident"), device)
        yield from compared("FineWeb", "tokens", batch * context, sides, seconds)


OPTIONS = {"--data": {"type": Path, "metavar": "DIR", "help": "folder with the real files"}}
