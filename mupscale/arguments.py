"""Checks the arguments of library calls: a UserError names a wrong argument and its value."""

import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from mupscale.errors import UserError


def refuse_unless_whole(name: str, value: Any, least: int | None = 1) -> None:
    """Raises a UserError if a value is not a whole number, of at least `least` unless that is None."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and int(value) < least):
        at_least = "" if least is None else f" of at least {least}"
        raise UserError(f"{name} must be a whole number{at_least}, got {shown(value)}")


def refuse_unless_level(name: str, value: Any) -> None:
    """Raises a UserError if a value is not a finite number of at least 0."""
    try:
        fits = not isinstance(value, bool | str | bytes) and math.isfinite(value) and value >= 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        fits = False
    if not fits:
        raise UserError(f"{name} must be a finite number of at least 0, got {shown(value)}")


def refuse_unless_callable(name: str, value: Any, form: str) -> None:
    """Raises a UserError if a value is not a function; `form` shows one."""
    if not callable(value):
        raise UserError(f"{name} must be a function, give {form}; got {shown(value)}")


def refuse_unless_iterable(name: str, value: Any, of: str) -> None:
    """Raises a UserError if a value is not iterable."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise UserError(f"{name} must be a list of {of}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value in a few characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}... ({type(value).__name__})"


def refuse_unless_model(name: str, model: object) -> None:
    """Raises a UserError if something is not a model but, for example, a class, a state_dict or None."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise UserError(f"{name} must be a torch.nn.Module, got {shown(model)}. Pass the network itself")
