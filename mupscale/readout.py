"""The muP output layer, and the mean cross-entropy of its logits, whose forward pass also makes their gradient.

Shapes: N rows, D width, V vocabulary. With a vocabulary of 50,304 the logits are the largest tensor of a training step,
so what counts is how often they are read.
"""

from importlib.util import find_spec
from typing import Any

import torch
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


KERNEL = find_spec("triton") is not None
"""Whether one Triton kernel makes losses and slopes on a GPU."""


class ReadoutLoss(torch.autograd.Function):
    """The mean cross-entropy of logits x Wᵀ. It keeps their gradient for the backward pass, and not the logits."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        losses_N, slope_NV = (slopes_in_place if uses_kernel(x_ND) else slopes)(x_ND, weight_VD, targets_N)
        ctx.save_for_backward(x_ND, weight_VD, slope_NV)
        return losses_N.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_ND, weight_VD, slope_NV = ctx.saved_tensors
        scale = gradients[0] / len(x_ND)  # last, where a small number does no harm to low precision
        return ((slope_NV @ weight_VD) * scale).to(x_ND.dtype), ((slope_NV.T @ x_ND) * scale).to(weight_VD.dtype), None


def uses_kernel(x: Tensor) -> bool:
    return KERNEL and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def slopes(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its gradient with respect to the logits of the row, in the precision of x."""
    logits_NV = (x_ND @ weight_VD.T).to(torch.promote_types(x_ND.dtype, torch.float32))
    normaliser_N1 = logits_NV.logsumexp(-1, keepdim=True)
    is_target_NV = torch.arange(len(weight_VD), device=x_ND.device) == targets_N[:, None]
    slope_NV = (logits_NV - normaliser_N1).exp() - is_target_NV.to(logits_NV.dtype)
    return (normaliser_N1 - logits_NV.gather(1, targets_N[:, None])).squeeze(1), slope_NV.to(x_ND.dtype)


# An operator that a compiled network contains as it is. The matmul is part of it, because the compiler would copy the
# input of a kernel that changes its input, unless it can prove that nothing else reads it.
@torch.library.custom_op("mupscale::readout_slopes", mutates_args=())
def slopes_in_place(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The same by one Triton kernel, which writes the gradient over the logits; float64 is not supported."""
    from mupscale.readout_kernel import overwrite_with_slopes

    logits_NV = x_ND @ weight_VD.T
    return overwrite_with_slopes(logits_NV, targets_N.contiguous()), logits_NV


@slopes_in_place.register_fake
def _(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    losses_N = x_ND.new_empty(len(x_ND), dtype=torch.float32)
    return losses_N, x_ND.new_empty(len(x_ND), len(weight_VD))
