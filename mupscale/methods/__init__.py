"""Growth methods: ways to make a wide network from a narrow one. `base.py` defines their interface."""

from collections.abc import Callable
from functools import partial

from mupscale.methods.base import Claim, GrowthMethod, Hyperparameters
from mupscale.methods.duplication import Duplication, HyperCloning, Variant
from mupscale.methods.groups import AxisGroups
from mupscale.methods.lemon import Lemon
from mupscale.methods.ligo import LiGO
from mupscale.methods.net2net import AKI, FPI, Net2Net
from mupscale.methods.padding import ShrinkAndPad, ZeroPadding

__all__ = [
    "AKI",
    "FPI",
    "METHODS",
    "AxisGroups",
    "Claim",
    "Duplication",
    "GrowthMethod",
    "HyperCloning",
    "Hyperparameters",
    "Lemon",
    "LiGO",
    "Net2Net",
    "ShrinkAndPad",
    "Variant",
    "ZeroPadding",
]

METHODS: dict[str, Callable[[], GrowthMethod]] = {
    "aki": AKI,
    "duplication": Duplication,
    "fpi": FPI,
    "hypercloning": HyperCloning,
    "hypercloning-diagonal": partial(HyperCloning, "diagonal"),
    "hypercloning-noisy": partial(HyperCloning, "noisy"),
    "lemon": Lemon,
    "ligo": LiGO,
    "net2net": Net2Net,
    "shrink-and-pad": ShrinkAndPad,
    "zero-padding": ZeroPadding,
}
"""With their default settings, by the names of the command line."""
