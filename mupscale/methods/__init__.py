"""Growth methods: ways to make a wide network from a narrow one. `base.py` defines their interface."""

from collections.abc import Callable
from functools import partial

from mupscale.methods.base import Claim as Claim
from mupscale.methods.base import Duplication, GrowthMethod, HyperCloning, ShrinkAndPad, ZeroPadding
from mupscale.methods.by_groups import AKI, FPI, Lemon, Net2Net
from mupscale.methods.ligo import LiGO

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
"""Methods with their default settings, by their names on the command line."""
