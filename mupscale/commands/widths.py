"""Widths, or sizes, and growths of an experiment."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from mupscale.errors import UserError

Size = int | list[int] | dict[str, Any]
"""A width, or a mapping: the width and the layers; after a growth also the `depth`, how layers are added."""


Fixed = Literal["wide", "middle", "narrow"]
FIXED: tuple[Fixed, ...] = ("wide", "middle", "narrow")
"""The widths that runs of protocol midrun have that do not grow."""

BUDGETS = {"flops": "equal FLOPs", "seconds": "equal seconds"}
"""What runs of protocol midrun can have in common, and its words."""


@dataclass(frozen=True)
class Growth:
    """Two widths, or sizes, of one model."""

    before: Size
    after: Size

    def __str__(self) -> str:
        return f"{_text(self.before)} → {_text(self.after)}"

    @property
    def name(self) -> str:
        return f"{folder_name(self.before)}-{folder_name(self.after)}"

    @property
    def factors(self) -> list[float]:
        """The factors by which the widths, and the layers, grow; a single one if they are all the same."""
        before, after = numbers_in(self.before), numbers_in(self.after)
        if len(before) != len(after):
            raise UserError(f"widths {self}: give as many before as after")
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        return ratios[:1] if len(set(ratios)) == 1 else ratios


def growth_of(key: str, pair: Any) -> Growth:
    is_pair = isinstance(pair, list) and len(pair) == 2 and all(is_size(size) for size in pair)
    if not is_pair or isinstance(pair[0], dict) != isinstance(pair[1], dict) or "depth" in str(pair[0]):
        raise UserError(
            f"{key}: give two widths, before and after, such as [100, 400], or two sizes, such as "
            f"[{{width: 64, layers: 2}}, {{width: 64, layers: 4, depth: identity}}]; got {pair!r}"
        )
    growth = Growth(*pair)
    factors = growth.factors
    if any(factor != int(factor) for factor in factors) or max(factors) == 1 or min(factors) < 1:
        raise UserError(f"{key}: the size after must be a multiple of the one before, got {growth}")
    return growth


def is_width(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(is_width(item) for item in value)
    return type(value) is int and value > 0


def is_size(value: Any) -> bool:
    if not isinstance(value, dict):
        return is_width(value)
    is_known = {"width", "layers"} <= value.keys() <= {"width", "layers", "depth"}
    return is_known and is_width(value["width"]) and is_width(value["layers"])


def model_size(size: Size) -> dict[str, Any]:
    arguments = size if isinstance(size, dict) else {"width": size}
    return {key: value for key, value in arguments.items() if key != "depth"}


def numbers_in(size: Size) -> list[int]:
    if isinstance(size, dict):
        return numbers_in([size["width"], size["layers"]])
    return [number for each in size for number in numbers_in(each)] if isinstance(size, list) else [size]


def _text(size: Size) -> str:
    return f"{size['width']} with {size['layers']} layers" if isinstance(size, dict) else str(size)


def factors_text(growth: Growth) -> str:
    return ", ".join(f"{factor:g}" for factor in growth.factors)


def folder_name(width: Size) -> str:
    """A size as folders and costs.json name it."""
    if isinstance(width, dict):
        return f"{folder_name(width['width'])}-{folder_name(width['layers'])}l"
    return "x".join(map(str, width)) if isinstance(width, list) else str(width)


def in_proportion(width: Any, large: Any, small: Any) -> Any:
    """The size that is to `small` what `width` is to `large`; None if it is not whole, or if they have other parts.

    >>> in_proportion(384, 256, 64)
    96
    """
    if all(isinstance(each, dict) for each in (width, large, small)):
        sizes = {key: in_proportion(width[key], large[key], small[key]) for key in ("width", "layers")}
        return None if None in sizes.values() else sizes
    if all(isinstance(each, list) and len(each) == len(width) for each in (width, large, small)):
        widths = [in_proportion(*each) for each in zip(width, large, small, strict=True)]
        return None if None in widths else widths
    if not all(isinstance(each, int) for each in (width, large, small)):
        return None
    return width * small // large if width * small % large == 0 else None


def width_number(width: Size) -> float:
    """A width as one number: of a list, the geometric mean; of a size, times its layers."""
    if isinstance(width, dict):
        return width_number(width["width"]) * width_number(width["layers"])
    return math.prod(width) ** (1 / len(width)) if isinstance(width, list) else float(width)
