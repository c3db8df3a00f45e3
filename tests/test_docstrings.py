"""The examples in docstrings run as they are printed, and every public name has one."""

import doctest
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest
from paths import ROOT

import mupscale

PRIVATE_FOLDERS = ("mupscale", "models", "callbacks", "datamodules")
NEED_A_RUN = {"mupscale.commands.reporting"}
"""Modules whose examples read the folder of a run."""


def modules_with_examples() -> list[str]:
    names = []
    for path in sorted(path for folder in PRIVATE_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            inside = parts if parts[0] == "mupscale" else ("mupscale", *parts)
            names.append(".".join(inside).removesuffix(".__init__"))
    return sorted({*names} - NEED_A_RUN)


def run(examples: Iterable[doctest.DocTest]) -> None:
    for example in examples:
        report: list[str] = []
        doctest.DocTestRunner().run(example, out=report.append)
        assert not report, "".join(report)


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("name", mupscale.__all__)
def test_the_example_of_a_public_name_can_be_pasted(name: str):
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(mupscale, name), name, globs={})
    assert any("mupscale." + name in step.source or name in ("Plan", "Found", "Verdict", "UpscaleReport")
               for step in example.examples), "the example does not use the name"  # fmt: skip
    run([example])


@pytest.mark.slow
@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module(name: str):
    found = doctest.DocTestFinder().find(import_module(name))
    run(example for example in found if example.name.rpartition(".")[2] not in mupscale.__all__)


def test_examples_are_found():
    assert {"mupscale.errors", "mupscale.widening.layers", "mupscale.callbacks.tensorboard"} <= {
        *modules_with_examples()
    }
    assert Path(ROOT / "mupscale/commands/reporting/__init__.py").read_text().count(">>> ") == 1
