"""Cells of a large grid that the fast tier runs, and those that only `--all` runs; the others are slow."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *fast: Any, kept: Container[Any] | None = None) -> list[Any]:
    """Values for `parametrize`: all but the fast ones are marked slow. A tuple is the values of several arguments.

    Of the slow ones only those in `kept` run without `--all`; without `kept`, all of them.

    @pytest.mark.parametrize("model", slow_except(MODELS, "mlp"))
    """
    answer = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        marks = [] if value in fast else [pytest.mark.slow]
        if marks and kept is not None and value not in kept:
            marks.append(pytest.mark.exhaustive)
        answer.append(pytest.param(*arguments, marks=marks))
    return answer
