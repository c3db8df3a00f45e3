"""Texts for people: tables that fit the terminal, one name for the same layer or parameter, how far work is."""

import csv
import io
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from mupscale.errors import prefix_errors

Style = Literal["heading", "good", "bad"]
Paint = Callable[[str, Style], str]
"""Gives a text its colour; what has none comes back as it is."""

GAP = "  "
INDENT = "    "


def unpainted(text: str, style: Style) -> str:
    """No colour."""
    return text


def size_of(count: float) -> str:
    """A number of bytes, to read.

    >>> size_of(310_000), size_of(3.8e9)
    ('0.3 MB', '3.80 GB')
    """
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e9:.2f} GB"


def as_csv(rows: Sequence[Mapping[str, Any]], head: Sequence[str] = ()) -> str:
    """Rows with the same keys as CSV; `head` are the keys if there may be no row. What is not a number is empty.

    >>> as_csv([{"lr": 0.1, "loss": math.inf}, {"lr": 0.2, "loss": 0.5}])
    'lr,loss\\n0.1,diverged\\n0.2,0.5\\n'
    """
    text = io.StringIO()
    keys = list(head or (rows[0] if rows else ()))
    if keys:
        table = csv.DictWriter(text, keys, lineterminator="\n")
        table.writeheader()
        table.writerows({name: _csv_cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if there is no file. Raises a UserError if it is not a table."""
    if not path.is_file():
        return []
    with prefix_errors(f"{path} is not a table that can be read", ValueError, csv.Error):
        text = path.read_text("utf-8")
        rows = list(csv.DictReader(text.splitlines()))
        if "\0" in text or any(None in row or None in row.values() for row in rows):
            raise ValueError("it has rows of other lengths than its head, or a NUL")
        return rows


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "" if math.isnan(value) else "diverged"


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    styles: Mapping[int, Style] | None = None,
    columns: int | None = None,
    paint: Paint = unpainted,
) -> list[str]:
    """The lines of a table whose first row is the heading; a cell may have several lines.

    The columns of `right` are aligned to the right. `styles` gives rows a colour. Where a row is longer than `columns`,
    its last cell goes on below after each comma; where that is not enough, its first cell gets a line of its own.

    >>> print("\\n".join(table([("name", "runs"), ("base", "5"), ("upscale", "12")], right=[1])))
    name     runs
    -------------
    base        5
    upscale    12
    """
    styles = {0: "heading", **(styles or {})}
    broken = [[*row[:-1], row[-1].replace(", ", ",\n")] for row in rows]
    for cells, under_names in ((rows, False), (broken, False), (rows, True), (broken, True)):
        blocks = _aligned(cells, right, under_names)
        if columns is None or _width(blocks) <= columns:
            break
    blocks = [folded(lines, columns) for lines in blocks]
    painted = [[paint(line, styles[at]) if at in styles else line for line in lines] for at, lines in enumerate(blocks)]
    return [*painted[0], "-" * _width(blocks), *chain(*painted[1:])]


def folded(lines: Iterable[str], columns: int | None) -> list[str]:
    """Lines that are longer than `columns` go on below, indented."""
    if columns is None:
        return [*lines]
    answer = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())] + GAP
        answer += textwrap.wrap(line, max(columns, 20), subsequent_indent=indent, break_on_hyphens=False) or [""]
    return answer


def _aligned(rows: Sequence[Sequence[str]], right: Collection[int], under_names: bool) -> list[list[str]]:
    """The lines of each row; `under_names`, its first cell is a line of its own."""
    first = 1 if under_names else 0
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*rows, strict=True)]
    answer = []
    for row in rows:
        lines = [*row[:first]]
        for texts in zip_longest(*(cell.split("\n") for cell in row[first:]), fillvalue=""):
            sized = enumerate(zip(texts, widths[first:], strict=True), first)
            cells = [text.rjust(width) if index in right else text.ljust(width) for index, (text, width) in sized]
            lines.append((INDENT * first + GAP.join(cells)).rstrip())
        answer.append(lines)
    return answer


def _width(blocks: Iterable[Iterable[str]]) -> int:
    return max((len(line) for lines in blocks for line in lines), default=0)


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


Watch = Callable[[str, int, int], None]
"""Called with what is being done in words, how many parts of it are done, and how many there are."""


def unwatched(words: str, done: int, total: int) -> None:
    """Nobody watches."""
