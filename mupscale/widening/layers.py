"""One name for the same parameter or module in all repeated layers."""

import re
from collections.abc import Iterable


def starred(name: str) -> str:
    """A name with a star for every number in it: the same for all layers.

    >>> starred("h.0.mlp.weight")
    'h.*.mlp.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def by_layer(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Merges equal notes on the same name in several layers into one line.

    >>> by_layer([("h.0.drop", "p = 0.1"), ("h.1.drop", "p = 0.1"), ("head", "tied")])
    ['h.*.drop: p = 0.1 (2 of them)', 'head: tied']
    """
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, text in lines:
        grouped.setdefault((starred(name), text), []).append(name)
    answer = []
    for (star, text), names in grouped.items():
        many = len(names) > 1
        answer.append(f"{star if many else names[0]}: {text}" + f" ({len(names)} of them)" * many)
    return answer


def notes_by_layer(notes: Iterable[str]) -> list[str]:
    """Notes of the form "name: text", one for all layers of which the same is said; others as they are."""
    named = [note.partition(": ") for note in notes]
    by_name = by_layer((name, text) for name, _, text in named if text)
    return [*by_name, *(name for name, _, text in named if not text)]
