"""The muP output layer."""

from torch import Tensor, nn
from torch.nn import functional as F

from mupscale.errors import refuse_unless_whole


class Readout(nn.Linear):
    """A linear layer from width to outputs that averages over the width: y = W · (multiplier · x) + b.

    `multiplier` is `output_mult / m` at m times the base width. `set_base_shapes` stores it as a plain number, which
    copies, pickles and reloaded weights keep; until then the layer is an ordinary linear layer. To tie it to an
    embedding: `readout.weight = wte.weight`.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> def build(width):
        ...     hidden = nn.Linear(width, width)
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), hidden, mupscale.Readout(width, 2))
        >>> model = mupscale.set_base_shapes(build(128), build(64), build(32))
        >>> model[3].multiplier  # at twice the base width
        0.5
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        output_mult: float = 1.0,
        readout_zero_init: bool = False,
    ) -> None:
        refuse_unless_whole("Readout: in_features", in_features, least=0)
        refuse_unless_whole("Readout: out_features", out_features, least=0)
        self.readout_zero_init = readout_zero_init
        self.output_mult = output_mult
        self.multiplier = output_mult
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        if self.readout_zero_init:
            nn.init.zeros_(self.weight)
            if self.bias is not None:
                nn.init.zeros_(self.bias)
        else:
            super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.multiplier * x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, multiplier={self.multiplier:g}"
