"""Table 1 of the paper, as pure functions of four numbers. Every power of a width factor is in this file.

What growth does to the entries of a parameter is a `Scale`: by what the weight is multiplied, by what the gradient, and
how many entries, in how many layers, come from one. Growth is exact if the product of the four is 1: then every column
of the table follows, for any optimizer whose update is proportional to the m-th power of the gradient (1 for SGD, 0 for
the Adam family). Scales multiply: over the axes of a parameter, over growths one after another, and with the width of a
model in units of its base width, which is how muP uses the same table.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

Side = Literal["out", "in", "mean"] | None
"""A width axis produces its units ("out"), is summed over ("in"), or is averaged over by a muP readout ("mean"); None
is an axis that is not width."""


class Scale(NamedTuple):
    """The ratios, wide over narrow, of one parameter's entries."""

    weight: float = 1.0
    gradient: float = 1.0
    copies: float = 1.0
    """How many entries of a wide parameter come from one narrow entry."""
    layers: float = 1.0
    """How many layers of a deeper model come from one."""


NOTHING = Scale()


def scale_of_axis(side: Side, copies: float, factor: float, share: float = 1.0) -> Scale:
    """The scale of entries with so many copies along an axis that grows by `factor` as a whole.

    A copy that is read with another share of its unit than 1 / copies has the `share`, in units of that. The multiplier
    of a muP readout falls by `factor`, whatever the number of copies of one entry is.
    """
    match side:
        case "out":
            return Scale(1.0, share / copies, copies)
        case "in":
            return Scale(share / copies, 1.0, copies)
        case "mean":
            return Scale(factor * share / copies, 1 / factor, copies)
    return Scale(copies=copies)


def product(scales: Iterable[Scale]) -> Scale:
    columns = list(zip(*scales, strict=True))
    return Scale(*(math.prod(column) for column in columns)) if columns else Scale()


def rescaled(scale: Scale, by: float) -> Scale:
    """The scale with the weight multiplied by a further factor, which a constant of the model takes back."""
    return scale._replace(weight=scale.weight * by, gradient=scale.gradient / by)


def deeper(scale: Scale, branch: float, layers: float) -> Scale:
    """The scale in one of `layers` copies of a layer, whose residual branches are multiplied by a further `branch`."""
    return scale._replace(gradient=scale.gradient * branch, layers=scale.layers * layers)


def lr(scale: Scale, m: int) -> float:
    return scale.weight / scale.gradient**m


def eps(scale: Scale) -> float:
    return scale.gradient


def coupled_weight_decay(scale: Scale) -> float:
    return scale.gradient / scale.weight


def decoupled_weight_decay(scale: Scale, m: int) -> float:
    return scale.gradient**m / scale.weight


def state(scale: Scale, power: int) -> float:
    """The factor of optimizer state that holds this power of the gradient."""
    return scale.gradient**power


def muon(scale: Scale) -> tuple[float, float]:
    """lr, before torch adjusts it to the shape, and eps: Newton–Schulz commutes with duplication, up to copies^-1/2."""
    root = math.sqrt(scale.copies)
    return scale.weight * root, scale.gradient * root


def clip(scale: Scale) -> float:
    """What the squared norm of a gradient is multiplied by, so that the global norm is the same at every size."""
    return 1 / (scale.copies * scale.layers * scale.gradient**2)


def shift(scale: Scale, offset: float) -> float:
    """What is added to a weight w that acts as offset + w, so that the sum is multiplied by the scale of the weight."""
    return (scale.weight - 1) * offset


def std(sides: Iterable[Side], fan_in: float, base: float = 1) -> float:
    """The standard deviation of muP's initialisation and noise; `base` is that of a width which is only summed over."""
    sides = tuple(sides)
    if "in" not in sides:
        return 1.0
    return fan_in**-0.5 if "out" in sides else base / fan_in


def spectral(scale: Scale) -> float:
    """What the spectral norm of a weight is multiplied by."""
    return scale.weight * math.sqrt(scale.copies)


def drawn(fan_growth: float) -> float:
    """What the standard deviation of torch's initial values is multiplied by, where the fan-in grows so."""
    return fan_growth**-0.5


def weight_norm_gain(normed: float, weight: float) -> float:
    """What g of W = g · v / ‖v‖ is multiplied by, if W is by `weight`, and `normed` copies are under the norm."""
    return weight * math.sqrt(normed)
