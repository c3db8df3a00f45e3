"""Batches per second of each data module, alone, beside a plain torch DataLoader that does the same work.

    python -m benchmarks data [--quick] [--device cuda] [--data DIR] [--out data.json]

DIR holds covertype.npz, cifar100.npz and fineweb/, a folder written by `python -m mupscale prepare`; what it lacks is
generated at its real size (581,012 rows, 50,000 images, 100 M tokens). The training tokens are read a third time from
1,000 .ds files, as datatrove writes them. Both sides deliver the training batches, ready,
on the device. The plain loader indexes sample by sample, shuffles, collates in worker processes, and copies from pinned
memory.
"""

import argparse
import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from mupscale.datamodules.cifar100 import CIFAR100
from mupscale.datamodules.covertype import Covertype
from mupscale.datamodules.fineweb import FineWeb
from mupscale.datamodules.preparation import FILE_TOKENS
from mupscale.datamodules.token_files import list_files, read_token_folder
from mupscale.datamodules.token_writer import TokenWriter

WARM_UP = 10
ROWS, IMAGES, TOKENS = 581_012, 50_000, 100_000_000


@dataclass
class Row:
    """One line of the table."""

    module: str
    side: str
    batch_size: int
    unit: str
    batches_per_second: float
    units_per_second: float
    first_batch_seconds: float
    over_plain: float = 1.0
    """Its rate over that of the fastest plain loader."""


Batches = Generator[Any, None, None]


# --- what a researcher would write first


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Standardised Covertype rows and labels, one at a time."""

    def __init__(self, file: Path) -> None:
        arrays = np.load(file)
        self.x = torch.from_numpy(arrays["X"]).float()
        self.x[:, :10] = (self.x[:, :10] - self.x[:, :10].mean(0)) / self.x[:, :10].std(0)
        self.y = torch.from_numpy(arrays["y"].astype(np.int64)) - 1

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Images(Dataset[tuple[Tensor, int]]):
    """Images as torchvision's CIFAR100 returns them, with the usual transforms."""

    def __init__(self, file: Path) -> None:
        arrays = np.load(file)
        self.x, self.y = arrays["x_train"], arrays["y_train"].tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)),
            ]
        )

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.x[index])), self.y[index]


class Crops(Dataset[Tensor]):
    """Random crops of memory-mapped tokens, as nanoGPT draws them."""

    def __init__(self, tokens: np.ndarray, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = int(torch.randint(len(self.tokens) - self.context, ()))
        return torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))


def plain(dataset: Callable[[], Dataset[Any]], batch_size: int, workers: int, device: torch.device) -> Batches:
    on_gpu = device.type == "cuda"
    loader = DataLoader(
        dataset(),
        batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=on_gpu,
        drop_last=True,
    )
    for batch in forever(loader):
        yield (
            [part.to(device, non_blocking=True) for part in batch]
            if isinstance(batch, list)
            else batch.to(device, non_blocking=True)
        )


# --- measuring


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def ours(module: LightningDataModule, device: torch.device) -> Batches:
    module.trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module.trainer.strategy.connect(LightningModule())  # whose sizes the data are checked against; this one has none
    module.prepare_data()
    module.setup("fit")
    yield from forever(module.train_dataloader())


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(batches: Iterator[Any], seconds: float, device: torch.device) -> tuple[float, float]:
    """Batches per second, the device idle at both ends; and the seconds to the first batch."""
    started = now(device)
    next(batches)
    first = now(device) - started
    for _ in itertools.islice(batches, WARM_UP):
        pass
    since = now(device)
    count = 0
    while time.perf_counter() - since < seconds:
        next(batches)
        count += 1
    return count / (now(device) - since), first


def compared(
    name: str, batch_size: int, unit: str, units: int, sides: dict[str, Batches], options: argparse.Namespace
) -> list[Row]:
    """The sides one after another; those not ours are plain."""
    rows = []
    for side, batches in sides.items():
        speed, first = measured(batches, options.seconds, options.device)
        rows.append(Row(name, side, batch_size, unit, speed, speed * units, first))
        print(f"{name}, {side}: {speed:,.0f} batches/s", flush=True)
        batches.close()  # stops its workers, and frees its memory
    for row in rows:
        row.over_plain = row.batches_per_second / max(
            r.batches_per_second for r in rows if not r.side.startswith("ours")
        )
    return rows


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


def complete(given: Path | None, temporary: Path) -> tuple[dict[str, Path], list[str]]:
    """Where each data set is, and which of them had to be generated."""
    paths = {name: given / name for name in GENERATORS if given is not None and (given / name).exists()}
    generated = [name for name in GENERATORS if name not in paths]
    for name in generated:
        print(f"generating {name}", flush=True)
        paths[name] = temporary / name
        GENERATORS[name](paths[name])
    return paths, generated


# --- the command


def measure(paths: dict[str, Path], options: argparse.Namespace) -> list[Row]:
    covertype, cifar100, fineweb = (paths[name] for name in GENERATORS)
    device = options.device

    def plain_sides(dataset: Callable[[], Dataset[Any]], batch_size: int) -> dict[str, Batches]:
        return {f"DataLoader, {n} workers": plain(dataset, batch_size, n, device) for n in (0, options.workers)}

    def crops() -> Dataset[Any]:
        _, content = next(read_token_folder(list_files(fineweb)).tokens("train").parts())
        return Crops(content, context)

    batch, context = 64, 1024
    rows = {"ours": ours(Covertype(str(covertype.parent), 2000), device), **plain_sides(lambda: Rows(covertype), 2000)}
    images = {"ours": ours(CIFAR100(str(cifar100.parent), 128), device), **plain_sides(lambda: Images(cifar100), 128)}
    tokens = {
        "ours, resident": ours(FineWeb(str(fineweb), batch, context, resident=True), device),
        "ours, mapped": ours(FineWeb(str(fineweb), batch, context, resident=False), device),
        **plain_sides(crops, batch),
    }
    return [
        *compared("Covertype", 2000, "rows", 2000, rows, options),
        *compared("CIFAR-100", 128, "images", 128, images, options),
        *compared("FineWeb", batch, "tokens", batch * context, tokens, options),
    ]


def table(rows: list[Row]) -> str:
    lines = [f"{'':9} {'':21} {'batch':>5} {'batches/s':>10} {'per second':>20} {'over plain':>10} {'first batch':>11}"]
    for row in rows:
        lines.append(
            f"{row.module:9} {row.side:21} {row.batch_size:>5} {row.batches_per_second:>10,.1f} "
            f"{row.units_per_second:>13,.0f} {row.unit:6} {row.over_plain:>9.2f}× {row.first_batch_seconds:>9.2f} s"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the real files")
    parser.add_argument("--quick", action="store_true", help="half a second for each measurement, not five")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args(arguments)
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data: there is no folder {options.data}")
    options.seconds = 0.5 if options.quick else 5.0
    options.workers = min(8, len(os.sched_getaffinity(0)))
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if options.device.type == "cpu":
        torch.set_num_threads(1)  # as the DataLoader's workers have: two threads on a busy machine wait for each other
    with tempfile.TemporaryDirectory() as temporary:
        paths, generated = complete(options.data, Path(temporary))
        rows = measure(paths, options)
    print(table(rows))
    if options.out:
        machine = torch.cuda.get_device_name() if options.device.type == "cuda" else "CPU"
        record = {
            "machine": machine,
            "torch": torch.__version__,
            "generated": generated,
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
