"""muP: the base shapes of a model, its readout multiplier, its initialisation, its optimizers, gradient clipping."""

import math
from functools import partial
from typing import Literal

import torch
from mup import MuReadout
from torch import Tensor, nn
from torch.optim import Optimizer

from mupscale._torch import foreach_mul, foreach_norm
from mupscale.errors import UserError, refuse_unless_level, refuse_unless_model
from mupscale.readout import Readout
from mupscale.sharding import gathered
from mupscale.widening import modules, table
from mupscale.widening.hints import Hints, Pairing, Use, all_sides, match_hints, scale_of_sides
from mupscale.widening.layers import BRANCH_MULTIPLIER, at_depth, spread
from mupscale.widening.optimizers import Sized, groups_by_id, rule_of
from mupscale.widening.records import Record, Records, names_by_id, records_of, store_records
from mupscale.widening.state import SOURCE_GROUP, begin_state_, refuse_bad_levels, split_groups
from mupscale.widening.table import Side

Init = Literal["fan_in", "constant"]


def set_base_shapes(
    model: nn.Module,
    base: nn.Module,
    delta: nn.Module | None = None,
    *,
    init: Init | None = "fan_in",
    hints: Hints | None = None,
) -> nn.Module:
    """Sets up `model` for muP, in place: scales of parameters, readout multipliers and initialisation. Returns it.

    The parameters of a module that has a `branch_multiplier`, a number by which it multiplies its residual branches,
    are scaled by CompleteP too: eps falls with the multiplier, and the rate of SGD rises. It should be 1 at the depth
    for which hyperparameters are given, and fall as 1 / depth.

    Args:
        model: The model to train.
        base: The same architecture at the base width, with any number of layers. It may be on the meta device.
        delta: The same architecture at any width but the base width: the axes in which `base` and `delta` differ are
            width. By default `model` takes its place.
        init: How the weights were drawn; they are rescaled to muP. "fan_in": with std ∝ fan_in^-1/2, as in torch's
            default and He initialisation; readouts and biases are scaled up. "constant": with the same std at every
            width, as GPT-2's 0.02; matrices are scaled down as fan_in^-1/2. None: keep the values, for example because
            a checkpoint will be loaded.
        hints: As in `plan`, from `base` to `model`. What they rescale is initialised and trained so.

    Examples:
        >>> import mupscale
        >>> import torch
        >>> from torch import nn
        >>> def build(width):
        ...     hidden = nn.Linear(width, width)
        ...     return nn.Sequential(nn.Linear(3, width), nn.ReLU(), hidden, mupscale.Readout(width, 2))
        >>> model = mupscale.set_base_shapes(build(128), build(64), build(32))
        >>> optimizer = mupscale.apply_mup(torch.optim.AdamW(model.parameters(), lr=0.01), model)
        >>> sorted({group["lr"] for group in optimizer.param_groups})
        [0.005, 0.01]
    """
    for name, given in (("model", model), ("base", base), ("delta", base if delta is None else delta)):
        refuse_unless_model(f"set_base_shapes: {name}", given)
    if init not in ("fan_in", "constant", None):
        raise UserError(f'set_base_shapes: init must be "fan_in", "constant" or None, got {init!r}')
    if records_of(model, mup_only=True) and init is not None:
        raise UserError(
            "set_base_shapes: the model has base shapes, and rescaled weights, already; pass init=None to change the "
            "base"
        )
    base_at_depth = at_depth(base, model, spread(base, model))
    other = model if delta is None else at_depth(delta, model, spread(delta, model))
    axes = _width_axes(base_at_depth, other)
    pairing = Pairing(base_at_depth, model, width_axes=axes)
    pairing.refuse_reparametrised(weight_norm=False)
    hinted = match_hints(pairing, hints, with_blocks=False)
    sides_of = all_sides(pairing, hinted.roles, averaging=True)
    multipliers = _branch_multipliers(model)
    widths: dict[str, Record] = {}
    factors: dict[str, float] = {}
    for use in pairing.uses:
        for axis in use.growing:
            if not axes[use.name][axis]:
                raise UserError(
                    f"set_base_shapes: axis {axis} of {use.name!r} is {use.narrow_shape[axis]} in the base model and "
                    f"{use.wide_shape[axis]} here, but is not width: base and delta have the same size there"
                )
        sides = sides_of[use.name]
        base_sizes = tuple(
            n if is_width else None for n, is_width in zip(use.narrow_shape, axes[use.name], strict=True)
        )
        rescale, offset = hinted.rescale.get(use.name, (1.0, 0.0))
        scale = table.rescaled(scale_of_sides(use, sides), rescale)
        multiplier = multipliers.get(use.name, 1.0)
        scale = table.deeper(scale, multiplier, 1 / multiplier)
        shift = table.shift(scale, offset) if offset else 0.0
        width = Record(scale, base_sizes, shift=shift)
        widths.update(dict.fromkeys(use.names, width))
        if init is not None:
            factors[use.name] = _init_factor(use, sides, init) * rescale
    store_records(model, Records(True, widths))
    for _, at_base, module in pairing.modules:
        if isinstance(module, Readout | MuReadout) and isinstance(at_base, nn.Linear):
            m = module.in_features / at_base.in_features
            if isinstance(module, Readout):
                module.multiplier = module.output_mult / m
            else:
                module.width_mult = partial(float, m)  # mup reads it off the parameter, which copies lose
    with torch.no_grad():
        for use in pairing.uses if init is not None else ():
            use.wide.mul_(factors[use.name])
            if widths[use.name].shift:
                use.wide.add_(widths[use.name].shift)
    return model


