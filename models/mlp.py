"""The paper's MLP: ReLU layers with biases and a zero-initialised muP readout."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mupscale._torch import has_hooks
from mupscale.models.base import refuse_bad_counts
from mupscale.models.tasks import Classifier
from mupscale.readout import Readout

if TYPE_CHECKING:
    from mupscale.stacking.stack import Losses


class ResidualBlock(nn.Module):
    """Two layers beside a shortcut, whose sum is multiplied by `branch_multiplier`."""

    residual_outputs = "outer.weight", "outer.bias"
    """The parameters that make it the identity where they are zero."""

    def __init__(self, width: int, branch_multiplier: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.activation = nn.ReLU()
        self.branch_multiplier = branch_multiplier

    @property
    def width_groups(self) -> dict[str, dict[str, int]]:
        return {"inner": {"inner.weight": 0, "outer.weight": 1}}

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.outer(self.activation(self.inner(x))), alpha=self.branch_multiplier)


class MLPNet(nn.Module):
    """Hidden layers of the widths `hidden`, then so many residual `blocks` with a `branch_multiplier`."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        blocks: int = 0,
        *,
        branch_multiplier: float = 1.0,
        readout_zero_init: bool = True,
    ) -> None:
        super().__init__()
        sizes = [inputs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = nn.ReLU()
        self.blocks = nn.Sequential(*(ResidualBlock(sizes[-1], branch_multiplier) for _ in range(blocks)))
        self.readout = Readout(sizes[-1], outputs, readout_zero_init=readout_zero_init)

    @property
    def width_groups(self) -> dict[str, dict[str, int]]:
        """The units of each hidden layer: what produces them, and what reads them. Blocks write to the last too."""
        readers = [f"layers.{index}.weight" for index in range(1, len(self.layers))]
        readers += [] if self.blocks else ["readout.weight"]
        return {f"hidden_{index}": {f"layers.{index}.weight": 0, name: 1} for index, name in enumerate(readers)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.readout(self.blocks(x))


class MLP(Classifier):
    """The paper's MLP: four layers, ReLU, biases."""

    def __init__(
        self,
        width: int | list[int],
        base_width: int | list[int] = 1,
        inputs: int = 54,
        outputs: int = 7,
        hidden_layers: int = 3,
        layers: int | None = None,
        base_layers: int | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            width: The number of units of every hidden layer, or a list with one number for each.
            base_width: The width for which the optimizer's hyperparameters are given.
            inputs: The number of features of a sample.
            outputs: The number of classes.
            hidden_layers: The number of hidden layers, if `width` is one number.
            layers: The number of residual blocks of two layers between these and the readout; only they can become
                more. The paper's MLP has none.
            base_layers: The number of blocks for which the optimizer's hyperparameters are given. With it, residual
                branches are multiplied by base_layers / layers, and the hyperparameters are rescaled, so that they
                serve at every depth (CompleteP); without it, by 1.
        """
        refuse_bad_counts(inputs=inputs, outputs=outputs, hidden_layers=hidden_layers)
        if base_layers is not None:
            refuse_bad_counts(base_layers=base_layers)
        super().__init__(width, base_width, layers=layers, **kwargs)

    def stacked_losses(self) -> "Losses | None":
        net = self.net
        plain = type(net) is MLPNet and not net.blocks and not any(has_hooks(module) for module in net.modules())
        own = type(self).loss is Classifier.loss and type(self).forward is Classifier.forward
        return self._losses if plain and own else None

    def _losses(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Tensor, Tensor], shared: bool
    ) -> Tensor:
        """The losses of all models, by one matrix product for each layer.

        On a GPU, the product of the first layer has no axis for models if all share a batch. On the CPU it has one, so
        that the loss of a model does not depend on the others, to the bit.
        """
        assert isinstance(self.net, MLPNet)
        x, labels = batch
        for index in range(len(self.net.layers)):
            weight, bias = (parameters[f"net.layers.{index}.{name}"] for name in ("weight", "bias"))
            if x.ndim == 2 and not x.is_cuda:
                x = x.expand(len(weight), -1, -1)
            if x.ndim == 2:
                y = F.linear(x, weight.flatten(0, 1), bias.flatten())
                x = y.unflatten(1, (len(weight), -1)).transpose(0, 1)
            else:
                x = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
            x = torch.relu(x)
        weight, bias = (parameters[f"net.readout.{name}"] for name in ("weight", "bias"))
        if weight.dtype == torch.float16:  # in which small weights would lose digits
            x = self.net.readout.multiplier * x
        else:  # there are fewer of them
            weight = self.net.readout.multiplier * weight
        logits = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
        labels = labels.expand(len(weight), -1) if shared else labels
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)

    def build(self, width: int | list[int], layers: int | None = None) -> nn.Module:
        hidden = width if isinstance(width, list) else [width] * self.hparams["hidden_layers"]
        base = self.hparams["base_layers"]
        multiplier = base / layers if base and layers else 1.0
        shape = self.hparams["inputs"], hidden, self.hparams["outputs"], layers or 0
        return MLPNet(*shape, branch_multiplier=multiplier)
