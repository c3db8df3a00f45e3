"""How long work says how far it is."""

from collections.abc import Callable

Watch = Callable[[str, int, int], None]
"""Called with what is being done in words, how many parts of it are done, and how many there are."""


def unwatched(words: str, done: int, total: int) -> None:
    """Nobody watches."""
