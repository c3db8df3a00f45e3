"""Refuses a named pipe where a file is wanted: opening one waits, perhaps for ever, for a program at its other end."""

import os
import stat
import sys
from typing import Any

from mupscale.errors import UserError

GIVEN_BY_SHELL = ("/dev/", "/proc/")
"""Where a shell puts the pipes of `--config <(program)`, which has a program at its other end."""

_watched = False


def refuse_pipes() -> None:
    """From now on, opening a named pipe by its path raises a UserError in this process, whichever library opens it."""
    global _watched
    if not _watched:
        sys.addaudithook(_refuse)  # there is no way to remove it
        _watched = True


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str) or arguments[0].startswith(GIVEN_BY_SHELL):
        return
    try:
        is_pipe = stat.S_ISFIFO(os.stat(arguments[0]).st_mode)
    except (OSError, ValueError):
        return
    if is_pipe:
        raise UserError(f"{arguments[0]} is a pipe; name a file")
