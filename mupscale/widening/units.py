"""Units: extra factors on parameters, which compensate for constants in the model that depend on its width.

A model may multiply its embedding by sqrt(width), or its logits by 1/sqrt(head_dim). Such a constant changes with the
width, and duplication does not compensate for it; a unit does. A unit s multiplies the widened parameter by s. In
Table 1 it is the pair of factors (k_out · s, k_in / s), from which weight, learning rate, eps, decay, optimizer state,
clipping and noise follow.

A unit may be affine, `(s, c)`, for a parameter w that acts as c + w, as a gain 1 + w does: then c + w is multiplied.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mupscale.errors import UserError
from mupscale.widening.roles import declared, given_pairs, matches
from mupscale.widening.survey import Survey, some_names

Units = Mapping[str, float | tuple[float, float]]
"""By name pattern: s, or (s, c) for a parameter w that acts as c + w."""


class Unit(NamedTuple):
    """Of one parameter w, which acts as offset + w: the wide model holds `scale` times what its role would write."""

    scale: float = 1.0
    offset: float = 0.0


NO_UNIT = Unit()


def match_units(survey: Survey, given: Units | None) -> dict[str, Unit]:
    """Units by parameter name: what model classes declare, overridden by what the caller gives; the last match wins."""
    names = survey.names_of_weights(scaled=True)
    answer: dict[str, Unit] = {}
    for pattern, value in [*declared(survey, "width_units"), *given_pairs("units", given)]:
        unit = _parse(pattern, value)
        matched = [first for name, first in names.items() if matches(name, pattern)]
        if not matched:
            raise UserError(f"units: the pattern {pattern!r} matches no parameter; there are {some_names(names)}")
        answer.update(dict.fromkeys(matched, unit))
    return answer


def _parse(pattern: str, value: Any) -> Unit:
    pair = value if isinstance(value, tuple | list) else (value, 0.0)
    if len(pair) != 2 or not all(_is_finite(number) for number in pair) or pair[0] <= 0:
        raise UserError(
            f"units: {pattern!r} must map to a finite number above 0, or to such a number and a finite offset, "
            f"(s, c); got {value!r}"
        )
    return Unit(float(pair[0]), float(pair[1]))


def _is_finite(number: Any) -> bool:
    return isinstance(number, float | int) and not isinstance(number, bool) and math.isfinite(number)
