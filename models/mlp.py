"""The paper's MLP: ReLU layers with biases and a zero-initialised muP readout."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from mupscale.readout import Readout


class MLPNet(nn.Module):
    """`hidden` lists the widths of the hidden layers; four layers in all are three hidden widths."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int, *, readout_zero_init: bool = True) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = nn.ReLU()
        self.readout = Readout(sizes[-1], outputs, readout_zero_init=readout_zero_init)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.readout(x)
