"""Optimizers under muP: their hyperparameters are base constants, rescaled for the width of each parameter."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale.arguments import refuse_unless_model, shown
from mupscale.errors import UserError
from mupscale.widening.groups import SOURCE_GROUP, begin_state_, split_groups
from mupscale.widening.optimizers import Sized, rule_of
from mupscale.widening.state import refuse_bad_levels
from mupscale.widening.stepping import Record, names_by_id, records_of


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
    known = records_of(model, mup_only=True)
    if not known:
        raise UserError(
            "apply_mup: the model has no base shapes. Call mupscale.set_base_shapes(model, base, delta) first"
        )
    names = names_by_id(model)
    widths: dict[int, Record] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UserError(
                    f"apply_mup: the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
                    "model"
                )
            widths[id(parameter)] = known.get(name, Record())
    return _scaled_from_base(optimizer, lambda parameter: widths[id(parameter)])


def _own_width(parameter: Tensor) -> Record:
    if not hasattr(parameter, "mup_record"):
        raise UserError(
            f"muP: a parameter of shape {tuple(parameter.shape)} has no base shape (copies of a model lose it). "
            "Call mupscale.set_base_shapes, or pass the model itself: apply_mup(optimizer, model)"
        )
    return parameter.mup_record


def _scaled_from_base(optimizer: Optimizer, width_of: Callable[[Tensor], Record]) -> Optimizer:
    if any(SOURCE_GROUP in group for group in optimizer.param_groups):
        raise UserError("apply_mup: this optimizer is muP-scaled already")
    rule = rule_of(optimizer)

    def sized(parameter: Tensor) -> Sized:
        width = width_of(parameter)
        after = tuple(parameter.shape)
        before = tuple(base or size for base, size in zip(width.base, after, strict=True)) if width.base else after
        return Sized(width.scale, before, after)

    optimizer.param_groups[:] = split_groups(optimizer.param_groups, rule, lambda p: (p, sized(p)))
    begin_state_(optimizer)
    return optimizer
