"""Linear layers whose bias gradient is summed while the gradient of their output is written.

torch's compiler writes that gradient and then reads it again for the sum over all rows: one pass more over the widest
activations of a transformer. Shapes: N rows, D width of the input, C columns of the output.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TWICE_SQRT_2_BY_PI = 2 * (2 / math.pi) ** 0.5

GROUPS = 128
"""Groups of rows, each of which is summed by itself: enough of them to occupy a GPU."""


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """GELU's tanh approximation as x · sigmoid(2u), with u inside the tanh, which is the same function.

    Compiled, one exponential takes 19 instructions where a tanh, with its branches, takes 33: more than a GPU can issue
    while it waits for memory.
    """
    return x * torch.sigmoid(x * (TWICE_SQRT_2_BY_PI + 0.044715 * TWICE_SQRT_2_BY_PI * x * x))


class LinearGELU(torch.autograd.Function):
    """GELU of a linear layer; input and weight have the same precision, that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_CD: Tensor, bias_C: Tensor) -> Tensor:
        hidden = F.linear(x, weight_CD, bias_C.to(x.dtype))
        ctx.save_for_backward(x, weight_CD, bias_C, hidden)
        return gelu_by_sigmoid(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight_CD, bias_C, hidden = ctx.saved_tensors
        made = gelu_gradient(gradients[0].flatten(0, -2), hidden.flatten(0, -2))
        return _linear_gradients(x, weight_CD, bias_C, *made)


class LinearChunks(torch.autograd.Function):
    """The result of a linear layer in three equal chunks; input and weight have the same precision, that of these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_CD: Tensor, bias_C: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight_CD, bias_C)
        return F.linear(x, weight_CD, bias_C.to(x.dtype)).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _linear_gradients(*ctx.saved_tensors, *join_gradients(*(each.flatten(0, -2) for each in gradients)))


def _linear_gradients(
    x: Tensor, weight_CD: Tensor, bias_C: Tensor, gradient_NC: Tensor, sums_GC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight = gradient_NC.T @ x.flatten(0, -2)
    return (gradient_NC @ weight_CD).view_as(x), of_weight, sums_GC.sum(0).to(bias_C.dtype)


def can_fuse(layer: nn.Module, x: Tensor) -> bool:
    """Whether the kernels can take the place of a layer: a plain one with a bias, on a GPU, not in float64."""
    return type(layer) is nn.Linear and layer.bias is not None and x.is_cuda and x.dtype != torch.float64


def in_one_precision(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias as autocast would have them, but for the bias, whose gradient is not rounded."""
    assert isinstance(layer, nn.Linear)
    dtype = autocast_dtype(x)
    return x.to(dtype), layer.weight.to(dtype), layer.bias


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The precision in which matmuls of x are computed."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


@torch.library.custom_op("mupscale::gelu_gradient", mutates_args=())
def gelu_gradient(gradient_NC: Tensor, hidden_NC: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient before a GELU from the one behind it, and its sums over groups of rows, in float32."""
    from mupscale.triton_kernels import gelu_gradient

    return gelu_gradient(gradient_NC.contiguous(), hidden_NC.contiguous(), GROUPS)


@torch.library.custom_op("mupscale::join_gradients", mutates_args=())
def join_gradients(q_ND: Tensor, k_ND: Tensor, v_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Three gradients side by side, and their sums over groups of rows, in float32."""
    from mupscale.triton_kernels import join_gradients

    return join_gradients(q_ND.contiguous(), k_ND.contiguous(), v_ND.contiguous(), GROUPS)


@gelu_gradient.register_fake
def _(gradient_NC: Tensor, hidden_NC: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = hidden_NC.shape
    return hidden_NC.new_empty(rows, columns), hidden_NC.new_empty(GROUPS, columns, dtype=torch.float32)


@join_gradients.register_fake
def _(q_ND: Tensor, k_ND: Tensor, v_ND: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = len(q_ND), 3 * q_ND.shape[1]
    return q_ND.new_empty(rows, columns), q_ND.new_empty(GROUPS, columns, dtype=torch.float32)
