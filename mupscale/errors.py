"""The error for users' mistakes: `python -m mupscale` prints it as one line; all other errors keep their traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        'weight' (8, 8) → (4, 4): axis 0 is narrower in the wide model (4 < 8); swap the models?
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
def needs_extra(name: str) -> Iterator[None]:
    """Turns a failing import into a UserError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        raise UserError(f"{package} is not installed. Install it with: pip install {pip_requirement(name)}") from error


def pip_requirement(extra: str, package: Path = Path(__file__).parent) -> str:
    """What pip installs for an extra: of the checkout, where the package lies in one, because it is on no index then.

    >>> pip_requirement("data", Path("/usr/lib/python3/site-packages/mupscale"))
    "'mupscale[data]'"
    """
    root = package.resolve().parent
    return f"-e '{root}[{extra}]'" if (root / "pyproject.toml").is_file() else f"'mupscale[{extra}]'"
