"""Functions that run compiled where there is a compiler, and as they are elsewhere."""

import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from mupscale.errors import UserError


class Compiled:
    """A function by `torch.compile`, for arguments of fixed shapes; eager, after a warning, where that fails."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """The function works on tensors, its other arguments are constants; `name` says what it does."""
        self._function, self._name = function, name
        self._compiled: Callable[..., Any] | None = torch.compile(_copied(function), dynamic=False, fullgraph=True)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            return self._function(*arguments)
        try:
            return self._compiled(*arguments)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # code that fails to compile has not run; an error of the function itself comes again, from here
            answer = self._function(*arguments)
            self._compiled = None
            first = next(iter(str(error).splitlines()), "")
            warnings.warn(
                f"{self._name} runs without torch.compile, which failed: {type(error).__name__}: {first}", stacklevel=2
            )
            return answer


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with code of its own: torch stops compiling a code object after a few kinds of arguments."""
    if isinstance(function, MethodType):
        return MethodType(_copied(function.__func__), function.__self__)
    if not isinstance(function, FunctionType):
        return function
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
