"""The paper's MLP: ReLU layers with biases and a zero-initialised muP readout."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from mupscale.models.classifier import Classifier
from mupscale.widening.readout import Readout


class MLPNet(nn.Module):
    """`hidden` lists the widths of the hidden layers; four layers in all are three hidden widths."""

    def __init__(self, inputs: int, hidden: Sequence[int], outputs: int, *, readout_zero_init: bool = True) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = nn.ReLU()
        self.readout = Readout(sizes[-1], outputs, readout_zero_init=readout_zero_init)

    @property
    def width_groups(self) -> dict[str, dict[str, int]]:
        """The units of each hidden layer: what produces them, and what reads them."""
        readers = [*(f"layers.{index}.weight" for index in range(1, len(self.layers))), "readout.weight"]
        return {f"hidden_{index}": {f"layers.{index}.weight": 0, name: 1} for index, name in enumerate(readers)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.readout(x)


class MLP(Classifier):
    """The paper's MLP: four layers, ReLU, biases."""

    def __init__(
        self,
        width: int | list[int],
        base_width: int | list[int] = 1,
        inputs: int = 54,
        outputs: int = 7,
        hidden_layers: int = 3,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            width: Hidden units of every hidden layer, or a list with those of each.
            base_width: The width at which the optimizer's hyperparameters mean what they say.
            inputs: Features of a sample.
            outputs: Classes.
            hidden_layers: Hidden layers, where `width` is one number.
        """
        super().__init__(width, base_width, **kwargs)

    @property
    def classes(self) -> int:
        return self.hparams["outputs"]

    def build(self, width: int | list[int]) -> nn.Module:
        hidden = width if isinstance(width, list) else [width] * self.hparams["hidden_layers"]
        return MLPNet(self.hparams["inputs"], hidden, self.hparams["outputs"])
