"""What users read has one word for one thing: a growth. Pages, help and messages avoid the words that it replaced."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

DROPPED = re.compile(
    r"\b(widen(s|ed|ing)?|swap(s|ped|ping)?|upscal(es|ed|ing)|(an|the|each|two) upscales?|falling rates)\b",
    re.IGNORECASE,
)
"""`upscale` is the name of a function, a callback and a command, and of no event."""

PAGES = [*(ROOT / name for name in ("README.md", "configs/README.md", "examples/README.md")), *ROOT.glob("docs/*.md")]
SOURCES = [path for room in ("mupscale", "callbacks", "models", "datamodules") for path in (ROOT / room).rglob("*.py")]


def prose(page: Path) -> str:
    """Without code, and without the targets of links. Tables of results have a row with the name "upscaled"."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)
    return re.sub("[Uu]pscaled", "", text) if page.name == "report.md" else text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path) -> None:
    assert [found[0] for found in DROPPED.finditer(prose(page))] == []


def messages(path: Path) -> Iterator[str]:
    """The strings of a file that are sentences, and the docstrings that `--help` prints."""
    tree = ast.parse(path.read_text())
    is_command = path.parent == ROOT / "mupscale" / "commands"
    for node in ast.walk(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring and not (is_command and node is tree.body[0]):
            node.value.value = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield re.sub(r"`[^`]*`|python -m mupscale upscale", "", node.value)


def test_messages() -> None:
    found = [(path.name, text) for path in SOURCES for text in messages(path) if DROPPED.search(text)]
    assert found == []
