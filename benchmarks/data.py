"""Batches per second of each data module, alone, beside a plain torch DataLoader that does the same work.

    python -m benchmarks data [--quick] [--device cuda] [--data DIR] [--out data.json]

DIR holds covertype.npz, cifar100.npz and fineweb/, a folder written by `python -m mupscale prepare`. Without it, files
of the real sizes are generated (581,012 rows, 50,000 images, 100 M tokens). Both sides deliver the training batches,
ready, on the device. The plain loader indexes sample by sample, shuffles, collates in worker processes, and copies from
pinned memory.
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

from benchmarks.harness import Row, now, rate
from benchmarks.training import endless
from mupscale.datamodules.cifar100 import CIFAR100
from mupscale.datamodules.covertype import SAMPLE, Covertype
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


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images one at a time, through torchvision's transforms, as its CIFAR100 gives them."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        from torchvision import transforms

        self.images, self.labels = images, labels
        self.transform = transforms.Compose([
            transforms.ToPILImage(), transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), int(self.labels[index])


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


def generate(folder: Path) -> None:
    """Files of the real sizes and formats."""
    draw = np.random.default_rng(0)
    with np.load(SAMPLE) as sample:
        np.savez(folder / "covertype.npz", X=np.resize(sample["X"], (ROWS, 54)), y=np.resize(sample["y"], ROWS))
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", IMAGES), ("test", IMAGES // 5)):
        arrays[f"x_{part}"] = draw.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = draw.integers(100, size=count)
    np.savez(folder / "cifar100.npz", **arrays)  # type: ignore[arg-type]
    (folder / "fineweb").mkdir()
    for split, count in (("train", TOKENS), ("val", TOKENS // 100)):
        writer = TokenWriter(folder / "fineweb" / split, FILE_TOKENS)
        writer.append(draw.integers(50_257, size=count, dtype=np.uint16), np.full(count // 1000, 1000))
        writer.finish("generated")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    device, seconds = options.device, 0.5 if options.quick else 5.0
    workers = min(8, len(os.sched_getaffinity(0)))
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the DataLoader's workers have: two threads on a busy machine wait for each other

    def plain_sides(dataset: Callable[[], Dataset[Any]], batch_size: int) -> dict[str, Batches]:
        return {f"DataLoader, {n} workers": plain(dataset, batch_size, n, device) for n in (0, workers)}

    def images() -> Dataset[Any]:
        arrays = np.load(folder / "cifar100.npz")
        return Augmented(arrays["x_train"], arrays["y_train"])

    def crops() -> Dataset[Any]:
        return Crops(TokenFolder(folder / "fineweb").tokens("train"), context)

    batch, context = 64, 1024
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        if options.data is None:
            generate(folder)
        sides = plain_sides(lambda: read_rows(folder / "covertype.npz"), 2000)
        sides["ours"] = ours(Covertype(str(folder), 2000), device)
        yield from compared("Covertype", "rows", 2000, sides, seconds)
        sides = {**plain_sides(images, 128), "ours": ours(CIFAR100(str(folder), 128), device)}
        yield from compared("CIFAR-100", "images", 128, sides, seconds)
        sides = plain_sides(crops, batch)
        for kind in ("resident", "mapped"):
            data = FineWeb(str(folder / "fineweb"), batch, context, resident=kind == "resident")
            sides[f"ours, {kind}"] = ours(data, device)
        yield from compared("FineWeb", "tokens", batch * context, sides, seconds)


OPTIONS = {"--data": {"type": Path, "metavar": "DIR", "help": "folder with the real files"}}