def _width_axes(base: nn.Module, delta: nn.Module) -> dict[str, tuple[bool, ...]]:
    uses = Pairing(base, delta).uses
    if not any(use.growing for use in uses):
        raise UserError(
            "set_base_shapes: nothing is width, because base and model (or delta) have the same shapes. "
            "Give a delta model of another width than the base"
        )
    return {use.name: tuple(axis in use.growing for axis in range(use.narrow.ndim)) for use in uses}


def _branch_multipliers(model: nn.Module) -> dict[str, float]:
    """The branch multipliers that modules declare, by the names of their parameters."""
    answer: dict[str, float] = {}
    for prefix, module in model.named_modules():
        multiplier = getattr(module, BRANCH_MULTIPLIER, None)
        if multiplier is not None:
            answer |= {f"{prefix}.{name}".removeprefix("."): multiplier for name, _ in module.named_parameters()}
    return answer


def _init_factor(use: Use, sides: tuple[Side, ...], init: Init) -> float:
    """The factor that gives a parameter, initialised according to `init`, its muP standard deviation."""
    _, before, after, attribute = use.owners[0]
    kind = modules.kind_of(before, attribute, use.narrow)
    fan_growth = math.prod(wide / narrow for (narrow, wide), side in zip(use.sizes, sides, strict=True) if side == "in")
    # a readout without a multiplier carries the 1/width in its weights, whatever its kind
    is_scaled = kind == "weight" or "out" not in sides
    wanted = table.std(sides, fan_growth) if is_scaled else 1.0
    if init == "constant":
        return wanted
    # a bare parameter is taken as drawn at its fan-in
    if modules.axis_sides(before, attribute, use.narrow) is not None:
        fan_growth = modules.drawn_fan_growth(before, after, attribute, (use.narrow_shape, use.wide_shape))
    return wanted / table.drawn(fan_growth)


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
    refuse_bad_levels(optimizer)
    if model is not None:
        refuse_unless_model("apply_mup: model", model)
    known, names = ({}, {}) if model is None else (records_of(model, mup_only=True), names_by_id(model))
    if model is not None and not known:
        raise UserError(
            "apply_mup: the model has no base shapes. Call mupscale.set_base_shapes(model, base, delta) first"
        )
    if any(SOURCE_GROUP in group for group in optimizer.param_groups):
        raise UserError("apply_mup: this optimizer is muP-scaled already")

    def sized(parameter: Tensor) -> tuple[Tensor, Sized]:
        after = tuple(parameter.shape)
        if model is None and not hasattr(parameter, "mup_record"):
            raise UserError(
                f"muP: a parameter of shape {after} has no base shape (copies of a model lose it). "
                "Call mupscale.set_base_shapes, or pass the model itself: apply_mup(optimizer, model)"
            )
        if model is not None and id(parameter) not in names:
            raise UserError(f"apply_mup: the optimizer holds a parameter of shape {after} that is not in the model")
        own: Record = getattr(parameter, "mup_record", Record())
        width = own if model is None else known.get(names[id(parameter)], Record())
        before = tuple(base or size for base, size in zip(width.base, after, strict=True)) if width.base else after
        return parameter, Sized(width.scale, before, after)

    optimizer.param_groups[:] = split_groups(optimizer.param_groups, rule_of(optimizer), sized)
    begin_state_(optimizer)
    return optimizer


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
    """Clips the gradients of `model` to a width-invariant global norm, in place; returns that norm before clipping.

    In the norm, each gradient is multiplied by what `table.clip` says for the width of its parameter, so that
    duplication does not change it; at the base width it is the usual norm. The widths come from
    `set_base_shapes`, or from the growth that made the model; without either, this is
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
    wanted = names_by_id(model) if optimizer is None else groups_by_id(optimizer)
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
