"""ResNet-18 for 32 × 32 images: a 3 × 3 stem without pooling, basic blocks, a zero-initialised muP readout."""

from typing import Any

import torch
from torch import Tensor, nn

from mupscale.models.arguments import refuse_bad_counts
from mupscale.models.classifier import Classifier
from mupscale.readout import Readout


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        self.activation = nn.ReLU()

    @property
    def width_groups(self) -> dict[str, dict[str, int]]:
        """The channels between the two convolutions, which nothing else reads."""
        return {"between": {"conv1.weight": 0, "bn1.weight": 0, "conv2.weight": 1}}

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.bn1(self.conv1(x)))
        return self.activation(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18Net(nn.Module):
    """`width` is the number of stem channels: 64 is the usual ResNet-18, the paper's 1×."""

    def __init__(self, width: int = 64, outputs: int = 100, *, readout_zero_init: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(4):
            for first in (True, False):
                after = width * 2**stage
                blocks.append(BasicBlock(channels, after, 2 if first and stage > 0 else 1))
                channels = after
        self.blocks = nn.Sequential(*blocks)
        self.readout = Readout(channels, outputs, readout_zero_init=readout_zero_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.blocks(self.stem(x)).mean((2, 3)))


class ResNet18(Classifier):
    """The paper's CIFAR ResNet-18."""

    counts_alike = True

    def __init__(self, width: int = 64, base_width: int = 64, outputs: int = 100, **kwargs: Any) -> None:
        """
        Args:
            width: The number of channels of the stem; 64 is the usual ResNet-18, the paper's 1×.
            base_width: The width for which the optimizer's hyperparameters are given.
            outputs: The number of classes.
        """
        refuse_bad_counts(outputs=outputs)
        super().__init__(width, base_width, **kwargs)

    @property
    def classes(self) -> int:
        return self.hparams["outputs"]

    def build(self, width: int) -> nn.Module:
        return ResNet18Net(width, self.hparams["outputs"])

    def prepare_network(self) -> None:
        assert self.net is not None
        if self.device_mesh is None:  # FSDP2 wants its parameters contiguous
            # what tensor cores convolve, and the data module delivers
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub forgets it
        super().prepare_network()
