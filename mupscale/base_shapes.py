"""muP: the base shapes of a model, its readout multiplier and its initialisation."""

from functools import partial
from typing import Literal

import torch
from mup import MuReadout
from torch import nn

from mupscale.errors import UserError
from mupscale.widening import modules
from mupscale.widening.readout import Readout
from mupscale.widening.roles import Role, Roles, all_sides, growth, match_roles
from mupscale.widening.survey import Survey, Use, refuse_unless_model
from mupscale.widening.units import NO_UNIT, Units, match_units
from mupscale.widening.width_table import Table, WidthFactors, merged_table, store_table

Init = Literal["fan_in", "constant"]


def set_base_shapes(
    model: nn.Module,
    base: nn.Module,
    delta: nn.Module | None = None,
    *,
    init: Init | None = "fan_in",
    roles: Roles | None = None,
    units: Units | None = None,
) -> nn.Module:
    """Sets up `model` for muP, in place: its width table, readout multipliers and initialisation. Returns it.

    Args:
        model: The model to train.
        base: The same architecture at the base width. It may be on the meta device.
        delta: The same architecture at any width but the base width: the axes in which `base` and `delta` differ are
            width. By default `model` takes its place.
        init: How the weights were drawn; they are rescaled to muP. "fan_in": with std ∝ fan_in^-1/2, as in torch's
            default and He initialisation; readouts and biases are scaled up. "constant": with the same std at every
            width, as GPT-2's 0.02; matrices are scaled down as fan_in^-1/2. None: keep the values, for example because
            a checkpoint will be loaded.
        roles: As in `plan`, from `base` to `model`.
        units: As in `plan`, from `base` to `model`. The weights are initialised and trained in these units.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> def build(width):
        ...     hidden = nn.Linear(width, width)
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), hidden, mupscale.Readout(width, 2))
        >>> model = mupscale.set_base_shapes(build(128), build(64), build(32))
        >>> optimizer = mupscale.MuAdamW(model, lr=0.01)  # at twice the base width
        >>> sorted({group["lr"] for group in optimizer.param_groups})
        [0.005, 0.01]
    """
    for name, given in (("model", model), ("base", base), ("delta", base if delta is None else delta)):
        refuse_unless_model(f"set_base_shapes: {name}", given)
    if init not in ("fan_in", "constant", None):
        raise UserError(f'set_base_shapes: init must be "fan_in", "constant" or None, got {init!r}')
    if merged_table(model, mup_only=True) and init is not None:
        raise UserError(
            "set_base_shapes: the model has base shapes, and rescaled weights, already; pass init=None to change the "
            "base"
        )
    axes = _width_axes(base, model if delta is None else delta)
    survey = Survey(base, model, width_axes=axes)
    survey.refuse_reparametrised(weight_norm=False)
    unit_of = match_units(survey, units)
    sides_of = all_sides(survey, match_roles(survey, roles), averaging=True)
    widths: dict[str, WidthFactors] = {}
    factors: dict[str, float] = {}
    for use in survey.uses:
        for axis in use.growing:
            if not axes[use.name][axis]:
                raise UserError(
                    f"set_base_shapes: axis {axis} of {use.name!r} is {use.narrow_shape[axis]} in the base model and "
                    f"{use.wide_shape[axis]} here, but is not width: base and delta have the same size there"
                )
        role, sides = sides_of[use.name]
        base_sizes = tuple(
            n if is_width else None for n, is_width in zip(use.narrow_shape, axes[use.name], strict=True)
        )
        m_out, m_in = growth(use, sides, "out"), growth(use, sides, "in")
        unit = unit_of.get(use.name, NO_UNIT)
        shift = (unit.scale / m_in - 1) * unit.offset if unit.offset else 0.0
        width = WidthFactors(m_out * unit.scale, m_in / unit.scale, base_sizes, shift=shift)
        widths.update(dict.fromkeys(use.names, width))
        if init is not None:
            factors[use.name] = _init_factor(use, role, m_in, init) * unit.scale
    store_table(model, Table(mup=True, widths=widths))
    for _, at_base, module in survey.modules:
        if isinstance(module, Readout | MuReadout) and isinstance(at_base, nn.Linear):
            m = module.in_features / at_base.in_features
            if isinstance(module, Readout):
                module.multiplier = module.output_mult / m
            else:
                module.width_mult = partial(float, m)  # mup reads it off the parameter, which copies lose
    with torch.no_grad():
        for use in survey.uses if init is not None else ():
            use.wide.mul_(factors[use.name])
            if widths[use.name].shift:
                use.wide.add_(widths[use.name].shift)
    return model


def _width_axes(base: nn.Module, delta: nn.Module) -> dict[str, tuple[bool, ...]]:
    uses = Survey(base, delta).uses
    if not any(use.growing for use in uses):
        raise UserError(
            "set_base_shapes: nothing is width, because base and model (or delta) have the same shapes. "
            "Give a delta model of another width than the base"
        )
    return {use.name: tuple(axis in use.growing for axis in range(use.narrow.ndim)) for use in uses}


def _init_factor(use: Use, role: Role, m_in: float, init: Init) -> float:
    """The factor that gives a parameter, initialised according to `init`, its muP standard deviation."""
    _, before, after, attribute = use.owners[0]
    kind = modules.kind_of(before, attribute, use.narrow)
    # a readout without a multiplier carries the 1/width in its weights
    wanted = 1 / m_in if role == "readout" else m_in**-0.5 if kind == "weight" else 1.0
    if init == "constant":
        return wanted
    if modules.axis_sides(before, attribute, use.narrow) is None:  # a bare parameter: taken to be drawn at its fan_in
        return wanted * m_in**0.5
    return wanted * modules.drawn_fan_growth(before, after, attribute, (use.narrow_shape, use.wide_shape)) ** 0.5
