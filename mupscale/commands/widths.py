"""Widths, or sizes, and growths of an experiment."""

from dataclasses import dataclass
from typing import Any

from mupscale.errors import UserError

Size = int | list[int] | dict[str, Any]
"""A width, or a mapping: the width and the layers; after a growth also the `depth`, how layers are added."""


@dataclass(frozen=True)
class SizePair:
    """Two widths, or sizes, of one model."""

    before: Size
    after: Size

    def __str__(self) -> str:
        sizes = (self.before, self.after)
        return " → ".join(f"{s['width']} with {s['layers']} layers" if isinstance(s, dict) else str(s) for s in sizes)

    @property
    def name(self) -> str:
        return f"{folder_name(self.before)}-{folder_name(self.after)}"

    @property
    def factors(self) -> list[float]:
        """The factors by which the widths, and the layers, grow; a single one if they are all the same."""
        ratios = [b / a for a, b in zip(numbers_in(self.before), numbers_in(self.after), strict=True)]
        return ratios[:1] if len(set(ratios)) == 1 else ratios


def growth_of(key: str, pair: Any) -> SizePair:
    try:
        growth = SizePair(*pair)
        factors = growth.factors
        is_pair = isinstance(growth.before, dict) == isinstance(growth.after, dict) and "depth" not in str(
            growth.before
        )
    except (TypeError, KeyError, ValueError, ZeroDivisionError):
        is_pair = False
    if not is_pair:
        raise UserError(
            f"{key}: give two widths, before and after, such as [100, 400], or two sizes, such as "
            f"[{{width: 64, layers: 2}}, {{width: 64, layers: 4, depth: identity}}]; got {pair!r}"
        )
    if any(factor != int(factor) for factor in factors) or max(factors) == 1 or min(factors) < 1:
        raise UserError(f"{key}: the size after must be a multiple of the one before, got {growth}")
    return growth


def model_size(size: Size) -> dict[str, Any]:
    arguments = size if isinstance(size, dict) else {"width": size}
    return {key: value for key, value in arguments.items() if key != "depth"}


def numbers_in(size: Size) -> list[int]:
    """The widths and layers of a size. Raises a TypeError, KeyError or ValueError if it is none."""
    if isinstance(size, dict):
        size = [size["width"], size["layers"]]
    if isinstance(size, list):
        return [number for each in size for number in numbers_in(each)]
    if type(size) is not int or size < 1:
        raise ValueError(size)
    return [size]


def folder_name(width: Size) -> str:
    """A size as folders are named."""
    if isinstance(width, dict):
        return f"{folder_name(width['width'])}-{folder_name(width['layers'])}l"
    return "x".join(map(str, width)) if isinstance(width, list) else str(width)
