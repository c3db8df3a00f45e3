"""ResNet-18 for 32 × 32 images: a 3 × 3 stem without pooling, basic blocks, a zero-initialised muP readout."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.errors import UserError
from mupscale.models.base import refuse_bad_counts
from mupscale.models.tasks import Classifier
from mupscale.readout import Readout


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    residual_outputs = "bn2.weight", "bn2.bias"
    """The parameters that make it the identity where they are zero, if its inputs are not negative, as those of a ReLU.
    A zero convolution before a norm would do so too, but its gradient would be divided by the norm's eps."""

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


class Stage(nn.Module):
    """Blocks of equal widths. The first may have other inputs; as many as wanted may follow it."""

    def __init__(self, channels_in: int, channels: int, stride: int, blocks: int) -> None:
        super().__init__()
        self.first = BasicBlock(channels_in, channels, stride)
        self.rest = nn.Sequential(*(BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))


class ResNet18Net(nn.Module):
    """ResNet-18 with `width` stem channels (64 is the paper's 1×), and `layers` blocks in each stage."""

    def __init__(
        self,
        width: int = 64,
        outputs: int = 100,
        layers: Sequence[int] = (2, 2, 2, 2),
        *,
        readout_zero_init: bool = True,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages: list[nn.Module] = []
        channels = width
        for number, blocks in enumerate(layers):
            after = width * 2**number
            stages.append(Stage(channels, after, 2 if number > 0 else 1, blocks))
            channels = after
        self.stages = nn.Sequential(*stages)
        self.readout = Readout(channels, outputs, readout_zero_init=readout_zero_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.stages(self.stem(x)).mean((2, 3)))


class ResNet18(Classifier):
    """The paper's CIFAR ResNet-18."""

    def __init__(
        self, width: int = 64, base_width: int = 64, outputs: int = 100, layers: list[int] | None = None, **kwargs: Any
    ) -> None:
        """
        Args:
            width: The number of channels of the stem; 64 is the usual ResNet-18, the paper's 1×.
            base_width: The width for which the optimizer's hyperparameters are given.
            outputs: The number of classes.
            layers: The number of blocks of each stage; by default [2, 2, 2, 2], which is ResNet-18.
        """
        refuse_bad_counts(outputs=outputs)
        layers = [2, 2, 2, 2] if layers is None else layers
        if not isinstance(layers, list):
            raise UserError(f"model.layers of a ResNet18 is a list, the blocks of each stage; got {layers}")
        super().__init__(width, base_width, layers=layers, **kwargs)

    def build(self, width: int, layers: list[int]) -> nn.Module:
        return ResNet18Net(width, self.hparams["outputs"], layers)

    def prepare_network(self) -> None:
        assert self.net is not None
        if self.device_mesh is None:  # FSDP2 wants its parameters contiguous
            # what tensor cores convolve, and the data module delivers
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub forgets it
        super().prepare_network()
