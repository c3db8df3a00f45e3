"""Cells of a large grid that the fast tier runs; the others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Values for `parametrize`: all but the fast ones are marked slow. A tuple is the values of several arguments.

    @pytest.mark.parametrize("model", slow_except(MODELS, "mlp"))
    """
    answer = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        answer.append(pytest.param(*arguments, marks=() if value in fast else pytest.mark.slow))
    return answer
