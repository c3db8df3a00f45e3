"""The page of a report: one HTML file that needs no other. Its template has the tables and the fixed texts."""

import base64
import csv
import json
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from mupscale.commands.config import brief
from mupscale.commands.figures import PALETTE
from mupscale.commands.reporting import words
from mupscale.commands.reporting.folders import EDGE
from mupscale.commands.reporting.groups import differing

LONG_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]{5,}(e-?[0-9]+)?")


class Picture(NamedTuple):
    source: str
    alt: str
    caption: str = ""


def render_page(**content: Any) -> str:
    """The page with what the template asks for."""
    environment = Environment(
        loader=PackageLoader("mupscale.commands.reporting", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = {name: each for name, each in vars(words).items() if callable(each)}
    environment.filters |= {**functions, "brief": brief, "differing": differing, "read_table": read_table}
    environment.filters["read_pictures"] = read_pictures
    environment.filters["as_json"] = partial(json.dumps, indent=2, ensure_ascii=False)
    template = environment.get_template("page.html.jinja")
    return template.render(content, palette=PALETTE, edge=EDGE).lstrip()


def picture(path: Path, title: str, more: str | None = None) -> Picture:
    """A picture with the caption `title` and `more`; without a caption if that is None."""
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return Picture(source, title, "" if more is None else f"{words.capital(title)}{more}.")


def read_pictures(folder: Path, *names: str) -> list[Picture]:
    """Those of the pictures with these names that are in a folder."""
    paths = [folder / f"{name}.png" for name in names]
    return [picture(path, path.stem) for path in paths if path.is_file()]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, with short numbers; none if there is no file."""
    if not path.is_file():
        return []
    rows = csv.DictReader(path.read_text().splitlines())
    return [{key: short(cell) for key, cell in row.items()} for row in rows]


def short(cell: str) -> str:
    return f"{float(cell):.5g}" if LONG_DECIMAL.fullmatch(cell) else cell
