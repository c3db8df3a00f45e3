"""Linear layers whose matmuls run in float8, forward and backward, with dynamic scales: one for each whole tensor.

    y  = x₈ w₈ᵀ + b        x₈, w₈ in e4m3
    dx = g₈ w₈             g₈ in e5m2
    dw = g₈ᵀ x₈

A scale makes the largest entry of a tensor the largest float8 number. Duplication multiplies all entries of a tensor by
one number, so both networks are rounded alike: growth by a whole factor is as exact as in bfloat16. Parameters keep
their precision; no checkpoint has float8 in it.

N samples, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mupscale._torch import is_mapped
from mupscale.errors import UserError

NARROWEST = 1024
"""Narrower layers stay in bfloat16: finding scales and casting would cost more than the faster matmul gains."""

MULTIPLE = 16
"""What float8 kernels need both sizes of a layer, and the number of samples, to be a multiple of."""

PRECISION = torch.bfloat16
"""The dtype of what the layers take and give."""

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


class Float8Linear(nn.Linear):
    """A linear layer in float8 where its input is bfloat16 on a GPU; anywhere else an ordinary one."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_in_float8(x):
            return super().forward(x)
        y_NO = _Matmul.apply(x.flatten(0, -2).to(PRECISION), self.weight, self.bias)
        return y_NO.unflatten(0, x.shape[:-1])

    def width_blocks(self, other: nn.Linear) -> dict[str, Any]:
        """Raises a UserError for copies of unequal weights, of which the largest entry is not that of the original."""
        here, there = (self.in_features, self.out_features), (other.in_features, other.out_features)
        if any(large % small for small, large in zip(here, there, strict=True)):
            raise UserError(
                f"model.fp8: a layer of {here[0]} × {here[1]} that grows to {there[0]} × {there[1]} would be rounded "
                "otherwise than before. Grow by a whole factor, or set model.fp8: false"
            )
        return {}


def use_float8_(part: nn.Module) -> None:
    """Makes the linear layers of a part of a network compute in float8, if they are large enough."""
    for layer in part.modules():
        if type(layer) is nn.Linear and is_large(layer):
            layer.__class__ = Float8Linear


def is_large(layer: nn.Linear) -> bool:
    sizes = layer.in_features, layer.out_features
    return min(sizes) >= NARROWEST and not any(size % MULTIPLE for size in sizes)


def refuse_without_float8(device: torch.device, precision: str) -> None:
    """Raises a UserError where no layer could run in float8."""
    if device.type != "cuda":
        raise UserError(f"model.fp8: float8 matmuls need a GPU, and this run is on {device.type}. Set model.fp8: false")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise UserError(
            f"model.fp8: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and float8 "
            "matmuls need 8.9 or more. Set model.fp8: false"
        )
    if precision != "bf16-mixed":
        raise UserError(f"model.fp8 needs trainer.precision: bf16-mixed, got {precision}")


def summary_of(network: nn.Module) -> str:
    """Which layers run in float8, in one line."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    count = sum(isinstance(layer, Float8Linear) for layer in layers)
    return (
        f"float8: {count} of {len(layers)} linear layers; readout, embeddings and layers narrower than {NARROWEST} "
        "stay in bfloat16"
    )


def is_in_float8(x: Tensor) -> bool:
    """Whether a matmul of x would be computed in bfloat16 on a GPU, of so many samples that the kernel takes them."""
    if not x.is_cuda or is_mapped(x):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype is PRECISION and x.shape[:-1].numel() % MULTIPLE == 0


class _Matmul(torch.autograd.Function):
    """A linear layer; what backward needs is kept in float8, half of what bfloat16 would take."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, w_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        x8_NI, x_scale = to_float8(x_NI, FORWARD)
        w8_OI, w_scale = to_float8(w_OI, FORWARD)
        ctx.save_for_backward(x8_NI, x_scale, w8_OI, w_scale)
        ctx.dtypes = x_NI.dtype, w_OI.dtype, None if bias_O is None else bias_O.dtype
        bias = None if bias_O is None else bias_O.to(x_NI.dtype)
        return multiply(x8_NI, w8_OI.t(), x_scale, w_scale, x_NI.dtype, bias)

    @staticmethod
    def backward(ctx: Any, g_NO: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x8_NI, x_scale, w8_OI, w_scale = ctx.saved_tensors
        of_x, of_w, of_bias = ctx.dtypes
        g8_NO, g_scale = to_float8(g_NO, BACKWARD)
        dx_NI = multiply(g8_NO, by_columns(w8_OI), g_scale, w_scale, of_x)
        dw_OI = multiply(g8_NO.t().contiguous(), by_columns(x8_NI), g_scale, x_scale, of_w)
        return dx_NI, dw_OI, None if of_bias is None else g_NO.sum(0, dtype=of_bias)


def to_float8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale, rounded, and the scale."""
    largest = torch.finfo(dtype).max
    scale = (x.abs().amax().to(torch.float32) / largest).clamp(min=1e-30)
    return (x.to(torch.float32) / scale).clamp(-largest, largest).to(dtype), scale


def by_columns(x: Tensor) -> Tensor:
    """The same matrix, stored by columns: the one layout that the kernel takes its second matrix in."""
    return x.t().contiguous().t()


def multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a @ b + bias of two float8 matrices; sums of gradients are float32 throughout, others by the fast kernel."""
    is_forward = a.dtype is FORWARD
    return torch._scaled_mm(
        a, b, scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=dtype, use_fast_accum=is_forward
    )
