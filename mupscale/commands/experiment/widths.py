"""Widths and growths of an experiment."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mupscale.errors import UserError
from mupscale.models.checkpoint import Width


@dataclass(frozen=True)
class Growth:
    """Two widths of one model."""

    before: Width
    after: Width

    def __str__(self) -> str:
        return f"{self.before} → {self.after}"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{folder_name(self.before)}-{folder_name(self.after)}"

    @property
    def factors(self) -> list[float]:
        """The factors by which the widths grow; a single one if they are all the same."""
        before, after = (width if isinstance(width, list) else [width] for width in (self.before, self.after))
        if len(before) != len(after):
            raise UserError(f"widths {self}: give as many before as after")
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        return ratios[:1] if len(set(ratios)) == 1 else ratios


def growth_of(key: str, pair: Any) -> Growth:
    if not isinstance(pair, list) or len(pair) != 2 or not all(is_width(width) for width in pair):
        raise UserError(f"{key}: give two widths, before and after, such as [100, 400], got {pair!r}")
    growth = Growth(*pair)
    factors = growth.factors
    if any(factor != int(factor) for factor in factors) or max(factors) == 1 or min(factors) < 1:
        raise UserError(f"{key}: the width after must be a multiple of the one before, got {growth}")
    return growth


def is_width(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(is_width(item) for item in value)
    return type(value) is int and value > 0


def factors_text(growth: Growth) -> str:
    return ", ".join(f"{factor:g}" for factor in growth.factors)


def folder_name(width: Width) -> str:
    return "x".join(map(str, width)) if isinstance(width, list) else str(width)


def in_proportion(width: Width, large: Width, small: Width) -> Width | None:
    """The width that is to `small` what `width` is to `large`; None if it is not whole.

    >>> in_proportion(384, 256, 64)
    96
    """
    lists = [each if isinstance(each, list) else [each] for each in (width, large, small)]
    if len({len(each) for each in lists}) > 1:
        return None
    ratios = [Fraction(a * c, b) for a, b, c in zip(*lists, strict=True)]
    if any(ratio.denominator != 1 for ratio in ratios):
        return None
    whole = [int(ratio) for ratio in ratios]
    return whole if isinstance(width, list) else whole[0]


def width_number(width: Width) -> float:
    """A width as one number: of a list, the geometric mean."""
    return math.prod(width) ** (1 / len(width)) if isinstance(width, list) else float(width)
