"""One name for the same parameter or module: in all repeated layers, and inside of wrappers."""

import re
from collections.abc import Iterable, Sequence


def unwrapped(name: str) -> str:
    """A name without what DistributedDataParallel, AveragedModel and torch.compile add to it.

    >>> unwrapped("module._orig_mod.h.0._orig_mod.mlp.weight")
    'h.0.mlp.weight'
    """
    return re.sub(r"^(module\.)+", "", name.replace("_orig_mod.", ""))


def starred(name: str) -> str:
    """A name with a star for every number in it: the same for all layers.

    >>> starred("h.0.mlp.weight")
    'h.*.mlp.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def braced(names: Sequence[str]) -> dict[str, list[str]]:
    """Names that differ only in the numbers of their layers, by one name for all of them.

    >>> braced(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp", "head"])
    {'h.{0…2,5}.mlp': ['h.0.mlp', 'h.1.mlp', 'h.2.mlp', 'h.5.mlp'], 'head': ['head']}
    """
    merged = {tuple(name.split(".")): [name] for name in names}
    for place in reversed(range(max((len(parts) for parts in merged), default=0))):
        alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for parts in merged:
            is_numbered = place < len(parts) and parts[place].isdecimal()
            alike.setdefault((*parts[:place], "*", *parts[place + 1 :]) if is_numbered else parts, []).append(parts)
        found = {}
        for pattern, members in alike.items():
            numbers = _braces([int(parts[place]) for parts in members]) if len(members) > 1 else ""
            together = (*pattern[:place], numbers, *pattern[place + 1 :]) if numbers else members[0]
            found[together] = [name for parts in members for name in merged[parts]]
        merged = found
    return {".".join(parts): members for parts, members in merged.items()}


def _braces(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}…{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return f"{{{','.join(texts)}}}"


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
