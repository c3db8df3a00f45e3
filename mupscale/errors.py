"""The error for users' mistakes, and checks of the arguments of library calls.

`python -m mupscale` prints a UserError as one line; all other errors keep their traceback.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A mistake in what the caller gave: the message names it, and how to fix it. It is a ValueError.

    Examples:
        >>> import mupscale
        >>> from torch import nn
        >>> narrow, wide = nn.Linear(4, 4), nn.Linear(8, 8)
        >>> try:
        ...     mupscale.plan(wide, narrow)
        ... except mupscale.UserError as error:
        ...     print(error)
        axis 0 of 'weight' (8, 8) → (4, 4): it is narrower in the wide model (4 < 8). Give the smaller model first
    """


class UncheckedWarning(UserWarning):
    """`upscale` was called without `call`, so that nothing shows whether the wide model computes as the narrow one."""


@contextmanager
def as_user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds into a UserError with the same message, where only the user can cause them."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(str(error)) from error


@contextmanager
def prefix_errors(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Puts what it is about, an option or a file, before the message of a UserError, or of an exception of `kinds`."""
    handled: tuple[type[Exception], ...] = (UserError, *kinds)
    try:
        yield
    except handled as error:
        message = str(error) if isinstance(error, UserError) else one_line(error)
        raise UserError(f"{what}: {message}") from error


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Turns a failing import into a UserError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        raise UserError(f"{package} is not installed. Install it with: pip install {pip_requirement(name)}") from error


def one_line(error: object, most: int | None = None) -> str:
    """The message of an exception as one line, for a message of our own; without one, its class."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def pip_requirement(extra: str, package: Path = Path(__file__).parent) -> str:
    """What pip installs for an extra: of the checkout, where the package lies in one, because it is on no index then.

    >>> pip_requirement("data", Path("/usr/lib/python3/site-packages/mupscale"))
    "'mupscale[data]'"
    """
    root = package.resolve().parent
    return f"-e '{root}[{extra}]'" if (root / "pyproject.toml").is_file() else f"'mupscale[{extra}]'"


MOST = 2**53
"""The largest number that counts something: steps, tokens, bytes. Larger ones are not exact as floats."""


def refuse_unless_whole(name: str, value: Any, least: int | None = 1) -> None:
    """Raises a UserError if a value is not a whole number, from `least` to MOST unless `least` is None."""
    if not is_whole(value, least):
        at_least = "" if least is None else f" of at least {least}"
        too_large = isinstance(value, Integral) and int(value) > MOST
        raise UserError(
            f"{name} must be a whole number{f' of at most {MOST}' if too_large else at_least}, got {shown(value)}"
        )


def is_whole(value: Any, least: int | None = 1) -> bool:
    """Whether a value, of a file perhaps, is a whole number, from `least` to MOST unless `least` is None.

    >>> is_whole(3), is_whole(True), is_whole(2**70), is_whole("3")
    (True, False, False, False)
    """
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return is_number and (least is None or least <= int(value) <= MOST)


def refuse_unless_level(name: str, value: Any) -> None:
    try:
        fits = not isinstance(value, bool | str | bytes) and math.isfinite(value) and value >= 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        fits = False
    if not fits:
        raise UserError(f"{name} must be a finite number of at least 0, got {shown(value)}")


def is_finite_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def shown(value: Any) -> str:
    """A value in a few characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}... ({type(value).__name__})"


def refuse_unless_model(name: str, model: object) -> None:
    from torch import nn

    if not isinstance(model, nn.Module):
        raise UserError(f"{name} must be a torch.nn.Module, got {shown(model)}. Pass the network itself")
