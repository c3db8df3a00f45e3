"""The page of a report: sections of sentences, tables and pictures, in one HTML file that needs no other."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from mupscale.commands.figures import PALETTE

GENERATOR = '<meta name="generator" content="mupscale report">'
"""The line of the template by which a page is recognised as a report."""

NUMBER = re.compile(r"(-?[0-9][0-9.,e+-]*×?( \(.*\))?|—)?")


class Cell(NamedTuple):
    """A text in a table; the name of a group has the CSS class of its colour."""

    text: str
    colour: str = ""


class Table(NamedTuple):
    head: list[str]
    rows: list[list[Cell]]
    is_number: list[bool]
    is_code: bool


class Picture(NamedTuple):
    source: str
    alt: str
    caption: str = ""


class Details(NamedTuple):
    """What the page shows when its summary is clicked: a table, or a text as it is."""

    summary: str
    content: Table | str


class Section(NamedTuple):
    """A part of the page, in the order of its fields. Empty fields are left out."""

    heading: str
    text: Sequence[str] = ()
    legend: Sequence[Cell] = ()
    pictures: Sequence[Picture] = ()
    has_wide_pictures: bool = False
    """Whether each picture has a line of its own."""
    tables: Sequence[tuple[str, Table]] = ()
    """Each with a heading, which may be empty."""
    fine: Sequence[str] = ()
    """Paragraphs in small print."""
    commands: Sequence[str] = ()
    details: Sequence[Details] = ()


class Opening(NamedTuple):
    """The top of the page. Each verdict is a list of sentences, the first of them in bold."""

    title: str
    verdicts: Sequence[Sequence[str]]
    further_verdicts: Sequence[Sequence[str]] = ()
    """Shown when they are clicked."""
    notes: Sequence[str] = ()


def render_page(opening: Opening, sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=PackageLoader("mupscale.commands.reporting", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html.jinja")
    return template.render(opening=opening, sections=sections, palette=PALETTE).lstrip()


def make_table(head: list[str], rows: Sequence[Sequence[str | Cell]], *, is_code: bool = False) -> Table:
    """A table in which columns of numbers stand to the right."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    is_number = []
    for column in range(len(head)):
        given = [row[column] for row in cells]
        is_number.append(not is_code and all(not cell.colour and NUMBER.fullmatch(cell.text) for cell in given))
    return Table(head, cells, is_number, is_code)


def read_pictures(paths: Sequence[Path]) -> list[Picture]:
    return [Picture(data_uri(path), path.stem) for path in paths if path.is_file()]


def data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
