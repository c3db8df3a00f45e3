"""ResNet-18 (SGD, batch 128, augmented images) inside `Trainer.fit`, beside a bare loop and a first draft.

python -m benchmarks resnet [--quick] [--out resnet.json]
"""

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from benchmarks.training import Case, first_draft, run
from mupscale.datamodules.cifar100 import AugmentingLoader, normalisation_table, padded
from mupscale.models.resnet import ResNet18, ResNet18Net

BATCH = 128
STEPS = {32: 800, 64: 800, 128: 400, 256: 200}


@cache
def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (count, 32, 32, 3), np.uint8), generator.integers(0, 100, count)


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images one at a time, through torchvision's transforms, as its CIFAR100 gives them."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels
        self.transform = transforms.Compose([
            transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def draft(width: int, count: int, device: torch.device) -> Iterator[None]:
    net = ResNet18Net(width, readout_zero_init=False).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    return first_draft(net, optimizer, Augmented(*images(count)), BATCH, device, workers=8)


def batches(count: int, device: torch.device) -> AugmentingLoader:
    x, y = (torch.from_numpy(part).to(device) for part in images(count))
    table = normalisation_table(torch.full((3,), 0.5), torch.full((3,), 0.25)).to(device)
    return AugmentingLoader(table, (padded(x), y), BATCH, shuffle=True, drop_last=True)


def cases(quick: bool) -> list[Case]:
    count = 1000 if quick else 50_000
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
    return [
        Case(
            f"width {width} ({width / 64:g}×)",
            partial(ResNet18, width, optimizer=sgd, compile=not quick),
            partial(batches, count),
            partial(draft, width, count),
            "img",
            BATCH,
            steps=4 if quick else STEPS[width],
            warm_up=5 if quick else 50,
            precision="bf16-mixed",
            draft_steps=4 if quick else 100,
        )
        for width in ([8] if quick else list(STEPS))
    ]


def main(arguments: list[str]) -> None:
    run(__doc__, cases, arguments)
