"""The examples in docstrings run as they are printed, and every public name has one."""

import doctest
import pydoc
import re
from collections.abc import Iterable
from importlib import import_module

import pytest
from paths import ROOT

import mupscale

PACKAGES = ("mupscale", "models", "callbacks", "datamodules")
NEED_A_RUN = {"mupscale.commands.reporting"}
"""Modules whose examples read the folder of a run."""


def modules_with_examples() -> list[str]:
    names = set()
    for path in (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            inside = parts if parts[0] == "mupscale" else ("mupscale", *parts)
            names.add(".".join(inside).removesuffix(".__init__"))
    return sorted(names - NEED_A_RUN)


def run(examples: Iterable[doctest.DocTest]) -> None:
    for example in examples:
        report: list[str] = []
        doctest.DocTestRunner().run(example, out=report.append)
        assert not report, "".join(report)


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("name", mupscale.__all__)
def test_the_example_of_a_public_name_can_be_pasted(name: str):
    """It runs with nothing imported but what it imports itself."""
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(mupscale, name), name, globs={})
    assert len(example.examples) > 3
    run([example])


@pytest.mark.slow
@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module(name: str):
    found = doctest.DocTestFinder().find(import_module(name))
    run(example for example in found if example.name.rpartition(".")[2] not in mupscale.__all__)


NO_NAMES = {"mupscale.json", "mupscale.md"}
"""Files."""


@pytest.mark.slow
def test_names_on_the_pages_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in re.findall(r"\bmupscale(?:\.\w+)+", page.read_text("utf-8"))}
    assert [name for name in sorted(names - NO_NAMES) if pydoc.locate(name) is None] == []


def test_examples_are_found_in_all_packages():
    found = {*modules_with_examples()}
    assert {"mupscale.errors", "mupscale.text_tables", "mupscale.callbacks.tensorboard"} <= found
