"""Gradient clipping that has the same effect on a model and on its widened copy."""

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import foreach_mul, foreach_norm
from mupscale.errors import refuse_unless_level, refuse_unless_model
from mupscale.sharding import gathered
from mupscale.widening import table
from mupscale.widening.stepping import Record, records_of


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
    """Clips the gradients of `model` to a width-invariant global norm, in place; returns that norm before clipping.

    In the norm, each gradient is multiplied by what `table.clip` says for the width of its parameter, so that
    duplication does not change it; at the base width it is the usual norm. The widths come from
    `set_base_shapes`, or from the upscale that made the model; without either, this is
    `torch.nn.utils.clip_grad_norm_`. The call does not synchronise with the device. `max_norm` must be finite and at
    least 0. With `optimizer`, only its parameters count and are clipped: a GAN has two optimizers.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
        >>> x = torch.randn(5, 3)
        >>> report = mupscale.upscale(narrow, wide, call=lambda model: model(x))
        >>> for model in (narrow, wide):
        ...     model(x).square().mean().backward()
        >>> torch.allclose(mupscale.clip_grad_norm_(wide, 1.0), mupscale.clip_grad_norm_(narrow, 1.0))
        True
    """
    refuse_unless_model("clip_grad_norm_: model", model)
    refuse_unless_level("clip_grad_norm_: max_norm", max_norm)
    widths = records_of(model)
    groups = optimizer.param_groups if optimizer is not None else ({"params": list(model.parameters())},)
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    clipped, values, factors = [], [], []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or id(parameter) not in wanted:
            continue
        width = widths.get(name, Record())
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if width.entries:
            dense = dense * (width.entry_scale("out", dense) / width.entry_scale("in", dense)).sqrt()
        clipped.append(parameter)
        values.append(dense)
        factors.append(math.sqrt(table.clip(width.scale)))
    if not clipped:
        return torch.tensor(0.0)
    # a kernel for many gradients, not one for each: a large network has hundreds
    norms = [gathered(norm) for norm in foreach_norm(values)]
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in foreach_mul(norms, factors)]))
    nn.utils.clip_grads_with_norm_(clipped, max_norm, total)
    return total
