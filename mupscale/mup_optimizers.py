"""Optimizers under muP: their hyperparameters are base constants, rescaled for the width of each parameter."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.arguments import shown
from mupscale.errors import UserError
from mupscale.widening.optimizer_state import refuse_bad_levels
from mupscale.widening.parameter_groups import SOURCE_GROUP, begin_state_, names_by_id, split_groups
from mupscale.widening.rules import Factors, rule_of
from mupscale.widening.survey import refuse_unless_model
from mupscale.widening.width_table import WidthFactors, merged_table


def apply_mup(optimizer: Optimizer, model: nn.Module | None = None) -> Optimizer:
    """Applies muP scaling to a plain optimizer over `model`, in place, and returns it.

    Its hyperparameters are taken as those of the base width of `set_base_shapes`, and rescaled for each parameter.
    Groups are split where their parameters scale differently; the key "source_group" of each part holds the index of
    the original group. Without `model`, the widths are read from the parameters; those of a copied model have none.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> def build(width):
        ...     hidden = nn.Linear(width, width)
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), hidden, mupscale.Readout(width, 2))
        >>> model = mupscale.set_base_shapes(build(128), build(64), build(32))
        >>> optimizer = mupscale.apply_mup(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        >>> sorted({group["lr"] for group in optimizer.param_groups})  # at twice the base width
        [0.005, 0.01]
    """
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"apply_mup: optimizer must be a torch.optim.Optimizer, got {shown(optimizer)}")
    refuse_bad_levels(optimizer)
    if model is None:
        return _scaled_from_base(optimizer, _own_width)
    refuse_unless_model("apply_mup: model", model)
    table = merged_table(model, mup_only=True)
    if not table:
        raise UserError(
            "apply_mup: the model has no base shapes. Call mupscale.set_base_shapes(model, base, delta) first"
        )
    names = names_by_id(model)
    widths: dict[int, WidthFactors] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UserError(
                    f"apply_mup: the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
                    "model"
                )
            widths[id(parameter)] = table.get(name, WidthFactors())
    return _scaled_from_base(optimizer, lambda parameter: widths[id(parameter)])


def MuSGD(params: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    """torch's SGD under muP, over a model or its parameters.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> def build(width):
        ...     hidden = nn.Linear(width, width)
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), hidden, mupscale.Readout(width, 2))
        >>> model = mupscale.set_base_shapes(build(128), build(64), build(32))
        >>> optimizer = mupscale.MuSGD(model, lr=0.1, momentum=0.9)
        >>> sorted({group["lr"] for group in optimizer.param_groups})
        [0.1, 0.2]
    """
    return _mu_optimizer(torch.optim.SGD, params, settings)


def MuAdam(params: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    """torch's Adam under muP, over a model or its parameters.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> def build(width):
        ...     hidden = nn.Linear(width, width)
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), hidden, mupscale.Readout(width, 2))
        >>> model = mupscale.set_base_shapes(build(128), build(64), build(32))
        >>> optimizer = mupscale.MuAdam(model, lr=0.01)
        >>> sorted({group["lr"] for group in optimizer.param_groups})
        [0.005, 0.01]
    """
    return _mu_optimizer(torch.optim.Adam, params, settings)


def MuAdamW(params: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    """torch's AdamW under muP, over a model or its parameters.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> def build(width):
        ...     hidden = nn.Linear(width, width)
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), hidden, mupscale.Readout(width, 2))
        >>> model = mupscale.set_base_shapes(build(128), build(64), build(32))
        >>> optimizer = mupscale.MuAdamW(model, lr=0.01, weight_decay=0.1)
        >>> sorted({group["lr"] for group in optimizer.param_groups})
        [0.005, 0.01]
    """
    return _mu_optimizer(torch.optim.AdamW, params, settings)


def _mu_optimizer(kind: type[Optimizer], params: nn.Module | Iterable[Any], settings: dict[str, Any]) -> Optimizer:
    model = params if isinstance(params, nn.Module) else None
    try:
        made = kind(params.parameters() if isinstance(params, nn.Module) else params, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"Mu{kind.__name__}: {error}. Give a model, or its parameters, and settings of torch.optim.{kind.__name__}"
        ) from error
    return apply_mup(made, model)


def _own_width(parameter: Tensor) -> WidthFactors:
    if not hasattr(parameter, "mup_width"):
        raise UserError(
            f"muP: a parameter of shape {tuple(parameter.shape)} has no base shape (copies of a model lose it). "
            "Call mupscale.set_base_shapes, or pass the model itself: apply_mup(optimizer, model), MuAdamW(model, ...)"
        )
    return parameter.mup_width


def _scaled_from_base(optimizer: Optimizer, width_of: Callable[[Tensor], WidthFactors]) -> Optimizer:
    if any(SOURCE_GROUP in group for group in optimizer.param_groups):
        raise UserError("apply_mup: this optimizer is muP-scaled already")
    rule = rule_of(optimizer)

    def factors(parameter: Tensor) -> Factors:
        width = width_of(parameter)
        after = tuple(parameter.shape)
        before = tuple(base or size for base, size in zip(width.base, after, strict=True)) if width.base else after
        return Factors(width.m_out, width.m_in, before, after)

    optimizer.param_groups[:] = split_groups(optimizer.param_groups, rule, lambda p: (p, factors(p)))
    begin_state_(optimizer)
    return optimizer
