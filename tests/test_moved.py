"""Modules under their names of version 0.1: each is the module of its new name, whichever is imported first."""

import importlib
import pickle
import subprocess
import sys

import pytest

from mupscale._moved import MOVED, RENAMED
from mupscale.widening.width_table import WidthFactors


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old: str):
    new = f"mupscale.{MOVED[old]}"
    moved, module = importlib.import_module(f"mupscale.{old}"), importlib.import_module(new)
    assert moved is module
    assert module.__name__ == new
    assert module.__spec__.name == new


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("mupscale.algorithm.upscale", "mupscale.growing.upscale"),
        ("mupscale.equivalence.verify", "mupscale.checks.verify"),
        ("mupscale.noise.AdditiveNoise", "mupscale.widening.noise"),
        ("mupscale.optim.MuAdamW", "mupscale.mup_optimizers"),
        ("mupscale.readout.Readout", "mupscale.widening.readout"),
        ("mupscale.widths.plan", "mupscale.widening.plan"),
    ],
)
def test_class_paths_of_old_configurations_are_found(path: str, new: str):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is getattr(importlib.import_module(new), name)


def test_a_width_of_an_old_pickled_model_is_found():
    """Its class was called `mupscale.tables.Width`."""
    assert RENAMED["tables"] == {"Width": "WidthFactors"}
    width = WidthFactors(2.0, 3.0)
    new = pickle.dumps(width, protocol=0)
    old = new.replace(b"mupscale.widening.width_table\nWidthFactors", b"mupscale.tables\nWidth")
    assert old != new
    assert pickle.loads(old) == width


@pytest.mark.parametrize("names", [("figures", "commands.figures"), ("commands.figures", "figures")])
def test_the_order_of_imports_does_not_matter(names: tuple[str, str]):
    first, second = (f"mupscale.{name}" for name in names)
    code = f"import {first}, {second}, sys; assert sys.modules['{first}'] is sys.modules['{second}']"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_other_names_are_not_found():
    for name in ("mupscale.nothing", "mupscale.widening.algorithm", "mupscale.algorithm.nothing"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)
